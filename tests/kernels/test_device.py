"""The operators on CUDA (``kvpass.ops.cuda``), kernels interpreted on the CPU, against the eager reference."""

from __future__ import annotations

import pytest
import torch

from kvpass.kernels import window_statistics
from kvpass.ops import cuda as device
from kvpass.ops import reference
from kvpass.policies import POLICIES, resolve
from numeric_checks import DecodeCase, assert_rounded, exact_attention

LAYERS, KV_HEADS, GROUP, DIM, VALUE_DIM, WINDOW = 3, 2, 2, 16, 12, 4
OPTIONS = {"cake": {"tau1": 1.0, "tau2": 1.0}, "vatp": {"indicator": "scissorhands"}}
STARTS = torch.tensor([0, 9, 9])
TOKENS = 37


def site(seed, tokens=TOKENS, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    shapes = ((KV_HEADS * GROUP, DIM), (KV_HEADS, DIM), (KV_HEADS, VALUE_DIM))
    rows = STARTS.numel()
    return [
        torch.randn(rows, tokens, heads, dim, generator=generator, dtype=dtype).transpose(1, 2) for heads, dim in shapes
    ]


def exact_prompt(q, k, v, scale, sliding_window=TOKENS, **options):
    """Attention of a prompt in float64, nothing in padding."""
    column = torch.arange(q.shape[2])
    away = column[:, None] - column
    seen = (away >= 0) & (away < sliding_window) & (column >= STARTS[:, None, None])
    keys, values = (x.repeat_interleave(GROUP, 1) for x in (k, v))
    return exact_attention(q, keys, values, scale, hidden=~seen[:, None], **options).out


def state(policy, entries, tail=TOKENS):
    b, e = STARTS.numel(), policy.capacity(entries, LAYERS, KV_HEADS)
    return {
        "pool_k": torch.full((b, e, DIM), float("nan")),
        "pool_v": torch.full((b, e, VALUE_DIM), float("nan")),
        "slots": torch.full((4, b, e), -1, dtype=torch.int32),
        "slot_traces": torch.zeros(2, b, e),
        "ledger": torch.zeros(b, LAYERS, dtype=torch.float64),
        "window_traces": torch.zeros(2, b, LAYERS, KV_HEADS, WINDOW),
        "tail_k": torch.full((LAYERS, b, KV_HEADS, tail, DIM), float("nan")),
        "tail_v": torch.full((LAYERS, b, KV_HEADS, tail, VALUE_DIM), float("nan")),
    }


def prefill(backend, policy, entries):
    """Outputs of all layers, the packed state and the offsets."""
    buffers, outputs = state(policy, entries), []
    budget = torch.full((STARTS.numel(),), entries)
    for layer in range(LAYERS):
        q, k, v = site(layer)
        out, scores, traces, weight = backend.observe_attention(q, k, v, STARTS, 0.3, layer, LAYERS, policy)
        backend.cascade_step(
            *buffers.values(), k, v, scores, traces, weight, budget, STARTS, layer=layer, policy=policy
        )
        outputs.append(out)
    offsets = torch.zeros(STARTS.numel(), LAYERS * KV_HEADS + 1, dtype=torch.int32)
    backend.pack(*(buffers[name] for name in ("pool_k", "pool_v", "slots", "slot_traces")), offsets)
    return outputs, buffers, offsets


SPLIT_OTHERWISE = {"lava_uniform", "lava_pyramid", "lava_nohead", "ada_pyramidkv"}
"""Policies whose scores are another one's: their splits are the same code on every device."""


@pytest.mark.parametrize(
    ("name", "window"),
    [
        *((name, WINDOW) for name in sorted(POLICIES.keys() - SPLIT_OTHERWISE)),
        *(pytest.param(name, WINDOW, marks=pytest.mark.exhaustive) for name in sorted(SPLIT_OTHERWISE)),
        *(("tova", 0), ("tova", 1)),
    ],
)
def test_prefill_keeps_and_answers_the_same(name, window):
    policy = resolve(name, window=window, **OPTIONS.get(name, {}))
    entries = 6 if policy.needs_budget else TOKENS
    _, wanted, bounds = prefill(reference, policy, entries)
    outputs, got, offsets = prefill(device, policy, entries)
    for layer, out in enumerate(outputs):
        assert_rounded(f"layer {layer}", out, exact_prompt(*site(layer), 0.3))
    assert torch.equal(offsets, bounds), "other numbers of entries per head"
    live = wanted["slots"][reference.OWNER] >= 0
    for plane in (reference.OWNER, reference.POSITION, reference.PLACE):
        assert torch.equal(got["slots"][plane][live], wanted["slots"][plane][live]), f"plane {plane} of the slots"
    assert torch.equal(got["slots"][reference.OWNER] >= 0, live)
    for table in ("pool_k", "pool_v"):
        assert torch.equal(got[table][live], wanted[table][live]), f"{table} holds other rows"
    torch.testing.assert_close(got["slot_traces"][:, live], wanted["slot_traces"][:, live], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(got["ledger"], wanted["ledger"], atol=1e-5, rtol=1e-4)
    for table in ("tail_k", "tail_v"):
        assert torch.equal(got[table][..., :window, :], wanted[table][..., :window, :])


@pytest.mark.parametrize(
    ("name", "window", "passes"), [("lava", WINDOW, 1), ("cake", WINDOW, 1), ("tova", 0, 1), ("tova", WINDOW, 2)]
)
def test_the_keys_are_read_once_for_all_that_a_policy_asks_of_its_window(name, window, passes, monkeypatch):
    launched = []
    monkeypatch.setattr(window_statistics, "launch", lambda kernel, *rest, **options: launched.append(kernel))
    policy = resolve(name, window=window, **OPTIONS.get(name, {}))
    q, k, v = site(0)
    device.observe_attention(q, k, v, STARTS, 0.3, 0, LAYERS, policy)
    assert launched.count(window_statistics._window_kernel) == passes


def test_sums_over_rows_are_taken_once_for_rows_of_the_batch_that_begin_apart(monkeypatch):
    launched = []
    monkeypatch.setattr(window_statistics, "launch", lambda kernel, *rest, **options: launched.append(kernel))
    policy = resolve("vatp", window=WINDOW, indicator="scissorhands")
    device.observe_attention(*site(0), STARTS, 0.3, 0, LAYERS, policy)
    assert launched.count(window_statistics._column_sum_kernel) == 1


@pytest.mark.parametrize("tokens", [1, 11])
def test_any_strides(tokens):
    """Queries, keys and values whose last dim is not contiguous, and sinks cut out of a larger table."""
    policy = resolve("lava", window=WINDOW)
    sinks = torch.randn(KV_HEADS * GROUP, 3)[:, 1]
    by_column = [x.mT.contiguous().mT for x in site(0)]
    observed = [
        device.observe_attention(*x, STARTS, 0.3, 0, LAYERS, policy, None, given)
        for x, given in ((site(0), sinks.contiguous()), (by_column, sinks))
    ]
    for found, expected in zip(*observed, strict=True):
        assert torch.equal(found, expected)
    states = [state(policy, 6) for _ in range(2)]
    for x, given in zip((site(0), by_column), states, strict=True):
        budget = torch.full((STARTS.numel(),), 6)
        device.cascade_step(*given.values(), *x[1:], *observed[0][1:], budget, STARTS, layer=0, policy=policy)
    for name in states[0]:
        torch.testing.assert_close(states[1][name], states[0][name], atol=0, rtol=0, equal_nan=True)
    _, buffers, offsets = prefill(reference, policy, entries=6)
    new, tables = site(7, tokens), device.index_pool(offsets, KV_HEADS, buffers["pool_k"].shape[1])
    found = [
        device.attend_cache(
            *x, buffers["pool_k"], buffers["pool_v"], offsets, buffers["tail_k"].clone(), buffers["tail_v"].clone(),
            torch.tensor([0, 1, 2]), torch.tensor(WINDOW), 0.3, 1, *tables, None, given,
        )
        for x, given in ((new, sinks.contiguous()), ([x.mT.contiguous().mT for x in new], sinks))
    ]  # fmt: skip
    assert torch.equal(*found)


@pytest.mark.parametrize("tokens", [1, 3, 11])
def test_attending_the_cache_answers_and_appends_the_same(tokens):
    policy = resolve("lava", window=WINDOW)
    _, buffers, offsets = prefill(reference, policy, entries=6)
    pool = (buffers["pool_k"], buffers["pool_v"], offsets)
    tables = device.index_pool(offsets, KV_HEADS, buffers["pool_k"].shape[1])
    q, k, v = site(7, tokens)
    start, used = torch.tensor([0, 1, 2]), torch.tensor(WINDOW)
    for layer in range(LAYERS):
        tail, twin = [[buffers[name].clone() for name in ("tail_k", "tail_v")] for _ in range(2)]
        expected = DecodeCase(q, k, v, *pool, *tail, start, used, layer, 0.3).exact()
        assert_rounded("eager", reference.attend_cache(q, k, v, *pool, *tail, start, used, 0.3, layer), expected)
        assert_rounded("device", device.attend_cache(q, k, v, *pool, *twin, start, used, 0.3, layer, *tables), expected)
        for one, other in zip(tail, twin, strict=True):
            torch.testing.assert_close(one, other, atol=0, rtol=0, equal_nan=True)


@pytest.mark.parametrize("held", [0, 1, 64, 65])
def test_the_index_of_a_small_pool_has_two_tiles_and_attends_it(held):
    """Dynamo takes a size of 0 or 1 for a constant, and a graph traced with it is wrong for every later pool."""
    generator = torch.Generator().manual_seed(0)

    def random(*sizes):
        return torch.randn(*sizes, generator=generator)

    tail = [random(1, 1, 1, 8, dim) for dim in (DIM, VALUE_DIM)]
    pool = (random(1, 70, DIM), random(1, 70, VALUE_DIM), torch.tensor([[0, held]], dtype=torch.int32))
    new = (random(1, 2, 1, DIM), random(1, 1, 1, DIM), random(1, 1, 1, VALUE_DIM))
    tables = device.index_pool(pool[2], 1, 70)
    assert tables[0].shape[1] == 2
    start, used = torch.tensor([1]), torch.tensor(3)
    expected = DecodeCase(*new, *pool, *tail, start, used, 0, 0.3).exact()
    assert_rounded("out", device.attend_cache(*new, *pool, *tail, start, used, 0.3, 0, *tables), expected)


@pytest.mark.parametrize("sliding_window", [5, 64])
def test_a_prompt_with_a_sliding_window_is_attended_the_same(sliding_window):
    q, k, v = site(3)
    sinks = torch.randn(KV_HEADS * GROUP)
    expected = exact_prompt(q, k, v, 0.3, sliding_window, softcap=20.0, sinks=sinks[:, None])
    for name, way in (("eager", reference), ("device", device)):
        assert_rounded(name, way.prompt_attention(q, k, v, STARTS, 0.3, 20.0, sinks, sliding_window), expected)
