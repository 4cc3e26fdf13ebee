"""Reused slots on the CPU: attention of one new token to a constant-size cache, and eviction."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor

from kvpass.kernels.checks import check_heads
from kvpass.kernels.cpu_library import Fault, Layouts, build, call_attend, check_layout, source
from kvpass.operands import Attention, Lines

_NAMES = ("q", "k", "v", "tail_k", "tail_v", "position")
_POOL_NAMES = ("pool_k", "pool_v", "offsets")
_ENTERED_NAMES = ("storage_order", "decode_state", "norm", "now")
_EVICT_NAMES = ("worth", "position", "decode_state", "quota")
_ORDER_NAMES = ("attention", "position", "storage_order")
_POOLS = (None, "avg", "max")
_GROUPS = ("mean", "max", "sum")


def attend_slots(call: Attention, lines: Lines, layer: int) -> tuple[Tensor, Tensor | None]:
    """CPU version of :func:`kvpass.ops.slots.attend_slots`; slots without an entry are not read.

    All tensors are on the CPU and contiguous, with two exceptions: q, k and v may have any strides (they are copied if
    the last dim is not contiguous), and position may repeat over rows and KV heads.

    Raises:
        ValueError: a line has no empty slot, or an argument would be read out of bounds; nothing was written.
        RuntimeError: there is no C++ compiler.
    """
    q, k, v = call[:3]
    pool_k, pool_v, offsets, tail_k, tail_v, position, entered = lines
    rows, heads, _, key_dim = q.shape
    _, kv_heads, _, value_dim = v.shape
    layers, _, _, slots, _ = tail_k.shape
    width = position.shape[2]
    if not 0 <= layer < layers:
        raise ValueError(f"layer={layer}: must be in 0..{layers - 1}")
    check_heads(heads, kv_heads)
    dtype = q.dtype
    given = [q, k, v, tail_k, tail_v, position]
    line_shape = (rows, kv_heads, width)
    expected: Layouts = [
        ((rows, heads, 1, key_dim), dtype),
        ((rows, kv_heads, 1, key_dim), dtype),
        ((rows, kv_heads, 1, value_dim), dtype),
        ((layers, rows, kv_heads, slots, key_dim), dtype),
        ((layers, rows, kv_heads, slots, value_dim), dtype),
        (line_shape, torch.int32),
    ]
    names: tuple[str, ...] = _NAMES
    contiguous = [tail_k, tail_v]
    entries, pool_width = 0, 0
    if pool_k is not None and pool_v is not None and offsets is not None:
        entries, pool_width = pool_k.shape[1], width - slots
        names += _POOL_NAMES
        given += [pool_k, pool_v, offsets]
        expected += [((rows, entries, key_dim), dtype), ((rows, entries, value_dim), dtype)]
        expected += [((rows, layers * kv_heads + 1), torch.int32)]
        contiguous += [pool_k, pool_v, offsets]
    if entered is not None:
        names += _ENTERED_NAMES
        given += entered
        expected += [(line_shape, torch.int32), (line_shape, torch.float32), (line_shape, torch.float32)]
        expected += [((rows,), torch.int64)]
        contiguous += [position, *entered]
    check_layout(names, given, expected)
    if width - slots != pool_width or pool_width < 0:
        raise ValueError(f"position has lines of {width} slots: {slots} of them are the tail's")
    if not all([x.is_contiguous() for x in contiguous]) or position.stride(2) != 1:
        raise ValueError("pool, tail, offsets and what a line remembers must be contiguous")
    if not all([x.is_cpu for x in given]):
        raise ValueError("all tensors must be on the CPU")
    weights = None if entered is None else torch.empty(rows, heads, width, dtype=torch.float32)
    line = (position, *(entered or (None,) * 4), weights)
    sizes = (entries, layers * kv_heads + 1, slots, slots, layer)
    line_sizes = (position.stride(0), position.stride(1), width)
    buffers = (pool_k, pool_v, offsets, tail_k, tail_v, None)
    out, fault, row = call_attend(call, buffers, sizes, line, line_sizes)
    if fault == Fault.OFFSETS:
        most = f"by at most {width - slots}, the slots of a line before the tail's"
        raise ValueError(f"offsets of row {row}, layer {layer} must rise within 0..{entries}, {most}")
    if fault == Fault.NO_SLOT:
        raise ValueError(f"a KV head of row {row}, layer {layer} has no empty slot among {width}")
    return out, weights


@functools.cache
def _function(name: str, pointers: int, numbers: int) -> Callable[..., None]:
    function = getattr(build(source("slots_cpu.cpp")), name)
    function.argtypes = [ctypes.c_void_p] * pointers + [ctypes.c_int64] * numbers
    function.restype = None
    return cast("Callable[..., None]", function)


def evict_lowest(worth: Tensor, position: Tensor, decode_state: Tensor, quota: Tensor, window: int) -> Tensor:
    """CPU version of :func:`kvpass.ops.slots.evict_lowest`; all tensors on the CPU and contiguous.

    Raises:
        ValueError: an argument would be read out of bounds; nothing was written.
        RuntimeError: there is no C++ compiler.
    """
    rows, kv_heads, width = line = position.shape
    given = [worth, position, decode_state, quota]
    expected: Layouts = [(line, torch.float32), (line, torch.int32), (line, torch.float32)]
    check_layout(_EVICT_NAMES, given, [*expected, ((rows, kv_heads), torch.int64)])
    worth = worth.contiguous()
    if not all([x.is_contiguous() and x.is_cpu for x in given[1:]]) or not worth.is_cpu:
        raise ValueError("position, decode_state and quota must be contiguous, and all tensors on the CPU")
    keep = torch.empty(line, dtype=torch.bool)
    tensors = (worth, position, decode_state, quota, keep)
    run = _function("kvpass_evict_lowest", 5, 3)
    run(*[x.data_ptr() for x in tensors], rows * kv_heads, width, window)
    return keep


def pool_in_order(
    attention: Tensor,
    position: Tensor,
    storage_order: Tensor,
    window: int,
    pool: str | None,
    kernel_size: int,
    group: str,
) -> Tensor:
    """CPU version of :func:`kvpass.policies.decode_rules.pool_in_order`.

    All tensors are on the CPU and contiguous; position and storage_order are int32.

    Raises:
        ValueError: an argument would be read out of bounds.
        RuntimeError: there is no C++ compiler.
    """
    rows, kv_heads, width = line = position.shape
    heads = attention.shape[1]
    given = [attention, position, storage_order]
    expected: Layouts = [((rows, heads, width), torch.float32), (line, torch.int32), (line, torch.int32)]
    check_layout(_ORDER_NAMES, given, expected)
    check_heads(heads, kv_heads)
    if not all([x.is_contiguous() and x.is_cpu for x in given]):
        raise ValueError("attention, position and storage_order must be contiguous and on the CPU")
    worth = torch.empty(line, dtype=torch.float32)
    how = (window, _POOLS.index(pool), kernel_size, _GROUPS.index(group))
    run = _function("kvpass_pool_in_order", 4, 7)
    run(*[x.data_ptr() for x in (*given, worth)], rows * kv_heads, heads // kv_heads, width, *how)
    return worth
