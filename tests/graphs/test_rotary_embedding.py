"""The rotary embedding that a policy reads is that of the model's queries, or the model is refused."""

import copy
import sys

import pytest
import torch
from torch import nn

import kvpass
from kvpass.policies.observation import Observation
from masked_oracle import kept_columns
from pairwise import quick
from tiny_models import ROTATED, compiled_once, left_pad, random_ids


def queries_before_rope(model, ids, monkeypatch):
    """What each layer of a model of transformers gives to its function of RoPE, ``[1, H, N, D]`` each."""
    found, module = [], sys.modules[type(model).__module__]
    rotate = module.apply_rotary_pos_emb

    def record(q, *rest, **options):
        found.append(q.clone())
        return rotate(q, *rest, **options)

    with monkeypatch.context() as patch, torch.no_grad():
        patch.setattr(module, "apply_rotary_pos_emb", record)
        model(ids, use_cache=False)
    return found


@pytest.mark.parametrize("family", quick(ROTATED, ["llama"]))
def test_turned_back_queries_are_those_of_the_model_before_rope(family, judged, monkeypatch):
    layers = 1 if family == "llama" else 2  # of some the first has a sliding window
    model, fast = compiled_once(family, layers=layers, policy="expected_attention", budget=24, backend="eager")
    ids = random_ids(1, 40)
    fast(ids)
    wanted = queries_before_rope(model, ids, monkeypatch)
    assert judged
    for call, inputs in judged:
        obs = Observation(call.q, call.k, call.v, call.scale, 0, 0, 1, asked=inputs)
        found = torch.cat([obs.unrotated_queries(head, 0) for head in range(obs.kv_heads)], 1)
        assert min(float((found - q).abs().max()) for q in wanted if q.shape == found.shape) < 1e-4


def test_a_norm_before_rope_and_padding_change_nothing_of_what_is_kept(judged):
    """Qwen3 has a norm between the projection and RoPE; a padded row keeps what it keeps alone, and what plan says."""
    options = {"budget": 24, "window": 2, "head_split": "adaptive", "epsilon": 0.02}
    _, fast = compiled_once("qwen3", layers=1, policy="expected_attention", backend="eager", **options)
    prompts = [random_ids(1, n, seed=n)[0] for n in (40, 33)]
    ids, mask = left_pad(prompts)
    together = fast(ids, attention_mask=mask).past_key_values
    for row, prompt in enumerate(prompts):
        judged.clear()
        alone = fast(prompt[None]).past_key_values
        q, k, v = (torch.stack([call[i] for call, _ in judged]) for i in range(3))
        turns = torch.stack([inputs.frequencies for _, inputs in judged])
        keep = kvpass.plan("expected_attention", q, k, v, rope_frequencies=turns, **options).keep[:, 0]
        n = len(prompt)
        assert torch.equal(kept_columns(together, 40)[row, ..., -n:], keep)
        assert torch.equal(kept_columns(alone, n)[0], keep)


class OtherLinear(nn.Module):
    """A linear layer that no pass knows as one, as a quantised one is."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight = linear.weight

    def forward(self, x):
        return (x.unsqueeze(-2) * self.weight).sum(-1)


def test_a_projection_of_another_kind_changes_nothing():
    options = {"policy": "expected_attention", "budget": 24, "backend": "eager"}
    model, fast = compiled_once("llama", layers=1, **options)
    other = copy.deepcopy(model)
    attention = other.model.layers[0].self_attn
    attention.q_proj = OtherLinear(attention.q_proj)
    caches = [each(random_ids(1, 40)).past_key_values for each in (fast, kvpass.compile(other, **options))]
    assert torch.equal(caches[0].positions, caches[1].positions)
