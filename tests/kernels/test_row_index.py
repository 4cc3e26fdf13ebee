"""Kernels for rows anywhere in one array, C++ and Triton interpreted, against each alone; what is not theirs is NaN."""

import itertools
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from triton import Config

from kvpass.kernels import cpu
from kvpass.kernels.ragged_decode import attend_ragged
from kvpass.kernels.ragged_extend import attend_extend
from kvpass.operands import CODES, AppendBuffers, Attention, Entries, by_name, from_names
from kvpass.ops import cuda, reference
from kvpass.ops.entry_formats import quantise
from kvpass.vllm.layout import SLOTS, BlockLayout
from pairwise import quick_rows

LAYERS, KV_HEADS, BLOCKS, TAIL = 3, 2, 5, 70
ROWS = (4, 0, 2)
SMALL = Config({"BLOCK_S": 16, "BLOCK_P": 4, "BLOCK_M": 2}, 4, 2)
EXTEND = Config({"BLOCK_R": 32, "BLOCK_S": 16}, 4, 2)
USED = (3, 64, 0)
"""Tail slots in use: in the first of two tiles, at the begin of the second, none."""


def reference_of(*given):
    return reference.attend_cache(*given[:3])  # without a config


def cpu_of(*given):
    return cpu.attend_cache(*given[:3])


def cuda_of(*given):
    return cuda.attend_cache(*given[:3])


WAYS = (attend_ragged, cpu_of)


class Case:
    """Rows 4, 0 and 2 of five; NaN outside of their segments and used tail slots."""

    def __init__(self, tokens=1, group=2, dim=16, dtype=torch.float32, *, options=False, entries="model") -> None:
        torch.manual_seed(0)
        self.layout = BlockLayout(LAYERS, KV_HEADS, dim, pool=200, tail=TAIL)
        heads = KV_HEADS * group
        self.units = self.layout.units(self.layout.largest)
        size = (BLOCKS * self.units, LAYERS, KV_HEADS, SLOTS, 2 * dim)
        held = self._blocks(self.layout, torch.full(size, torch.nan, dtype=dtype))
        pool_k, tail_k, pool_v, tail_v = held.values()
        sides = (pool_k, tail_k), (pool_v, tail_v)
        bounds = [[0, 0, 130, 131, 131, 199, 200], [0, 1, 66, 66, 66, 66, 66], [0] * 7]
        offsets = torch.full((BLOCKS, 7), -1, dtype=torch.int32)
        used, start = torch.full((BLOCKS,), -1), torch.zeros(BLOCKS, dtype=torch.int64)
        for row, (at, count) in enumerate(zip(ROWS, USED, strict=True)):
            offsets[at], used[at] = torch.tensor(bounds[row]), count
            for pool, tails in sides:
                pool[at, : bounds[row][-1]] = torch.randn(bounds[row][-1], dim).to(dtype)
                tails[:, at, :, :count] = torch.randn(LAYERS, KV_HEADS, count, dim).to(dtype)
        q, k, v = (torch.randn(3, tokens, n, dim).to(dtype).transpose(1, 2) for n in (heads, KV_HEADS, KV_HEADS))
        extra = (20.0, torch.randn(heads)) if options else ()
        self.call = Attention(q, k, v, 0.25, *extra)
        arrivals = torch.zeros(len(USED) * KV_HEADS, 64, dtype=torch.int32)
        pool, tail = Entries(pool_k, pool_v), Entries(tail_k, tail_v)
        self.held = AppendBuffers(pool, offsets, tail, start, used, arrivals, row_index=torch.tensor(ROWS))
        if entries != "model":
            self._quantise(replace(self.layout, entry_format=entries))

    def _blocks(self, layout: BlockLayout, memory: Tensor) -> dict[str, Tensor]:
        """Pools and tails of blocks that lie one behind the other."""
        every, step = layout.buffers(memory[:, 0], 0, TAIL), self.units
        return {name: x[::step] if name.startswith("pool") else x[:, ::step] for name, x in every.items()}

    def _quantise(self, layout: BlockLayout) -> None:
        """Hold codes of what is held, in one memory."""
        size = (BLOCKS * self.units, LAYERS, KV_HEADS, SLOTS, layout.width)
        codes = self._blocks(layout, torch.zeros(size, dtype=CODES[layout.entry_format]))
        floats = by_name(self.held)
        for name in ("pool_k", "pool_v", "tail_k", "tail_v"):
            quantise(floats[name], codes[name], codes[f"{name}_scale"])
        self.held = from_names(AppendBuffers, floats | codes)

    def row(self, row: int) -> tuple[Attention, AppendBuffers]:
        """A row by itself, in memory of its own."""
        at = slice(ROWS[row], ROWS[row] + 1)
        held, copied = self.held, lambda entries: Entries(*(x if x is None else x.clone() for x in entries))
        pool, tail = copied(held.pool.at(at)), copied(held.tail.at((slice(None), at)))
        arrivals = torch.zeros(KV_HEADS, 64, dtype=torch.int32)
        alone = AppendBuffers(
            pool, held.offsets[at].clone(), tail, held.tail_start[at], held.tail_used[at][0], arrivals
        )
        return self.call.rows(slice(row, row + 1), slice(None)), alone

    def changed(self, **buffers: Tensor) -> AppendBuffers:
        """The cache with other buffers."""
        return from_names(AppendBuffers, by_name(self.held) | buffers)

    def check(self, layer, config=SMALL, way=attend_ragged) -> Tensor:
        held = {name: x for name, x in by_name(self.held).items() if name.startswith(("pool", "tail_k", "tail_v"))}
        before = {name: x.clone() for name, x in held.items() if x is not None}
        expected = []
        for row, at in enumerate(ROWS):
            call, alone = self.row(row)
            expected.append(reference.attend_cache(call, alone, layer))
            for name, wanted in before.items():
                if name.startswith("tail"):
                    wanted[:, at] = by_name(alone)[name][:, 0]
        found = way(self.call, self.held, layer, config)
        tolerance = 1e-5 if self.call.q.dtype == torch.float32 else 1e-2
        torch.testing.assert_close(found, torch.cat(expected), atol=tolerance, rtol=tolerance)
        assert found.transpose(1, 2).is_contiguous()
        for name, wanted in before.items():
            exactly = 1e-6 if name.endswith("scale") else 0.0
            torch.testing.assert_close(held[name], wanted, rtol=exactly, atol=0.0, equal_nan=True)
        assert not self.held.arrivals.any()
        return found


HALF = torch.float16
OTHER_WAYS = (lambda *given: attend_extend(*given[:3], EXTEND), reference_of, cpu_of)


@pytest.mark.parametrize(
    ("made", "checked"),
    [
        *(({}, {"layer": layer}) for layer in range(LAYERS)),
        *(({"dtype": x}, {"layer": i, "way": cpu_of}) for x in (torch.float32, torch.bfloat16) for i in range(LAYERS)),
        *(({"tokens": 3}, {"layer": 1, "way": way}) for way in OTHER_WAYS),
        ({"tokens": 3, "group": 3, "dim": 20, "options": True}, {"layer": 1}),
        ({"dtype": HALF, "dim": 32}, {"layer": 2, "config": None}),
        pytest.param({"dtype": HALF, "dim": 512}, {"layer": 2, "config": None}, marks=pytest.mark.exhaustive),
    ],
)
def test_rows_anywhere_attend_and_append_as_each_alone(made, checked):
    """Without a config: in that of the table."""
    Case(**made).check(**checked)


OF_CODES = {"C++": (cpu_of, 0), "ragged": (cuda_of, 8), "extend": (cuda_of, 0)}
OFTEN = [*(("C++", entries) for entries in CODES), ("ragged", "int8"), ("ragged", "rot4"), ("extend", "rot3")]


@pytest.mark.parametrize(("name", "entries"), quick_rows([*itertools.product(OF_CODES, CODES)], OFTEN))
def test_rows_of_codes_anywhere_attend_and_append_as_each_alone(name, entries, monkeypatch):
    way, split = OF_CODES[name]
    monkeypatch.setattr(cuda, "SPLIT_TOKENS", split)
    Case(tokens=3, entries=entries).check(1, way=way)


def test_a_row_is_rounded_as_it_is_alone():
    case = Case()
    alone = [cuda.attend_cache(call, held, 0) for call, held in map(case.row, range(len(USED)))]
    assert torch.equal(case.check(0, config=None), torch.cat(alone))


@pytest.mark.parametrize("way", [cuda_of, cpu_of])
def test_scales_that_do_not_lie_as_their_codes_are_refused(way):
    case = Case(entries="int8")
    change = {"tail_v_scale": case.held.tail.v_scale.clone(memory_format=torch.contiguous_format)}
    with pytest.raises(ValueError, match="scales of tail_k and tail_v must lie as far apart as these"):
        way(case.call, case.changed(**change), 0)


def test_other_strides_of_a_known_shape_are_refused():
    case = Case()
    cpu_of(case.call, case.held, 0)
    *sizes, dim = case.held.tail.v.shape
    with pytest.raises(ValueError, match="must be packed in each row, with the same strides"):
        cpu_of(case.call, case.changed(tail_v=torch.zeros(*sizes, 2 * dim)[..., :dim]), 0)


@pytest.mark.parametrize(
    ("way", "change", "layer", "message"),
    [
        (attend_ragged, {"row_index": torch.zeros(2, dtype=torch.int64)}, 0, "row_index is"),
        (cpu_of, {"row_index": torch.tensor([4, 0, 5])}, 1, r"must be in 0..4"),
        (cpu_of, {"offsets": torch.full((BLOCKS, 7), 201, dtype=torch.int32)}, 1, r"must rise within 0..200"),
        (cpu_of, {"tail_used": torch.tensor([-1, 0, 0, 0, 3])}, 1, r"must be in 0..-1"),
        (cpu_of, {"tail_used": torch.tensor([TAIL, -1, 0, 20, 3])}, 1, rf"tail_used\[0\]={TAIL}"),
        *((way, {"tail_k": torch.zeros(LAYERS, BLOCKS, KV_HEADS, TAIL, 16)}, 0, "same strides") for way in WAYS),
        *((way, {"tail_k_scale": torch.zeros(LAYERS, BLOCKS, KV_HEADS, TAIL)}, 0, "given together") for way in WAYS),
    ],
)
def test_what_does_not_fit_is_refused_and_nothing_is_written(way, change, layer, message):
    case = Case()
    before = case.held.tail.k.clone()
    with pytest.raises(ValueError, match=message):
        way(case.call, case.changed(**change), layer)
    assert torch.equal(case.held.tail.k.nan_to_num(), before.nan_to_num())
