"""Operators on a CPU with C++ decoding; imported at first use, since ``import kvpass`` loads no kernel."""

from __future__ import annotations

from torch import Tensor

from kvpass.kernels.decode_cpu import attend_decode
from kvpass.kernels.slots_cpu import attend_slots, evict_lowest, pool_in_order
from kvpass.operands import AppendBuffers, Attention
from kvpass.ops import reference

__all__ = ["attend_cache", "attend_slots", "evict_lowest", "pool_in_order"]

_MAX_TOKENS = 8
"""Above so many new tokens the work is matrix-matrix, and the per-head reference on BLAS is faster."""


def attend_cache(call: Attention, held: AppendBuffers, layer: int) -> Tensor:
    """See :func:`kvpass.ops.reference.attend_cache`."""
    attend = attend_decode if call.q.shape[2] <= _MAX_TOKENS else reference.attend_cache
    return attend(call, held, layer)
