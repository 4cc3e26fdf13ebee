"""Pooling of attention over neighbours in storage order, on CUDA, for slots in any order.

The rank of an entry is the number of entries before it; it is counted, not sorted, since a line is short and the device
wide.

Legend: B batch, H query heads, K KV heads, G = H / K, S slots of a line.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvpass.kernels.checks import check_heads, check_tensors
from kvpass.kernels.launch import KernelConfig, launch
from kvpass.kernels.slot_line import largest

_CONFIGS = (KernelConfig.of(4, 1, BLOCK_S=64, BLOCK_L=128),)
_POOL_CONFIGS = (KernelConfig.of(4, 1, BLOCK_S=128),)
_LINE_BLOCK = 1024


@triton.jit(do_not_specialize=["width", "window"])
def _rank_kernel(  # type: ignore[no-untyped-def]
    attention, position, storage_order, in_order, rank, width, window, G: tl.constexpr, LINE_BLOCK: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_L: tl.constexpr,
):  # fmt: skip
    """Rank some slots of one line by storage_order (-1: not competing); store their attention by rank."""
    i_line = tl.program_id(0).to(tl.int64)
    p_position = position + i_line * width
    p_place = storage_order + i_line * width
    oldest_spared = largest(p_position, width, LINE_BLOCK) - window + 1
    o_s = tl.program_id(1) * BLOCK_S + tl.arange(0, BLOCK_S)
    m_s = o_s < width
    b_position = tl.load(p_position + o_s, mask=m_s, other=-1)
    b_place = tl.load(p_place + o_s, mask=m_s, other=0)
    m_s_competes = (b_position >= 0) & (b_position < oldest_spared)
    b_rank = tl.zeros([BLOCK_S], tl.int32)
    for i_l in range(0, width, BLOCK_L):
        o_l = i_l + tl.arange(0, BLOCK_L)
        b_other = tl.load(p_position + o_l, mask=o_l < width, other=-1)
        b_other_place = tl.load(p_place + o_l, mask=o_l < width, other=0)
        m_before = (b_other >= 0) & (b_other < oldest_spared)
        m_before = m_before[None, :] & (b_other_place[None, :] < b_place[:, None])
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
    attention: Tensor,
    position: Tensor,
    storage_order: Tensor,
    window: int,
    pool: str | None,
    kernel_size: int,
    group: str,
) -> Tensor:
    """Pool the attention of older entries over neighbours in storage order; reduce over the group.

    All tensors are contiguous and on one device.

    Args:
        attention: fp32 ``[B, H, S]``, not negative. position: int32 ``[B, K, S]``, negative = no entry; K divides H.
            storage_order: storage order, ascending; int32 ``[B, K, S]``, different for the entries of a line.
        window: the newest positions of a line, which are left out.
        pool: ``"avg"`` (counts zeros beyond the ends), ``"max"`` or None. kernel_size: odd.
        group: ``"mean"``, ``"max"`` or ``"sum"``.

    Returns:
        fp32 ``[B, K, S]``, 0 in slots that are left out.

    Raises:
        ValueError: an argument's shape, dtype, strides or device do not fit.
    """
    rows, kv_heads, width = line = position.shape
    heads = attention.shape[1]
    check_heads(heads, kv_heads)
    expected = {
        "attention": (attention, (rows, heads, width), torch.float32),
        "position": (position, line, torch.int32),
        "storage_order": (storage_order, line, torch.int32),
    }
    check_tensors(expected, position.device)
    in_order = torch.empty_like(attention)
    rank = torch.empty_like(position)
    worth = torch.empty(line, dtype=torch.float32, device=position.device)
    shared = {"in_order": in_order, "rank": rank, "width": width, "G": heads // kv_heads, "LINE_BLOCK": _LINE_BLOCK}
    tensors = {name: tensor for name, (tensor, _, _) in expected.items()}

    def grid(given: dict[str, int]) -> tuple[int, int]:
        return rows * kv_heads, triton.cdiv(width, given["BLOCK_S"])

    launch(_rank_kernel, grid, {**tensors, **shared, "window": window}, _CONFIGS)
    how = {"POOL": pool, "KERNEL": 1 if pool is None else kernel_size, "GROUP": group}
    launch(_pool_kernel, grid, {**shared, "worth": worth, **how}, _POOL_CONFIGS)
    return worth
