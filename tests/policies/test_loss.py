"""The layer attention output loss and its bounds (Ada-KV Theorems 3.1 and 3.3, LAVa Lemma 1 and Theorem 1)."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvpass.cache.plan import plan
from kvpass.policies.loss import attention_output_loss


def prompt(seed: int, group: int = 2):
    """Queries, keys, values and output projections of two layers, two rows and two KV heads."""
    layers, batch, kv_heads, length, dim = 2, 2, 2, 40, 8
    g = torch.Generator().manual_seed(seed)
    q = torch.randn(layers, batch, kv_heads * group, length, dim, generator=g) * 2
    k = torch.randn(layers, batch, kv_heads, length, dim, generator=g)
    v = torch.randn(layers, batch, kv_heads, length, dim, generator=g) * torch.rand(kv_heads, 1, 1, generator=g)
    w = torch.randn(layers, 12, kv_heads * group * dim, generator=g)
    return q, k, v, w


def output(q: Tensor, k: Tensor, v: Tensor, w: Tensor, keep: Tensor) -> Tensor:
    """Attention output of the last query of one layer and row, attending to kept entries only; fp64 ``[E]``."""
    group = q.shape[0] // k.shape[0]
    parts = []
    for h in range(q.shape[0]):
        chosen = keep[h // group]
        keys, values = k[h // group, chosen].double(), v[h // group, chosen].double()
        parts.append((keys @ q[h, -1].double() * q.shape[-1] ** -0.5).softmax(0) @ values)
    return w.double() @ torch.cat(parts)


@pytest.mark.parametrize("policy", ["lava", "ada_snapkv", "tova"])
def test_the_loss_is_the_distance_between_two_attention_outputs(policy):
    q, k, v, w = prompt(0)
    keep = plan(policy, q, k, v, budget=12, window=0 if policy == "tova" else 4).keep
    found = attention_output_loss(q, k, v, keep, w)
    for layer, row in np.ndindex(2, 2):
        x = q[layer, row], k[layer, row], v[layer, row], w[layer]
        want = (output(*x, torch.ones_like(keep[layer, row])) - output(*x, keep[layer, row])).abs().sum()
        assert found.loss[layer, row].item() == pytest.approx(want.item(), rel=1e-5)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**31), st.sampled_from(["lava", "snapkv", "random"]), st.integers(5, 40), st.integers(1, 3))
def test_the_loss_is_below_both_bounds(seed, policy, budget, group):
    q, k, v, w = prompt(seed, group=group)
    found = attention_output_loss(q, k, v, plan(policy, q, k, v, budget=budget, window=4).keep, w)
    assert (found.loss <= found.ada_bound + 1e-6).all()
    assert (found.loss <= found.lava_bound + 1e-6).all()


def test_bad_input_is_named():
    q, k, v, w = prompt(0)
    keep = torch.ones(k.shape[:4], dtype=torch.bool)
    with pytest.raises(ValueError, match=r"keep\[0\].shape=\(2, 2, 39\)"):
        attention_output_loss(q, k, v, keep[..., 1:], w)
    with pytest.raises(ValueError, match=r"output_weights\[0\].shape=\(12, 31\)"):
        attention_output_loss(q, k, v, keep, w[..., 1:])
    keep[1, 0, 1] = False
    with pytest.raises(ValueError, match=r"keep\[1\]: every head must keep at least 1"):
        attention_output_loss(q, k, v, keep, w)
