"""The layer attention output loss and its bounds (Ada-KV Theorems 3.1 and 3.3, LAVa Lemma 1 and Theorem 1).

And budgets that follow from it: ``lava`` with ``loss``.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvpass.policies.loss import attention_output_loss
from kvpass.policies.plan import plan
from masked_oracle import kept_columns
from recorded_calls import inputs_and_outputs
from tiny_models import VOCABULARY, compiled_once, in_blocks, left_pad, tiny_model


def prompt(
    seed: int, layers: int = 2, batch: int = 2, kv_heads: int = 2, group: int = 2, length: int = 40, dim: int = 8
):
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
    for layer in range(2):
        for row in range(2):
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


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**31), st.integers(2, 39))
def test_an_adaptive_head_split_never_has_the_larger_ada_kv_bound(seed, budget):
    q, k, v, w = prompt(seed)
    options = {"budget": budget, "window": 1, "pool": None}
    adaptive = plan("ada_snapkv", q, k, v, alpha=0.0, **options)
    uniform = plan("snapkv", q, k, v, **options)
    assert torch.equal(adaptive.lengths.sum(2), uniform.lengths.sum(2))
    bounds = [attention_output_loss(q, k, v, x.keep, w).ada_bound for x in (adaptive, uniform)]
    assert (bounds[0] <= bounds[1] + 1e-6).all()


def test_nothing_is_lost_when_everything_is_kept():
    q, k, v, w = prompt(1)
    found = attention_output_loss(list(q), list(k), list(v), torch.ones(k.shape[:4], dtype=torch.bool), list(w))
    for x in (found.loss, found.ada_bound, found.lava_bound):
        assert x.abs().max() < 1e-5 and x.shape == (2, 2)


def test_neither_bound_is_always_the_tighter_one():
    """Ada-KV's constant mixes heads but sees W_O and v together; LAVa's is per head but takes W_O's worst row."""
    even = attention_output_loss(*prompt(2)[:3], plan("snapkv", *prompt(2)[:3], budget=10, window=4).keep, prompt(2)[3])
    assert (even.ada_bound < even.lava_bound).any()
    q, k, v, w = prompt(3, kv_heads=4)
    v[:, :, 1:] *= 1e-3
    one_loud_head = attention_output_loss(q, k, v, plan("snapkv", q, k, v, budget=10, window=4).keep, w)
    assert (one_loud_head.lava_bound < one_loud_head.ada_bound).any()


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


# --- as few entries as a loss allows ---------------------------------------------------------------------------------


def bound_of(a: Tensor, v: Tensor, window: int) -> Tensor:
    """What each entry of a layer adds to LAVa's bound when it is dropped, fp64 ``[K, N]``.

    Args:
        a: attention of all queries, ``[H, N, N]``. v: ``[K, N, D]``.
    """
    paid = a[:, len(a[0]) - window :].double().mean(1).unflatten(0, (v.shape[0], -1)).sum(1)
    return paid * v.double().abs().sum(2).amax(1, keepdim=True)


def kept_of_layer(a: Tensor, v: Tensor, window: int, loss: float, most: int) -> Tensor:
    """Entries that ``lava`` keeps of a layer, bool ``[K, N]``: its best ones until the bound is met, or ``most``."""
    n = a.shape[2]
    mean = a[:, n - window :].double().mean(1)[:, : n - window]
    pooled = torch.stack([mean[:, max(i - 3, 0) : i + 4].amax(1) for i in range(n - window)], 1)
    score = pooled.unflatten(0, (v.shape[0], -1)).amax(1)
    score = score * v[:, : n - window].double().abs().sum(2).amax(1, keepdim=True)
    bound = bound_of(a, v, window)
    keep = torch.zeros(bound.shape, dtype=torch.bool)
    keep[:, n - window :] = True
    # equal scores (pooling makes them): the lower position, then the lower head
    order = sorted(
        ((k, i) for k in range(len(v)) for i in range(n - window)), key=lambda x: (-float(score[x].float()), x[1], x[0])
    )
    for place in order[:most]:
        if float(bound[~keep].sum()) <= loss * float(bound.sum()):
            break
        keep[place] = True
    return keep


def causal_attention(q: Tensor, k: Tensor) -> Tensor:
    n, group = k.shape[1], q.shape[0] // k.shape[0]
    logits = q.double() @ k.double().repeat_interleave(group, 0).mT * q.shape[2] ** -0.5
    return logits.masked_fill(torch.ones(n, n, dtype=torch.bool).triu(1), float("-inf")).softmax(2)


@pytest.mark.parametrize("loss", [0.0, 0.02, 0.3, 1.0])
def test_each_layer_keeps_as_few_entries_as_the_loss_allows(loss):
    q, k, v, _ = prompt(4, layers=3)
    keep = plan("lava", q, k, v, budget=1.0, window=4, loss=loss).keep
    for layer in range(3):
        for row in range(2):
            a = causal_attention(q[layer, row], k[layer, row])
            assert torch.equal(keep[layer, row], kept_of_layer(a, v[layer, row], 4, loss, 10**6))
    assert loss > 0 or keep.all(), "random attention is nowhere zero"
    assert loss < 1 or not keep[..., :-4].any()
    assert bool((keep.sum((1, 2, 3)) != keep[0].sum()).any()) == (0 < loss < 1), "layers differ"


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**31), st.floats(0, 1), st.integers(1, 3), st.booleans())
def test_the_bound_on_the_last_output_is_as_low_as_asked(seed, loss, group, equal_heads):
    """With a window of one query the share is that of the bound that :func:`attention_output_loss` gives."""
    q, k, v, w = prompt(seed, group=group)
    policy, options = "lava_nohead" if equal_heads else "lava", {"budget": 1.0, "window": 1, "loss": loss}
    found = attention_output_loss(q, k, v, plan(policy, q, k, v, **options).keep, w)
    largest = v.abs().sum(4).amax(3).sum(2) * group
    row_norm = w.abs().sum(1).amax(1, keepdim=True)
    assert (found.lava_bound <= loss * 2 * row_norm * largest * (1 + 1e-6) + 1e-9).all()


def test_a_budget_is_the_most_and_layers_share_it_by_what_they_need():
    q, k, v, _ = prompt(4, layers=3)
    needed = plan("lava", q, k, v, budget=1.0, window=4, loss=0.1).lengths.sum(2) - 2 * 4
    total = int(needed.sum(0).min()) * 2 // 3
    found = plan("lava", q, k, v, budget=4 + total // 6, window=4, loss=0.1).lengths.sum(2) - 2 * 4
    assert found.sum(0).tolist() == [total // 6 * 6] * 2
    assert ((found - needed * (total // 6 * 6) / needed.sum(0)).abs() < 1).all()


@pytest.mark.parametrize("budget", [1.0, 16])
def test_a_compiled_model_keeps_what_the_loss_asks_and_says_where_it_cannot(budget):
    window, loss, lengths = 5, 0.05, (41, 19)
    _, fast = compiled_once("llama", layers=3, policy="full", budget=None, backend="eager")
    model = tiny_model("llama", layers=3)
    model.set_attn_implementation("eager")
    fast.set_policy("lava", budget, window=window, loss=loss)
    prompts = [torch.randint(1, VOCABULARY, (1, tokens)) for tokens in lengths]
    with in_blocks(fast, 8):
        cache = fast.compress(*left_pad([ids[0] for ids in prompts]))
    report = fast.report()
    beyond, totals = [], []
    for row, ids in enumerate(prompts):
        n = ids.shape[1]
        projections = [layer.self_attn.v_proj for layer in model.model.layers]
        with torch.no_grad(), inputs_and_outputs(projections) as projected:
            attentions = model(ids, output_attentions=True).attentions
        wanted = [
            kept_of_layer(a[0], v[0].unflatten(1, (2, -1)).transpose(0, 1), window, loss, 10**6)
            for a, (_, v) in zip(attentions, projected, strict=True)
        ]
        kept = [int(keep.sum()) - 2 * window for keep in wanted]
        room = (min(n if budget == 1.0 else budget, n) - window) * 2 * 3
        totals.append(min(room, sum(kept)))
        assert int(report.lengths[row].sum()) - 2 * 3 * window == totals[-1]
        beyond.append(0)
        for held, keep, needed in zip(kept_columns(cache, max(lengths))[row, ..., -n:], wanted, kept, strict=True):
            if sum(kept) <= room:
                assert torch.equal(held, keep)
            assert not (held & ~keep).any()
            beyond[-1] += int(held.sum()) - 2 * window < needed
    assert report.layers_beyond_loss.tolist() == beyond
    assert (sum(beyond) == 0) == (budget == 1.0)
    assert ("no layer lost more" if budget == 1.0 else f"{max(beyond)} layers lost more") in str(report)
    (store,) = cache.full_layers
    assert store.pool_k.shape[1] == max(totals)
    assert store.pool_k.untyped_storage().nbytes() == store.pool_k.nbytes


def test_values_of_zero_lose_nothing():
    q, k, v, _ = prompt(0)
    v[1] = 0
    keep = plan("lava", q, k, v, budget=1.0, window=4, loss=0.0).keep
    assert keep[0].all()
    assert not keep[1, ..., :-4].any()
