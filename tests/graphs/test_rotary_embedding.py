"""The rotary embedding that a policy reads is that of the model's queries, or the model is refused."""

import copy
import sys

import pytest
import torch
from torch import nn

import kvpass
from kvpass.policies.observation import Observation
from pairwise import quick
from tiny_models import ROTATED, compiled_once, random_ids


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


@pytest.mark.parametrize("family", quick(ROTATED, ["qwen3"]))
def test_turned_back_queries_are_those_of_the_model_before_rope(family, judged, monkeypatch):
    """Qwen3 has a norm between the projection and RoPE. Padded rows, of llama: tests/e2e/test_decode_eviction.py."""
    layers = 1 if family == "qwen3" else 2  # of some the first has a sliding window
    model, fast = compiled_once(family, layers=layers, policy="expected_attention", budget=24, backend="eager")
    ids = random_ids(1, 40)
    fast(ids)
    wanted = queries_before_rope(model, ids, monkeypatch)
    assert judged
    for call, inputs in judged:
        obs = Observation(call.q, call.k, call.v, call.scale, 0, 0, 1, asked=inputs)
        found = torch.cat([obs.unrotated_queries(head, 0) for head in range(obs.kv_heads)], 1)
        assert min(float((found - q).abs().max()) for q in wanted if q.shape == found.shape) < 1e-4


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
