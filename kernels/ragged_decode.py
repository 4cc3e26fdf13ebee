"""Attention of a few new tokens to a compressed cache on CUDA.

Split-KV decoding (FlashDecoding, Dao et al. 2023) over ragged heads. What all rows and KV heads read is one line of
tiles. Program p of P attends the pieces that begin in the p-th of P equal shares of it, and so reads no more than its
share and a piece, however unequal heads are. A piece is some tiles of a head's pool entries, or one of its tail; each
has a partial result, and where a head is cut depends on its row alone, so that a row is rounded as it is alone. The
last program of a KV head and block of query rows to finish merges the partial results of these in their order, so
which one it is does not show. It also sets the counter of finished pieces back to zero: a CUDA graph can replay the
launch. The grid depends on shapes and device only, nothing is read on the host, and no workspace but the counters
outlives the call.

Legend as in ``cached_attention.py``; P partial results.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvpass.kernels.append_codes import append_codes
from kvpass.kernels.cached_attention import (
    absorb_entries,
    append_entries,
    begin_merge,
    case_of,
    channels,
    check_call,
    empty_state,
    held_row,
    hold_queries,
    merge_partials,
    shared_arguments,
)
from kvpass.kernels.launch import launch
from kvpass.kernels.prefill_attention import block_dim, in_parts
from kvpass.operands import AppendBuffers, Attention

TILE = tl.constexpr(64)  # entries; the blocks of all configs divide it
PIECE = tl.constexpr(128)  # pool entries, if a layer has few. On an H200, 64 entries were slower at every batch
MOST_PIECES = 1024
"""Approximate limit per row: eight for each multiprocessor of an H100 or H200. More only cost merging."""
PROGRAMS = 4  # for each multiprocessor: as many as an H100 or H200 runs at once


def most_pieces(entries: int) -> int:
    """Return the limit of a row and layer, ``entries`` on average; a layer of more than twice these has longer ones."""
    return max(1, min(MOST_PIECES, 2 * -(-entries // PIECE.value)))


def block_rows_of(dtype: torch.dtype, key_dim: int, value_dim: int, query_rows: int) -> int:
    """Return the query rows per block: all rows, up to what fits in registers."""
    if dtype == torch.float32 or in_parts(key_dim, value_dim):
        return 16
    most = 64 if block_dim(key_dim) + block_dim(value_dim) <= 128 else 32
    return min(most, max(16, triton.next_power_of_2(query_rows)))


@triton.jit
def segment_of(i_s, tables, K: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return of a segment, a (row, KV head), or a block of them: row, begin and end of entries in pool, and in tail.

    Then how it is cut: tiles in the pool, tiles in all, tiles of a piece of the pool, number of the first partial
    result. A segment's lie side by side, from ``j + h (most tiles of a tail + 1)`` of its row on, where j is how many
    whole pieces the entries of the heads before head h fill: from head to head that grows by at least its pieces.
    """
    offsets, tail_start, tail_used, row_index, layer, layers, slots, most, row_partials = tables
    i_row, used = held_row(row_index, tail_used, i_s // K)
    start = tl.load(tail_start + i_row).to(tl.int32)
    p_bounds = offsets + i_row * (layers * K + 1) + layer * K
    begin = tl.load(p_bounds)
    first = tl.load(p_bounds + i_s % K)
    last = tl.load(p_bounds + i_s % K + 1)
    pool_tiles = tl.cdiv(last - first, TILE)
    tiles = pool_tiles + tl.maximum(used - start, 0) // TILE + 1
    per_piece = tl.maximum(tl.cdiv(tl.load(p_bounds + K) - begin, TILE * most), PIECE // TILE)
    first_partial = i_s // K * row_partials + (first - begin) // (TILE * per_piece) + i_s % K * (slots // TILE + 2)
    return i_row, first, last, start, used, pool_tiles, tiles, per_piece, first_partial


@triton.jit
def share_of(tables, segments, K: tl.constexpr, SEGMENTS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return at which tiles this program's share begins and ends, its first segment, where that begins, its last."""
    o_s = tl.arange(0, SEGMENTS)
    _, _, _, _, _, _, b_tiles, _, _ = segment_of(tl.minimum(o_s, segments - 1), tables, K)
    b_end = tl.cumsum(tl.where(o_s < segments, b_tiles, 0), 0)
    total = tl.max(b_end, 0).to(tl.int64)
    begin = (tl.program_id(0) * total // tl.num_programs(0)).to(tl.int32)
    end = ((tl.program_id(0) + 1) * total // tl.num_programs(0)).to(tl.int32)
    m_before = b_end <= begin
    i_first = tl.sum(m_before.to(tl.int32), 0)
    return begin, end, i_first, tl.max(tl.where(m_before, b_end, 0), 0), tl.sum((b_end < end).to(tl.int32), 0)


@triton.jit
def pieces_before(tile, tiles, pool_tiles, per_piece):  # type: ignore[no-untyped-def]
    """Return how many pieces of a segment begin before a tile, which may lie outside; tiles of the tail are pieces."""
    tile = tl.minimum(tl.maximum(tile, 0), tiles)
    return tl.cdiv(tl.minimum(tile, pool_tiles), per_piece) + tl.maximum(tile - pool_tiles, 0)


@triton.jit(
    do_not_specialize=[
        "stride_p", "stride_tl", "stride_tb", "layer", "layers", "pool_rows", "slots", "tokens", "segments", "most",
        "row_partials",
    ]
)  # fmt: skip
def _attend_share(  # type: ignore[no-untyped-def]
    q, k, v, pool_k, pool_v, pool_k_scale, pool_v_scale, offsets, arrivals, tail_k, tail_v, tail_k_scale,
    tail_v_scale, tail_start, tail_used, row_index, sinks, partial, partial_ml, out, stride_qb, stride_qh, stride_qt,
    stride_kb, stride_kh, stride_kt, stride_vb, stride_vh, stride_vt, stride_p, stride_tl, stride_tb, scale, softcap,
    layer, layers, pool_rows, slots, tokens, segments, most, row_partials,
    K: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, SV: tl.constexpr, BITS: tl.constexpr,
    BDV: tl.constexpr, SEGMENTS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_S: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_M: tl.constexpr, MOST_BLOCKS: tl.constexpr,
):  # fmt: skip
    """Attend the pieces that begin in a share, then merge each KV head that this program is the last to attend.

    Stores acc ``[P, G*T, Dv]`` not divided by l, and ``(m, l)`` ``[2, P, G*T]`` in base 2. The last piece of a tail has
    the new tokens, which are appended too; if scales are given, entries are codes, and the new ones are there already.
    """
    i_r = tl.program_id(1)
    num_rows = (segments // K * row_partials).to(tl.int64) * G * tokens
    tables = (offsets, tail_start, tail_used, row_index, layer, layers, slots, most, row_partials)
    begin, end, i_first, first_begin, i_last = share_of(tables, segments, K, SEGMENTS)
    # neither loop keeps invariants, nor what depends on a `zero` that is not known: registers are for the innermost
    s_begin = first_begin
    for i in tl.range(0, i_last - i_first + 1, disable_licm=True):
        i_b = (i_first + i) // K
        i_h = (i_first + i) % K
        segment = segment_of(i_first + i, tables, K)
        i_row, head_begin, head_end, start, used, pool_tiles, tiles, per_piece, i_partial = segment
        pieces = tl.cdiv(pool_tiles, per_piece)
        p_first = pieces_before(begin - s_begin, tiles, pool_tiles, per_piece)
        p_last = pieces_before(end - s_begin, tiles, pool_tiles, per_piece)
        s_begin += tiles
        for i_piece in tl.range(p_first, p_last, disable_licm=True):
            is_pool = i_piece < pieces
            if is_pool:
                first = head_begin + i_piece * per_piece * TILE
                last = tl.minimum(first + per_piece * TILE, head_end)
                new = 0
                i_held = tl.minimum(i_row, pool_rows - 1) * stride_p
            else:
                first = start + (i_piece - pieces) * TILE
                last = tl.minimum(first + TILE, used)
                new = tl.where(first + TILE > used, tokens, 0)
                i_held = layer.to(tl.int64) * stride_tl + i_row * stride_tb + i_h * slots
            p_k = tl.where(is_pool, pool_k, tail_k) + i_held * (D * BITS // 8)
            p_v = tl.where(is_pool, pool_v, tail_v) + i_held * (SV * BITS // 8)
            k_scale = None
            v_scale = None
            if pool_k_scale is not None:
                k_scale = tl.where(is_pool, pool_k_scale, tail_k_scale) + i_held
                v_scale = tl.where(is_pool, pool_v_scale, tail_v_scale) + i_held
            zero = first >> 31
            o_r = i_r * BLOCK_R + zero + tl.arange(0, BLOCK_R)
            o_t = o_r // G
            o_e = channels(BDV, BITS)
            m_r = o_r < G * tokens
            p_q = q + i_b.to(tl.int64) * stride_qb + (i_h * G + o_r % G).to(tl.int64) * stride_qh
            b_q = hold_queries(p_q + o_t.to(tl.int64) * stride_qt, m_r, D, BITS)
            state = empty_state(float("-inf"), BLOCK_R, BDV)
            state = absorb_entries(
                b_q, state, (p_k, p_v, D, SV), first, last, o_t, (scale, softcap), D, DV, BDV, BLOCK_S, False, k_scale,
                v_scale, BITS,
            )  # fmt: skip
            i_used = used.to(tl.int64)
            entries = (p_k + i_used * (D * BITS // 8), p_v + i_used * (SV * BITS // 8), D, SV)
            if k_scale is None:
                p_k_new = k + i_b.to(tl.int64) * stride_kb + i_h.to(tl.int64) * stride_kh
                p_v_new = v + i_b.to(tl.int64) * stride_vb + i_h.to(tl.int64) * stride_vh
                tail, entries = entries, (p_k_new, p_v_new, stride_kt, stride_vt)
                if i_r == 0:
                    append_entries(entries, tail, zero, new, slots - used, D, DV, BLOCK_T)
            else:
                k_scale += used
                v_scale += used
            state = absorb_entries(
                b_q, state, entries, zero, new, o_t, (scale, softcap), D, DV, BDV, BLOCK_T, True, k_scale, v_scale, BITS
            )
            o_partial = (i_partial + i_piece).to(tl.int64) * G * tokens + o_r
            tl.store(partial_ml + o_partial, state[0], mask=m_r)
            tl.store(partial_ml + num_rows + o_partial, state[1], mask=m_r)
            p_acc = partial + o_partial[:, None] * DV + o_e[None, :]
            tl.store(p_acc, state[2], mask=m_r[:, None] & (o_e < DV)[None, :])

    tl.debug_barrier()  # the stores of all threads, then the counts
    s_begin = first_begin
    for i in tl.range(0, i_last - i_first + 1, disable_licm=True):
        _, _, _, _, _, pool_tiles, tiles, per_piece, i_partial = segment_of(i_first + i, tables, K)
        p_first = pieces_before(begin - s_begin, tiles, pool_tiles, per_piece)
        p_last = pieces_before(end - s_begin, tiles, pool_tiles, per_piece)
        s_begin += tiles
        if p_first < p_last:
            p_arrivals = arrivals + (i_first + i) * MOST_BLOCKS + i_r
            count = pieces_before(tiles, tiles, pool_tiles, per_piece)
            if tl.atomic_add(p_arrivals, p_last - p_first, sem="acq_rel") + p_last - p_first == count:
                tl.store(p_arrivals, 0)
                o_v = tl.arange(0, BDV)
                for i_m in range(i_r * BLOCK_R, tl.minimum(i_r * BLOCK_R + BLOCK_R, G * tokens), BLOCK_M):
                    o_m = i_m + tl.arange(0, BLOCK_M)
                    m_m = o_m < G * tokens
                    o_h = (i_first + i) % K * G + o_m % G
                    merged = begin_merge(sinks, o_h, BLOCK_M, BDV)
                    for i_p in range(0, count, BLOCK_P):
                        o_p = i_p + tl.arange(0, BLOCK_P)
                        m_p = (o_p < count)[:, None] & m_m[None, :]
                        o_merged = (i_partial + o_p).to(tl.int64)[:, None] * G * tokens + o_m[None, :]
                        merged = merge_partials(merged, (partial, partial_ml, num_rows), o_merged, m_p, DV, BDV)
                    b_out = merged[2] / tl.where(m_m, merged[1], 1.0)[:, None]
                    p_out = out + (((i_first + i) // K).to(tl.int64) * tokens * K * G + o_m // G * (K * G) + o_h) * DV
                    m_out = m_m[:, None] & (o_v < DV)[None, :]
                    tl.store(p_out[:, None] + o_v[None, :], b_out.to(out.dtype.element_ty), mask=m_out)


def attend_ragged(
    call: Attention, held: AppendBuffers, layer: int, config: triton.Config | None = None, programs: int | None = None
) -> Tensor:
    """Append a few new entries of one layer to its tail; attend pool, tail and new tokens.

    New token t of row b attends to the pool entries of its KV head, to the tail slots
    ``tail_start[b] .. tail_used - 1`` and to the new tokens 0..t. One softmax, in fp32.

    All tensors are on one device; q, k, v, pool and tail share one dtype (fp32, fp16 or bf16), or pool and tail hold
    codes with scales (int8, fp8 e4m3, or of 4, 3 or 2 bits; of 4 and fewer with q, k and v rotated), which become
    numbers of that dtype as they are read. New entries are attended as they are stored. The caller must ensure that
    ``tail_used + T <= C``: entries beyond the last slot are not stored, and perhaps not attended.

    Args:
        call: K divides H; q, k and v with any strides but a contiguous last dim.
        held: contiguous, unless it has a row_index. arrivals are zero, and are so again afterwards; calls that may run
            at the same time must not share them.
        programs: among how many the work is divided; None: :data:`PROGRAMS` for each multiprocessor.

    Returns:
        ``[B, H, T, Dv]`` in the dtype of q, stored as ``[B, T, H, Dv]``. ValueError, before anything is written: an
        argument's shape, dtype, strides or device do not fit, or there are more query rows than counters.
    """
    q, (rows, heads, tokens, key_dim), (_, kv_heads, _, value_dim) = call.q, call.q.shape, call.v.shape
    if held.arrivals is None:
        raise ValueError("arrivals are None: kernels on CUDA need counters of the programs of a KV head")
    check_call(call, held, layer)
    query_rows = heads // kv_heads * tokens
    most = most_pieces(held.pool.k.shape[1] // held.tail.k.shape[0])
    row_partials = most + kv_heads * (held.tail.k.shape[3] // TILE.value + 2)
    partial = torch.empty(rows * row_partials, query_rows, value_dim, dtype=torch.float32, device=q.device)
    partial_ml = torch.empty(2, len(partial), query_rows, dtype=torch.float32, device=q.device)
    block_rows = block_rows_of(q.dtype, key_dim, value_dim, query_rows)
    blocks, cells = triton.cdiv(query_rows, block_rows), held.arrivals.shape[1]
    if blocks > cells:
        raise ValueError(
            f"q has {query_rows} rows for a KV head, {blocks} blocks of {block_rows}: arrivals count {cells} blocks"
        )
    if programs is None:
        on_device = torch.cuda.get_device_properties(q.device).multi_processor_count if q.is_cuda else 1
        programs = min(triton.cdiv(PROGRAMS * on_device, blocks), 2 * len(partial))
    segments = rows * kv_heads  # up to 32, each warp adds up their tiles by itself, without a barrier
    arguments = {
        **shared_arguments(call, held, layer), "arrivals": held.arrivals,
        "partial": partial, "partial_ml": partial_ml, "segments": segments, "most": most,
        "row_partials": row_partials, "BLOCK_R": block_rows, "MOST_BLOCKS": cells,
        "SEGMENTS": 32 if segments <= 32 else max(256, triton.next_power_of_2(segments)),
    }  # fmt: skip
    append_codes(call, held, layer)
    launch(_attend_share, (programs, blocks), arguments, case_of("decode", call, held), config)
    out: Tensor = arguments["out"]
    return out.transpose(1, 2)
