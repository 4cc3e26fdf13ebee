"""What follows a decode step over lines of slots, on CUDA: pool attention over neighbours, evict the lowest scores.

A line has one int32 for every slot of one KV head: the position or the rank of its entry; negative: no entry. Nothing
is sorted: usually one entry is evicted, so the minimum is searched once per evicted entry; and the rank of an entry in
storage order is the number of entries before it, which is counted, since a line is short and the device wide.

Legend: B batch, H query heads, K KV heads, G = H / K, S slots of a line.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvpass.kernels.checks import check_eviction, check_order
from kvpass.kernels.launch import launch

EMPTY = tl.constexpr(-1)  # position of a free slot
HIGHEST_KEY = tl.constexpr((1 << 63) - 1)

_LINE_BLOCK = 1024


@triton.jit
def first_empty(p_line, width, BLOCK_L: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the first slot whose position is EMPTY; ``width`` if there is none."""
    slot = width
    for i_l in range(0, width, BLOCK_L):
        o_l = i_l + tl.arange(0, BLOCK_L)
        b_position = tl.load(p_line + o_l, mask=o_l < width, other=0)
        slot = tl.minimum(slot, tl.min(tl.where(b_position == EMPTY, o_l, width), 0))
    return slot


@triton.jit
def largest(p_line, width, BLOCK_L: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the largest value of a line; -1 if no slot has an entry."""
    found = tl.full([], -1, tl.int32)
    for i_l in range(0, width, BLOCK_L):
        o_l = i_l + tl.arange(0, BLOCK_L)
        found = tl.maximum(found, tl.max(tl.load(p_line + o_l, mask=o_l < width, other=-1), 0))
    return found


@triton.jit
def _load_keys(p_worth, p_position, o_l, width, oldest_spared):  # type: ignore[no-untyped-def]
    """Return sort keys (rising with score, falling with position), which slots compete, and positions."""
    m_l = o_l < width
    b_position = tl.load(p_position + o_l, mask=m_l, other=EMPTY)
    b_worth = tl.load(p_worth + o_l, mask=m_l, other=0.0)
    b_bits = tl.where(b_worth == 0.0, 0.0, b_worth).to(tl.int32, bitcast=True)  # -0.0 equals 0.0
    b_bits = tl.where(b_bits < 0, b_bits ^ 0x7FFFFFFF, b_bits)
    b_keys = b_bits.to(tl.int64) * (1 << 32) + (0x7FFFFFFF - b_position)
    return b_keys, (b_position >= 0) & (b_position < oldest_spared), b_position


@triton.jit(do_not_specialize=["width", "window"])
def _evict_lowest(  # type: ignore[no-untyped-def]
    worth, position, quota, keep, width, window, BLOCK_L: tl.constexpr,
):  # fmt: skip
    """Evict the lowest keys of one line until ``quota`` competing entries are left."""
    i_line = tl.program_id(0).to(tl.int64)
    p_worth = worth + i_line * width
    p_position = position + i_line * width
    oldest_spared = largest(p_position, width, BLOCK_L) - window + 1
    losers = -tl.load(quota + i_line)
    for i_l in range(0, width, BLOCK_L):
        b_keys, m_competes, b_position = _load_keys(
            p_worth, p_position, i_l + tl.arange(0, BLOCK_L), width, oldest_spared
        )
        losers += tl.sum(m_competes.to(tl.int64), 0)
    last_key = tl.full([], -HIGHEST_KEY - 1, tl.int64)
    for _ in range(0, losers):
        lowest = tl.full([], HIGHEST_KEY, tl.int64)
        for i_l in range(0, width, BLOCK_L):
            b_keys, m_competes, b_position = _load_keys(
                p_worth, p_position, i_l + tl.arange(0, BLOCK_L), width, oldest_spared
            )
            b_left = tl.where(m_competes & (b_keys > last_key), b_keys, HIGHEST_KEY)
            lowest = tl.minimum(lowest, tl.min(b_left, 0))
        last_key = lowest
    for i_l in range(0, width, BLOCK_L):
        o_l = i_l + tl.arange(0, BLOCK_L)
        m_l = o_l < width
        b_keys, m_competes, b_position = _load_keys(p_worth, p_position, o_l, width, oldest_spared)
        m_leaves = m_competes & (b_keys <= last_key)
        tl.store(keep + i_line * width + o_l, ((b_position >= 0) & ~m_leaves).to(tl.int8), mask=m_l)
        tl.store(p_position + o_l, tl.full([BLOCK_L], EMPTY, tl.int32), mask=m_l & m_leaves)


def evict_lowest(worth: Tensor, position: Tensor, quota: Tensor, window: int) -> Tensor:
    """CUDA version of :func:`kvpass.ops.slots.evict_lowest`; all tensors are on one device, the tables contiguous."""
    worth = worth.contiguous()
    check_eviction(worth, position, quota)
    rows, kv_heads, width = position.shape
    keep = torch.empty_like(position, dtype=torch.int8)
    arguments = {
        "worth": worth, "position": position, "quota": quota, "keep": keep, "width": width, "window": window,
    }  # fmt: skip
    launch(_evict_lowest, (rows * kv_heads,), arguments, "evict")
    return keep.view(torch.bool)


@triton.jit(do_not_specialize=["width", "window"])
def _rank_kernel(  # type: ignore[no-untyped-def]
    attention, position, storage_order, in_order, rank, width, window, G: tl.constexpr, LINE_BLOCK: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_L: tl.constexpr,
):  # fmt: skip
    """Rank some slots of one line by storage_order (-1: not competing); store their attention by rank."""
    i_line = tl.program_id(0).to(tl.int64)
    p_position = position + i_line * width
    p_order = storage_order + i_line * width
    oldest_spared = largest(p_position, width, LINE_BLOCK) - window + 1
    o_s = tl.program_id(1) * BLOCK_S + tl.arange(0, BLOCK_S)
    m_s = o_s < width
    b_position = tl.load(p_position + o_s, mask=m_s, other=-1)
    b_order = tl.load(p_order + o_s, mask=m_s, other=0)
    m_s_competes = (b_position >= 0) & (b_position < oldest_spared)
    b_rank = tl.zeros([BLOCK_S], tl.int32)
    for i_l in range(0, width, BLOCK_L):
        o_l = i_l + tl.arange(0, BLOCK_L)
        b_other = tl.load(p_position + o_l, mask=o_l < width, other=-1)
        b_other_order = tl.load(p_order + o_l, mask=o_l < width, other=0)
        m_before = (b_other >= 0) & (b_other < oldest_spared)
        m_before = m_before[None, :] & (b_other_order[None, :] < b_order[:, None])
        b_rank += tl.sum(m_before.to(tl.int32), 1)
    tl.store(rank + i_line * width + o_s, tl.where(m_s_competes, b_rank, -1), mask=m_s)
    for i_g in tl.static_range(G):
        o_row = (i_line * G + i_g) * width
        b_a = tl.load(attention + o_row + o_s, mask=m_s_competes, other=0.0)
        tl.store(in_order + o_row + b_rank, b_a, mask=m_s_competes)


@triton.jit(do_not_specialize=["width"])
def _pool_kernel(  # type: ignore[no-untyped-def]
    in_order, rank, worth, width, G: tl.constexpr, POOL: tl.constexpr, KERNEL: tl.constexpr, GROUP: tl.constexpr,
    LINE_BLOCK: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Pool the attention of some slots of one line, from the attention in rank order."""
    i_line = tl.program_id(0).to(tl.int64)
    last = largest(rank + i_line * width, width, LINE_BLOCK)
    o_s = tl.program_id(1) * BLOCK_S + tl.arange(0, BLOCK_S)
    m_s = o_s < width
    b_rank = tl.load(rank + i_line * width + o_s, mask=m_s, other=-1)
    b_worth = tl.zeros([BLOCK_S], tl.float32)
    for i_g in tl.static_range(G):
        p_row = in_order + (i_line * G + i_g) * width
        b_pooled = tl.zeros([BLOCK_S], tl.float32)
        for i_near in tl.static_range(KERNEL):
            o_near = b_rank + i_near - KERNEL // 2
            b_near = tl.load(p_row + o_near, mask=(b_rank >= 0) & (o_near >= 0) & (o_near <= last), other=0.0)
            if POOL == "max":
                b_pooled = tl.maximum(b_pooled, b_near)
            else:
                b_pooled += b_near
        if POOL == "avg":
            b_pooled = b_pooled / KERNEL
        if GROUP == "max":
            b_worth = tl.maximum(b_worth, b_pooled)
        else:
            b_worth += b_pooled
    if GROUP == "mean":
        b_worth = b_worth / G
    tl.store(worth + i_line * width + o_s, b_worth, mask=m_s)


def pool_in_order(
    attention: Tensor, position: Tensor, order: Tensor, window: int, pool: str | None, kernel_size: int, group: str
) -> Tensor:
    """CUDA version of :func:`kvpass.policies.decode_rules.pool_in_order`.

    All tensors are contiguous and on one device; attention is not negative, and the storage order differs for the
    entries of a line.
    """
    check_order(attention, position, order)
    rows, kv_heads, width = position.shape
    in_order, rank = torch.empty_like(attention), torch.empty_like(position)
    worth = torch.empty_like(position, dtype=torch.float32)
    group_size = attention.shape[1] // kv_heads
    shared = {"in_order": in_order, "rank": rank, "width": width, "G": group_size, "LINE_BLOCK": _LINE_BLOCK}
    tensors = {"attention": attention, "position": position, "storage_order": order}

    def grid(given: dict[str, int]) -> tuple[int, int]:
        return rows * kv_heads, triton.cdiv(width, given["BLOCK_S"])

    launch(_rank_kernel, grid, {**tensors, **shared, "window": window}, "rank")
    how = {"POOL": pool, "KERNEL": 1 if pool is None else kernel_size, "GROUP": group}
    launch(_pool_kernel, grid, {**shared, "worth": worth, **how}, "pool")
    return worth
