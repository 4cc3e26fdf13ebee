"""Turns on layers with a sliding window, against attention over all columns there ever were."""

import torch

import kvpass.ops.schemas  # noqa: F401 (registers the operators)
from kvpass.operands import Attention, RingBuffers
from kvpass.ops.sliding import ROW_BLOCK, attend_ring, columns_held, keep_newest
from numeric_checks import Largest, assert_rounded, exact_attention, hidden_in_prompt
from pairwise import pairwise

ROWS, HEADS, KV_HEADS, DIM, VALUE_DIM = 2, 4, 2, 8, 6


def site(tokens, dtype=torch.float32):
    generator = torch.Generator().manual_seed(tokens)
    sizes = ((HEADS, DIM), (KV_HEADS, DIM), (KV_HEADS, VALUE_DIM))
    return [torch.randn(ROWS, heads, tokens, dim, generator=generator).to(dtype) for heads, dim in sizes]


def filled_ring(x, slots):
    """What a ring holds of these keys or values."""
    ring = torch.zeros(ROWS, KV_HEADS, slots, x.shape[3])
    for column in range(max(x.shape[2] - slots, 0), x.shape[2]):
        ring[:, :, column % slots] = x[:, :, column]
    return ring


@pairwise(
    before=[5, 400],
    tokens=[1, 40, ROW_BLOCK, ROW_BLOCK + 1, 3 * ROW_BLOCK - 5],
    slots=[16, 300],
    chunked=[False, True],
    with_sinks=[False, True],
    softcap=[None, 2.0],
    impl=["eager", "cpp"],
)
def test_a_turn_of_any_length_equals_attention_over_all_columns(
    before, tokens, slots, chunked, with_sinks, softcap, impl
):
    """One token in C++ too; the ring of another layer is neither read nor written."""
    k_before, v_before = site(before)[1:]
    q, k, v = site(tokens)
    first, seen = torch.tensor([0, 3]), torch.tensor(before)
    sinks = torch.linspace(-1, 1, HEADS) if with_sinks else None
    rings = [torch.zeros(2, ROWS, KV_HEADS, slots, dim) for dim in (DIM, VALUE_DIM)]
    for ring in rings:
        ring[0] = torch.nan
    keep_newest(RingBuffers(*rings), k_before, v_before, torch.arange(before), 1)
    call = Attention(q, k, v, 0.3, softcap, sinks)
    held = columns_held(seen, first, slots, chunked)
    out = torch.ops.kvpass.attend_ring(*call, *rings, held, seen, 1, first if chunked else None, impl)
    all_k, all_v = torch.cat([k_before, k], 2), torch.cat([v_before, v], 2)
    query, column = torch.arange(before, before + tokens), torch.arange(before + tokens)
    hidden = hidden_in_prompt(query, column, first, slots, chunked=chunked)
    expected = exact_attention(Attention(q, all_k, all_v, 0.3, softcap, sinks), hidden)
    assert_rounded("out", out, expected.out)
    for ring, x in zip(rings, (all_k, all_v), strict=True):
        assert torch.equal(ring[1], filled_ring(x, slots)) and ring[0].isnan().all()


def test_a_long_turn_never_makes_all_its_logits():
    tokens, slots = 4096, 128
    q, k, v = site(tokens, torch.bfloat16)
    ring = RingBuffers(*(torch.zeros(1, *x.shape[:2], slots, x.shape[3], dtype=x.dtype) for x in (k, v)))
    first, seen = torch.zeros(ROWS, dtype=torch.int64), torch.tensor(1000)
    with Largest() as largest:
        attend_ring(Attention(q, k, v, 0.3), ring, columns_held(seen, first, slots), seen, 0)
    bound = 4 * ROWS * HEADS * ROW_BLOCK * (2 * slots + ROW_BLOCK)
    assert largest.nbytes <= bound < 4 * ROWS * HEADS * tokens * tokens / 16
