"""Ragged decode attention on the CPU, in C++ built once with the compiler that Inductor uses.

The source (``decode_cpu.cpp``, ``cpu_vectors.h``) goes through ``CppCodeCache``: same flags, instruction set, OpenMP
runtime and on-disk cache as Inductor's own CPU kernels, so torch's thread settings hold here too.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn, cast

import torch
from torch import Tensor
from torch._inductor import exc
from torch._inductor.codecache import CppCodeCache

_ENTRY_TYPES = {torch.float32: "float", torch.bfloat16: "bf16", torch.float16: "fp16"}

_NAMES = ("k", "v", "pool_k", "pool_v", "tail_k", "tail_v", "offsets", "tail_start")

# 11 pointers, 11 sizes, 9 strides, scale and softcap: the fields of `struct Call` in decode_cpu.cpp.
_CALL = struct.Struct("=31q2d")


def _source(dtype: torch.dtype) -> str:
    """C++ text for entries of ``dtype``, complete in itself because Inductor's cache key is the hash of one text.

    Raises:
        ValueError: ``dtype`` has no kernel.
    """
    if dtype not in _ENTRY_TYPES:
        raise ValueError(f"q has dtype {dtype}: CPU decode attention takes float32, bfloat16 or float16")
    here = Path(__file__).parent
    vectors = (here / "cpu_vectors.h").read_text(encoding="utf-8")
    kernel = (here / "decode_cpu.cpp").read_text(encoding="utf-8")
    return f"#define ENTRY {_ENTRY_TYPES[dtype]}\n" + kernel.replace('#include "cpu_vectors.h"', vectors)


@functools.cache
def _build(dtype: torch.dtype) -> Callable[[bytes], int]:
    """Compile (or load from Inductor's cache) the kernel for entries of ``dtype``; about a second the first time.

    Raises:
        ValueError: ``dtype`` has no kernel.
        RuntimeError: there is no C++ compiler, or it fails.
    """
    source = _source(dtype)
    try:
        library = CppCodeCache.load(source, "cpu")
    except (exc.InvalidCxxCompiler, exc.CppCompileError) as error:
        raise RuntimeError(
            "cannot compile CPU decode attention: a C++ compiler is needed (install g++ or set CXX), "
            f'or use backend="eager". {error}'
        ) from error
    function = library.kvpass_attend_decode
    function.argtypes = [ctypes.c_char_p]
    function.restype = ctypes.c_int64
    return cast("Callable[[bytes], int]", function)


def _refuse(what: str, given: Sequence[object], expected: Sequence[object]) -> NoReturn:
    """Name the first argument whose shape or dtype is not the expected one."""
    at = next(i for i, pair in enumerate(zip(given, expected, strict=True)) if pair[0] != pair[1])
    raise ValueError(f"{_NAMES[at]} has {what} {given[at]}: expected {expected[at]}")


def attend_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pool_k: Tensor,
    pool_v: Tensor,
    offsets: Tensor,
    tail_k: Tensor,
    tail_v: Tensor,
    tail_start: Tensor,
    tail_used: Tensor,
    layer: int,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Append the new entries of one layer to its tail and attend to pool segment and tail.

    New token t of row b attends to ``pool[b, offsets[b, layer*K + head] : offsets[b, layer*K + head + 1]]`` and to the
    tail slots ``tail_start[b] .. used + t``. One softmax over both, in fp32; its log-sum-exp merge over chunks is that
    of FlashDecoding (Dao et al. 2023), the online form that of Milakov and Gimelshein (arXiv:1805.02867).

    All tensors are on the CPU; q, k, v, pool and tail share one dtype (fp32, bf16 or fp16).

    Args:
        q: [B, H, T, D] queries, RoPE applied; any strides (so k, v), a last dim that is not contiguous costs a copy.
        k: [B, K, T, D] keys of the new tokens; K divides H.
        v: [B, K, T, Dv] values of the new tokens.
        pool_k: [B, E, D] contiguous kept keys in (layer, head, position) order.
        pool_v: [B, E, Dv] contiguous kept values.
        offsets: int32 [B, L*K + 1] contiguous, rows of the pool where each (layer, head) begins.
        tail_k: [L, B, K, C, D] contiguous; slots ``used .. used + T - 1`` of this layer are written.
        tail_v: [L, B, K, C, Dv] contiguous; likewise.
        tail_start: int64 [B], first valid tail slot of each row.
        tail_used: int64, one element: tail slots in use before this call, the same for all rows.
        layer: index of the layer in pool and tail.
        scale: factor on the scores.
        softcap: scores become ``softcap * tanh(score / softcap)``; None for none.
        sinks: [H] one more logit per query head, in the denominator only; None for none.

    Returns:
        [B, H, T, Dv] in the dtype of q; its ``transpose(1, 2)`` is contiguous.

    Raises:
        ValueError: used + T > C, or an argument that would be read out of bounds; nothing was written.
        RuntimeError: there is no C++ compiler.
    """
    rows, heads, tokens, key_dim = q.shape
    _, kv_heads, _, value_dim = v.shape
    layers, _, _, slots, _ = tail_k.shape
    entries = pool_k.shape[1]
    used = int(tail_used)
    if used < 0 or used + tokens > slots:
        raise ValueError(f"tail_used={used}: appending {tokens} entries exceeds the tail capacity of {slots} slots")
    if not 0 <= layer < layers:
        raise ValueError(f"layer={layer}: must be in 0..{layers - 1}")
    if kv_heads == 0 or heads % kv_heads:
        raise ValueError(f"q has {heads} heads: must be a multiple of the {kv_heads} KV heads")
    dtype = q.dtype
    # Lists, compared whole, because this runs once per layer and token.
    shapes = [x.shape for x in (k, v, pool_k, pool_v, tail_k, tail_v, offsets, tail_start)]
    expected_shapes: list[tuple[int, ...]] = [
        (rows, kv_heads, tokens, key_dim),
        (rows, kv_heads, tokens, value_dim),
        (rows, entries, key_dim),
        (rows, entries, value_dim),
        (layers, rows, kv_heads, slots, key_dim),
        (layers, rows, kv_heads, slots, value_dim),
        (rows, layers * kv_heads + 1),
        (rows,),
    ]
    if shapes != expected_shapes:
        _refuse("shape", shapes, expected_shapes)
    dtypes = [x.dtype for x in (k, v, pool_k, pool_v, tail_k, tail_v, offsets, tail_start)]
    expected_dtypes = [dtype, dtype, dtype, dtype, dtype, dtype, torch.int32, torch.int64]
    if dtypes != expected_dtypes:
        _refuse("dtype", dtypes, expected_dtypes)
    packed = [x.is_contiguous() for x in (pool_k, pool_v, tail_k, tail_v, offsets, tail_start)]
    if not all(packed):
        raise ValueError(f"{_NAMES[2 + packed.index(False)]} is not contiguous")
    if not all([x.is_cpu for x in (q, k, v, pool_k, pool_v, tail_k, tail_v, offsets, tail_start)]):
        raise ValueError("q, k, v, pool, tail, offsets and tail_start must all be on the CPU")
    q_strides, k_strides, v_strides = q.stride(), k.stride(), v.stride()
    if q_strides[3] != 1 or k_strides[3] != 1 or v_strides[3] != 1:
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        q_strides, k_strides, v_strides = q.stride(), k.stride(), v.stride()
    if sinks is not None:
        if sinks.shape != (heads,):
            raise ValueError(f"sinks has shape {tuple(sinks.shape)}: expected {(heads,)}")
        sinks = sinks.to("cpu", torch.float32).contiguous()
    out = torch.empty_strided(
        (rows, heads, tokens, value_dim),
        (tokens * heads * value_dim, value_dim, heads * value_dim, 1),
        dtype=dtype,
    )
    fault = _build(dtype)(
        _CALL.pack(
            q.data_ptr(),
            k.data_ptr(),
            v.data_ptr(),
            pool_k.data_ptr(),
            pool_v.data_ptr(),
            offsets.data_ptr(),
            tail_k.data_ptr(),
            tail_v.data_ptr(),
            tail_start.data_ptr(),
            0 if sinks is None else sinks.data_ptr(),
            out.data_ptr(),
            rows,
            heads,
            kv_heads,
            tokens,
            key_dim,
            value_dim,
            entries,
            layers * kv_heads + 1,
            slots,
            used,
            layer,
            *q_strides[:3],
            *k_strides[:3],
            *v_strides[:3],
            scale,
            0.0 if softcap is None else softcap,
        )
    )
    if fault > 0:
        raise ValueError(f"offsets of row {fault - 1}, layer {layer} must rise within 0..{entries}")
    if fault < 0:
        raise ValueError(f"tail_start[{-fault - 1}]={int(tail_start[-fault - 1])}: must be in 0..{used}")
    return out
