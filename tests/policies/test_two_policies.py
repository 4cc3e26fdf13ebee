"""One policy for the prompt and another's decode rule: as one value, in compiled models, in files, what is refused."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import Tensor

import kvpass
from kvpass.eval.policy_spec import parse_policies
from kvpass.policies import from_spec, resolve
from kvpass.policies.decode_rules import DecodeRule, Slots
from kvpass.policies.plan import plan
from kvpass.policies.r_kv import RKV
from kvpass.policies.scores import reduce_group
from kvpass.policies.tova import Tova
from masked_oracle import kept_columns
from recorded_calls import recorded_calls
from tiny_models import compiled_once, kvzap_file, left_pad, random_ids, tiny_model

pytestmark = pytest.mark.usefixtures("captures_kept")
LAYERS, BUDGET, STEPS = 3, 16, 30
KVZAP = {"weights": kvzap_file(LAYERS)}
PAIRS = {
    "lava+h2o": {"policy": "lava", "window": 8, "decode_policy": "h2o", "decode_window": 6},
    "lava+triattention": {"policy": "lava", "window": 8, "decode_policy": "triattention", "decode_buffer": 5},
    "keydiff+r_kv": {"policy": "keydiff", "window": 8, "decode_policy": RKV(window=6, buffer=5)},
    "kvzap+r_kv": {"policy": "kvzap", "window": 8, **KVZAP, "decode_policy": "r_kv", "decode_buffer": 5},
    "kvzap+h2o": {"policy": "kvzap", "window": 8, **KVZAP, "decode_policy": "h2o", "decode_window": 6},
    "kvzap+streaming_llm": {"policy": "kvzap", "window": 8, **KVZAP, "decode_policy": "streaming_llm"},
    "snapkv+kvzap": {
        **{"policy": "snapkv", "window": 8, "decode_policy": "kvzap", "decode_window": 6},
        **{"decode_weights": KVZAP["weights"], "decode_evict_during_decode": True},
    },
}


@pytest.mark.parametrize("name", PAIRS)
def test_a_padded_batch_keeps_what_the_prompts_policy_does_and_decodes_as_plan_says(name, monkeypatch):
    given, calls, entered = PAIRS[name], recorded_calls(monkeypatch), {}
    policy = resolve(**given)
    prompts = [random_ids(1, n, seed=n)[0] for n in (40, 21, 9)]
    _, fast = compiled_once("llama", layers=LAYERS, backend="eager", policy="full", budget=None)
    original = type(policy).token_scores

    def scored(self, x, layer, *args):
        entered.setdefault(layer, []).append(x.clone())
        return original(self, x, layer, *args)

    monkeypatch.setattr(type(policy), "token_scores", scored)
    fast.set_policy(policy, BUDGET)
    ids, mask = left_pad(prompts)
    tokens = [random_ids(3, 1, seed=step) for step in range(STEPS)]
    cache = fast(ids, attention_mask=mask, logits_to_keep=1).past_key_values
    found = [kept_columns(cache, 40)]
    for token in tokens:
        fast(token, past_key_values=cache)
        found.append(kept_columns(cache, cache.columns))
    assert int(cache.lengths.max()) <= found[0].sum(-1).max() + 8, "it does not grow"
    every = {layer: torch.cat(parts, 1) for layer, parts in entered.items()}
    steps = [calls[LAYERS * (s + 1) : LAYERS * (s + 2)] for s in range(STEPS)]
    for row, prompt in enumerate(prompts):
        n, pad = len(prompt), 40 - len(prompt)
        q, k, v = (torch.stack([call[i][row : row + 1, :, pad:] for call in calls[:LAYERS]]) for i in range(3))
        decode = tuple(
            torch.stack([torch.stack([call[i][row : row + 1, :, 0] for call in step]) for step in steps])
            for i in range(3)
        )
        x = torch.stack([every[i][row : row + 1, pad:] for i in range(LAYERS)]) if policy.scores_tokens else None
        turns = fast.model.rotary_emb.inv_freq.expand(LAYERS, -1)
        asked = {"rope_frequencies": turns, "entering": x}
        expected = plan(policy, q, k, v, budget=BUDGET, decode=decode, **asked)
        assert torch.equal(found[0][row, ..., pad:], expected.keep[:, 0])
        assert n > BUDGET or bool(expected.keep.all())
        for step in range(STEPS):
            wanted = expected.decode_keep[step, :, 0, :, : n + step + 1]
            assert torch.equal(found[step + 1][row, ..., pad:], wanted), f"row {row}, step {step}"
    fast.set_policy(policy.prompt, BUDGET)
    alone = fast(ids, attention_mask=mask).past_key_values
    assert torch.equal(kept_columns(alone, 40), found[0]), "as the prompt's policy alone"


def test_the_second_stage_of_the_prompts_policy_is_kept() -> None:
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
    (store,) = cache.full_layers
    assert not store.decode_state.any()
    fast(random_ids(2, 1), past_key_values=cache)
    state = store.decode_state[0]
    left = 4 - state.sum((2, 3))  # of each layer and row: 4 query heads, and what was paid to evicted entries
    assert bool((left > -1e-5).all()) and bool((left < 2).all())
    from_spec.cache_clear()


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", PAIRS)
def test_inductor_decodes_by_two_policies_as_eager_does(name):
    model, found = tiny_model("llama", layers=LAYERS), []
    ids, mask = left_pad([random_ids(1, n, seed=n)[0] for n in (40, 21, 3)])
    for backend in ("inductor", "eager"):
        fast = kvpass.compile(model, backend=backend, budget=BUDGET, **PAIRS[name])
        given = {"attention_mask": mask, "max_new_tokens": 25, "do_sample": False}
        found.append(fast.generate(ids, return_dict_in_generate=True, **given))
    assert torch.equal(found[0].sequences, found[1].sequences)
    assert torch.equal(found[0].past_key_values.positions, found[1].past_key_values.positions)


@pytest.mark.parametrize("name", PAIRS)
def test_a_file_goes_on_as_the_cache_does_and_names_both(name, tmp_path):
    policy = resolve(**PAIRS[name])
    assert from_spec(policy.spec) == policy and json.loads(policy.spec)["decode_policy"] == policy.decode.name
    _, fast = compiled_once("llama", layers=LAYERS, backend="eager", policy="full", budget=None)
    fast.set_policy(policy, BUDGET)
    cache = fast.compress(random_ids(2, 40))
    cache.save(tmp_path / "text.kv")
    caches = [cache.clone(), kvpass.load_cache(tmp_path / "text.kv", fast).clone()]
    for step in range(20):
        for one in caches:
            fast(random_ids(2, 1, seed=step), past_key_values=one)
    assert torch.equal(caches[0].positions, caches[1].positions)
    assert fast.report().to_dict()["policy"] == name
    fast.set_policy(policy.prompt, BUDGET)
    with pytest.raises(kvpass.CacheMismatchError, match=f"decode_policy.: .{policy.decode.name}"):
        kvpass.load_cache(tmp_path / "text.kv", fast)


def test_options_change_the_policy_that_they_are_of():
    policy = resolve("snapkv", decode_policy="r_kv", decode_buffer=5)
    assert (policy.prompt, policy.decode) == (resolve("snapkv"), RKV(buffer=5))
    changed = resolve(policy, kernel_size=31, decode_importance=0.5)
    assert (changed.prompt.kernel_size, changed.decode) == (31, RKV(buffer=5, importance=0.5))
    assert resolve(policy, decode_policy=None) == resolve("snapkv")
    (spec,) = parse_policies("snapkv:window=16,decode_policy=r_kv,decode_buffer=5")
    assert spec.resolve() == resolve("snapkv", window=16, decode_policy=RKV(buffer=5))


@pytest.mark.parametrize(
    ("policy", "options", "said"),
    [
        ("full", {"decode_policy": "r_kv"}, "'full' keeps the whole prompt"),
        ("h2o", {"decode_policy": "r_kv"}, "'h2o' evicts while decoding itself: give evict_during_decode=False"),
        ("lava", {"decode_policy": "snapkv"}, "'snapkv' only appends"),
        ("lava", {"decode_policy": "tova"}, "'tova' keeps one set of entries in all heads"),
        ("lava", {"decode_policy": "r_kv", "decode_parity": "code"}, "give decode_parity='paper'"),
        ("lava", {"decode_policy": "r_kv", "window": 4}, "decode_window=8 must be at most the window of 'lava', 4"),
        (
            "kvzap",
            {**KVZAP, "decode_policy": "kvzap", "decode_evict_during_decode": True, "decode_weights": "x"},
            "give evict_during_decode=True to the first",
        ),
        ("lava", {"decode_buffer": 5}, "decode_buffer is an option of decode_policy, which is not given"),
        ("lava", {"decode_policy": "r_vk"}, "did you mean 'r_kv'"),
        ("lava", {"decode_policy": "r_kv", "decode_bufer": 5}, "bufer=5: not an option of policy 'r_kv'"),
    ],
)
def test_contract_10_policies_that_do_not_go_together_are_refused(policy, options, said):
    with pytest.raises(ValueError, match=said):
        kvpass.compile(tiny_model("llama", layers=1), policy=policy, budget=BUDGET, **options)
