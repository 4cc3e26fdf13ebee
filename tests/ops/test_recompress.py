"""What a turn's queries say of the entries held, and which of them stay, against a softmax over each head's own."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvpass.operands import AppendBuffers, Attention, Entries, RecompressBuffers
from kvpass.ops.recompress import NOT_DUE, fill_shares, observe_held, select_held
from kvpass.policies import resolve
from kvpass.ranks import ONE_PROCESS
from numeric_checks import EPS, assert_close, exact_attention

WINDOW = 8


def ragged(seed=0, t=5, window=4, heads=4, kv_heads=2, dim=6):
    """Arguments of ``observe_held`` for one layer of two, one row, with the entries of each head beside."""
    torch.manual_seed(seed)
    lengths, used, start = torch.tensor([7, 3, 5, 11]), 6, 2
    offsets = torch.cat([torch.zeros(1), lengths.cumsum(0)]).int()[None]
    pool_k, pool_v = torch.randn(1, 26, dim), torch.randn(1, 26, dim)
    tail_k, tail_v = torch.randn(2, 1, kv_heads, 16, dim), torch.randn(2, 1, kv_heads, 16, dim)
    q = torch.randn(1, heads, t, dim)
    keys, values = [], []
    for head in range(kv_heads):
        kept = slice(*offsets[0, 2 + head : 4 + head].tolist())
        keys.append(torch.cat([pool_k[0, kept], tail_k[1, 0, head, start : used + t]]))
        values.append(torch.cat([pool_v[0, kept], tail_v[1, 0, head, start : used + t]]))
    pool, tail = Entries(pool_k, pool_v), Entries(tail_k, tail_v)
    held = AppendBuffers(pool, offsets, tail, torch.tensor([start]), torch.tensor(used))
    scores, masses = torch.full((1, 2, kv_heads, 30), float("-inf")), torch.zeros(1, 2, kv_heads, 30)
    found = RecompressBuffers(scores, masses, torch.zeros(1, 2).double(), torch.tensor([window]))
    new = (slice(None), slice(None), slice(used, used + t))
    return Attention(q, tail_k[1][new], tail_v[1][new], 0.3), held, found, keys, values


def observe(call, held, found, policy):
    observe_held(call.q, call.v.shape[3], *call[3:], held, found, 1, policy, ONE_PROCESS)


def attention_of(q, keys, rows, **options):
    """Causal attention of the last ``rows`` queries over the entries of one KV head, fp64 ``[G, rows, n]``.

    Returns:
        it, and how far rounding in float32 may take its weights and sums of them, as a share of them.
    """
    n = keys.shape[0]
    future = torch.arange(n) > torch.arange(n - rows, n)[:, None]
    weights = exact_attention(Attention(q[:, -rows:], keys, keys, 0.3, **options), future).weights
    return weights.value, float((weights.error / weights.value).nan_to_num().max()) + 8 * EPS


@pytest.mark.parametrize(
    ("t", "window", "softcap", "sinks"),
    [(5, 4, None, None), (4, 4, None, None), (2, 4, None, None), (5, 0, None, None), (5, 4, 2.0, torch.randn(4))],
    ids=["5", "4", "2", "no window", "softcap and sinks"],
)
def test_every_head_is_scored_over_its_own_entries(t, window, softcap, sinks):
    call, held, found, keys, values = ragged(t=t, window=window)
    call = call._replace(softcap=softcap, sinks=sinks)
    scores, masses, layer_weights, _ = found
    policy = resolve("lava", window=window, pool=None)
    observe(call, held, found, policy)
    assert bool((scores[:, 0] == float("-inf")).all()) and not bool(masses[:, 0].any()), "another layer was written"
    every = []
    for head in range(2):
        heads = slice(2 * head, 2 * head + 2)
        options = {"softcap": softcap, "sinks": None if sinks is None else sinks[heads]}
        a, error = attention_of(call.q[0, heads], keys[head], max(min(window, t), 1), **options)
        a, n = a.mean(1), keys[head].shape[0]
        norm = values[head].double().abs().sum(-1)[: n - min(window, t)].max()
        worth = (a.amax(0) * norm)[: n - window]
        assert_close(f"scores of head {head}", scores[0, 1, head, : n - window].double(), worth, atol=0, rtol=error)
        assert bool((scores[0, 1, head, n - window :] == float("-inf")).all())
        assert_close(f"mass of head {head}", masses[0, 1, head, :n].double(), a.mean(0), atol=0, rtol=error)
        every.append(worth)
    p = torch.cat(every)
    p = p / p.sum()
    entropy = -(p * p.log()).sum() / torch.tensor(float(p.numel())).double().log()
    # all p may be off by that share, ln p by as much
    assert_close("weight", layer_weights[0, 1], entropy, atol=2 * error)


def test_the_weight_of_a_layer_takes_all_its_heads_and_a_row_that_is_not_due_is_not_looked_at():
    call, held, found, keys, _ = ragged(t=5)
    policy = resolve("cake", window=4, tau1=1.5, tau2=0.5, evict_during_decode=False)
    observe(call, held, found, policy)
    h = v = 0.0
    for head in range(2):
        a, error = attention_of(call.q[0, 2 * head : 2 * head + 2], keys[head], 4)
        a = a[..., :-4]
        h, v = h - (a * (a + 1e-10).log()).sum(), v + a.var(1).sum()
    weight = h ** (1 / 1.5) * v ** (1 / 0.5)
    assert_close("weight", found.recompress_weights[0, 1], weight, atol=0, rtol=(2 / 1.5 + 4 / 0.5) * error)
    call, held, found, *_ = ragged(window=NOT_DUE)
    observe(call, held, found, resolve("lava", window=4))
    assert bool((found[0] == float("-inf")).all()) and not bool(found[1].any()) and not bool(found[2].any())


def shares(layers):
    return st.lists(st.integers(0, 40), min_size=layers, max_size=layers)


@given(st.integers(1, 6).flatmap(lambda layers: st.tuples(shares(layers), shares(layers))))
def test_no_layer_gets_more_than_it_holds_and_the_total_is_exact(pair):
    budgets, held = (torch.tensor(values)[None] for values in pair)
    filled = fill_shares(budgets, held)
    assert int(filled.sum()) == min(int(budgets.sum()), int(held.sum()))
    assert bool((filled <= held).all()) and bool((filled >= torch.minimum(budgets, held)).all())


@pytest.mark.parametrize("policy", ["snapkv", "lava", "ada_snapkv", "pyramidkv"])
def test_the_selection_is_exact_and_keeps_the_best_of_every_head(policy):
    torch.manual_seed(0)
    chosen = resolve(policy, window=WINDOW)
    scores = torch.rand(2, 3, 2, 40)
    scores[torch.arange(40) >= torch.randint(2, 40, (2, 3, 2, 1))] = float("-inf")
    held, tokens = (scores > float("-inf")).sum((2, 3)), torch.tensor([60] * 2)
    for entries in (0, 3, 9, 100):
        stay = select_held(scores, torch.rand(2, 3).double(), torch.tensor([entries] * 2), tokens, chosen)
        total = torch.minimum(held.sum(1), torch.tensor(6 * entries))
        assert torch.equal(stay.sum((1, 2, 3)), total)
        worst = torch.where(stay, scores, float("inf")).amin(-1)
        best_lost = torch.where(stay, float("-inf"), scores).amax(-1)
        assert bool((best_lost <= worst).all()), "a head lost an entry better than one it kept"
    uniform = select_held(scores, torch.zeros(2, 3).double(), torch.tensor([2] * 2), tokens, resolve("snapkv"))
    assert bool((uniform.sum(-1) == 2).all())
