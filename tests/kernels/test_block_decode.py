"""Decode kernel for rows in blocks, in Triton's interpreter, against rows alone; what it must not read is NaN."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvpass.kernels.block_decode import attend_blocks
from kvpass.kernels.launch import KernelConfig
from kvpass.operands import AppendBuffers, Attention, Blocks
from kvpass.ops import cuda, reference
from kvpass.vllm.layout import BlockLayout

LAYERS, KV_HEADS, BLOCKS, TAIL = 3, 2, 5, 70
SMALL = KernelConfig.of(4, 2, BLOCK_S=16, BLOCK_P=4, BLOCK_M=2)
USED = (3, 64, 0)
"""Tail slots in use: in the first of two tiles, at the begin of the second, none."""


class Case:
    """Rows in blocks 4, 0 and 2 of five; NaN outside of their segments and used tail slots."""

    def __init__(
        self,
        tokens: int = 1,
        group: int = 2,
        dim: int = 16,
        dtype: torch.dtype = torch.float32,
        *,
        options: bool = False,
    ) -> None:
        torch.manual_seed(0)
        self.layout = BlockLayout(LAYERS, KV_HEADS, dim, pool=200, tail=TAIL)
        heads = KV_HEADS * group
        page = torch.full((BLOCKS, LAYERS, KV_HEADS, self.layout.slots, 2 * dim), torch.nan, dtype=dtype)[:, 0]
        keys, values = self.layout.blocks(page, 0)
        block = torch.tensor([4, 0, 2])
        bounds = [[0, 0, 130, 131, 131, 199, 200], [0, 1, 66, 66, 66, 66, 66], [0] * 7]
        offsets = torch.tensor(bounds, dtype=torch.int32)
        for row, used in enumerate(USED):
            for side in (keys, values):
                pool, tails = self.layout.parts(side[block[row]])
                pool[0, : bounds[row][-1]] = torch.randn(bounds[row][-1], dim).to(dtype)
                tails[..., :used, :] = torch.randn(*tails.shape[:3], used, dim).to(dtype)
        q, k, v = (torch.randn(3, tokens, n, dim).to(dtype).transpose(1, 2) for n in (heads, KV_HEADS, KV_HEADS))
        extra = (20.0, torch.randn(heads)) if options else ()
        self.call = Attention(q, k, v, 0.25, *extra)
        held = Blocks(keys, values, block, offsets, torch.tensor(USED), self.layout.pool, TAIL)
        tables = cuda.index_blocks(
            BLOCKS, LAYERS, KV_HEADS, self.layout.pool, self.layout.pool, len(USED), torch.device("cpu")
        )
        self.held = Blocks(*held[:7], *tables)
        for row, place in enumerate(block.tolist()):
            self.index(place, offsets[row])

    def index(self, block: int, offsets: Tensor) -> None:
        tiles, tile_offsets = self.held.tiles, self.held.tile_offsets
        assert tiles is not None and tile_offsets is not None
        cuda.index_block(tiles, tile_offsets, block, offsets, self.layout.pool)

    def row(self, row: int) -> tuple[Attention, AppendBuffers]:
        """A row by itself, in memory of its own."""
        place = int(self.held.block[row])
        (pool_k, tail_k), (pool_v, tail_v) = (self.layout.parts(side[place].clone()) for side in self.held[:2])
        offsets, start = self.held.offsets[row : row + 1], torch.zeros(1, dtype=torch.int64)
        tables = cuda.index_pool(offsets, KV_HEADS, self.layout.pool)
        used = self.held.used[row]
        alone = AppendBuffers(pool_k, pool_v, offsets, tail_k, tail_v, start, used, *tables)
        return self.call.rows(slice(row, row + 1), slice(None)), alone

    def check(self, layer: int, config: KernelConfig | None = SMALL, row_tiles: int | None = None) -> Tensor:
        before = self.held.keys.clone(), self.held.values.clone()
        expected = []
        for row in range(len(USED)):
            call, alone = self.row(row)
            expected.append(reference.attend_cache(call, alone, layer))
            for side, tails in zip(before, (alone.tail_k, alone.tail_v), strict=True):
                self.layout.parts(side[self.held.block[row]])[1].copy_(tails)
        found = attend_blocks(self.call, self.held, layer, row_tiles, config)
        tolerance = 1e-5 if self.call.q.dtype == torch.float32 else 1e-2
        torch.testing.assert_close(found, torch.cat(expected), atol=tolerance, rtol=tolerance)
        assert found.transpose(1, 2).is_contiguous()
        for side, wanted in zip(self.held[:2], before, strict=True):
            assert torch.equal(side.nan_to_num(77.0), wanted.nan_to_num(77.0)), "only the new tail slots are written"
        assert not self.held.arrivals.any()
        return found


@pytest.fixture(autouse=True)
def unwritten_memory_is_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, **options: empty(*size, **options).fill_(torch.nan))


@pytest.mark.parametrize("layer", range(LAYERS))
def test_rows_in_blocks_attend_and_append_as_each_alone(layer):
    Case().check(layer)


def test_several_tokens_groups_soft_capping_and_sinks():
    Case(tokens=3, group=3, dim=20, options=True).check(1)


def test_half_precision_in_the_pinned_config():
    Case(dtype=torch.float16, dim=32).check(2, config=None)


@pytest.mark.exhaustive
def test_wide_heads_in_the_pinned_config():
    Case(dtype=torch.float16, dim=512).check(2, config=None)


def test_a_row_is_rounded_as_it_is_alone():
    case = Case()
    alone = [cuda.attend_cache(call, held, 0) for call, held in map(case.row, range(len(USED)))]
    assert torch.equal(case.check(0, config=None), torch.cat(alone))


def test_the_grid_may_be_cut_to_the_largest_row():
    case = Case()
    most = int(case.held.tile_offsets[..., -1].max())
    assert 1 < most < case.held.tiles.shape[2]
    assert torch.equal(case.check(0, row_tiles=most), Case().check(0))


def test_new_tables_of_a_block_replace_its_old_ones():
    case = Case()
    other = torch.tensor([0, 150, 160, 160, 160, 160, 200], dtype=torch.int32)
    case.index(4, other)
    case.index(4, case.held.offsets[0])
    case.check(0)


@pytest.mark.parametrize("name", ["tiles", "tile_offsets", "arrivals"])
def test_without_tables_it_is_refused(name):
    case = Case()
    with pytest.raises(ValueError, match="kernels on CUDA need the tile maps"):
        attend_blocks(case.call, case.held._replace(**{name: None}), 0)


@pytest.mark.parametrize(
    ("change", "layer", "message"),
    [
        ({"block": torch.zeros(2, dtype=torch.int64)}, 0, "block is"),
        ({"used": torch.zeros(3, dtype=torch.int32)}, 0, "used is"),
        ({"arrivals": torch.zeros(5, dtype=torch.int32)}, 0, "arrivals is"),
        ({"tail": TAIL + 60}, 0, "does not hold"),
        ({}, 3, "layer=3"),
    ],
)
def test_what_does_not_fit_is_refused_and_nothing_is_written(change, layer, message):
    case = Case()
    before = case.held.keys.clone()
    with pytest.raises(ValueError, match=message):
        attend_blocks(case.call, case.held._replace(**change), layer)
    assert torch.equal(case.held.keys.nan_to_num(), before.nan_to_num())
