"""Movement of KV entries on CUDA: from a prompt into pool slots, and within the pool.

Nothing is read on the host: cumulative counts tell which selected entry goes into which slot.

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
from kvpass.kernels.launch import KernelConfig, blocks, launch, strides
from kvpass.kernels.prefill_attention import load_parts, store_parts, wide_case
from kvpass.operands import Candidates, PrefillBuffers

OWNER, RANK, POSITION = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
EMPTY = -1
"""Owner of a free slot; source of a slot that receives no entry."""
SCRATCH_SHARE = 8
"""``pack`` copies the pool in this many parts; its scratch is the size of one part."""
SECTOR_BYTES = 32
"""Bytes that one read of device memory fetches: the least width of a part."""


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


@triton.jit(do_not_specialize=["entries"])
def _permute_kernel(  # type: ignore[no-untyped-def]
    pool, permutation, scratch, entries, first, width, D: tl.constexpr, BW: tl.constexpr, BLOCK_E: tl.constexpr
):
    """Store ``scratch[b, e] = pool[b, permutation[b, e], first : first + width]`` for a block of slots."""
    i_b = tl.program_id(1)
    o_e = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E)
    o_w = tl.arange(0, BW)
    i_row = i_b.to(tl.int64) * entries
    # [BLOCK_E]
    b_from = tl.load(permutation + i_row + o_e, mask=o_e < entries, other=0)
    m_block = (o_e < entries)[:, None] & (o_w < width)[None, :]
    # [BLOCK_E, BW]
    b_part = tl.load(pool + (i_row + b_from)[:, None] * D + first + o_w[None, :], mask=m_block, other=0.0)
    tl.store(scratch + (i_row + o_e)[:, None] * width + o_w[None, :], b_part, mask=m_block)


def assign_slots(keep: Tensor, owner: Tensor) -> Tensor:
    """Assign the j-th selected entry, in (head, column) order, to the j-th free slot.

    Args:
        keep: bool ``[B, K, N]``, the entries of this layer to store in the pool.
        owner: int32 ``[B, E]``, -1 for a free slot.

    Returns:
        int32 ``[B, E]``: for each slot the flat index ``head * N + column`` of the entry that moves in, or -1.

    Raises:
        RuntimeError: more selected entries than free slots; on CUDA a device-side assertion, noticed at the next
            synchronisation.
    """
    winners = keep.flatten(1).cumsum(1, dtype=torch.int32)
    is_free = owner == EMPTY
    turn = is_free.cumsum(1, dtype=torch.int32)
    total = winners[:, -1:]
    torch._assert_async((total <= turn[:, -1:]).all(), "more winners than free slots of the pool")
    # the j-th selected entry is where the running count first reaches j
    source = torch.searchsorted(winners, turn, out_int32=True)
    return torch.where(is_free & (turn <= total), source, EMPTY)


def gather_winners(
    source: Tensor,
    rank: Tensor,
    candidates: Candidates,
    buffers: PrefillBuffers,
    layer: int,
    config: KernelConfig | None = None,
) -> None:
    """Copy the entries that ``source`` names into the pool and record them in its tables; one launch.

    Args:
        source: int32 ``[B, E]``, from :func:`assign_slots`: flat index ``head * N + column``, or -1. Slots with -1 stay
            as they are.
        rank: order of entry, int32 ``[B, K, N]``.
        candidates: k and v with any strides but a contiguous last dim; true positions count from ``start``.
        buffers: pool, slots and slot_stats are written.
        layer: the layer of k and v.
    """
    k, v, stats, start = candidates.k, candidates.v, candidates.stats, candidates.start
    pool_k, pool_v, slots, slot_stats = buffers[:4]
    rows, kv_heads, columns, dim = k.shape
    value_dim, entries, planes = v.shape[3], pool_k.shape[1], stats.shape[0]
    held = dict(zip(PrefillBuffers._fields[:4], buffers, strict=False))
    check_tensors(
        {
            "k": (k, k.shape, k.dtype),
            "v": (v, (rows, kv_heads, columns, value_dim), k.dtype),
            "source": (source, (rows, entries), torch.int32),
            "rank": (rank, (rows, kv_heads, columns), torch.int32),
            "stats": (stats, (planes, rows, kv_heads, columns), torch.float32),
            "start": (start, (rows,), torch.int64),
            **of_table(held, {"B": rows, "E": entries, "D": dim, "V": value_dim, "F": planes}, k.dtype),
        },
        k.device,
        strided=("k", "v"),
    )
    arguments = {
        "source": source, "k": k, "v": v, "rank": rank, "stats": stats, "start": start,
        "pool_k": pool_k, "pool_v": pool_v, "slots": slots, "slot_stats": slot_stats,
        **strides("bhn", k=k, v=v),
        "layer": layer, "rows": rows, "entries": entries, "columns": columns, "K": kv_heads, "D": dim, "DV": value_dim,
        "STATS": planes,
    }  # fmt: skip
    launch(_gather_kernel, blocks(entries, "BLOCK_E", rows), arguments, "gather" + wide_case(dim, value_dim), config)


def _part_width(pool_k: Tensor, pool_v: Tensor) -> int:
    """Return the columns ``pack`` moves at a time: its share in whole sectors, at least one."""
    sector = SECTOR_BYTES // pool_k.element_size()
    entry = pool_k.shape[2] + pool_v.shape[2]
    return max(entry // SCRATCH_SHARE // sector, 1) * sector


def pack(buffers: PrefillBuffers, config: KernelConfig | None = None) -> None:
    """Permute the pool once into (layer, head, position) order; empty slots go last.

    A few columns of all rows move at a time, through a scratch of about an eighth of the pool. Writes pool, slots,
    slot_stats and offsets.
    """
    pool_k, pool_v, slots, slot_stats = buffers[:4]
    offsets = buffers.offsets
    rows, entries, dim = pool_k.shape
    groups = offsets.shape[1] - 1
    sizes = {"B": rows, "E": entries, "D": dim, "V": pool_v.shape[2], "P": groups + 1, "F": len(slot_stats)}
    held = {**dict(zip(PrefillBuffers._fields[:4], buffers, strict=False)), "offsets": offsets}
    check_tensors(of_table(held, sizes, pool_k.dtype), pool_k.device)
    owner = torch.where(slots[OWNER.value] == EMPTY, groups, slots[OWNER.value]).long()
    permutation = ((owner << 32) + slots[POSITION.value]).argsort(dim=1)
    ordered = owner.gather(1, permutation)
    bounds = torch.arange(groups + 1, device=owner.device).expand(rows, -1).contiguous()
    offsets.copy_(torch.searchsorted(ordered, bounds, out_int32=True))
    for planes in (slots, slot_stats):
        planes.copy_(planes.gather(2, permutation.expand(len(planes), -1, -1)))

    width = _part_width(pool_k, pool_v)
    scratch = torch.empty(rows * entries * width, dtype=pool_k.dtype, device=pool_k.device)
    for pool in (pool_k, pool_v):
        for first in range(0, pool.shape[2], width):
            _permute_part(pool, permutation, scratch, first, min(width, pool.shape[2] - first), config)


def _permute_part(
    pool: Tensor, permutation: Tensor, scratch: Tensor, first: int, width: int, config: KernelConfig | None
) -> None:
    """Permute columns first .. first + width - 1 of every row of the pool."""
    rows, entries, dim = pool.shape
    arguments = {
        "pool": pool, "permutation": permutation, "scratch": scratch, "entries": entries, "first": first,
        "width": width, "D": dim, "BW": triton.next_power_of_2(width),
    }  # fmt: skip
    launch(_permute_kernel, blocks(entries, "BLOCK_E", rows), arguments, "permute" + wide_case(dim), config)
    part = scratch[: rows * entries * width].view(rows, entries, width)
    pool[:, :, first : first + width].copy_(part)
