"""Ragged decode attention on the CPU: few new tokens against a packed pool segment and a dense tail."""

from __future__ import annotations

import torch
from torch import Tensor

from kvpass.kernels.checks import check_heads
from kvpass.kernels.cpu_library import Fault, call_attend, check_lists

_NAMES = ("k", "v", "pool_k", "pool_v", "tail_k", "tail_v", "offsets", "tail_start")


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
    check_heads(heads, kv_heads)
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
    check_lists(_NAMES, "shape", shapes, expected_shapes)
    dtypes = [x.dtype for x in (k, v, pool_k, pool_v, tail_k, tail_v, offsets, tail_start)]
    expected_dtypes = [dtype, dtype, dtype, dtype, dtype, dtype, torch.int32, torch.int64]
    check_lists(_NAMES, "dtype", dtypes, expected_dtypes)
    packed = [x.is_contiguous() for x in (pool_k, pool_v, tail_k, tail_v, offsets, tail_start)]
    if not all(packed):
        raise ValueError(f"{_NAMES[2 + packed.index(False)]} is not contiguous")
    if not all([x.is_cpu for x in (q, k, v, pool_k, pool_v, tail_k, tail_v, offsets, tail_start)]):
        raise ValueError("q, k, v, pool, tail, offsets and tail_start must all be on the CPU")
    pools = (pool_k, pool_v, offsets, tail_k, tail_v, tail_start)
    sizes = (entries, layers * kv_heads + 1, slots, used, layer)
    out, fault, row = call_attend(q, k, v, *pools, sinks, sizes, scale, softcap)
    if fault == Fault.OFFSETS:
        raise ValueError(f"offsets of row {row}, layer {layer} must rise within 0..{entries}")
    if fault == Fault.START:
        raise ValueError(f"tail_start[{row}]={int(tail_start[row])}: must be in 0..{used}")
    return out
