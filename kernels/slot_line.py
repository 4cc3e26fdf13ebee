"""Search functions over a line of slots, for the Triton kernels of reused slots.

A line has one int32 for every slot of one KV head: the position or the rank of its entry; negative: no entry.
"""

from __future__ import annotations

import triton
import triton.language as tl

EMPTY = tl.constexpr(-1)
"""Position of a free slot."""


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
