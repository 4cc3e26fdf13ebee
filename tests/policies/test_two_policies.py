"""One policy for the prompt and another's decode rule: as one value, and what is refused.

Compiled models decode by both in tests/e2e/test_decode_eviction.py.
"""

import json
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

import kvpass
from kvpass.cache.plan import plan
from kvpass.eval.policy_spec import parse_policies
from kvpass.policies import from_spec, resolve
from kvpass.policies.decode_rules import DecodeRule, Slots
from kvpass.policies.r_kv import RKV
from kvpass.policies.scores import reduce_group
from kvpass.policies.tova import Tova
from tiny_models import compiled_once, kvzap_file, random_ids

LAYERS, BUDGET = 3, 16
KVZAP = {"weights": kvzap_file(LAYERS)}


def test_the_second_stage_of_the_prompts_policy_is_kept():
    q, k, v = (torch.randn(2, 1, heads, 64, 8) for heads in (4, 2, 2))
    given = {"budget": 24, "window": 8, "output_weights": torch.randn(2, 16, 32)}
    plain, critical, both = (
        plan("snapkv", q, k, v, **given, **options).keep
        for options in ({}, {"critical": True}, {"critical": True, "decode_policy": "h2o", "decode_window": 8})
    )
    assert torch.equal(critical, both) and not torch.equal(plain, critical)


@dataclass(frozen=True, kw_only=True)
class Since(DecodeRule):
    """Evicts what had the least attention since the prompt."""

    numbers_per_entry = 1

    def observe(self, attention: Tensor, slots: Slots) -> tuple[Tensor, Tensor]:
        state = slots.decode_state + reduce_group(attention, slots.position.shape[1], "sum")
        return state[0], state


@dataclass(frozen=True, kw_only=True)
class Attended(Tova):
    name: ClassVar[str] = "attended"

    def decode_rule(self) -> DecodeRule:
        return Since(window=self.window)


def test_a_state_of_each_entry_begins_at_zero_where_layers_competed_by_their_scores(monkeypatch):
    monkeypatch.setitem(kvpass.POLICIES, "attended", Attended)
    _, fast = compiled_once("llama", layers=LAYERS, backend="eager", policy="full", budget=None)
    fast.set_policy("kvzap", BUDGET, window=8, **KVZAP, decode_policy="attended", decode_window=4)
    cache = fast(random_ids(2, 40)).past_key_values
    (store,) = cache.state.full_layers
    assert not store.buffers.decode_state.any()
    fast(random_ids(2, 1), past_key_values=cache)
    state = store.buffers.decode_state[0]
    left = 4 - state.sum((2, 3))  # of each layer and row: 4 query heads, and what was paid to evicted entries
    assert bool((left > -1e-5).all()) and bool((left < 2).all())
    from_spec.cache_clear()


def test_options_change_the_policy_that_they_are_of():
    policy = resolve("snapkv", decode_policy="r_kv", decode_buffer=5)
    assert (policy.prompt, policy.decode) == (resolve("snapkv"), RKV(buffer=5))
    assert (
        from_spec(policy.spec) == policy == from_spec(policy.text)
        and json.loads(policy.spec)["decode_policy"] == "r_kv"
    )
    changed = resolve(policy, kernel_size=31, decode_importance=0.5)
    assert (changed.prompt.kernel_size, changed.decode) == (31, RKV(buffer=5, importance=0.5))
    assert resolve(policy, decode_policy=None) == resolve("snapkv")
    (spec,) = parse_policies("snapkv:window=16,decode_policy=r_kv,decode_buffer=5")
    assert spec.resolve() == resolve("snapkv", window=16, decode_policy=RKV(buffer=5))
