"""Entries in fewer bits: codes with a scale for each entry (8 bits), or with groups (4 and 2 bits).

``int8``: scale = max|x| / 127, code = x / scale rounded half to even. ``fp8``: scale = max|x| / 448, code = x / scale
cast to e4m3 (nearest even). An entry of zeros has scale 0 and codes 0. What is stored stands for ``code * scale``.

``int4``, ``int2``: KIVI (Liu et al., arXiv:2402.02750). lo = smallest and step = (largest - lo) / (2^bits - 1) of a
group, code = (x - lo) / step rounded half to even, all in the dtype of the entries; what is stored stands for
``code * step + lo``. A group of keys is one channel of :data:`kvpass.operands.GROUP` consecutive entries of one KV
head, in the order of positions; the last group of a head has those that are left. A group of values is as many
consecutive channels of one entry. Codes lie along channels, the lowest bits of a byte first. Group j of the keys of
segment s, which begins at slot ``offsets[s]``, has the number ``offsets[s] // GROUP + s + j``, so no table is needed.

Legend: B rows, E pool slots, D head dim of keys, V of values, F groups of keys, U groups of channels in a value.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvpass.config import EntryFormat
from kvpass.operands import CODES, GROUP, GROUPED, AppendBuffers, key_groups

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


def _group_of(offsets: Tensor, slots: int, size: int) -> Tensor:
    """Return the number of the group of keys that each slot is in, int64 ``[B, E]``."""
    slot = torch.arange(slots, device=offsets.device).expand(offsets.shape[0], -1).contiguous()
    segment = torch.searchsorted(offsets[:, 1:].long(), slot, right=True)
    first = offsets.long().gather(1, segment)
    return first // size + segment + (slot - first) // size


def quantise_keys(
    x: Tensor, offsets: Tensor, bits: int, codes: Tensor | None = None, size: int = GROUP
) -> tuple[Tensor, Tensor]:
    """Return codes uint8 ``[B, E, D * bits / 8]`` and planes step and minimum ``[2, B, F, D]`` of keys ``[B, E, D]``.

    Args:
        offsets: bounds of the segments of the pool. codes: where to write them; None: new memory. size: of a group.
    Steps and minima of groups without an entry are 0.
    """
    group = _group_of(offsets, x.shape[1], size)
    shape = (x.shape[0], key_groups(x.shape[1], offsets.shape[1] - 1, size), x.shape[2])
    index = group[..., None].expand_as(x)
    lowest = x.new_zeros(shape).scatter_reduce(1, index, x, "amin", include_self=False)
    step = x.new_zeros(shape).scatter_reduce(1, index, x, "amax", include_self=False)
    unused = torch.arange(shape[1], device=x.device) >= offsets[:, -1:] // size + offsets.shape[1] - 1
    step = ((step - lowest) / (2**bits - 1)).masked_fill_(unused[..., None], 0)
    lowest.masked_fill_(unused[..., None], 0)
    codes = x.new_empty(*x.shape[:2], x.shape[2] * bits // 8, dtype=torch.uint8) if codes is None else codes
    for block, code, near in zip(x.split(_BLOCK, 1), codes.split(_BLOCK, 1), index.split(_BLOCK, 1), strict=True):
        code.copy_(_pack(_coded(block, step.gather(1, near), lowest.gather(1, near), bits), bits))
    return codes, torch.stack([step, lowest])


def quantise_values(x: Tensor, bits: int, codes: Tensor | None = None, size: int = GROUP) -> tuple[Tensor, Tensor]:
    """Return codes uint8 ``[B, E, V * bits / 8]`` and planes step and minimum ``[2, B, E, U]`` of values ``[B, E, V]``.

    Args:
        codes, size: as in :func:`quantise_keys`.
    """
    groups = x.unflatten(-1, (-1, size))
    lowest = groups.amin(-1)
    step = (groups.amax(-1) - lowest) / (2**bits - 1)
    codes = x.new_empty(*x.shape[:2], x.shape[2] * bits // 8, dtype=torch.uint8) if codes is None else codes
    parts = (tensor.split(_BLOCK, 1) for tensor in (groups, codes, step[..., None], lowest[..., None]))
    for block, code, own_step, own_lowest in zip(*parts, strict=True):
        code.copy_(_pack(_coded(block, own_step, own_lowest, bits).flatten(-2), bits))
    return codes, torch.stack([step, lowest])


def _coded(x: Tensor, step: Tensor, lowest: Tensor, bits: int) -> Tensor:
    scaled = (x - lowest) / step.where(step != 0, 1.0)
    return scaled.clamp(0, 2**bits - 1).round().nan_to_num(0.0).to(torch.uint8)


def _shifts(bits: int, device: torch.device) -> Tensor:
    return torch.arange(0, 8, bits, dtype=torch.uint8, device=device)


def _pack(codes: Tensor, bits: int) -> Tensor:
    """Codes ``[.., D]`` as bytes ``[.., D * bits / 8]``."""
    return (codes.unflatten(-1, (-1, 8 // bits)) << _shifts(bits, codes.device)).sum(-1, dtype=torch.uint8)


def unpack(codes: Tensor, bits: int) -> Tensor:
    """Bytes ``[.., D * bits / 8]`` as codes uint8 ``[.., D]``."""
    return ((codes[..., None] >> _shifts(bits, codes.device)) & (2**bits - 1)).flatten(-2)


def dequantise_groups(codes: Tensor, step: Tensor, lowest: Tensor) -> Tensor:
    """Return numbers, in the dtype of steps and minima; the shapes broadcast."""
    return codes.to(step.dtype) * step + lowest


def packed(held: AppendBuffers, entry_format: EntryFormat) -> AppendBuffers:
    """Return a cache whose pool, which holds floats, is held in fewer bits."""
    bits = GROUPED.get(entry_format)
    if bits is None:
        (k, k_scale), (v, v_scale) = (quantise(pool, entry_format) for pool in held[:2])
        return held._replace(pool_k=k, pool_v=v, pool_k_scale=k_scale, pool_v_scale=v_scale)
    k, k_steps = quantise_keys(held.pool_k, held.offsets, bits)
    v, v_steps = quantise_values(held.pool_v, bits)
    return held._replace(pool_k=k, pool_v=v, pool_k_steps=k_steps, pool_v_steps=v_steps)


def pool_rows(held: AppendBuffers, row: int, segment: int, slots: slice) -> tuple[Tensor, Tensor]:
    """Return keys and values of a segment of a row's pool: as they are held, or fp32 where that is in codes.

    Args:
        slots: of the segment.
    """
    row = min(row, len(held.pool_k) - 1)
    k, v, k_scale, v_scale = held.pool_k[row, slots], held.pool_v[row, slots], held.pool_k_scale, held.pool_v_scale
    k_steps, v_steps = held.pool_k_steps, held.pool_v_steps
    if k_scale is not None and v_scale is not None:
        return dequantise(k, k_scale[row, slots]), dequantise(v, v_scale[row, slots])
    if k_steps is not None and v_steps is not None:
        bits = k.shape[1] * 8 // k_steps.shape[3]
        group = slots.start // GROUP + segment + torch.arange(k.shape[0], device=k.device) // GROUP
        keys = dequantise_groups(unpack(k, bits), *k_steps[:, row, group].float())
        values = unpack(v, bits).unflatten(-1, (-1, GROUP))
        return keys, dequantise_groups(values, *v_steps[:, row, slots, :, None].float()).flatten(-2)
    return k, v
