"""The operators on CUDA (``kvpass.device``), kernels interpreted on the CPU, against the eager reference."""

from __future__ import annotations

import pytest
import torch

from kvpass import device, reference, sliding
from kvpass.policies import POLICIES, resolve

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


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_prefill_keeps_and_answers_the_same(name):
    policy = resolve(name, window=WINDOW, **OPTIONS.get(name, {}))
    entries = 6 if policy.needs_budget else TOKENS
    expected, wanted, bounds = prefill(reference, policy, entries)
    actual, got, offsets = prefill(device, policy, entries)
    for layer, (out, want) in enumerate(zip(actual, expected, strict=True)):
        torch.testing.assert_close(out, want, atol=1e-5, rtol=1e-5, msg=lambda text, i=layer: f"layer {i}: {text}")
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
        assert torch.equal(got[table][..., :WINDOW, :], wanted[table][..., :WINDOW, :])


@pytest.mark.parametrize("tokens", [1, 3, 11])
def test_attending_the_cache_answers_and_appends_the_same(tokens):
    policy = resolve("lava", window=WINDOW)
    _, buffers, offsets = prefill(reference, policy, entries=6)
    pool = (buffers["pool_k"], buffers["pool_v"], offsets)
    tables = device.index_pool(offsets, KV_HEADS)
    q, k, v = site(7, tokens)
    start, used = torch.tensor([0, 1, 2]), torch.tensor(WINDOW)
    for layer in range(LAYERS):
        tail, twin = [[buffers[name].clone() for name in ("tail_k", "tail_v")] for _ in range(2)]
        expected = reference.attend_cache(q, k, v, *pool, *tail, start, used, 0.3, layer)
        actual = device.attend_cache(q, k, v, *pool, *twin, start, used, 0.3, layer, *tables)
        torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)
        for one, other in zip(tail, twin, strict=True):
            torch.testing.assert_close(one, other, atol=0, rtol=0, equal_nan=True)


@pytest.mark.parametrize("window", [5, 64])
def test_a_ring_is_filled_the_same(window):
    q, k, v = site(3)
    rings = [[torch.zeros(1, STARTS.numel(), KV_HEADS, window, dim) for dim in (DIM, VALUE_DIM)] for _ in range(2)]
    sinks = torch.randn(KV_HEADS * GROUP)
    expected = sliding.fill_ring(q, k, v, STARTS, *rings[0], 0.3, 0, 20.0, sinks)
    actual = device.fill_ring(q, k, v, STARTS, *rings[1], 0.3, 0, 20.0, sinks)
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)
    assert all(torch.equal(one, other) for one, other in zip(*rings, strict=True))
