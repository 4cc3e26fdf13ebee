"""C++ kernels for the CPU: ragged decode attention, attention to reused slots with eviction, prompts in blocks.

Compiled once through ``CppCodeCache``: same compiler, flags, instruction set, OpenMP runtime and on-disk cache as
Inductor's own CPU kernels, so torch's thread settings apply to them too.
"""

from __future__ import annotations

import ctypes
import functools
import re
import struct
from collections.abc import Callable, Hashable, Sequence
from enum import IntEnum
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from kvpass.kernels.checks import check_cache, check_eviction, check_order, check_selection, check_slots
from kvpass.operands import AppendBuffers, Attention, BlockSelection, PartialAttention, SlotCache, by_name
from kvpass.rotation import rotation_parts
from kvpass.torch_compat import CppCodeCache, inductor_exc

_ENTRY_TYPES = {torch.float32: "float", torch.bfloat16: "bf16", torch.float16: "fp16"}
CODE_TYPES = {
    (torch.int8, 8): "int8_t",
    (torch.uint8, 8): "e4m3",
    **{(torch.uint8, bits): f"levels<{bits}>" for bits in (4, 3, 2)},
}
"""C++ type of the codes of each dtype and number of bits."""

_ATTEND_CALL = struct.Struct("=50q2d")
"""Fields of ``struct Call`` in decode_cpu.cpp: 22 pointers, 13 sizes, 12 strides, 3 of lines, scale, softcap."""

_BLOCKS_CALL = struct.Struct("=27q2d")
"""Fields of ``struct Call`` in blocks_cpu.cpp: 7 pointers, 11 sizes, 9 strides, scale, softcap."""

_CHECKED: set[Hashable] = set()
"""Layouts of arguments that have been checked."""
MOST_CHECKED = 1024

_POOLS = (None, "avg", "max")
_GROUPS = ("mean", "max", "sum")


class InvalidCall(IntEnum):
    """Error code of ``kvpass_attend_decode``; nothing was written."""

    OFFSETS = 1
    START = 2
    NO_SLOT = 3


def source(name: str, defines: str = "") -> str:
    """Return the C++ text of a file with our includes inserted; Inductor's cache key is its hash."""
    text = (Path(__file__).parent / name).read_text(encoding="utf-8")
    return defines + re.sub(r'#include "(\w+\.h)"\n', lambda found: source(found[1]), text)


def attend_source(dtype: torch.dtype, held: str = "") -> str:
    """Return the text of decode_cpu.cpp for queries and new entries of ``dtype``; ValueError: there is no kernel.

    ``held``: C++ type of the codes that the cache holds; empty: it holds entries of ``dtype``.
    """
    if dtype not in _ENTRY_TYPES:
        raise ValueError(f"q has dtype {dtype}: CPU decode attention takes float32, bfloat16 or float16")
    entry = _ENTRY_TYPES[dtype]
    return source("decode_cpu.cpp", f"#define ENTRY {entry}\n#define HELD {held or entry}\n")


def build(text: str) -> Any:
    """Compile a source, or load it from Inductor's cache; RuntimeError: there is no C++ compiler, or it fails."""
    try:
        return CppCodeCache.load(text, "cpu")
    except (inductor_exc.InvalidCxxCompiler, inductor_exc.CppCompileError) as error:
        raise RuntimeError(
            "cannot compile CPU attention: a C++ compiler is needed (install g++ or set CXX), "
            f'or use backend="eager". {error}'
        ) from error


@functools.cache
def attend_function(dtype: torch.dtype, held: str = "") -> Callable[[bytes], int]:
    """Return ``kvpass_attend_decode`` of :func:`attend_source`; it takes a packed ``Call`` and returns 0 or a fault."""
    function = build(attend_source(dtype, held)).kvpass_attend_decode
    function.argtypes = [ctypes.c_char_p]
    function.restype = ctypes.c_int64
    return cast("Callable[[bytes], int]", function)


class _Lines(NamedTuple):
    """What a call of the kernel says of slots beside the buffers."""

    used: int  # slots of the tail that are used
    start: Tensor | None = None  # the first of them of each row
    row_index: Tensor | None = None  # where rows are not those of the call, and tail_used of them
    tail_used: Tensor | None = None
    position: Tensor | None = None  # of reused slots, as now and weights
    now: Tensor | None = None
    weights: Tensor | None = None


def _call_attend(
    call: Attention, cache: AppendBuffers | SlotCache, layer: int, lines: _Lines
) -> tuple[Tensor, int, int]:
    """Pack the arguments, already checked, and call the kernel.

    Returns the output, stored as ``[B, T, H, Dv]``; the :class:`InvalidCall` or 0; and the row with the fault.
    """
    q, k, v, scale, softcap, sinks = call
    (rows, heads, tokens, key_dim), kv_heads, result_dim = q.shape, k.shape[1], v.shape[3]
    pool_k, pool_v, *pool_scales = cache.pool or (None,) * 4
    tail_k, tail_v, *tail_scales = cache.tail
    layers, _, _, slots, width = tail_k.shape
    rotations: tuple[Tensor | None, Tensor | None] = (None, None)
    value_row = value_dim = result_dim
    if tail_v.shape[-1] == 0:  # values are stored in keys
        pool_v, tail_v, value_row = pool_k, tail_k, key_dim
        pool_scales, tail_scales = pool_scales[:1] * 2, tail_scales[:1] * 2
    if width < key_dim:  # rotated; then a part of a key is that of the whole key's output
        v, value_dim = (k, key_dim) if tail_v is tail_k else (v, result_dim)
        rotations = rotation_parts(key_dim, value_dim)
    if any(x.stride(3) != 1 for x in (q, k, v)):
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    if sinks is not None:
        if sinks.shape != (heads,):
            raise ValueError(f"sinks has shape {tuple(sinks.shape)}: expected {(heads,)}")
        sinks = sinks.to("cpu", torch.float32).contiguous()
    shape, strides = (rows, heads, tokens, value_dim), (tokens * heads * value_dim, value_dim, heads * value_dim, 1)
    out = torch.empty_strided(shape, strides, dtype=q.dtype, device="cpu")
    tensors = (q, k, v, pool_k, pool_v, cache.offsets, tail_k, tail_v, lines.start, sinks, out)
    of_lines = (lines.position, lines.now, lines.weights, lines.row_index, lines.tail_used)
    pointers = (*tensors, *of_lines, *pool_scales, *tail_scales, *rotations)
    position = lines.position
    codes = "" if tail_scales[0] is None else CODE_TYPES[tail_k.dtype, width * 8 // key_dim]
    fault = attend_function(q.dtype, codes)(
        _ATTEND_CALL.pack(
            *[0 if tensor is None else tensor.data_ptr() for tensor in pointers],
            *(rows, heads, kv_heads, tokens, key_dim, value_dim, value_row),
            *((0, 0) if pool_k is None else pool_k.shape[:2]),
            *(layers * kv_heads + 1, slots, lines.used, layer),
            0 if pool_k is None else pool_k.stride(0) // width,
            *(tail_k.stride(0) // width, tail_k.stride(1) // width),
            *(*q.stride()[:3], *k.stride()[:3], *v.stride()[:3]),
            *((0, 0, 0) if position is None else (*position.stride()[:2], position.shape[2])),
            *(scale, 0.0 if softcap is None else softcap),
        )
    )
    if value_dim > result_dim:
        out = out[..., :result_dim].transpose(1, 2).contiguous().transpose(1, 2)
    return out, fault % 4, fault // 4


def _check_once(name: str, tensors: Sequence[Tensor | None], check: Callable[[], None]) -> None:
    """Check arguments of a layout that was not seen yet: a check takes longer than a small step."""
    layout = (name, *[None if x is None else (x.shape, x.stride(), x.dtype, x.is_cpu) for x in tensors])
    if layout not in _CHECKED:
        for x in tensors:
            if x is not None and not x.is_cpu:
                raise ValueError(f"a tensor of {list(x.shape)} is on {x.device}: all must be on the CPU")
        check()
        if len(_CHECKED) == MOST_CHECKED:
            _CHECKED.clear()
        _CHECKED.add(layout)


def _packed(call: Attention) -> Attention:
    """Return a call to be checked: q, k and v may have any strides here, sinks any dtype and device."""
    q, k, v = (x.contiguous() for x in call[:3])
    return Attention(q, k, v, call.scale)


def attend_cache(call: Attention, held: AppendBuffers, layer: int) -> Tensor:
    """CPU version of :func:`kvpass.kernels.ragged_decode.attend_ragged`: append to the tail, attend pool and tail.

    New token t of row b attends to ``pool[b, offsets[b, layer*K + head] : offsets[b, layer*K + head + 1]]`` and to the
    tail slots ``tail_start[b] .. used + t``; a pool of one row serves all. One softmax over both, in fp32: online
    (Milakov and Gimelshein, arXiv:1805.02867), with the log-sum-exp merge over chunks of FlashDecoding (Dao et al.
    2023). q, k and v are copied if the last dim is not contiguous. With a row_index pool and tail are packed in each
    row.

    ValueError, before anything is written: used + T > C, or an argument would be read out of bounds.
    """
    tail_start, tail_used, row_index = held.tail_start, held.tail_used, held.row_index
    (layers, buffer_rows, _, slots, _), tokens = held.tail.k.shape, call.q.shape[2]
    used = 0 if row_index is not None else int(tail_used)
    if used < 0 or used + tokens > slots:
        raise ValueError(f"tail_used={used}: appending {tokens} entries exceeds the tail capacity of {slots} slots")
    if not 0 <= layer < layers:
        raise ValueError(f"layer={layer}: must be in 0..{layers - 1}")
    tensors = (*call[:3], *held.pool, held.offsets, *held.tail, *held[3:])
    _check_once("cache", tensors, lambda: check_cache(_packed(call), by_name(held), layer))
    if row_index is not None and any(not 0 <= row < buffer_rows for row in row_index.tolist()):
        raise ValueError(f"row_index={row_index.tolist()}: must be in 0..{buffer_rows - 1}")
    lines = _Lines(used, tail_start, row_index, None if row_index is None else tail_used)
    out, fault, row = _call_attend(call, held, layer, lines)
    if fault:
        if row_index is not None:
            row = int(row_index[row])
            used = int(tail_used[row])
        if fault == InvalidCall.OFFSETS:
            raise ValueError(f"offsets of row {row}, layer {layer} must rise within 0..{held.pool.k.shape[1]}")
        if fault == InvalidCall.START:
            raise ValueError(f"tail_start[{row}]={int(tail_start[row])}: must be in 0..{used}")
        raise ValueError(f"tail_used[{row}]={used}: appending {tokens} entries exceeds the tail's {slots} slots")
    return out


def attend_slots(call: Attention, lines: SlotCache, layer: int) -> tuple[Tensor, Tensor | None]:
    """CPU version of :func:`kvpass.ops.slots.attend_slots`; slots without an entry are not read.

    All tensors are on the CPU and contiguous, with two exceptions: q, k and v may have any strides (they are copied if
    the last dim is not contiguous), and position may repeat over rows and KV heads. ValueError, before anything is
    written: a line has no empty slot, or an argument would be read out of bounds.
    """
    pool, position, now = lines.pool, lines.position, lines.now
    (layers, rows, _, slots, _), heads, width = lines.tail.k.shape, call.q.shape[1], position.shape[2]
    if not 0 <= layer < layers:
        raise ValueError(f"layer={layer}: must be in 0..{layers - 1}")
    tensors = (*call[:3], *(pool or ()), lines.offsets, *lines.tail, position, now)
    _check_once("slots", tensors, lambda: check_slots(_packed(call), lines, layer))
    weights = None if now is None else torch.empty(rows, heads, width, dtype=torch.float32, device="cpu")
    out, fault, row = _call_attend(call, lines, layer, _Lines(slots, position=position, now=now, weights=weights))
    if fault == InvalidCall.OFFSETS:
        assert pool is not None
        most = f"by at most {width - slots}, the slots of a line before the tail's"
        raise ValueError(f"offsets of row {row}, layer {layer} must rise within 0..{pool.k.shape[1]}, {most}")
    if fault == InvalidCall.NO_SLOT:
        raise ValueError(f"a KV head of row {row}, layer {layer} has no empty slot among {width}")
    return out, weights


@functools.cache
def _blocks_function(dtype: torch.dtype) -> Callable[[bytes], None]:
    function = build(source("blocks_cpu.cpp", f"#define ENTRY {_ENTRY_TYPES[dtype]}\n")).kvpass_attend_blocks
    function.argtypes, function.restype = [ctypes.c_char_p], None
    return cast("Callable[[bytes], None]", function)


def attend_blocks(call: Attention, selection: BlockSelection, block: int) -> PartialAttention:
    """CPU version of :func:`kvpass.ops.reference.attend_blocks`; ``block`` is a multiple of 64."""
    check_selection(call, selection, block)
    return attend_causal(call, None, selection, block)


def attend_causal(
    call: Attention, sliding_window: int | None = None, selection: BlockSelection | None = None, block: int = 1
) -> PartialAttention:
    """Causal attention of the last T of N tokens without padding, or of all of them to selected blocks.

    Args:
        call: q float32, bfloat16 or float16; sinks are not read. sliding_window: query i sees key j only if
            ``i - j < sliding_window``.
    """
    q, k, v = (x if x.stride(3) == 1 else x.contiguous() for x in call[:3])
    (rows, heads, queries, key_dim), (_, kv_heads, tokens, value_dim) = q.shape, v.shape
    if q.dtype not in _ENTRY_TYPES:
        raise ValueError(f"q has dtype {q.dtype}: CPU attention takes float32, bfloat16 or float16")
    out = torch.empty(rows, queries, heads, value_dim, dtype=q.dtype, device="cpu")
    lse = torch.empty(rows, heads, queries, dtype=torch.float32, device="cpu")
    blocks, columns = (0, 0) if selection is None else (selection.blocks.shape[-1], selection.columns.shape[-1])
    selected = (None, None) if selection is None else selection
    _blocks_function(q.dtype)(
        _BLOCKS_CALL.pack(
            *[0 if tensor is None else tensor.data_ptr() for tensor in (q, k, v, out, lse, *selected)],
            *(rows, heads, kv_heads, tokens, key_dim, value_dim, block, blocks, columns),
            *(queries, min(sliding_window or tokens, tokens)),
            *(*q.stride()[:3], *k.stride()[:3], *v.stride()[:3]),
            *(call.scale, call.softcap or 0.0),
        )
    )
    return PartialAttention(out.transpose(1, 2), lse)


@functools.cache
def _function(name: str, pointers: int, numbers: int) -> Callable[..., None]:
    function = getattr(build(source("slots_cpu.cpp")), name)
    function.argtypes = [ctypes.c_void_p] * pointers + [ctypes.c_int64] * numbers
    function.restype = None
    return cast("Callable[..., None]", function)


def evict_lowest(worth: Tensor, position: Tensor, quota: Tensor, window: int) -> Tensor:
    """CPU version of :func:`kvpass.ops.slots.evict_lowest`; all tensors on the CPU and contiguous, else ValueError."""
    tensors = (worth.contiguous(), position, quota)
    _check_once("evict", tensors, lambda: check_eviction(*tensors))
    rows, kv_heads, width = position.shape
    keep = torch.empty(position.shape, dtype=torch.bool, device="cpu")
    run = _function("kvpass_evict_lowest", 4, 3)
    run(*[x.data_ptr() for x in (*tensors, keep)], rows * kv_heads, width, window)
    return keep


def pool_in_order(
    attention: Tensor, position: Tensor, order: Tensor, window: int, pool: str | None, kernel_size: int, group: str
) -> Tensor:
    """CPU version of :func:`kvpass.policies.decode_rules.pool_in_order`.

    All tensors are on the CPU and contiguous; position and storage order are int32; else ValueError.
    """
    tensors = (attention, position, order)
    _check_once("order", tensors, lambda: check_order(*tensors))
    rows, kv_heads, width = position.shape
    worth = torch.empty(position.shape, dtype=torch.float32, device="cpu")
    pooling = (window, _POOLS.index(pool), kernel_size, _GROUPS.index(group))
    run = _function("kvpass_pool_in_order", 4, 7)
    run(*[x.data_ptr() for x in (*tensors, worth)], rows * kv_heads, attention.shape[1] // kv_heads, width, *pooling)
    return worth
