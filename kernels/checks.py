"""Argument checks of the kernel launchers: shapes, dtypes, strides and devices, never values."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from kvpass.operands import BITS, BUFFERS, CODES, Attention, BlockSelection, SlotCache, by_name

Expected = Mapping[str, tuple[Tensor, Sequence[int], torch.dtype]]
"""Name of an argument -> the tensor given, and the shape and dtype it must have."""


def of_table(buffers: Mapping[str, Tensor | None], sizes: Mapping[str, int], entry: torch.dtype) -> Expected:
    """Return shape and dtype of buffers by their table, from sizes by name and the dtype of keys and values."""
    tensors = {name: tensor for name, tensor in buffers.items() if tensor is not None and name in BUFFERS}
    scales = [tensors.get(f"{side}_{name}_scale") for side in ("pool", "tail") for name in "kv"]
    codes, columns = entry, sizes
    if any(scale is not None for scale in scales):
        bits = code_bits(tensors["tail_k"], sizes["key_dim"], scales, sizes["value_dim"])
        columns = {**sizes, **{dim: sizes[dim] * bits // 8 for dim in ("key_dim", "value_dim")}}
        codes = tensors["tail_k"].dtype
    expected = {}
    for name, tensor in tensors.items():
        buffer = BUFFERS[name]
        if buffer.packed:
            expected[name] = tensor, buffer.shape(columns), codes
        else:
            expected[name] = tensor, buffer.shape(sizes), buffer.dtype or entry
    return expected


def code_bits(tail_k: Tensor, key_dim: int, scales: Sequence[Tensor | None], value_columns: int) -> int:
    """Return the bits of a code of a cache with scales, for keys of ``key_dim`` numbers.

    ``scales``: of keys and values of the pool, then of the tail. ``value_columns``: of stored values; 0: they are in
    the keys, and have no scales.
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
    """Raise at the first tensor of wrong shape, dtype, device or layout: contiguous, if ``strided`` in the last dim."""
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


def check_selection(call: Attention, selection: BlockSelection, block: int) -> None:
    """Raise if kernels would read a selection wrongly."""
    b, heads, n, _ = call.q.shape
    count = -(-n // block)
    if block < 64 or block % 64:
        raise ValueError(f"blocks of {block} tokens: must be a multiple of 64")
    expected: Expected = {
        "blocks": (selection.blocks, (b, heads, count, count), torch.bool),
        "columns": (selection.columns, (b, heads, selection.columns.shape[-1]), torch.int32),
    }
    check_tensors(expected, call.q.device)


def check_heads(heads: int, kv_heads: int) -> None:
    """Raise if the query heads do not divide into equal groups, one per KV head."""
    if kv_heads == 0 or heads % kv_heads:
        raise ValueError(f"q has {heads} heads: must be a multiple of the {kv_heads} KV heads")


def values_in_keys(stored: Tensor, key_dim: int, value_dim: int) -> bool:
    """Return whether the values, of which no columns are stored, are the first columns of the keys."""
    return stored.shape[-1] == 0 and value_dim <= key_dim


def check_cache(
    call: Attention, held: Mapping[str, Tensor | None], layer: int, line: Expected | None = None,
    strided: Collection[str] = ("q", "k", "v"),
) -> None:  # fmt: skip
    """Check a call of attention to pool and tail: buffers by name, tables of slots, and which tensors are strided."""
    q, k, v, _, _, sinks = call
    tail_k, tail_v, pool_k = held["tail_k"], held["tail_v"], held.get("pool_k")
    assert tail_k is not None and tail_v is not None
    rows, heads, tokens, key_dim = q.shape
    _, kv_heads, _, value_dim = v.shape
    layers, _, _, slots, _ = tail_k.shape
    check_heads(heads, kv_heads)
    if not 0 <= layer < layers:
        raise ValueError(f"layer={layer}: must be in 0..{layers - 1}")
    if tokens > slots:
        raise ValueError(f"q has {tokens} tokens: the tail has {slots} slots")
    tail_used, row_index = held.get("tail_used"), held.get("row_index")
    buffer_rows = rows if row_index is None else tail_k.shape[1]
    sizes = {
        **{"batch": buffer_rows, "layers": layers, "kv_heads": kv_heads, "key_dim": key_dim, "tail": slots},
        "pool_batch": 1 if pool_k is not None and len(pool_k) == 1 and line is None else buffer_rows,
        "value_dim": 0 if values_in_keys(tail_v, key_dim, value_dim) else value_dim,
        "pool": 0 if pool_k is None else pool_k.shape[1],
        **{"bounds": layers * kv_heads + 1, "programs": rows * kv_heads, "*": rows},
    }
    expected = {
        "q": (q, q.shape, q.dtype),
        "k": (k, (rows, kv_heads, tokens, key_dim), q.dtype),
        "v": (v, (rows, kv_heads, tokens, value_dim), q.dtype),
        **(line or {}),
        **of_table(held, sizes, q.dtype),
    }
    if sinks is not None:
        expected["sinks"] = (sinks, (heads,), sinks.dtype)
    free = set(strided)
    if row_index is not None:
        assert tail_used is not None
        expected["tail_used"] = (tail_used, (buffer_rows,), torch.int64)
        free |= {f"{side}_{name}" for side in ("pool", "tail") for name in ("k", "v", "k_scale", "v_scale")}
        check_packed_rows(held)
    check_tensors(expected, q.device, free)


def check_packed_rows(held: Mapping[str, Tensor | None]) -> None:
    """Raise if a row of pool or tails is not packed, or keys, values and scales lie apart by other strides."""
    for side, at in (("pool", 0), ("tail", (0, 0))):
        keys, values = held[f"{side}_k"], held[f"{side}_v"]
        assert keys is not None and values is not None
        steps = [step % keys.shape[-1] for step in keys.stride()[:-1]]
        if keys.stride() != values.stride() or any(steps) or not keys[at].is_contiguous():
            raise ValueError(f"{side}_k and {side}_v must be packed in each row, with the same strides")
        apart = [step // keys.shape[-1] for step in keys.stride()[:-1]]
        for scale in (held.get(f"{side}_k_scale"), held.get(f"{side}_v_scale")):
            if scale is not None and list(scale.stride()) != apart:
                raise ValueError(f"scales of {side}_k and {side}_v must lie as far apart as these, in entries: {apart}")


def check_slots(call: Attention, lines: SlotCache, layer: int) -> None:
    """Check a call of attention to lines of slots; as :func:`check_cache`."""
    position, now = lines.position, lines.now
    if call.q.shape[2] != 1:
        raise ValueError(f"q has {call.q.shape[2]} tokens: must be 1")
    slots, width = lines.tail.k.shape[3], position.shape[2]
    rows, kv_heads = call.v.shape[:2]
    line: dict[str, tuple[Tensor, Sequence[int], torch.dtype]] = {
        "position": (position, (rows, kv_heads, width), torch.int32)
    }
    if now is not None:
        line["now"] = (now, (rows,), torch.int64)
        if lines.offsets is None:
            raise ValueError("an entry is written down in lines that have a pool: offsets is None")
    check_cache(call, by_name(lines), layer, line, ("q", "k", "v", *(["position"] if now is None else [])))
    if not slots <= width <= (slots if lines.pool is None else width):
        raise ValueError(f"position has lines of {width} slots: {slots} of them are the tail's")


def check_eviction(worth: Tensor, position: Tensor, quota: Tensor) -> None:
    line = position.shape
    expected = {
        "worth": (worth, line, torch.float32),
        "position": (position, line, torch.int32),
        "quota": (quota, line[:2], torch.int64),
    }
    check_tensors(expected, position.device)


def check_order(attention: Tensor, position: Tensor, storage_order: Tensor) -> None:
    """Check attention ``[B, H, S]`` over lines ``[B, K, S]``, and their positions and storage order."""
    rows, kv_heads, width = line = position.shape
    check_heads(attention.shape[1], kv_heads)
    expected = {
        "attention": (attention, (rows, attention.shape[1], width), torch.float32),
        "position": (position, line, torch.int32),
        "storage_order": (storage_order, line, torch.int32),
    }
    check_tensors(expected, position.device)
