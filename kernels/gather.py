"""Movement of KV entries on CUDA, from a prompt into pool slots.

Legend: B batch, N prompt columns, K KV heads, D head dim of keys, Dv of values, L layers, E pool slots. Tables of the
pool: slots int32 ``[3, B, E]`` with planes owner (layer * K + head, -1 = empty), rank (order of entry) and position
(true position); slot_stats fp32 ``[F, B, E]``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvpass.kernels.checks import check_tensors, of_table
from kvpass.kernels.launch import blocks, launch, strides
from kvpass.kernels.prefill_attention import load_parts, store_parts, wide_case
from kvpass.operands import Candidates, PrefillBuffers

OWNER, RANK, POSITION = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit(do_not_specialize=["layer", "rows", "entries", "columns"])
def _gather_kernel(  # type: ignore[no-untyped-def]
    source, k, v, rank, stats, start, pool_k, pool_v, slots, slot_stats, stride_kb, stride_kh, stride_kn, stride_vb,
    stride_vh, stride_vn, layer, rows, entries, columns, K: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    STATS: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Write the entries that move into a block of slots of one row, with their tables."""
    i_b = tl.program_id(1)
    o_e = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E)
    o_slot = i_b.to(tl.int64) * entries + o_e
    # [BLOCK_E]
    b_source = tl.load(source + o_slot, mask=o_e < entries, other=-1).to(tl.int64)
    m_e = b_source >= 0
    if tl.max(b_source, 0) >= 0:
        b_head = b_source // columns
        b_column = b_source % columns
        p_k = k + i_b.to(tl.int64) * stride_kb + b_head * stride_kh + b_column * stride_kn
        store_parts(pool_k + o_slot * D, load_parts(p_k, m_e, D), m_e, D)
        if DV > 0:  # otherwise values are stored in the keys
            p_v = v + i_b.to(tl.int64) * stride_vb + b_head * stride_vh + b_column * stride_vn
            store_parts(pool_v + o_slot * DV, load_parts(p_v, m_e, DV), m_e, DV)

        plane = rows.to(tl.int64) * entries
        o_entry = i_b.to(tl.int64) * K * columns + b_source
        b_position = b_column - tl.load(start + i_b)
        tl.store(slots + OWNER * plane + o_slot, (layer * K + b_head).to(tl.int32), mask=m_e)
        tl.store(slots + RANK * plane + o_slot, tl.load(rank + o_entry, mask=m_e, other=0), mask=m_e)
        tl.store(slots + POSITION * plane + o_slot, b_position.to(tl.int32), mask=m_e)
        stat_plane = rows.to(tl.int64) * K * columns
        for i_stat in tl.static_range(STATS):
            b_stat = tl.load(stats + i_stat * stat_plane + o_entry, mask=m_e, other=0.0)
            tl.store(slot_stats + i_stat * plane + o_slot, b_stat, mask=m_e)


def gather_winners(source: Tensor, rank: Tensor, candidates: Candidates, buffers: PrefillBuffers, layer: int) -> None:
    """Copy the entries that ``source`` names into the pool and record them in its tables; one launch.

    Args:
        source: int32 ``[B, E]``: flat index ``head * N + column``, or -1 for slots that stay as they are.
        rank: order of entry, int32 ``[B, K, N]``. layer: of k and v.
        candidates: k and v with any strides but a contiguous last dim; true positions count from ``start``.
        buffers: pool, slots and slot_stats are written.
    """
    k, v, stats, start = candidates.k, candidates.v, candidates.stats, candidates.start
    written = dict(zip(PrefillBuffers._fields[:4], buffers, strict=False))
    rows, kv_heads, columns, dim = k.shape
    value_dim, entries, planes = v.shape[3], buffers.pool_k.shape[1], stats.shape[0]
    sizes = {"batch": rows, "pool": entries, "key_dim": dim, "value_dim": value_dim, "stat_planes": planes}
    check_tensors(
        {
            "k": (k, k.shape, k.dtype),
            "v": (v, (rows, kv_heads, columns, value_dim), k.dtype),
            "source": (source, (rows, entries), torch.int32),
            "rank": (rank, (rows, kv_heads, columns), torch.int32),
            "stats": (stats, (planes, rows, kv_heads, columns), torch.float32),
            "start": (start, (rows,), torch.int64),
            **of_table(written, sizes, k.dtype),
        },
        k.device,
        strided=("k", "v"),
    )
    arguments = {
        "source": source, "k": k, "v": v, "rank": rank, "stats": stats, "start": start, **written,
        **strides("bhn", k=k, v=v),
        "layer": layer, "rows": rows, "entries": entries, "columns": columns, "K": kv_heads, "D": dim, "DV": value_dim,
        "STATS": planes,
    }  # fmt: skip
    launch(_gather_kernel, blocks(entries, "BLOCK_E", rows), arguments, "gather" + wide_case(dim, value_dim))
