"""The CPU kernel on rows that lie anywhere in one array, against one row at a time."""

import pytest
import torch

from kvpass.kernels import cpu
from kvpass.operands import AppendBuffers, Attention
from kvpass.ops import reference
from kvpass.vllm.layout import BlockLayout

LAYOUT = BlockLayout(layers=3, kv_heads=2, head_dim=16, pool=50, tail=12)
BLOCKS, HEADS = 5, 4


def case(dtype: torch.dtype = torch.float32) -> tuple[Attention, AppendBuffers]:
    """Rows 4, 0 and 2, with segments of random lengths."""
    torch.manual_seed(0)
    page = torch.randn(BLOCKS, LAYOUT.layers, LAYOUT.kv_heads, LAYOUT.slots, 32).to(dtype)[:, 0]
    (pool_k, tail_k), (pool_v, tail_v) = map(LAYOUT.parts, LAYOUT.blocks(page, 0))
    offsets = torch.randint(0, 51, (BLOCKS, 7)).sort(dim=1).values.int()
    q, k, v = (torch.randn(3, heads, 1, 16).to(dtype) for heads in (HEADS, 2, 2))
    start, used = torch.zeros(BLOCKS, dtype=torch.int64), torch.tensor([11, -1, 0, 20, 3])
    held = AppendBuffers(pool_k, pool_v, offsets, tail_k, tail_v, start, used, row_index=torch.tensor([4, 0, 2]))
    return Attention(q, k, v, 0.25), held


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layer", range(3))
def test_rows_in_blocks_attend_and_append_as_they_do_alone(layer, dtype):
    call, held = case(dtype)
    expected, states = [], []
    for row, block in enumerate(held.row_index.tolist()):
        at = slice(block, block + 1)
        tail_k, tail_v = (x[:, at].clone() for x in held[3:5])
        start = torch.zeros(1, dtype=torch.int64)
        alone = AppendBuffers(
            held.pool_k[at], held.pool_v[at], held.offsets[at], tail_k, tail_v, start, held.tail_used[block]
        )
        expected.append(reference.attend_cache(call.rows(slice(row, row + 1), slice(None)), alone, layer))
        states.append((tail_k, tail_v))
    out = cpu.attend_cache(call, held, layer)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(out, torch.cat(expected), atol=tolerance, rtol=tolerance)
    for block, state in zip(held.row_index.tolist(), states, strict=True):
        for entries, tail in zip(held[3:5], state, strict=True):
            assert torch.equal(entries[:, block], tail[:, 0])


def test_a_full_tail_is_refused_and_nothing_is_written():
    call, held = case()
    before = held.tail_k.clone()
    with pytest.raises(ValueError, match=r"tail_used\[0\]=12"):
        cpu.attend_cache(call, held._replace(tail_used=torch.tensor([12, -1, 0, 20, 3])), 1)
    assert torch.equal(held.tail_k, before)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"row_index": torch.tensor([4, 0, 5])}, r"must be in 0..4"),
        ({"row_index": torch.tensor([4, 0, -1])}, r"must be in 0..4"),
        ({"offsets": torch.full((BLOCKS, 7), 51, dtype=torch.int32)}, r"must rise within 0..50"),
        ({"tail_used": torch.tensor([-1, 0, 0, 0, 3])}, r"must be in 0..-1"),
        ({"tail_v": torch.zeros(3, BLOCKS, 2, 12, 16)}, "with the same strides"),
        ({"tail_k_scale": torch.zeros(3, BLOCKS, 2, 12)}, "must be given together"),
    ],
)
def test_what_would_be_read_out_of_bounds_is_refused(change, message):
    call, held = case()
    with pytest.raises(ValueError, match=message):
        cpu.attend_cache(call, held._replace(**change), 1)
