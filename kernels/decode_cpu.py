"""Ragged decode attention on the CPU: a few new tokens against pool segment and tail."""

from __future__ import annotations

import torch
from torch import Tensor

from kvpass.kernels.checks import check_heads
from kvpass.kernels.cpu_library import Fault, Layouts, call_attend, check_layout
from kvpass.operands import AppendBuffers, Attention

_NAMES = ("k", "v", "pool_k", "pool_v", "tail_k", "tail_v", "offsets", "tail_start")


def attend_decode(call: Attention, held: AppendBuffers, layer: int) -> Tensor:
    """Append the new entries of one layer to its tail, then attend pool segment and tail.

    New token t of row b attends to ``pool[b, offsets[b, layer*K + head] : offsets[b, layer*K + head + 1]]`` and to the
    tail slots ``tail_start[b] .. used + t``. One softmax over both, in fp32: online (Milakov and Gimelshein,
    arXiv:1805.02867), with the log-sum-exp merge over chunks of FlashDecoding (Dao et al. 2023).

    All tensors are on the CPU; q, k, v, pool and tail share one dtype (fp32, bf16 or fp16). q, k and v may have any
    strides, but are copied if the last dim is not contiguous; the buffers are contiguous.

    Returns:
        [B, H, T, Dv] in the dtype of q; its ``transpose(1, 2)`` is contiguous.

    Raises:
        ValueError: used + T > C, or an argument that would be read out of bounds; nothing was written.
        RuntimeError: there is no C++ compiler.
    """
    q, k, v = call[:3]
    pool_k, pool_v, offsets, tail_k, tail_v, tail_start, tail_used = held[:7]
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
    given = [k, v, pool_k, pool_v, tail_k, tail_v, offsets, tail_start]
    expected: Layouts = [
        ((rows, kv_heads, tokens, key_dim), dtype),
        ((rows, kv_heads, tokens, value_dim), dtype),
        ((rows, entries, key_dim), dtype),
        ((rows, entries, value_dim), dtype),
        ((layers, rows, kv_heads, slots, key_dim), dtype),
        ((layers, rows, kv_heads, slots, value_dim), dtype),
        ((rows, layers * kv_heads + 1), torch.int32),
        ((rows,), torch.int64),
    ]
    check_layout(_NAMES, given, expected)
    packed = [x.is_contiguous() for x in given[2:]]
    if not all(packed):
        raise ValueError(f"{_NAMES[2 + packed.index(False)]} is not contiguous")
    if not all([x.is_cpu for x in (q, *given)]):
        raise ValueError("q, k, v, pool, tail, offsets and tail_start must all be on the CPU")
    pools = (pool_k, pool_v, offsets, tail_k, tail_v, tail_start)
    sizes = (entries, layers * kv_heads + 1, slots, used, layer)
    out, fault, row = call_attend(call, pools, sizes)
    if fault == Fault.OFFSETS:
        raise ValueError(f"offsets of row {row}, layer {layer} must rise within 0..{entries}")
    if fault == Fault.START:
        raise ValueError(f"tail_start[{row}]={int(tail_start[row])}: must be in 0..{used}")
    return out
