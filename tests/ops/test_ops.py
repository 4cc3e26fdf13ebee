"""The operators: schemas and fakes by opcheck, numbers against float64, the cascade against deciding once."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention

import kvpass.ops.schemas  # noqa: F401
from kvpass.ops import evict, reference, slots
from kvpass.policies import resolve
from numeric_checks import DecodeCase, assert_rounded, exact_attention

OPS = torch.ops.kvpass
SCALE = 0.3


def qkv(b=2, h=4, k=2, n=40, d=8, dv=8, seed=0, dtype=torch.float32):
    g = torch.Generator().manual_seed(seed)
    shapes = ((b, n, h, d), (b, n, k, d), (b, n, k, dv))
    return [torch.randn(shape, generator=g).to(dtype).transpose(1, 2) * 2 for shape in shapes]


def prefill_state(b, layers, k, d, dv, n, entries, policy, slots=None, tail=None):
    slots = slots or policy.capacity(max(entries), layers, k)
    window = min(policy.window, n)
    return {
        "pool_k": torch.full((b, slots, d), float("nan")),
        "pool_v": torch.full((b, slots, dv), float("nan")),
        "slots": torch.full((4, b, slots), -1, dtype=torch.int32),
        "slot_traces": torch.zeros(2, b, slots),
        "ledger": torch.zeros(b, layers, dtype=torch.float64),
        "window_traces": torch.zeros(2, b, layers, k, max(policy.window, 1)),
        "tail_k": torch.full((layers, b, k, tail or window + 4, d), float("nan")),
        "tail_v": torch.full((layers, b, k, tail or window + 4, dv), float("nan")),
    }


def decode_state(b=2, layers=2, k=2, d=8, dv=8, used=5, capacity=9, seed=1):
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 6, (b, layers * k), generator=g)
    offsets = torch.zeros(b, layers * k + 1, dtype=torch.int32)
    offsets[:, 1:] = lengths.cumsum(1)
    slots = int(offsets.max()) + 2
    tail = [torch.full((layers, b, k, capacity, dim), float("nan")) for dim in (d, dv)]
    start = torch.tensor([0, 3])[:b]
    for tensor in tail:
        for row in range(b):
            shape = (layers, k, used - int(start[row]), tensor.shape[-1])
            tensor[:, row, :, int(start[row]) : used] = torch.randn(shape, generator=g)
    pool = [torch.randn(b, slots, dim, generator=g) for dim in (d, dv)]
    return [*pool, offsets, *tail, start, torch.tensor(used)]


def test_opcheck_site_and_observe_attention():
    q, k, v = qkv()
    torch.library.opcheck(OPS.site.default, (q, k, v, SCALE))
    spec = resolve("lava", window=8).spec
    args = (q, k, v, torch.tensor([0, 3]), SCALE, 0, 2, spec)
    torch.library.opcheck(OPS.observe_attention.default, args)


def test_opcheck_cascade_step_and_pack():
    q, k, v = qkv()
    policy = resolve("lava", window=8)
    entries, start = torch.tensor([6, 6]), torch.tensor([0, 3])
    state = prefill_state(2, 2, 2, 8, 8, 40, [6], policy)
    state = {name: tensor.nan_to_num(0.0) if tensor.is_floating_point() else tensor for name, tensor in state.items()}
    _, scores, traces, weight = OPS.observe_attention.default(q, k, v, start, SCALE, 0, 2, policy.spec)
    args = (*state.values(), k, v, scores, traces, weight, entries, start, 0, policy.spec)
    torch.library.opcheck(OPS.cascade_step.default, args)
    offsets = torch.zeros(2, 5, dtype=torch.int32)
    names = ("pool_k", "pool_v", "slots", "slot_traces")
    torch.library.opcheck(OPS.pack.default, (*(state[name] for name in names), offsets))


@pytest.mark.parametrize("impl", ["reference", "native"])
def test_opcheck_attend_cache(impl):
    q, k, v = qkv(n=1)
    state = decode_state()
    state = [tensor.nan_to_num(0.0) if tensor.is_floating_point() else tensor for tensor in state]
    torch.library.opcheck(OPS.attend_cache.default, (q, k, v, *state, SCALE, 1, impl))


@pytest.mark.parametrize("impl", ["reference", "native"])
def test_opcheck_attend_evict(impl):
    q, k, v = qkv(n=2)
    pool_k, pool_v, offsets, tail_k, tail_v, _, _ = (
        tensor.nan_to_num(0.0) if tensor.is_floating_point() else tensor for tensor in decode_state()
    )
    lengths = offsets.diff(dim=1).view(2, 2, 2).transpose(0, 1)
    longest = int(lengths.max())
    table = torch.full((2, 2, 2, 2, longest + tail_k.shape[3]), slots.EMPTY, dtype=torch.int32)
    table[..., :longest][:, torch.arange(longest) >= lengths[..., None]] = slots.ABSENT
    table[evict.SLOT_POSITION, ..., longest : longest + 5] = torch.arange(5)
    memory = torch.zeros(2, 2, 2, 2, table.shape[-1])
    quota, position = torch.full((2, 2, 2), 3), torch.tensor([5, 5])
    policy = resolve("h2o", window=2).spec
    state = (pool_k, pool_v, offsets, tail_k, tail_v, table, memory, quota, position)
    torch.library.opcheck(OPS.attend_evict.default, (q, k, v, *state, SCALE, 1, policy, impl))


def test_opcheck_observe_held():
    q, _, _ = qkv(n=2)
    held = [tensor.nan_to_num(0.0) if tensor.is_floating_point() else tensor for tensor in decode_state()]
    scores, masses = torch.full((2, 2, 2, 16), float("-inf")), torch.zeros(2, 2, 2, 16)
    found = (scores, masses, torch.zeros(2, 2, dtype=torch.float64), torch.tensor([2, 2]))
    policy = resolve("snapkv", window=2).spec
    torch.library.opcheck(OPS.observe_held.default, (q, *held, *found, SCALE, 1, 2, policy))


def test_opcheck_the_ring_operators():
    rings = [torch.zeros(2, 2, 2, 7, 8) for _ in range(2)]
    torch.library.opcheck(OPS.fill_ring.default, (*qkv(), torch.tensor([0, 3]), *rings, SCALE, 1))
    seen, first = torch.tensor(40), torch.tensor([0, 3])
    torch.library.opcheck(OPS.columns_held.default, (seen, first, 7))
    held = OPS.columns_held.default(seen, first, 7)
    for tokens, impl in ((3, "reference"), (3, "native"), (1, "native")):
        torch.library.opcheck(OPS.attend_ring.default, (*qkv(n=tokens), *rings, held, seen, SCALE, 1, impl))


@pytest.mark.parametrize("impl", ["reference", "native"])
@pytest.mark.parametrize("window", [1, 4, 64])
@pytest.mark.parametrize("options", [{}, {"softcap": 2.0, "sinks": torch.linspace(-1, 2, 4)}], ids=["plain", "capped"])
def test_a_ring_answers_like_attention_over_all_columns_of_the_window(window, options, impl):
    """A padded prompt, then one token and three at once; nothing in padding."""
    q, k, v = qkv(n=27, dv=6)
    capped = options | ({"sinks": options["sinks"][:, None]} if options else {})
    start, rings = torch.tensor([0, 20]), [torch.full((2, 2, 2, window, dim), float("nan")) for dim in (8, 6)]
    for ring in rings:
        ring[1] = 0.0
    parts = [slice(0, 23), slice(23, 24), slice(24, 27)]
    outs = [OPS.fill_ring.default(*(x[:, :, parts[0]] for x in (q, k, v)), start, *rings, SCALE, 1, **options)]
    for part in parts[1:]:
        new = (x[:, :, part] for x in (q, k, v))
        seen = torch.tensor(part.start)
        held = OPS.columns_held.default(seen, start, window)
        outs.append(OPS.attend_ring.default(*new, *rings, held, seen, SCALE, 1, impl, **options))
    columns = torch.arange(27)
    seen = (columns <= columns[:, None]) & (columns[:, None] - columns < window) & (columns >= start[:, None, None])
    expected = exact_attention(q, *(x.repeat_interleave(2, 1) for x in (k, v)), SCALE, hidden=~seen[:, None], **capped)
    assert_rounded("out", torch.cat(outs, 2), expected.out)
    assert all(ring[0].isnan().all() for ring in rings), "a ring of another layer changed"


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1)])
@pytest.mark.parametrize("options", [{}, {"softcap": 2.0}, {"sinks": True}], ids=str)
def test_prompt_attention_of_padded_rows(heads, options):
    h, kv = heads
    q, k, v = qkv(h=h, k=kv, n=23, dv=6)
    start = torch.tensor([5, 0])  # rows in any order
    sinks = torch.linspace(-1, 2, h) if options.get("sinks") else None
    softcap = options.get("softcap")
    columns = torch.arange(23)
    seen = (columns <= columns[:, None]) & (columns >= start[:, None, None])
    keys, values = (x.repeat_interleave(h // kv, 1) for x in (k, v))
    expected = exact_attention(
        q, keys, values, SCALE, hidden=~seen[:, None], softcap=softcap, sinks=None if sinks is None else sinks[:, None]
    )
    assert_rounded("out", reference.prompt_attention(q, k, v, start, SCALE, softcap, sinks), expected.out)


@pytest.mark.parametrize("impl", ["reference", "native"])
@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("options", [{}, {"softcap": 2.0}, {"sinks": torch.linspace(-1, 2, 4)}], ids=lambda o: str(*o))
def test_attend_cache_appends_and_attends(impl, tokens, options):
    q, k, v = qkv(n=tokens, dv=6)
    state = decode_state(dv=6)
    before = [tensor.clone() for tensor in state]
    expected = DecodeCase(q, k, v, *before, layer=1, scale=SCALE, **options).exact()
    assert_rounded("out", OPS.attend_cache.default(q, k, v, *state, SCALE, 1, impl, **options), expected)
    tail_k, tail_v = state[3:5]
    assert torch.equal(tail_k[1, :, :, 5 : 5 + tokens], k) and torch.equal(tail_v[1, :, :, 5 : 5 + tokens], v)
    assert tail_k[1, :, :, 5 + tokens :].isnan().all() and tail_k[0, :, :, 5:].isnan().all()
    for name, now, then in zip(("pool_k", "pool_v", "offsets"), state[:3], before[:3], strict=True):
        assert torch.equal(now, then), f"{name} changed"


@pytest.mark.parametrize("impl", ["reference", "native"])
def test_an_append_over_capacity_raises_and_writes_nothing(impl):
    q, k, v = qkv(n=5)
    state = decode_state()
    before = [tensor.clone() for tensor in state]
    with pytest.raises(ValueError, match="9"):
        OPS.attend_cache.default(q, k, v, *state, SCALE, 1, impl)
    assert all(torch.equal(now.nan_to_num(7), then.nan_to_num(7)) for now, then in zip(state, before, strict=True))


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_contract_3_the_cascaded_pool_holds_what_deciding_once_keeps(data):
    """Random scores with ties, layers, heads, rows of different length and budgets, through the operators."""
    layers = data.draw(st.integers(1, 4), label="layers")
    kv_heads = data.draw(st.integers(1, 3), label="kv_heads")
    n = data.draw(st.integers(2, 24), label="n")
    window = data.draw(st.integers(0, 4), label="window")
    policy = resolve(data.draw(st.sampled_from(["lava", "snapkv", "ada_snapkv", "lava_nohead"])), window=window)
    rows = data.draw(st.integers(1, 2), label="rows")
    start = torch.tensor([data.draw(st.integers(0, n - 1)) for _ in range(rows)])
    entries = torch.tensor([data.draw(st.integers(0, n + 3)) for _ in range(rows)])
    g = torch.Generator().manual_seed(data.draw(st.integers(0, 2**16)))
    levels = data.draw(st.sampled_from([1, 2, 5, 1000]), label="levels")
    state = prefill_state(rows, layers, kv_heads, 4, 4, n, entries.tolist(), policy)
    all_scores, keys = [], []
    for layer in range(layers):
        k, v = (torch.randn(rows, kv_heads, n, 4, generator=g) for _ in range(2))
        scores = torch.randint(0, levels, (rows, kv_heads, n), generator=g).float()
        column = torch.arange(n)
        last = torch.maximum(torch.tensor(n - window), start)
        scores[((column < start[:, None]) | (column >= last[:, None]))[:, None].expand_as(scores)] = float("-inf")
        weight = torch.randint(0, 4, (rows,), generator=g).double()
        traces = torch.rand(2, rows, kv_heads, n, generator=g)
        reference.cascade_step(*state.values(), k, v, scores, traces, weight, entries, start, layer, policy)
        all_scores.append(scores)
        keys.append(k)
    available = (n - start - window).clamp(min=0)
    final = policy.layer_budgets(state["ledger"], entries, available, kv_heads, layers)
    expected = torch.stack(
        [
            (policy.rank(scores, entries) < final[:, layer, None, None]) & (scores > float("-inf"))
            for layer, scores in enumerate(all_scores)
        ],
        1,
    )
    assert torch.equal(expected.sum((1, 2, 3)), torch.minimum(entries, available) * layers * kv_heads), (
        "the total is not exactly the budget"
    )
    offsets = torch.zeros(rows, layers * kv_heads + 1, dtype=torch.int32)
    reference.pack(state["pool_k"], state["pool_v"], state["slots"], state["slot_traces"], offsets)
    for row in range(rows):
        for head in range(layers * kv_heads):
            layer, kv_head = divmod(head, kv_heads)
            segment = slice(int(offsets[row, head]), int(offsets[row, head + 1]))
            columns = expected[row, layer, kv_head].nonzero()[:, 0]
            kept = state["slots"][reference.POSITION, row, segment].long() + start[row]
            assert torch.equal(kept, columns)
            assert torch.equal(state["pool_k"][row, segment], keys[layer][row, kv_head, columns]), "rows moved wrongly"


def test_a_full_pool_raises_instead_of_dropping_entries():
    policy = resolve("lava", window=2)
    q, k, v = qkv(b=1, n=20)
    start, entries = torch.tensor([0]), torch.tensor([8])
    state = prefill_state(1, 1, 2, 8, 8, 20, [8], policy, slots=5)
    _, scores, traces, weight = reference.observe_attention(q, k, v, start, SCALE, 0, 1, policy)
    with pytest.raises(RuntimeError, match="pool of 5 slots is full"):
        reference.cascade_step(*state.values(), k, v, scores, traces, weight, entries, start, 0, policy)


def test_site_equals_sdpa_with_grouped_heads():
    q, k, v = qkv()
    hidden = torch.ones(40, 40, dtype=torch.bool).triu(1)
    expected = exact_attention(q, *(x.repeat_interleave(2, 1) for x in (k, v)), SCALE, hidden=hidden).out
    assert_rounded("site", OPS.site.default(q, k, v, SCALE), expected)
    of_torch = scaled_dot_product_attention(q, k, v, is_causal=True, scale=SCALE, enable_gqa=True)
    assert_rounded("torch", of_torch, expected)
