"""Argument checks of the kernel launchers: shapes, dtypes, strides and devices, never values."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from kvpass.operands import BITS, BUFFERS, CODES

Expected = Mapping[str, tuple[Tensor, Sequence[int], torch.dtype]]
"""Name of an argument -> the tensor given, and the shape and dtype it must have."""


def of_table(buffers: Mapping[str, Tensor | None], sizes: Mapping[str, int], entry: torch.dtype) -> Expected:
    """What the table of buffers says of those that are given.

    Args:
        sizes: by the letters of the table. entry: dtype of keys and values.
    Raises:
        ValueError: as :func:`code_bits`.
    """
    given = {name: tensor for name, tensor in buffers.items() if tensor is not None}
    scales = [given.get(f"{side}_{name}_scale") for side in ("pool", "tail") for name in "kv"]
    codes, columns = entry, sizes
    if any(scale is not None for scale in scales):
        bits, codes = code_bits(given["tail_k"], sizes["D"], scales, sizes["V"]), given["tail_k"].dtype
        columns = {**sizes, "D": sizes["D"] * bits // 8, "V": sizes["V"] * bits // 8}
    return {
        name: (
            x,
            BUFFERS[name].shape(columns if BUFFERS[name].packed else sizes),
            codes if BUFFERS[name].packed else BUFFERS[name].dtype or entry,
        )
        for name, x in given.items()
    }


def code_bits(tail_k: Tensor, key_dim: int, scales: Sequence[Tensor | None], value_columns: int) -> int:
    """Return the bits of a code of a cache with scales, for keys of ``key_dim`` numbers.

    Args:
        scales: of keys and values of the pool, then of the tail. value_columns: of stored values; 0: they are in the
            keys, and have no scales.
    Raises:
        ValueError: some scales are missing, or keys with scales are no codes.
    """
    if any(scale is None for scale in (scales if value_columns else scales[::2])):
        raise ValueError("scales of keys and values, of pool and tail, must be given together")
    bits = 8 * tail_k.shape[-1] / key_dim
    if all((tail_k.dtype, bits) != (CODES[name], BITS[name]) for name in CODES):
        raise ValueError(
            f"tail_k is {tail_k.dtype} {list(tail_k.shape)} and has scales: keys of {key_dim} numbers must be int8 or "
            "fp8 codes, or uint8 with 4, 3 or 2 bits a number"
        )
    return int(bits)


def check_tensors(expected: Expected, device: torch.device, strided: Collection[str] = ()) -> None:
    """Raise at the first tensor with a wrong shape, dtype, layout or device.

    Args:
        device: where all tensors must be.
        strided: names of tensors of which only the last dim must be contiguous; all others must be contiguous.

    Raises:
        ValueError: names the tensor.
    """
    for name, (tensor, shape, dtype) in expected.items():
        if tensor.shape != tuple(shape) or tensor.dtype != dtype:
            raise ValueError(f"{name} is {tensor.dtype} {list(tensor.shape)}: expected {dtype} {list(shape)}")
        if tensor.device != device:
            raise ValueError(f"{name} is on {tensor.device}: expected {device}")
        if name in strided:
            if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
                raise ValueError(f"{name} has strides {tensor.stride()}: the last must be 1")
        elif not tensor.is_contiguous():
            raise ValueError(f"{name} has strides {tensor.stride()}: must be contiguous")


def check_packed_rows(held: Mapping[str, Tensor | None]) -> None:
    """Raise if a row of pool or tails is not packed, or keys and values lie apart by other strides.

    Raises:
        ValueError: says so.
    """
    for side, at in (("pool", 0), ("tail", (0, 0))):
        keys, values = held[f"{side}_k"], held[f"{side}_v"]
        assert keys is not None and values is not None
        steps = [step % keys.shape[-1] for step in keys.stride()[:-1]]
        if keys.stride() != values.stride() or any(steps) or not keys[at].is_contiguous():
            raise ValueError(f"{side}_k and {side}_v must be packed in each row, with the same strides")


def check_heads(heads: int, kv_heads: int) -> None:
    """Raise if the query heads do not divide into equal groups, one per KV head.

    Raises:
        ValueError: they do not.
    """
    if kv_heads == 0 or heads % kv_heads:
        raise ValueError(f"q has {heads} heads: must be a multiple of the {kv_heads} KV heads")
