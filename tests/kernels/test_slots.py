"""Slots that change hands: C++ on the CPU, Triton in its interpreter and the eager reference.

What none of them may read is NaN.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvpass.kernels import cpu
from kvpass.operands import Attention, Entries, SlotCache, by_name
from kvpass.ops import cuda as device
from kvpass.ops import slots
from kvpass.ops.slots import ABSENT, EMPTY
from kvpass.policies.decode_rules import pool_in_order
from numeric_checks import EPS, CacheCase, Exact, assert_rounded, exact_attention, rounded
from pairwise import pairwise, quick, quick_rows

WAYS = {"cpu": cpu.attend_slots, "triton": device.attend_slots}
LOSERS = {"cpu": cpu.evict_lowest, "triton": device.evict_lowest}
POOLED = {"eager": pool_in_order, "cpu": cpu.pool_in_order, "triton": device.pool_in_order}
both_ways = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)


class SlotsCase(CacheCase):
    """Arguments of ``attend_slots``; ``held`` is a ``SlotCache``."""

    def unpacked(self) -> SlotsCase:
        """The case with what codes stand for, in float64, and a new entry that is rounded as they are."""
        found = {name: self.floats(name) for name in ("pool_k", "pool_v", "tail_k", "tail_v")}
        k, v = (rounded(x.double(), self.entry_format) for x in (self.call.k, self.call.v))
        return replace(self.changed(**found, k=k, v=v), entry_format="model")

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Everything a call may write or must leave alone."""
        given = self.call._asdict() | by_name(self.held)
        return {name: x for name, x in given.items() if isinstance(x, Tensor)}

    def copy(self) -> SlotsCase:
        copies = {name: x.clone() for name, x in self.tensors.items() if name != "position"}
        return self.changed(**copies, position=self.held.position + 0)

    def exact(self) -> tuple[Exact, Exact]:
        """Output ``[B, H, 1, Dv]`` and weights ``[B, H, S]``, one line after another."""
        if self.entry_format != "model":
            return self.unpacked().exact()
        (q, k, v, scale, softcap, sinks), held = self.call, self.held
        (rows, kv_heads, width), heads = held.position.shape, q.shape[1]
        group, behind = heads // kv_heads, width - held.tail.k.shape[3]
        lines = []
        for row, head in itertools.product(range(rows), range(kv_heads)):
            slot = int((held.position[row, head] == EMPTY).nonzero()[0])
            live = (held.position[row, head] >= 0) | (torch.arange(width) == slot)
            first = 0 if held.offsets is None else int(held.offsets[row, self.layer * kv_heads + head])
            sides = []
            pool_k, pool_v = held.pool[:2] if held.pool else (None, None)
            stored = (pool_k, held.tail.k) if held.tail.v.shape[4] == 0 else (pool_v, held.tail.v)
            values = [None if x is None else x[..., : v.shape[3]] for x in stored]
            for pool, tail, new in ((pool_k, held.tail.k, k), (*values, v)):
                line = tail.new_zeros(width, tail.shape[4])
                if pool is not None:
                    segment = pool[row, first : first + behind]
                    line[: len(segment)] = segment
                line[behind:], line[slot] = tail[self.layer, row, head], new[row, head, 0]
                line[~live] = 0.0
                sides.append(line)
            of_head = slice(head * group, (head + 1) * group)
            call = Attention(q[row, of_head], *sides, scale, softcap, None if sinks is None else sinks[of_head])
            lines.append(exact_attention(call, ~live, rounds_weights=True))
        out, weights = (Exact.cat([getattr(line, name) for line in lines]) for name in ("out", "weights"))
        return out.view(rows, heads, 1, -1), weights.view(rows, heads, width)


def slots_case(
    lengths: list[list[int]],
    *,
    group: int = 2,
    dim: int = 32,
    value_dim: int | None = None,
    capacity: int = 24,
    live: float = 0.8,
    pool: bool = True,
    recorded: bool = True,
    dtype: torch.dtype = torch.float32,
    softcap: float | None = None,
    sinks: bool = False,
    seed: int = 0,
    in_keys: bool = False,
) -> SlotsCase:
    """Random arguments; of three layers the second is attended.

    Args:
        lengths: of the pool segments, by row and KV head. live: share of the slots that hold an entry. in_keys: values
            are the first columns of the keys, and stored there only.
    """
    generator = torch.Generator().manual_seed(seed)
    rows, kv_heads, layers, layer = len(lengths), len(lengths[0]), 3, 1

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    segments = torch.full((rows, layers, kv_heads), 2)
    segments[:, layer] = torch.tensor(lengths)
    offsets = torch.nn.functional.pad(segments.flatten(1).cumsum(1), (1, 0)).int()
    behind = max(2, int(segments.max())) if pool else 0
    width = behind + capacity
    position = torch.randperm(width, generator=generator).expand(rows, kv_heads, width).clone().int() + 3
    dead = torch.rand(rows, kv_heads, width, generator=generator) >= live
    position[dead] = torch.where(torch.rand(int(dead.sum()), generator=generator) < 0.5, EMPTY, ABSENT).int()
    if pool:
        position[..., :behind][torch.arange(behind) >= segments[:, layer, :, None]] = ABSENT
    position[..., -1] = torch.where((position == EMPTY).any(-1), position[..., -1], EMPTY)
    pools, tails = [], []
    for size in (dim, value_dim or dim):
        tail = torch.full((layers, rows, kv_heads, capacity, size), torch.nan, dtype=dtype)
        tail[layer][position[..., behind:] >= 0] = random(int((position[..., behind:] >= 0).sum()), size)
        rows_of_pool = torch.full((rows, int(offsets[:, -1].max()) + 3, size), torch.nan, dtype=dtype)
        for row in range(rows):
            for head in range(kv_heads):
                first = int(offsets[row, layer * kv_heads + head])
                for slot in (position[row, head, :behind] >= 0).nonzero().flatten().tolist():
                    rows_of_pool[row, first + slot] = random(size)
        pools.append(rows_of_pool)
        tails.append(tail)
    k = random(rows, 1, kv_heads, dim).transpose(1, 2)
    v = k[..., :value_dim] if in_keys else random(rows, 1, kv_heads, value_dim or dim).transpose(1, 2)
    if in_keys:
        pools[1], tails[1] = pools[1][..., :0].contiguous(), tails[1][..., :0].contiguous()
    now = torch.randint(width + 3, width + 99, (rows,), generator=generator) if recorded else None
    q = random(rows, 1, group * kv_heads, dim).transpose(1, 2)
    call = Attention(q, k, v, dim**-0.5, softcap, random(group * kv_heads) * 3 if sinks else None)
    kept = (Entries(*pools), offsets) if pool else (None, None)
    held = SlotCache(*kept, Entries(*tails), position, now)
    return SlotsCase(call, held, layer)


def check(case: SlotsCase, way: Callable[..., Any]) -> None:
    """Output and weights exact but for rounding; the positions and every entry the reference's."""
    expected, found = case.copy(), case.copy()
    right = case.exact()
    for name, answer in (("eager", slots.attend_slots(*expected.arguments)), ("found", way(*found.arguments))):
        assert answer[0].dtype == case.call.q.dtype and answer[0].transpose(1, 2).is_contiguous()
        assert_rounded(name, answer[0], right[0])
        if case.held.now is None:
            assert answer[1] is None
        else:
            assert_rounded(f"weights, {name}", answer[1], right[1])
    for name, tensor in expected.tensors.items():
        other = found.tensors[name]
        if name.endswith("scale"):
            torch.testing.assert_close(other, tensor, atol=0, rtol=EPS * case.call.v.shape[3] ** 0.5, equal_nan=True)
        else:
            assert torch.equal(tensor.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8)), name


LENGTHS = [[0, 33], [40, 1]]
THREE_HEADS = [[0, 33, 7], [70, 1, 32]]


@pairwise(way=[*WAYS], group=[1, 3, 8], live=[0.0, 0.9, 1.0])
def test_groups_and_empty_slots(way, group, live):
    check(slots_case(LENGTHS, group=group, live=live), WAYS[way])


SIZES = [
    *(([[19, 40]], {"dim": dim, "value_dim": value_dim}) for dim, value_dim in ((100, 100), (192, 128), (16, 48))),
    ([[19], [40]], {"group": 4, "dim": 72, "value_dim": 64, "in_keys": True}),
    ([[19], [40]], {"group": 20, "dim": 576, "value_dim": 512, "in_keys": True}),
    (LENGTHS, {"group": 4, "dim": 80, "dtype": torch.float16}),
    ([[1025, 5]], {"dim": 16}),
]


@both_ways
@pytest.mark.parametrize(
    ("lengths", "given"), quick_rows([*SIZES, *(([[19, 40]], {"dim": dim}) for dim in (64, 80, 128, 256))], SIZES)
)
def test_head_dims_values_in_keys_half_precision_and_long_lines(way, lengths, given):
    check(slots_case(lengths, **given), way)


@pairwise(way=[*WAYS], softcap=[None, 4.0, 30.0], sinks=[False, True], recorded=[True, False])
def test_softcap_and_sinks(way, softcap, sinks, recorded):
    check(slots_case(LENGTHS, group=4, softcap=softcap, sinks=sinks, recorded=recorded), WAYS[way])


@pairwise(way=[*WAYS], entry_format=["int8", "fp8", "rot4", "rot3", "rot2"], dims=[(40, 24), (64, 96)], live=[0.5, 1.0])
def test_codes(way, entry_format, dims, live):
    """A new entry takes the slot of an evicted one, in pool or tail."""
    case = slots_case(LENGTHS, group=3, dim=dims[0], value_dim=dims[1], live=live, sinks=True, softcap=20.0)
    check(case.packed(entry_format), WAYS[way])


def test_bfloat16_on_the_cpu():
    check(slots_case(LENGTHS, group=4, dim=80, dtype=torch.bfloat16), cpu.attend_slots)


@both_ways
@pytest.mark.parametrize("capacity", quick([1, 63, 64, 65, 200], [1, 64, 65]))
def test_lines_without_a_pool(way, capacity):
    """As those of a ring: the same positions for all heads, in one place in memory, and nothing written down."""
    case = slots_case([[0, 0]], capacity=capacity, pool=False, recorded=False, live=0.0)
    columns = torch.arange(capacity, dtype=torch.int32).roll(capacity // 3)
    columns[capacity // 2] = EMPTY
    for tail in (case.held.tail.k, case.held.tail.v):
        tail.normal_()[:, :, :, capacity // 2] = torch.nan
    check(case.changed(position=columns.expand(1, 2, capacity)), way)


@both_ways
def test_strided_queries_keys_and_values(way):
    case = slots_case(THREE_HEADS)
    heads, kv_heads = case.call.q.shape[1], case.call.k.shape[1]
    fused = torch.randn(2, 1, heads + 2 * kv_heads, 32)
    q, k, v = (x.transpose(1, 2) for x in fused.split([heads, kv_heads, kv_heads], dim=2))
    check(case.changed(q=q, k=k, v=v), way)


@both_ways
@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"layer": 3}, "layer=3"),
        ({"k": torch.zeros(2, 3, 2, 32)}, "k (is|has)"),
        ({"q": torch.zeros(2, 7, 1, 32)}, "7 heads"),
        ({"position": torch.zeros(2, 3, 94, dtype=torch.int64)}, "position (is|has)"),
        ({"now": torch.zeros(2, dtype=torch.int32)}, "now (is|has)"),
        ({"position": torch.zeros(2, 3, 20, dtype=torch.int32)}, "20 slots"),
        ({"position": torch.zeros(2, 3, 20, dtype=torch.int32), "now": None}, "20 slots"),
    ],
)
def test_bad_arguments_are_named(way, change, named):
    case = slots_case(THREE_HEADS)
    before = case.copy()
    with pytest.raises(ValueError, match=named):
        way(*case.changed(**change).arguments)
    for name, tensor in before.tensors.items():
        assert torch.equal(tensor.contiguous().view(torch.uint8), case.tensors[name].contiguous().view(torch.uint8))


@pytest.mark.parametrize("way", [slots.attend_slots, cpu.attend_slots], ids=["eager", "cpu"])
def test_a_line_without_an_empty_slot(way):
    case = slots_case(THREE_HEADS)
    case.held.position[1, 2] = ABSENT
    before = case.held.tail.k.clone()
    with pytest.raises(ValueError, match="empty"):
        way(*case.arguments)
    assert torch.equal(case.held.tail.k.view(torch.uint8), before.view(torch.uint8))


def test_a_segment_longer_than_its_part_of_a_line():
    case = slots_case(THREE_HEADS)
    before = case.held.tail.k.clone()
    with pytest.raises(ValueError, match=r"rise within 0.*by at most 60"):
        cpu.attend_slots(*case.changed(position=case.held.position[..., 10:].contiguous(), now=None).arguments)
    assert torch.equal(case.held.tail.k.view(torch.uint8), before.view(torch.uint8))


@pytest.mark.parametrize("way", LOSERS)
@settings(max_examples=6)
@given(
    seed=st.integers(0, 2**32),
    width=st.sampled_from([1, 2, 7, 64, 300]),
    window=st.sampled_from([0, 1, 4, 500]),
    values=st.sampled_from([1, 3, 1000]),
)
def test_evict_losers_equals_the_eager_reference(way, seed, width, window, values):
    """Few different values make ties, which go to the lower position; scores may be negative, infinite or -0."""
    generator = torch.Generator().manual_seed(seed)
    line = (2, 3, width)
    worth = torch.randint(-values, values, line, generator=generator) / 7
    worth[torch.rand(line, generator=generator) < 0.1] = -0.0
    worth[torch.rand(line, generator=generator) < 0.05] = torch.finfo(torch.float32).max
    worth[torch.rand(line, generator=generator) < 0.05] = float("-inf")
    position = torch.stack([torch.randperm(2 * width, generator=generator)[:width] for _ in range(6)]).view(line).int()
    position[torch.rand(line, generator=generator) < 0.2] = EMPTY
    position[torch.rand(line, generator=generator) < 0.1] = ABSENT
    position[..., int(torch.randint(width, (1,), generator=generator))] = 2 * width  # every head has the newest
    quota = ((position >= 0).sum(2) - torch.randint(-1, 9, (2, 3), generator=generator)).clamp(min=0)
    expected, found = position.clone(), position.clone()
    keep = slots.evict_lowest(worth, expected, quota, window)
    assert torch.equal(LOSERS[way](worth, found, quota, window), keep)
    assert torch.equal(found, expected)
    assert torch.equal(keep, expected >= 0)


@pairwise(
    way=[*POOLED],
    width=[1, 6, 130],
    window=[0, 40],
    pooling=[(None, 5), ("avg", 1), ("avg", 5), ("max", 7)],
    group=["mean", "max", "sum"],
)
def test_neighbours_in_storage_order(way, width, window, pooling, group):
    pool, kernel_size = pooling
    generator = torch.Generator().manual_seed(width)
    line = (2, 3, width)
    attention = torch.rand(2, 12, width, generator=generator)
    drawn = [torch.randperm(999, generator=generator)[:width].int() for _ in range(12)]
    position, storage_order = torch.stack(drawn).view(2, *line).clone()
    position[torch.rand(line, generator=generator) < 0.2] = EMPTY
    position[..., -1] = 1000
    position[1, 0, :-1] = ABSENT
    storage_order = storage_order + (1 << 30)
    how = (position, storage_order, window, pool, kernel_size, group)
    expected = torch.zeros(line)
    for row, head in itertools.product(range(2), range(3)):
        old = [j for j in range(width) if 0 <= position[row, head, j] <= 1000 - window]
        old.sort(key=lambda j: int(storage_order[row, head, j]))
        for i, j in enumerate(old):
            near = old[max(i - kernel_size // 2, 0) : i + kernel_size // 2 + 1] if pool else [j]
            a = attention[row, 4 * head : 4 * head + 4][:, near]
            pooled = a.amax(1) if pool == "max" else a.sum(1) / (kernel_size if pool else 1)
            expected[row, head, j] = {"mean": pooled.mean(), "max": pooled.max(), "sum": pooled.sum()}[group]
    torch.testing.assert_close(POOLED[way](attention, *how), expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("way", LOSERS.values(), ids=LOSERS)
@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"worth": torch.zeros(2, 3, 4)}, "worth (is|has)"),
        ({"position": torch.zeros(2, 3, 5, dtype=torch.int64)}, "position (is|has)"),
        ({"position": torch.zeros(2, 3, 10, dtype=torch.int32)[..., ::2]}, "position|contiguous"),
        ({"quota": torch.zeros(2, dtype=torch.int64)}, "quota (is|has)"),
    ],
)
def test_losers_of_another_line(way, change, named):
    line = (2, 3, 5)
    given = {
        "worth": torch.zeros(line),
        "position": torch.zeros(line, dtype=torch.int32),
        "quota": torch.ones(2, 3, dtype=torch.int64),
    }
    with pytest.raises(ValueError, match=named):
        way(**{**given, **change}, window=1)
    assert not given["position"].any()
