"""The operators on CUDA (``kvpass.ops.cuda``), kernels interpreted on the CPU, against the eager reference."""

import functools

import pytest
import torch

from kvpass.kernels import window_statistics
from kvpass.operands import AppendBuffers, Attention, Candidates, Entries, PolicyInputs
from kvpass.ops import cuda as device
from kvpass.ops import reference
from kvpass.ops.compress import keep_entries
from kvpass.policies import POLICIES, resolve
from kvpass.policies.observation import Observation
from numeric_checks import assert_close, assert_rounded, exact_attention, hidden_in_prompt, observe, prefill_buffers
from pairwise import quick
from tiny_models import POLICY_OPTIONS

LAYERS, KV_HEADS, GROUP, DIM, VALUE_DIM, WINDOW = 3, 2, 2, 16, 12, 4
STARTS = torch.tensor([0, 9, 9, 35])
"""First real columns; the last row is shorter than the window."""
TOKENS = 37
WEIGHT = torch.randn(20, KV_HEADS * GROUP * VALUE_DIM, generator=torch.Generator().manual_seed(2))
"""Output projection."""
TURNS = 0.2 ** torch.arange(DIM // 2)
"""Inverse frequencies of the rotary embedding."""


def site(seed, tokens=TOKENS, dtype=torch.float32):
    given = {"generator": torch.Generator().manual_seed(seed), "dtype": dtype}
    shapes = ((KV_HEADS * GROUP, DIM), (KV_HEADS, DIM), (KV_HEADS, VALUE_DIM))
    return [torch.randn(len(STARTS), tokens, *shape, **given).transpose(1, 2) for shape in shapes]


@pytest.mark.parametrize("backend", [reference, device], ids=["eager", "device"])
def test_column_sums_of_blocks_add_up_to_those_of_the_prompt(backend):
    call = Attention(*site(0), 0.3)
    total = torch.zeros(*call.q.shape[:3])
    for first, end in ((0, 7), (7, 20), (20, TOKENS)):
        block = Attention(call.q[:, :, first:end], call.k[:, :, :end], call.v[:, :, :end], 0.3)
        lse = backend.attend_prompt(block, STARTS)[1]
        total[..., :end] += backend.column_sums(block, lse, STARTS, STARTS)
    for row, column in enumerate(STARTS.tolist()):
        alone = call.from_column(slice(row, row + 1), column)
        expected = Observation(*alone[:4], min(WINDOW, TOKENS - column), 0, LAYERS).column_sum
        assert_close("sums", total[row, :, column:], expected[0], atol=1e-5)
    policy = resolve("h2o", window=WINDOW)
    last = call._replace(q=call.q[:, :, -WINDOW:])
    lse = backend.attend_prompt(last, STARTS)[1]
    found = backend.score_layer(last, lse, STARTS, STARTS, 0, LAYERS, policy, PolicyInputs(summed=total))
    for x, y in zip(found, reference.score_layer(call, None, STARTS, STARTS, 0, LAYERS, policy), strict=True):
        assert_close("h2o", x, y, atol=1e-5)


def exact_prompt(q, k, v, scale, chunk=TOKENS):
    """Attention of a prompt in float64, nothing in padding."""
    column = torch.arange(q.shape[2])
    hidden = hidden_in_prompt(column, column, STARTS, chunk, chunked=True)
    return exact_attention(Attention(q, k, v, scale), hidden).out


def state(policy, entries):
    return prefill_buffers(policy, entries, LAYERS, len(STARTS), KV_HEADS, (DIM, VALUE_DIM), TOKENS)


@functools.cache
def attended(backend, layer):
    """Output and log-sum-exp of the prompt in a layer: the same under every policy."""
    return backend.attend_prompt(Attention(*site(layer), 0.3), STARTS)


def prefill(backend, policy, entries):
    """Outputs of all layers and the packed state."""
    buffers, outputs = state(policy, entries), []
    for layer in range(LAYERS):
        call = Attention(*site(layer), 0.3)
        given = torch.rand(STARTS.numel(), KV_HEADS, TOKENS, generator=torch.Generator().manual_seed(layer))
        asked = PolicyInputs(WEIGHT, TURNS, buffers.entries, replayed=given, entered=given)
        out, lse = attended(backend, layer)
        seen = backend.score_layer(call, lse, STARTS, STARTS, layer, LAYERS, policy, asked)
        keep_entries(backend, buffers, Candidates(call.k, call.v, *seen, STARTS), layer, policy)
        outputs.append(out)
    backend.pack(buffers)
    return outputs, buffers


def appended(buffers):
    """A compressed prompt as a step finds it, its tail copied."""
    pool, tail = Entries(buffers.pool_k, buffers.pool_v), Entries(buffers.tail_k.clone(), buffers.tail_v.clone())
    arrivals = torch.zeros(STARTS.numel() * KV_HEADS, 64, dtype=torch.int32)
    return AppendBuffers(pool, buffers.offsets, tail, torch.arange(len(STARTS)), torch.tensor(WINDOW), arrivals)


OWN_SCORES = {"cake", "h2o", "lava", "snapkv", "streaming_llm", "vatp"}
"""Scores of the others are theirs or fewer: how they are split is the same code on every device."""


@pytest.mark.parametrize(
    ("name", "window"),
    [
        *((name, WINDOW) for name in sorted(OWN_SCORES)),
        ("tova", 0),
        *(pytest.param(name, WINDOW, marks=pytest.mark.exhaustive) for name in sorted(POLICIES.keys() - OWN_SCORES)),
        pytest.param("tova", 1, marks=pytest.mark.exhaustive),
    ],
)
def test_prefill_keeps_and_answers_the_same(name, window):
    policy = resolve(name, window=window, **POLICY_OPTIONS.get(name, {}))
    entries = 6 if policy.needs_budget else TOKENS
    _, wanted = prefill(reference, policy, entries)
    outputs, got = prefill(device, policy, entries)
    for layer, out in enumerate(outputs):
        assert_rounded(f"layer {layer}", out, exact_prompt(*site(layer), 0.3))
    assert torch.equal(got.offsets, wanted.offsets), "other numbers of entries per head"
    live = wanted.slots[reference.OWNER] >= 0
    for plane in (reference.OWNER, reference.POSITION):
        assert torch.equal(got.slots[plane][live], wanted.slots[plane][live]), f"plane {plane} of the slots"
    assert torch.equal(got.slots[reference.OWNER] >= 0, live)
    for table in ("pool_k", "pool_v"):
        assert torch.equal(getattr(got, table)[live], getattr(wanted, table)[live]), f"{table} holds other rows"
    torch.testing.assert_close(got.slot_stats[:, live], wanted.slot_stats[:, live], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(got.layer_weights, wanted.layer_weights, atol=1e-5, rtol=1e-4)
    for table in ("tail_k", "tail_v"):
        tails = (getattr(buffers, table)[..., :window, :] for buffers in (got, wanted))
        torch.testing.assert_close(*tails, atol=0, rtol=0, equal_nan=True)  # a short row has slots that are not used


@pytest.mark.parametrize(
    ("name", "window", "kernel", "passes"),
    [
        ("lava", WINDOW, "_window_kernel", 1),
        ("cake", WINDOW, "_window_kernel", 1),
        ("tova", 0, "_window_kernel", 1),
        ("tova", WINDOW, "_window_kernel", 2),
        ("vatp", WINDOW, "_column_sum_kernel", 1),
    ],
)
def test_the_keys_are_read_once_for_all_that_a_policy_asks_of_its_window_or_of_all_rows(
    name, window, kernel, passes, monkeypatch
):
    """Also for rows of the batch that begin apart."""
    launched = []
    monkeypatch.setattr(window_statistics, "launch", lambda kernel, *rest, **options: launched.append(kernel))
    policy = resolve(name, window=window, **POLICY_OPTIONS.get(name, {}))
    observe(device, Attention(*site(0), 0.3), STARTS, STARTS, 0, LAYERS, policy)
    assert launched.count(getattr(window_statistics, kernel)) == passes


def test_any_strides():
    """Queries, keys and values whose last dim is not contiguous, and sinks cut out of a larger table."""
    policy = resolve("lava", window=WINDOW)
    sinks = torch.randn(KV_HEADS * GROUP, 3)[:, 1]
    by_column = [x.mT.contiguous().mT for x in site(0)]
    observed = [
        observe(device, Attention(*x, 0.3, sinks=given), STARTS, STARTS, 0, LAYERS, policy)
        for x, given in ((site(0), sinks.contiguous()), (by_column, sinks))
    ]
    for found, expected in zip(*observed, strict=True):
        assert torch.equal(found, expected)
    states = [state(policy, 6) for _ in range(2)]
    for x, given in zip((site(0), by_column), states, strict=True):
        keep_entries(device, given, Candidates(*x[1:], *observed[0][1:], STARTS), 0, policy)
    for one, other in zip(*states, strict=True):
        torch.testing.assert_close(other, one, atol=0, rtol=0, equal_nan=True)
    _, buffers = prefill(reference, policy, entries=6)
    new = site(7, 1)
    found = [
        device.attend_cache(Attention(*x, 0.3, sinks=given), appended(buffers), 1)
        for x, given in ((new, sinks.contiguous()), ([x.mT.contiguous().mT for x in new], sinks))
    ]
    assert torch.equal(*found)


@pytest.mark.parametrize("chunk", quick([12, 64], [12]))
def test_chunks_of_a_prompt_are_attended_the_same(chunk):
    """All tokens, and the last ones, whose first chunk began before them."""
    call = Attention(*site(3), 0.3)
    expected = exact_prompt(*call[:4], chunk=chunk)
    for name, way in (("eager", reference), ("device", device)):
        for tokens in (TOKENS, 7):
            out = way.attend_prompt(call._replace(q=call.q[:, :, -tokens:]), STARTS, chunk, True)[0]
            assert_rounded(name, out, expected.tokens(slice(-tokens, None)))
