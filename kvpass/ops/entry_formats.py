"""Entries in fewer bits: codes, with one scale for each key and one for each value. Every entry is on its own.

``int8``: scale = max|x| / 127, code = x / scale rounded half to even. ``fp8``: scale = max|x| / 448, code = the bits of
x / scale cast to e4m3 (nearest even). An entry of zeros has scale 0. What is stored stands for ``code * scale``.

``rot4``, ``rot3``, ``rot2``: TurboQuant (arXiv 2504.19874) without its correction of one bit. Keys and values are held
rotated (:mod:`kvpass.rotation`). With r the root of the mean square of a rotated vector y, code i stands for the
number of y / r that is nearest to level i of :data:`kvpass.operands.LEVELS`, which have the least squared error for
normally distributed numbers (Lloyd-Max). scale = y . c / c . c, by least squares, where c are the levels of the codes.
What is stored stands for ``c * scale``. Codes lie along channels, the lowest bits of the bytes first.

Keys of a head have much in common: a mean of up to 99 % of their norm. What all keys of a head have in common adds the
same to every logit of a query and changes no softmax, so where a cache only appends, and logits are plain products, it
is subtracted before keys become codes (:func:`key_mean`, :func:`centred`), and attention does not add it again.

Legend: B rows, L layers, K KV heads, E pool slots, D head dim.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvpass.config import EntryFormat
from kvpass.operands import BITS, CODES, AppendBuffers, Attention, Entries, levels
from kvpass.rotation import rotated

_LARGEST = {torch.int8: 127.0, torch.uint8: 448.0}
"""Largest number that a code of 8 bits of each dtype stands for."""
_BLOCK = 1 << 14
"""Entries quantised at a time, so that no fp32 copy of the whole is made."""


def quantise(x: Tensor, codes: Tensor, scale: Tensor) -> None:
    """Write the codes and scales of floats ``[.., E, D]``, which are rotated first for codes of 4 bits and fewer.

    Args:
        codes: ``[.., E, D * bits / 8]``, of the dtype in :data:`kvpass.operands.CODES`. scale: fp32 ``[.., E]``.
    """
    bits = codes.shape[-1] * 8 // x.shape[-1]
    for block, code, factor in zip(x.split(_BLOCK, -2), codes.split(_BLOCK, -2), scale.split(_BLOCK, -1), strict=True):
        x32 = block.float()
        found = _nearest_levels(rotated(x32), bits) if bits < 8 else _in_steps(x32, codes.dtype)
        code.copy_(found[0])
        factor.copy_(found[1])


def quantised(x: Tensor, entry_format: EntryFormat) -> tuple[Tensor, Tensor]:
    """Return codes and scales of floats ``[.., E, D]``, as :func:`quantise` writes them."""
    dtype, bits = CODES[entry_format], BITS[entry_format]
    codes = torch.empty(*x.shape[:-1], x.shape[-1] * bits // 8, dtype=dtype, device=x.device)
    scale = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
    quantise(x, codes, scale)
    return codes, scale


def _in_steps(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return codes of 8 bits ``[.., E, D]`` and scales ``[.., E]`` of floats in fp32."""
    largest = _LARGEST[dtype]
    scale = x.abs().amax(-1) / largest
    scaled = (x / scale.where(scale != 0, 1.0)[..., None]).clamp(-largest, largest)
    codes = scaled.round().to(dtype) if dtype == torch.int8 else scaled.to(torch.float8_e4m3fn).view(dtype)
    return codes, scale


def _nearest_levels(y: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Return codes in bytes ``[.., E, D * bits / 8]`` and scales ``[.., E]`` of rotated vectors in fp32."""
    found = levels(bits, y.device)
    size = y.square().mean(-1, keepdim=True).sqrt()
    codes = torch.bucketize(y / size.where(size != 0, 1.0), (found[1:] + found[:-1]) / 2)
    near = found[codes]
    return pack(codes, bits), (y * near).sum(-1) / near.square().sum(-1)


def dequantise(codes: Tensor, scale: Tensor, dim: int) -> Tensor:
    """Return the entries ``[.., E, dim]``, in the dtype of the scales; of 4 bits and fewer the rotated ones."""
    bits = codes.shape[-1] * 8 // dim
    if bits < 8:
        numbers = levels(bits, codes.device)[unpack(codes, bits).long()].to(scale.dtype)
    elif codes.dtype == torch.uint8:
        numbers = codes.view(torch.float8_e4m3fn).to(scale.dtype)
    else:
        numbers = codes.to(scale.dtype)
    return numbers * scale[..., None]


def key_mean(pool_k: Tensor, offsets: Tensor, tail_k: Tensor, start: Tensor) -> Tensor:
    """Return the mean of the keys of each head, fp32 ``[L, B, K, D]``.

    A few columns at a time, so that no fp32 copy of the whole is made. Sums of a head are made in the order of its
    entries, the same in every run.

    Args:
        pool_k: ``[B, E, D]``, packed. offsets: int32 ``[B, L*K + 1]``. tail_k: its used slots, ``[L, B, K, n, D]``, of
            which those before start, int64 ``[B]``, hold no entries.
    """
    layers, rows, kv_heads, used, dim = tail_k.shape
    bounds = offsets.long()
    held = torch.arange(used, device=start.device) >= start[:, None]
    sums = torch.where(held[:, None, :, None], tail_k.float(), 0.0).sum(3)
    for row in range(rows):
        for first in range(0, dim, max(1, dim // 8)):
            columns = slice(first, first + max(1, dim // 8))
            of_pool = pool_k[row, :, columns].float().contiguous()
            found = torch.segment_reduce(of_pool, "sum", offsets=bounds[row], axis=0, initial=0.0)
            sums[:, row, :, columns] += found.view(layers, kv_heads, -1)
    counts = bounds.diff(dim=1).view(rows, layers, kv_heads).transpose(0, 1) + held.sum(1)[:, None]
    return sums / counts.clamp(min=1)[..., None]


def quantise_pool_keys(pool_k: Tensor, offsets: Tensor, mean: Tensor, codes: Tensor, scale: Tensor) -> None:
    """As :func:`quantise`, of the keys ``[B, E, D]`` of a packed pool less the mean of their heads."""
    rows, slots, _ = pool_k.shape
    heads = mean.transpose(0, 1).flatten(1, 2)
    for first in range(0, slots, _BLOCK):
        at = slice(first, min(first + _BLOCK, slots))
        slot = torch.arange(at.start, at.stop, dtype=torch.int32, device=offsets.device).expand(rows, -1).contiguous()
        head = torch.searchsorted(offsets[:, 1:].contiguous(), slot, right=True).clamp(max=heads.shape[1] - 1)
        own = heads.gather(1, head[..., None].expand(-1, -1, heads.shape[2]))
        quantise(pool_k[:, at].float() - own, codes[:, at], scale[:, at])


def quantise_buffer(
    name: str, floats: Tensor, codes: Tensor, scale: Tensor, offsets: Tensor, mean: Tensor | None
) -> None:
    """As :func:`quantise`, of the buffer of that name of a cache; keys less the mean of their heads, if it is given."""
    if mean is not None and name == "pool_k":
        quantise_pool_keys(floats, offsets, mean, codes, scale)
    elif mean is not None and name == "tail_k":
        quantise(floats - mean[:, :, :, None], codes, scale)
    else:
        quantise(floats, codes, scale)


def centred(call: Attention, key_mean: Tensor, at: Any) -> Attention:
    """Return an attention op whose new keys are less the mean of their heads ``key_mean[at]``."""
    return call._replace(k=(call.k - key_mean[at][:, :, None]).to(call.k.dtype))  # in fp32


def store(k: Tensor, v: Tensor, entries: Entries, slots: slice) -> None:
    """Write keys ``[.., T, D]`` and values ``[.., T, Dv]`` into some slots of a part of pool or tail."""
    for x, stored, scale in ((k, entries.k, entries.k_scale), (v, entries.v, entries.v_scale)):
        if stored.shape[-1] == 0:  # values are stored in keys
            continue
        if scale is None:
            stored[..., slots, :] = x
        else:
            quantise(x, stored[..., slots, :], scale[..., slots])


def entries_held(entries: Entries, key_dim: int, value_dim: int) -> tuple[Tensor, Tensor]:
    """Return keys ``[.., key_dim]`` and values ``[.., value_dim]`` as they are held; of codes :func:`dequantise`."""
    keys, values, k_scale, v_scale = entries
    k = keys if k_scale is None else dequantise(keys, k_scale, key_dim)
    if values.shape[-1] == 0:
        return k, k[..., :value_dim]
    return k, values if v_scale is None else dequantise(values, v_scale, value_dim)


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


def entries_of_head(
    held: AppendBuffers, row: int, kept: slice, tail: tuple[Any, ...], key_dim: int, value_dim: int
) -> tuple[Tensor, Tensor]:
    """Return keys ``[n, key_dim]`` and values ``[n, value_dim]`` of a KV head, pool first, as :func:`entries_held`.

    Args:
        kept: slots of the row's pool. tail: index of the slots of the tail.
    """
    sides = held.pool.at((min(row, len(held.pool.k) - 1), kept)), held.tail.at(tail)
    k, v = (torch.cat(pair) for pair in zip(*(entries_held(side, key_dim, value_dim) for side in sides), strict=True))
    return k, v


def packed(held: AppendBuffers, entry_format: EntryFormat) -> AppendBuffers:
    """Return a cache whose entries, which are floats, are held in fewer bits."""

    def codes(entries: Entries) -> Entries:
        k, k_scale = quantised(entries.k, entry_format)
        if entries.v.shape[-1] == 0:  # values are stored in keys
            return Entries(k, entries.v.to(CODES[entry_format]), k_scale)
        v, v_scale = quantised(entries.v, entry_format)
        return Entries(k, v, k_scale, v_scale)

    return held._replace(pool=codes(held.pool), tail=codes(held.tail))
