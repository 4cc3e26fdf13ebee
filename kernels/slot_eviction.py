"""Eviction from a cache of constant size, on CUDA: each KV head keeps its best and newest.

Usually one entry is evicted, so the minimum is searched once per evicted entry; nothing is sorted.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvpass.kernels.checks import check_tensors
from kvpass.kernels.launch import KernelConfig, launch
from kvpass.kernels.slot_line import EMPTY, largest

HIGHEST_KEY = tl.constexpr((1 << 63) - 1)

_CONFIGS = (KernelConfig.of(4, 1, BLOCK_L=1024),)


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
    worth, position, decode_state, quota, keep, width, window, BLOCK_L: tl.constexpr,
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
        tl.store(decode_state + i_line * width + o_l, tl.zeros([BLOCK_L], tl.float32), mask=m_l & m_leaves)


def evict_lowest(worth: Tensor, position: Tensor, decode_state: Tensor, quota: Tensor, window: int) -> Tensor:
    """Evict the lowest scores after a step: empty their slots, set their decode_state to 0.

    All tensors are contiguous and on one device.

    Args:
        worth: fp32 ``[B, K, S]``, higher = keep, ties to the lower position. position: int32, same shape, negative = no
            entry. decode_state: decode state, fp32, same shape.
        quota: entries a head may hold besides the newest ``window`` positions of the line, int64 ``[B, K]``.

    Returns:
        which slots still hold an entry, bool ``[B, K, S]``.

    Raises:
        ValueError: an argument's shape, dtype, strides or device do not fit; nothing was written.
    """
    rows, kv_heads, width = line = position.shape
    expected = {
        "worth": (worth, line, torch.float32),
        "position": (position, line, torch.int32),
        "decode_state": (decode_state, line, torch.float32),
        "quota": (quota, (rows, kv_heads), torch.int64),
    }
    check_tensors(expected, position.device)
    keep = torch.empty(line, dtype=torch.int8, device=position.device)
    tensors = {name: tensor for name, (tensor, _, _) in expected.items()}
    launch(_evict_lowest, (rows * kv_heads,), {**tensors, "keep": keep, "width": width, "window": window}, _CONFIGS)
    return keep.view(torch.bool)
