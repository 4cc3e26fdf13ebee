"""Build of the C++ CPU kernels: compiled once, with the compiler that Inductor uses.

They go through ``CppCodeCache``: same flags, instruction set, OpenMP runtime and on-disk cache as Inductor's own CPU
kernels, so torch's thread settings apply to them too.
"""

from __future__ import annotations

import ctypes
import functools
import re
import struct
from collections.abc import Callable, Sequence
from enum import IntEnum
from pathlib import Path
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor

from kvpass.operands import Attention
from kvpass.torch_compat import CppCodeCache, inductor_exc

_ENTRY_TYPES = {torch.float32: "float", torch.bfloat16: "bf16", torch.float16: "fp16"}

Layouts: TypeAlias = list[tuple[tuple[int, ...], torch.dtype]]
"""Shape and dtype of some tensors."""

_ATTEND_CALL = struct.Struct("=40q2d")
"""Fields of ``struct Call`` in decode_cpu.cpp: 17 pointers, 11 sizes, 9 strides, 3 of lines, scale, softcap."""


class Fault(IntEnum):
    """Error code of ``kvpass_attend_decode``; nothing was written."""

    OFFSETS = 1
    START = 2
    NO_SLOT = 3


def source(name: str, defines: str = "") -> str:
    """Return the C++ text of a file with our includes inserted; Inductor's cache key is its hash."""
    text = (Path(__file__).parent / name).read_text(encoding="utf-8")
    return defines + re.sub(r'#include "(\w+\.h)"\n', lambda found: source(found[1]), text)


def attend_source(dtype: torch.dtype) -> str:
    """Return the text of decode_cpu.cpp for entries of ``dtype``.

    Raises:
        ValueError: there is no kernel for ``dtype``.
    """
    if dtype not in _ENTRY_TYPES:
        raise ValueError(f"q has dtype {dtype}: CPU decode attention takes float32, bfloat16 or float16")
    return source("decode_cpu.cpp", f"#define ENTRY {_ENTRY_TYPES[dtype]}\n")


def build(text: str) -> Any:
    """Compile a source, or load it from Inductor's cache; the first build takes about a second.

    Raises:
        RuntimeError: there is no C++ compiler, or it fails.
    """
    try:
        return CppCodeCache.load(text, "cpu")
    except (inductor_exc.InvalidCxxCompiler, inductor_exc.CppCompileError) as error:
        raise RuntimeError(
            "cannot compile CPU decode attention: a C++ compiler is needed (install g++ or set CXX), "
            f'or use backend="eager". {error}'
        ) from error


@functools.cache
def attend_function(dtype: torch.dtype) -> Callable[[bytes], int]:
    """Return ``kvpass_attend_decode`` for entries of ``dtype``; it takes a packed ``Call`` and returns 0 or a fault.

    Raises:
        ValueError: there is no kernel for ``dtype``.
        RuntimeError: as :func:`build`.
    """
    function = build(attend_source(dtype)).kvpass_attend_decode
    function.argtypes = [ctypes.c_char_p]
    function.restype = ctypes.c_int64
    return cast("Callable[[bytes], int]", function)


def call_attend(
    call: Attention,
    buffers: Sequence[Tensor | None],
    sizes: tuple[int, int, int, int, int],
    line: Sequence[Tensor | None] = (None,) * 6,
    line_sizes: tuple[int, int, int] = (0, 0, 0),
) -> tuple[Tensor, int, int]:
    """Pack the arguments, already checked, and call the kernel.

    Args:
        buffers: pool_k, pool_v, offsets, tail_k, tail_v, tail_start; None for those that do not exist.
        sizes: entries of the pool, row stride of the offsets, slots of the tail, used slots, layer.
        line: position, storage_order, decode_state, norm, now and weights; for reused slots.
        line_sizes: row and head stride of position, slots of a line.

    Returns:
        output ``[B, H, T, Dv]``, stored as ``[B, T, H, Dv]``; the :class:`Fault` or 0; the row with the fault.
    """
    q, k, v, scale, softcap, sinks = call
    q_strides, k_strides, v_strides = q.stride(), k.stride(), v.stride()
    if q_strides[3] != 1 or k_strides[3] != 1 or v_strides[3] != 1:
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        q_strides, k_strides, v_strides = q.stride(), k.stride(), v.stride()
    rows, heads, tokens, key_dim = q.shape
    kv_heads, value_dim = k.shape[1], v.shape[3]
    if sinks is not None:
        if sinks.shape != (heads,):
            raise ValueError(f"sinks has shape {tuple(sinks.shape)}: expected {(heads,)}")
        sinks = sinks.to("cpu", torch.float32).contiguous()
    out = torch.empty_strided(
        (rows, heads, tokens, value_dim),
        (tokens * heads * value_dim, value_dim, heads * value_dim, 1),
        dtype=q.dtype,
    )
    tensors = (q, k, v, *buffers, sinks, out, *line)
    fault = attend_function(q.dtype)(
        _ATTEND_CALL.pack(
            *[0 if tensor is None else tensor.data_ptr() for tensor in tensors],
            rows,
            heads,
            kv_heads,
            tokens,
            key_dim,
            value_dim,
            *sizes,
            *q_strides[:3],
            *k_strides[:3],
            *v_strides[:3],
            *line_sizes,
            scale,
            0.0 if softcap is None else softcap,
        )
    )
    return out, fault % 4, fault // 4


def check_layout(names: Sequence[str], given: Sequence[Tensor], expected: Layouts) -> None:
    """Raise at the first tensor with an unexpected shape or dtype; whole lists are compared, for speed.

    Raises:
        ValueError: names the tensor.
    """
    found: Layouts = [(x.shape, x.dtype) for x in given]
    if found != expected:
        for name, pair, wanted in zip(names, found, expected, strict=True):
            for what, has, must in zip(("shape", "dtype"), pair, wanted, strict=True):
                if has != must:
                    raise ValueError(f"{name} has {what} {has}: expected {must}")
