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
        ValueError: one side of the pool has scales and the other not, or what has them holds no codes.
    """
    given = {name: tensor for name, tensor in buffers.items() if tensor is not None}
    scales = [given.get(f"pool_{side}_scale") for side in "kv"]
    pool_k = given.get("pool_k")
    codes, columns = entry, sizes
    if pool_k is not None and any(scale is not None for scale in scales):
        bits, codes = code_bits(pool_k, sizes["D"], *scales), pool_k.dtype
        columns = {**sizes, "D": sizes["D"] * bits // 8, "V": sizes["V"] * bits // 8}
    return {
        name: (
            x,
            BUFFERS[name].shape(columns if BUFFERS[name].packed else sizes),
            codes if BUFFERS[name].packed else BUFFERS[name].dtype or entry,
        )
        for name, x in given.items()
    }


def code_bits(pool_k: Tensor, key_dim: int, k_scale: Tensor | None, v_scale: Tensor | None) -> int:
    """Return the bits of a code of a pool with scales, for keys of ``key_dim`` numbers.

    Raises:
        ValueError: as :func:`of_table`.
    """
    if k_scale is None or v_scale is None:
        raise ValueError("pool_k_scale and pool_v_scale: must be given together")
    bits = 8 * pool_k.shape[-1] / key_dim
    if all((pool_k.dtype, bits) != (CODES[name], BITS[name]) for name in CODES):
        raise ValueError(
            f"pool_k is {pool_k.dtype} {list(pool_k.shape)} and has scales: keys of {key_dim} numbers must be int8 or "
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


def check_block_layout(keys: Tensor, values: Tensor, dim: int, entries: int) -> None:
    """Raise if blocks of keys and values ``[blocks, R, D]`` are not packed, or hold fewer than these entries.

    Raises:
        ValueError: says which.
    """
    if keys.shape[2] != dim or keys.stride() != values.stride() or keys.stride()[1:] != (dim, 1):
        raise ValueError("keys and values must be [blocks, entries, D], packed within a block")
    if keys.stride(0) % dim or keys.shape[1] < entries:
        raise ValueError(f"a block of {keys.shape[1]} entries does not hold its pool and tails of {entries}")


def check_heads(heads: int, kv_heads: int) -> None:
    """Raise if the query heads do not divide into equal groups, one per KV head.

    Raises:
        ValueError: they do not.
    """
    if kv_heads == 0 or heads % kv_heads:
        raise ValueError(f"q has {heads} heads: must be a multiple of the {kv_heads} KV heads")
