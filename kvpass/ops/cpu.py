"""``kvpass::`` operators on a CPU by C++ kernels, where torch has none or a slower one.

Contracts as in :mod:`kvpass.ops.reference`, of whose other operators there is no version here.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvpass.kernels.cpu import (  # noqa: F401 (of this implementation)
    attend_blocks,
    attend_cache,
    attend_causal,
    attend_slots,
    evict_lowest,
    pool_in_order,
)
from kvpass.operands import Attention
from kvpass.ops import reference


def attend_prompt(
    call: Attention, start: Tensor, sliding_window: int | None = None, chunked: bool = False
) -> tuple[Tensor, None]:
    """See :func:`kvpass.ops.reference.attend_prompt`; by torch what it does as fast."""

    def attend(part: Attention, window: int | None, rows: slice) -> tuple[Tensor, None]:
        found = attend_causal(part, window)
        return (found if part.sinks is None else found.with_sinks(part.sinks)).out, None

    if _torch_is_as_fast(call, sliding_window):
        return reference.attend_prompt(call, start, sliding_window, chunked)
    return reference.attend_rows(call, start, sliding_window, chunked, attend)[0], None


def _torch_is_as_fast(call: Attention, sliding_window: int | None) -> bool:
    """Whether torch has a kernel for the call, and not for 16 bits, which it does not multiply in pairs."""
    has_kernel = call.softcap is None and call.sinks is None and (sliding_window or call.k.shape[2]) >= call.k.shape[2]
    return has_kernel and (call.q.dtype == torch.float32 or torch.backends.cpu.get_cpu_capability() != "AVX512")
