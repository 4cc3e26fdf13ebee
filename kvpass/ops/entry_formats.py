"""Entries in fewer bits: codes, and one fp32 scale for the key and one for the value of each entry.

``int8``: scale = max|x| / 127, code = x / scale rounded half to even. ``fp8``: scale = max|x| / 448, code = x / scale
cast to e4m3 (nearest even). An entry of zeros has scale 0 and codes 0. What is stored stands for ``code * scale``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvpass.config import EntryFormat
from kvpass.operands import CODES, AppendBuffers

_LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
"""Largest code of each dtype."""
_BLOCK = 1 << 14
"""Entries quantised at a time, so that no fp32 copy of the whole is made."""


def quantise(x: Tensor, entry_format: EntryFormat, codes: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return codes ``[.., E, D]`` and scales fp32 ``[.., E]`` of floats of that shape.

    Args:
        codes: where to write them, of dtype ``CODES[entry_format]``; None: new memory.
    """
    codes = torch.empty_like(x, dtype=CODES[entry_format]) if codes is None else codes
    scale = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
    largest = _LARGEST[codes.dtype]
    for block, code, factor in zip(x.split(_BLOCK, -2), codes.split(_BLOCK, -2), scale.split(_BLOCK, -1), strict=True):
        values = block.float()
        factor.copy_(values.abs().amax(-1) / largest)
        scaled = (values / factor.where(factor != 0, 1.0)[..., None]).clamp(-largest, largest)
        code.copy_(scaled.round() if codes.dtype == torch.int8 else scaled)
    return codes, scale


def dequantise(codes: Tensor, scale: Tensor) -> Tensor:
    """Return the entries, in the dtype of the scales."""
    return codes.to(scale.dtype) * scale[..., None]


def pool_rows(held: AppendBuffers, row: int, slots: slice) -> tuple[Tensor, Tensor]:
    """Return keys and values of some slots of a row's pool: as they are held, or fp32 where that is in codes."""
    k, v, k_scale, v_scale = held.pool_k[row, slots], held.pool_v[row, slots], held.pool_k_scale, held.pool_v_scale
    if k_scale is None or v_scale is None:
        return k, v
    return dequantise(k, k_scale[row, slots]), dequantise(v, v_scale[row, slots])
