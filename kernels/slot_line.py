"""What the Triton kernels of slots that change hands share: looking through a line of slots.

A line has an int32 for every slot of one KV head: the position of its entry, or its rank; negative: no entry.
"""

from __future__ import annotations

import triton
import triton.language as tl

EMPTY = tl.constexpr(-1)
"""Position of a slot that can be taken."""


@triton.jit
def first_empty(p_line, width, BLOCK_L: tl.constexpr):  # type: ignore[no-untyped-def]
    """The first slot whose position is EMPTY; ``width`` where there is none."""
    slot = width
    for i_l in range(0, width, BLOCK_L):
        o_l = i_l + tl.arange(0, BLOCK_L)
        b_position = tl.load(p_line + o_l, mask=o_l < width, other=0)
        slot = tl.minimum(slot, tl.min(tl.where(b_position == EMPTY, o_l, width), 0))
    return slot


@triton.jit
def largest(p_line, width, BLOCK_L: tl.constexpr):  # type: ignore[no-untyped-def]
    """The largest of a line; -1 where no slot has an entry."""
    found = tl.full([], -1, tl.int32)
    for i_l in range(0, width, BLOCK_L):
        o_l = i_l + tl.arange(0, BLOCK_L)
        found = tl.maximum(found, tl.max(tl.load(p_line + o_l, mask=o_l < width, other=-1), 0))
    return found
