"""Turns on layers with a sliding window, against attention over all columns there ever were."""

import torch

from kvpass.operands import Attention, RingBuffers
from kvpass.ops.sliding import ROW_BLOCK, attend_ring, columns_held
from numeric_checks import Largest, assert_rounded, exact_attention, hidden_in_prompt
from pairwise import pairwise

ROWS, HEADS, KV_HEADS, DIM = 2, 4, 2, 8


def site(tokens, dtype=torch.float32):
    generator = torch.Generator().manual_seed(tokens)
    heads = (HEADS, KV_HEADS, KV_HEADS)
    return [torch.randn(ROWS, h, tokens, DIM, generator=generator).to(dtype) for h in heads]


def filled_ring(k, v, slots):
    """What a ring holds after these columns."""
    ring_k, ring_v = (torch.zeros(1, ROWS, KV_HEADS, slots, DIM) for _ in range(2))
    for column in range(max(k.shape[2] - slots, 0), k.shape[2]):
        ring_k[0, :, :, column % slots], ring_v[0, :, :, column % slots] = k[:, :, column], v[:, :, column]
    return ring_k, ring_v


@pairwise(
    before=[5, 400],
    tokens=[1, 40, ROW_BLOCK, ROW_BLOCK + 1, 3 * ROW_BLOCK - 5],
    slots=[16, 300],
    chunked=[False, True],
    with_sinks=[False, True],
    softcap=[None, 2.0],
)
def test_a_turn_of_any_length_equals_attention_over_all_columns(before, tokens, slots, chunked, with_sinks, softcap):
    k_before, v_before = site(before)[1:]
    q, k, v = site(tokens)
    first = torch.tensor([0, 3])
    sinks = torch.linspace(-1, 1, HEADS) if with_sinks else None
    ring_k, ring_v = filled_ring(k_before, v_before, slots)
    seen = torch.tensor(before)
    held = columns_held(seen, first, slots, chunked)
    call, ring = Attention(q, k, v, 0.3, softcap, sinks), RingBuffers(ring_k, ring_v)
    out = attend_ring(call, ring, held, seen, 0, first if chunked else None)
    all_k, all_v = torch.cat([k_before, k], 2), torch.cat([v_before, v], 2)
    query, column = torch.arange(before, before + tokens), torch.arange(before + tokens)
    hidden = hidden_in_prompt(query, column, first, slots, chunked=chunked)
    expected = exact_attention(Attention(q, all_k, all_v, 0.3, softcap, sinks), hidden)
    assert_rounded("out", out, expected.out)
    after_k, after_v = filled_ring(all_k, all_v, slots)
    assert torch.equal(ring_k, after_k) and torch.equal(ring_v, after_v)


def test_a_long_turn_never_makes_all_its_logits():
    tokens, slots = 4096, 128
    q, k, v = site(tokens, torch.bfloat16)
    ring = RingBuffers(*(torch.zeros(1, ROWS, KV_HEADS, slots, DIM, dtype=torch.bfloat16) for _ in range(2)))
    first, seen = torch.zeros(ROWS, dtype=torch.int64), torch.tensor(1000)
    with Largest() as largest:
        attend_ring(Attention(q, k, v, 0.3), ring, columns_held(seen, first, slots), seen, 0)
    bound = 4 * ROWS * HEADS * ROW_BLOCK * (2 * slots + ROW_BLOCK)
    assert largest.nbytes <= bound < 4 * ROWS * HEADS * tokens * tokens / 16
