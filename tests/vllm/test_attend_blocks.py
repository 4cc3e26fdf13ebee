"""The CPU kernel on rows that lie in blocks of one array, against one row at a time."""

import pytest
import torch

from kvpass.kernels import cpu
from kvpass.operands import AppendBuffers, Attention, Blocks
from kvpass.ops import reference
from kvpass.vllm.layout import BlockLayout

LAYOUT = BlockLayout(layers=3, kv_heads=2, head_dim=16, pool=50, tail=12)
BLOCKS, HEADS = 5, 4


def case(dtype: torch.dtype = torch.float32) -> tuple[Attention, Blocks]:
    """Three rows in blocks 4, 0 and 2, with segments of random lengths."""
    torch.manual_seed(0)
    page = torch.randn(BLOCKS, LAYOUT.layers, LAYOUT.kv_heads, LAYOUT.slots, 32).to(dtype)[:, 0]
    keys, values = LAYOUT.blocks(page, 0)
    offsets = torch.randint(0, 51, (3, 7)).sort(dim=1).values.int()
    q, k, v = (torch.randn(3, heads, 1, 16).to(dtype) for heads in (HEADS, 2, 2))
    held = Blocks(keys, values, torch.tensor([4, 0, 2]), offsets, torch.tensor([3, 11, 0]), 50, 12)
    return Attention(q, k, v, 0.25), held


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layer", range(3))
def test_rows_in_blocks_attend_and_append_as_they_do_alone(layer, dtype):
    call, held = case(dtype)
    expected, states = [], []
    for row, block in enumerate(held.block.tolist()):
        (pool_k, tail_k), (pool_v, tail_v) = (LAYOUT.parts(x[block].clone()) for x in held[:2])
        alone = AppendBuffers(
            pool_k, pool_v, held.offsets[row : row + 1], tail_k, tail_v, torch.zeros(1).long(), held.used[row]
        )
        expected.append(reference.attend_cache(call.rows(slice(row, row + 1), slice(None)), alone, layer))
        states.append((tail_k, tail_v))
    out = cpu.attend_blocks(call, held, layer)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(out, torch.cat(expected), atol=tolerance, rtol=tolerance)
    for block, state in zip(held.block.tolist(), states, strict=True):
        for entries, tail in zip(held[:2], state, strict=True):
            assert torch.equal(LAYOUT.parts(entries[block])[1], tail)


def test_a_full_tail_is_refused_and_nothing_is_written():
    call, held = case()
    before = held.keys.clone()
    with pytest.raises(ValueError, match=r"used\[1\]=12"):
        cpu.attend_blocks(call, held._replace(used=torch.tensor([3, 12, 0])), 1)
    assert torch.equal(held.keys, before)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block": torch.tensor([4, 0, 5])}, r"must be in 0..4"),
        ({"block": torch.tensor([4, 0, -1])}, r"must be in 0..4"),
        ({"offsets": torch.full((3, 7), 51, dtype=torch.int32)}, r"must rise within 0..50"),
        ({"used": torch.tensor([3, -1, 0])}, r"used\[1\]=-1"),
        ({"tail": 13}, "does not hold"),
    ],
)
def test_what_would_be_read_out_of_bounds_is_refused(change, message):
    call, held = case()
    with pytest.raises(ValueError, match=message):
        cpu.attend_blocks(call, held._replace(**change), 1)
