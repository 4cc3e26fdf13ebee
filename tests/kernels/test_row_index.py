"""Kernels for rows anywhere in one array, C++ and Triton interpreted, against each alone; what is not theirs is NaN."""

import itertools

import pytest
import torch
from torch import Tensor
from triton import Config

from kvpass.kernels import cpu
from kvpass.kernels.ragged_decode import attend_ragged
from kvpass.kernels.ragged_extend import attend_extend
from kvpass.operands import CODES, AppendBuffers, by_name, from_names
from kvpass.ops import cuda, reference
from kvpass.vllm.layout import SLOTS, BlockLayout
from numeric_checks import assert_rounded, decode_case
from pairwise import quick_rows

LAYERS, KV_HEADS, BLOCKS, TAIL = 3, 2, 5, 70
ROWS = (4, 0, 2)
LENGTHS = [[129, 58], [65, 0], [0, 0]]
"""Of each row: entries of the pool."""
USED = (3, 64, 0)
"""Tail slots in use: in the first of two tiles, at the begin of the second, none."""
SMALL = Config({"BLOCK_S": 16, "BLOCK_P": 4, "BLOCK_M": 2}, 4, 2)
EXTEND = Config({"BLOCK_R": 32, "BLOCK_S": 16}, 4, 2)


def reference_of(*given):
    return reference.attend_cache(*given[:3])  # without a config


def cpu_of(*given):
    return cpu.attend_cache(*given[:3])


def cuda_of(*given):
    return cuda.attend_cache(*given[:3])


WAYS = (attend_ragged, cpu_of)


class Rows:
    """Rows 4, 0 and 2 of five; NaN outside of their segments and used tail slots. ``alone``: each by itself."""

    def __init__(self, layer=1, tokens=1, group=2, dim=16, dtype=torch.float32, *, options=False, entries="model"):
        given = {"tokens": tokens, "group": group, "dim": dim, "dtype": dtype, "slots": TAIL, "layer": layer}
        given |= {"softcap": 20.0} if options else {}
        alone = [
            decode_case([lengths], used=used, seed=row, sinks=options, **given)
            for row, (lengths, used) in enumerate(zip(LENGTHS, USED, strict=True))
        ]
        self.alone = [case.changed(sinks=alone[0].call.sinks).packed(entries) for case in alone]
        q, k, v = (torch.cat([getattr(c.call, x).transpose(1, 2) for c in self.alone]).transpose(1, 2) for x in "qkv")
        self.call = self.alone[0].call._replace(q=q, k=k, v=v)
        layout = BlockLayout(LAYERS, KV_HEADS, dim, pool=200, tail=TAIL, entry_format=entries)
        step = layout.units(layout.largest)
        size = (BLOCKS * step, LAYERS, KV_HEADS, SLOTS, layout.width)
        empty = torch.nan if entries == "model" else 0
        self.memory = torch.full(size, empty, dtype=CODES.get(entries, dtype))
        buffers = layout.buffers(self.memory[:, 0], 0, TAIL)
        self.blocks = {name: x[::step] if name.startswith("pool") else x[:, ::step] for name, x in buffers.items()}
        offsets, used = torch.full((BLOCKS, 7), -1, dtype=torch.int32), torch.full((BLOCKS,), -1)
        for at, case in zip(ROWS, self.alone, strict=True):
            offsets[at], used[at] = case.held.offsets[0], case.held.tail_used
            for name, x in by_name(case.held).items():
                if name in self.blocks:
                    self._of_row(name, at, x.shape[1]).copy_(x)
        start, arrivals = torch.zeros(BLOCKS, dtype=torch.int64), torch.zeros(3 * KV_HEADS, 64, dtype=torch.int32)
        tables = {"offsets": offsets, "tail_start": start, "tail_used": used, "arrivals": arrivals}
        self.held = from_names(AppendBuffers, self.blocks | tables | {"row_index": torch.tensor(ROWS)})

    def _of_row(self, name, at, entries):
        """A buffer of one row, as a batch of one."""
        block = self.blocks[name]
        return block[at : at + 1, :entries] if name.startswith("pool") else block[:, at : at + 1]

    def _kept(self) -> list[Tensor]:
        """What no call changes: all buffers, zeros in the slots of the new entries."""
        found = {name: x.clone() for name, x in self.blocks.items()}
        tails = [x for name, x in found.items() if name.startswith("tail")]
        for x, (at, case) in itertools.product(tails, zip(ROWS, self.alone, strict=True)):
            used = int(case.held.tail_used)
            x[case.layer, at, :, used : used + self.call.q.shape[2]] = 0
        return [x.contiguous().view(torch.uint8) for x in found.values()]

    def changed(self, **buffers: Tensor) -> AppendBuffers:
        """The cache with other buffers."""
        return from_names(AppendBuffers, by_name(self.held) | buffers)

    def check(self, config=SMALL, way=attend_ragged) -> Tensor:
        before = self._kept()
        found = way(self.call, self.held, self.alone[0].layer, config)
        for row, (at, case) in enumerate(zip(ROWS, self.alone, strict=True)):
            own = {name: x for name, x in by_name(case.held).items() if name in self.blocks}
            own = {name: self._of_row(name, at, x.shape[1]).contiguous() for name, x in own.items()}
            after = case.changed(**own)
            after.check_appended()
            half = found.dtype != torch.float32
            assert_rounded(f"row {row}", found[row : row + 1], after.exact(rounds_weights=half))
        assert all(map(torch.equal, self._kept(), before))
        assert found.transpose(1, 2).is_contiguous() and not self.held.arrivals.any()
        return found


HALF = torch.float16
OTHER_WAYS = (lambda *given: attend_extend(*given[:3], EXTEND), reference_of, cpu_of)


@pytest.mark.parametrize(
    ("made", "checked"),
    [
        *(({"layer": layer}, {}) for layer in range(LAYERS)),
        *(({"dtype": x, "layer": i}, {"way": cpu_of}) for x in (torch.float32, torch.bfloat16) for i in range(LAYERS)),
        *(({"tokens": 3}, {"way": way}) for way in OTHER_WAYS),
        ({"tokens": 3, "group": 3, "dim": 20, "options": True}, {}),
        ({"dtype": HALF, "dim": 32, "layer": 2}, {"config": None}),
        pytest.param({"dtype": HALF, "dim": 512, "layer": 2}, {"config": None}, marks=pytest.mark.exhaustive),
    ],
)
def test_rows_anywhere_attend_and_append_as_each_alone(made, checked):
    """Without a config: in that of the table."""
    Rows(**made).check(**checked)


OF_CODES = {"C++": (cpu_of, 0), "ragged": (cuda_of, 8), "extend": (cuda_of, 0)}
OFTEN = [*(("C++", entries) for entries in CODES), ("ragged", "int8"), ("ragged", "rot4"), ("extend", "rot3")]


@pytest.mark.parametrize(("name", "entries"), quick_rows([*itertools.product(OF_CODES, CODES)], OFTEN))
def test_rows_of_codes_anywhere_attend_and_append_as_each_alone(name, entries, monkeypatch):
    way, split = OF_CODES[name]
    monkeypatch.setattr(cuda, "SPLIT_TOKENS", split)
    Rows(tokens=3, entries=entries).check(way=way)


def test_a_row_is_rounded_as_it_is_alone():
    rows, counters = Rows(), torch.zeros(KV_HEADS, 64, dtype=torch.int32)
    alone = [case.copied().changed(arrivals=counters) for case in rows.alone]
    assert torch.equal(rows.check(config=None), torch.cat([cuda.attend_cache(*case.arguments) for case in alone]))


@pytest.mark.parametrize("way", [cuda_of, cpu_of])
def test_scales_that_do_not_lie_as_their_codes_are_refused(way):
    rows = Rows(entries="int8")
    change = {"tail_v_scale": rows.held.tail.v_scale.clone(memory_format=torch.contiguous_format)}
    with pytest.raises(ValueError, match="scales of tail_k and tail_v must lie as far apart as these"):
        way(rows.call, rows.changed(**change), 0)


def test_other_strides_of_a_known_shape_are_refused():
    rows = Rows()
    cpu_of(rows.call, rows.held, 0)
    *sizes, dim = rows.held.tail.v.shape
    with pytest.raises(ValueError, match="must be packed in each row, with the same strides"):
        cpu_of(rows.call, rows.changed(tail_v=torch.zeros(*sizes, 2 * dim)[..., :dim]), 0)


@pytest.mark.parametrize(
    ("way", "change", "layer", "message"),
    [
        (attend_ragged, {"row_index": torch.zeros(2, dtype=torch.int64)}, 0, "row_index is"),
        (cpu_of, {"row_index": torch.tensor([4, 0, 5])}, 1, r"must be in 0..4"),
        (cpu_of, {"offsets": torch.full((BLOCKS, 7), 201, dtype=torch.int32)}, 1, r"must rise within 0..200"),
        (cpu_of, {"tail_used": torch.tensor([-1, 0, 0, 0, 3])}, 1, r"must be in 0..-1"),
        (cpu_of, {"tail_used": torch.tensor([TAIL, -1, 0, 20, 3])}, 1, rf"tail_used\[0\]={TAIL}"),
        *((way, {"tail_k": torch.zeros(LAYERS, BLOCKS, KV_HEADS, TAIL, 16)}, 0, "same strides") for way in WAYS),
    ],
)
def test_what_does_not_fit_is_refused_and_nothing_is_written(way, change, layer, message):
    rows = Rows()
    before = rows.held.tail.k.clone()
    with pytest.raises(ValueError, match=message):
        way(rows.call, rows.changed(**change), layer)
    assert torch.equal(rows.held.tail.k.nan_to_num(), before.nan_to_num())
