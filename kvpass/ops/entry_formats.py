"""Entries in fewer bits: codes, with one scale for each key and one for each value. Every entry is on its own.

``int8``: scale = max|x| / 127, code = x / scale rounded half to even. ``fp8``: scale = max|x| / 448, code = x / scale
cast to e4m3 (nearest even). An entry of zeros has scale 0. What is stored stands for ``code * scale``.

``rot4``, ``rot3``, ``rot2``: TurboQuant (arXiv 2504.19874) without its correction of one bit. Keys and values are held
rotated (:mod:`kvpass.ops.rotation`). With r the root of the mean square of a rotated vector y, code i stands for the
number of y / r that is nearest to level i of :data:`kvpass.operands.LEVELS`, which have the least squared error for
normally distributed numbers (Lloyd-Max). scale = y . c / c . c, by least squares, where c are the levels of the codes.
What is stored stands for ``c * scale``. Codes lie along channels, the lowest bits of the bytes first.

Legend: B rows, E pool slots, D head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvpass.config import EntryFormat
from kvpass.operands import BITS, CODES, AppendBuffers, levels

_LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
"""Largest code of each dtype."""
_BLOCK = 1 << 14
"""Entries quantised at a time, so that no fp32 copy of the whole is made."""


def quantise(x: Tensor, entry_format: EntryFormat, codes: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return codes ``[.., E, D]`` and scales fp32 ``[.., E]`` of floats of that shape; of 8 codes BITS bytes.

    Args:
        x: rotated, for formats of 4 bits and fewer. codes: where to write them, of dtype ``CODES[entry_format]``; None:
            new memory.
    """
    bits = BITS[entry_format]
    if codes is None:
        codes = torch.empty(*x.shape[:-1], x.shape[-1] * bits // 8, dtype=CODES[entry_format], device=x.device)
    scale = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
    for block, code, factor in zip(x.split(_BLOCK, -2), codes.split(_BLOCK, -2), scale.split(_BLOCK, -1), strict=True):
        own, found = _in_steps(block.float(), codes.dtype) if bits == 8 else _nearest_levels(block.float(), bits)
        code.copy_(own)
        factor.copy_(found)
    return codes, scale


def _in_steps(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return codes of 8 bits ``[.., E, D]``, still in fp32, and scales ``[.., E]`` of floats in fp32."""
    largest = _LARGEST[dtype]
    scale = x.abs().amax(-1) / largest
    scaled = (x / scale.where(scale != 0, 1.0)[..., None]).clamp(-largest, largest)
    return scaled.round() if dtype == torch.int8 else scaled, scale


def _nearest_levels(y: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Return codes in bytes ``[.., E, D * bits / 8]`` and scales ``[.., E]`` of rotated vectors in fp32."""
    found = levels(bits, y.device)
    size = y.square().mean(-1, keepdim=True).sqrt()
    codes = torch.bucketize(y / size.where(size != 0, 1.0), (found[1:] + found[:-1]) / 2)
    near = found[codes]
    return pack(codes, bits), (y * near).sum(-1) / near.square().sum(-1)


def dequantise(codes: Tensor, scale: Tensor, dim: int) -> Tensor:
    """Return the entries ``[.., E, dim]``, in the dtype of the scales; rotated ones of formats that are."""
    if codes.dtype == torch.uint8:
        bits = codes.shape[-1] * 8 // dim
        return levels(bits, codes.device)[unpack(codes, bits).long()].to(scale.dtype) * scale[..., None]
    return codes.to(scale.dtype) * scale[..., None]


def _shifts(count: int, step: int, device: torch.device) -> Tensor:
    return torch.arange(0, count * step, step, dtype=torch.int32, device=device)


def pack(codes: Tensor, bits: int) -> Tensor:
    """Return codes ``[.., D]``, of any int dtype, as bytes ``[.., D * bits / 8]``: each 8 codes are ``bits`` bytes."""
    words = (codes.unflatten(-1, (-1, 8)).int() << _shifts(8, bits, codes.device)).sum(-1, dtype=torch.int32)
    return ((words[..., None] >> _shifts(bits, 8, codes.device)) & 255).flatten(-2).to(torch.uint8)


def unpack(codes: Tensor, bits: int) -> Tensor:
    """Return bytes ``[.., D * bits / 8]`` as codes uint8 ``[.., D]``."""
    words = (codes.unflatten(-1, (-1, bits)).int() << _shifts(bits, 8, codes.device)).sum(-1, dtype=torch.int32)
    return ((words[..., None] >> _shifts(8, bits, codes.device)) & (2**bits - 1)).flatten(-2).to(torch.uint8)


def packed(held: AppendBuffers, entry_format: EntryFormat) -> AppendBuffers:
    """Return a cache whose pool, which holds floats (rotated, for formats that are), is held in fewer bits."""
    (k, k_scale), (v, v_scale) = (quantise(pool, entry_format) for pool in held[:2])
    return held._replace(pool_k=k, pool_v=v, pool_k_scale=k_scale, pool_v_scale=v_scale)


def pool_rows(held: AppendBuffers, row: int, slots: slice) -> tuple[Tensor, Tensor]:
    """Return keys and values of some slots of a row's pool: as they are held, or fp32 where that is in codes."""
    row = min(row, len(held.pool_k) - 1)
    k, v, k_scale, v_scale = held.pool_k[row, slots], held.pool_v[row, slots], held.pool_k_scale, held.pool_v_scale
    if k_scale is None or v_scale is None:
        return k, v
    key_dim, value_dim = held.tail_k.shape[-1], held.tail_v.shape[-1]
    return dequantise(k, k_scale[row, slots], key_dim), dequantise(v, v_scale[row, slots], value_dim)
