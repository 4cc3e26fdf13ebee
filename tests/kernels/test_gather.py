"""Gather, in Triton's interpreter, against loops over rows."""

import pytest
import torch
from torch import Tensor

from kvpass.kernels import gather
from kvpass.operands import Candidates, PrefillBuffers
from kvpass.ops.reference import OWNER, POSITION, RANK


def same_bits(found: Tensor, expected: Tensor) -> bool:
    return torch.equal(found.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8))


def make_pool(rows: int, entries: int, dim: int, value_dim: int, dtype: torch.dtype, planes: int = 2) -> list[Tensor]:
    """pool_k, pool_v, slots, slot_stats with contents that differ everywhere."""
    return [
        torch.randn(rows, entries, dim).to(dtype),
        torch.randn(rows, entries, value_dim).to(dtype),
        torch.randint(100, 200, (3, rows, entries), dtype=torch.int32),
        torch.randn(planes, rows, entries),
    ]


def buffers(pool: list[Tensor], offsets: Tensor) -> PrefillBuffers:
    """Of a pool and its offsets; the others are of no size."""
    return PrefillBuffers(*pool, *(torch.zeros(0) for _ in range(4)), offsets, torch.zeros(0))


def gather_winners(source: Tensor, rank: Tensor, pool: list[Tensor], layer: int, **of: Tensor) -> None:
    candidates = Candidates(scores=torch.zeros(0), weight=torch.zeros(0), **of)
    gather.gather_winners(source, rank, candidates, buffers(pool, torch.zeros(0)), layer)


@pytest.mark.parametrize(
    ("rows", "kv_heads", "columns", "entries", "dim", "value_dim", "dtype", "planes"),
    [
        (1, 1, 5, 3, 64, 64, torch.float32, 2),
        (2, 3, 40, 70, 80, 80, torch.float16, 1),
        (2, 2, 33, 64, 192, 128, torch.float32, 3),
        (1, 2, 100, 129, 100, 16, torch.bfloat16, 1),
        (1, 1, 4097, 300, 64, 64, torch.float32, 2),
        (2, 1, 40, 70, 72, 0, torch.float32, 2),
        (2, 1, 40, 70, 576, 0, torch.float16, 1),
        (1, 2, 9, 20, 288, 512, torch.float32, 3),
    ],
)
def test_gather_winners(rows, kv_heads, columns, entries, dim, value_dim, dtype, planes):
    k = torch.randn(rows, columns, kv_heads, dim).to(dtype).transpose(1, 2)
    v = torch.randn(rows, columns, kv_heads, value_dim).to(dtype).transpose(1, 2)
    rank = torch.randint(1000, (rows, kv_heads, columns), dtype=torch.int32)
    stats = torch.randn(planes, rows, kv_heads, columns)
    start = torch.arange(rows) * 2
    given = make_pool(rows, entries, dim, value_dim, dtype, planes)
    expected = [tensor.clone() for tensor in given]
    source = torch.where(torch.rand(rows, entries) < 0.4, torch.randint(kv_heads * columns, (rows, entries)), -1).int()
    source[0, -1] = kv_heads * columns - 1
    for row, slot in (source >= 0).nonzero().tolist():
        head, column = divmod(int(source[row, slot]), columns)
        expected[0][row, slot] = k[row, head, column]
        expected[1][row, slot] = v[row, head, column]
        entry = (5 * kv_heads + head, rank[row, head, column], column - start[row])
        for plane, value in zip((OWNER, RANK, POSITION), entry, strict=True):
            expected[2][plane, row, slot] = int(value)
        expected[3][:, row, slot] = stats[:, row, head, column]
    gather_winners(source, rank, given, 5, k=k, v=v, stats=stats, start=start)
    for found, wanted in zip(given, expected, strict=True):
        assert same_bits(found, wanted)


def arguments(winner: int) -> dict[str, Tensor]:
    """Of a call in which all slots take the same entry of a prompt that is NaN; none with -1."""
    return {
        "source": torch.full((1, 40), winner, dtype=torch.int32),
        **dict.fromkeys(["k", "v"], torch.full((1, 2, 9, 16), torch.nan)),
        "rank": torch.zeros(1, 2, 9, dtype=torch.int32),
        "stats": torch.zeros(2, 1, 2, 9),
        "start": torch.zeros(1, dtype=torch.int64),
    }


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"source": torch.zeros(1, 39, dtype=torch.int32)}, "source is"),
        ({"rank": torch.zeros(1, 2, 9)}, "rank is"),
        ({"v": torch.zeros(1, 2, 8, 16)}, "v is"),
        ({"k": torch.zeros(1, 2, 9, 32)[..., ::2]}, "k has strides"),
        ({"start": torch.zeros(1, dtype=torch.int32)}, "start is"),
        ({"slots": torch.zeros(40, 1, 3, dtype=torch.int32).permute(2, 1, 0)}, "slots has strides"),
    ],
)
def test_bad_arguments_are_named(change, named):
    names = ("pool_k", "pool_v", "slots", "slot_stats")
    pool = dict(zip(names, make_pool(1, 40, 16, 16, torch.float32), strict=True))
    before = [tensor.clone() for tensor in pool.values()]
    given = {**arguments(0), **pool, **change}
    with pytest.raises(ValueError, match=named):
        gather_winners(pool=[given.pop(name) for name in names], layer=0, **given)
    assert all(same_bits(found, wanted) for found, wanted in zip(pool.values(), before, strict=True))
