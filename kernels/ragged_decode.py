"""Attention of a few new tokens to a compressed cache on CUDA.

Split-KV decoding (FlashDecoding, Dao et al. 2023) over ragged heads: the pool entries of a row and layer, one KV head
after the other, are cut into chunks of one length, and these where a head ends; each piece is a program, so that none
reads more than another, however unequal the heads are. Tails and new tokens are cut into tiles, one program each. The
last program of a KV head and block of query rows to finish merges the partial results of these in their order, so
which one it is does not show. It also sets the counter of finished ones back to zero: a CUDA graph can replay the
launch. The grid depends on shapes only, nothing is read on the host, and no workspace but the counters outlives the
call.

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
    channels,
    check_call,
    codes_case,
    empty_state,
    held_row,
    hold_queries,
    merge_partials,
    shared_arguments,
)
from kvpass.kernels.launch import kind, launch
from kvpass.kernels.prefill_attention import block_dim, in_parts, wide_case
from kvpass.operands import AppendBuffers, Attention

TAIL_TILE = 64  # tail slots per program
CHUNK = 128  # pool entries of a chunk, of a layer of mean length. On an H200, 64 entries were slower at every batch
MOST_CHUNKS = 1024
"""Approximate limit per row: eight for each multiprocessor of an H100 or H200. More only cost merging."""
CHUNK_STEP = 16  # of which the length of a chunk is a multiple


def chunks_of(entries: int) -> int:
    """Return the chunks of the pool of a row and layer of ``entries`` on average, the same for any batch."""
    return max(1, min(MOST_CHUNKS, -(-entries // CHUNK)))


def block_rows_of(dtype: torch.dtype, key_dim: int, value_dim: int, query_rows: int) -> int:
    """Return the query rows per block: all rows, up to what fits in registers."""
    if dtype == torch.float32 or in_parts(key_dim, value_dim):
        return 16
    most = 64 if block_dim(key_dim) + block_dim(value_dim) <= 128 else 32
    return min(most, max(16, triton.next_power_of_2(query_rows)))


def case_of(dtype: torch.dtype, key_dim: int, value_dim: int, held: AppendBuffers) -> str:
    """Return the case: what fits in registers."""
    codes = codes_case(held, key_dim)
    if codes == " levels" and dtype != torch.float32 and block_dim(key_dim) + block_dim(value_dim) > 384:
        codes = " wide levels"
    return f"decode {kind(dtype)}{codes}{wide_case(key_dim, value_dim)}"


@triton.jit
def _merge_head(  # type: ignore[no-untyped-def]
    partial, partial_ml, num_partials, sinks, p_out, i_h, tokens, first_piece, pieces, first_tail, count,
    K: tl.constexpr, G: tl.constexpr, DV: tl.constexpr, BDV: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Merge the partial results of this program's query rows of KV head i_h: first those of the pool, then of the tail.

    Number j of ``count`` is partial result ``first_piece + j``, from ``pieces`` on ``first_tail + j``.
    """
    o_e = tl.arange(0, BDV)
    first = tl.program_id(1) * BLOCK_R
    for i_m in range(first, tl.minimum(first + BLOCK_R, G * tokens), BLOCK_M):
        o_m = i_m + tl.arange(0, BLOCK_M)
        m_m = o_m < G * tokens
        o_h = i_h * G + o_m % G
        state = begin_merge(sinks, o_h, BLOCK_M, BDV)
        for i_p in range(0, count, BLOCK_P):
            o_p = i_p + tl.arange(0, BLOCK_P)
            m_p = (o_p < count)[:, None] & m_m[None, :]
            o_partial = tl.where(o_p < pieces, first_piece + o_p, first_tail + o_p).to(tl.int64)
            partials = (partial, partial_ml, num_partials * G * tokens)
            state = merge_partials(state, partials, o_partial[:, None] * G * tokens + o_m[None, :], m_p, DV, BDV)
        _, b_l, b_acc = state
        b_out = b_acc / tl.where(m_m, b_l, 1.0)[:, None]
        p_row = p_out + (o_m // G * (K * G) + o_h).to(tl.int64) * DV
        m_out = m_m[:, None] & (o_e < DV)[None, :]
        tl.store(p_row[:, None] + o_e[None, :], b_out.to(p_out.dtype.element_ty), mask=m_out)


@triton.jit(
    do_not_specialize=[
        "stride_p", "stride_tl", "stride_tb", "layer", "layers", "pool_rows", "slots", "tokens", "chunks", "tail_tiles",
        "num_pieces",
    ]
)  # fmt: skip
def _attend_piece(  # type: ignore[no-untyped-def]
    q, k, v, pool_k, pool_v, pool_k_scale, pool_v_scale, offsets, arrivals, tail_k, tail_v, tail_k_scale,
    tail_v_scale, tail_start, tail_used, row_index, sinks, partial, partial_ml, out, stride_qb, stride_qh, stride_qt,
    stride_kb, stride_kh, stride_kt, stride_vb, stride_vh, stride_vt, stride_p, stride_tl, stride_tb, scale, softcap,
    layer, layers, pool_rows, slots, tokens, chunks, num_pieces, tail_tiles,
    K: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, SV: tl.constexpr, BITS: tl.constexpr,
    BDV: tl.constexpr, BK: tl.constexpr, TAIL_TILE: tl.constexpr, CHUNK_STEP: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_M: tl.constexpr,
    MOST_BLOCKS: tl.constexpr,
):  # fmt: skip
    """Attend a piece of the pool or a tile of a tail; the last program of a KV head merges its partial results.

    Stores acc ``[P, G*T, Dv]`` not divided by l, and ``(m, l)`` ``[2, P, G*T]`` in base 2. Programs 0..num_pieces-1
    handle the pool, ``chunks + K`` for each row; after them come tail_tiles programs for each (row, head). The program
    whose tail tile holds the slot tail_used also attends the new tokens and appends them; if scales are given, entries
    are codes, and the new ones are there already.

    The piece of chunk j that belongs to head h has number ``j + h`` of its row: from one piece to the next j or h
    grows, or both, so that no two have one number, and those of a head lie side by side.
    """
    i_p = tl.program_id(0)
    i_b = tl.where(i_p < num_pieces, i_p // (chunks + K), (i_p - num_pieces) // tail_tiles // K)
    i_row, used = held_row(row_index, tail_used, i_b)
    p_bounds = offsets + i_row * (layers * K + 1) + layer * K
    begin = tl.load(p_bounds)
    length = tl.maximum(tl.cdiv(tl.cdiv(tl.load(p_bounds + K) - begin, chunks), CHUNK_STEP), 1) * CHUNK_STEP
    if i_p < num_pieces:
        i_piece = i_p % (chunks + K)
        o_k = tl.arange(0, BK)
        b_begin = tl.load(p_bounds + o_k, mask=o_k < K, other=0)
        b_end = tl.load(p_bounds + 1 + o_k, mask=o_k < K, other=0)
        m_k = ((b_begin - begin) // length + o_k <= i_piece) & (i_piece <= (b_end - 1 - begin) // length + o_k)
        m_k = m_k & (b_begin < b_end)
        is_live = tl.sum(m_k.to(tl.int32), 0) > 0
        i_h = tl.sum(tl.where(m_k, o_k, 0), 0)
        first = tl.maximum(begin + (i_piece - i_h) * length, tl.load(p_bounds + i_h))
        last = tl.minimum(begin + (i_piece - i_h + 1) * length, tl.load(p_bounds + i_h + 1))
        new = 0
        i_row = tl.minimum(i_row, pool_rows - 1) * stride_p
        p_k = pool_k + i_row * (D * BITS // 8)
        p_v = pool_v + i_row * (SV * BITS // 8)
    else:
        i_tile = (i_p - num_pieces) % tail_tiles
        i_h = (i_p - num_pieces) // tail_tiles % K
        first = tl.maximum(i_tile * TAIL_TILE, tl.load(tail_start + i_row).to(tl.int32))
        last = tl.minimum(i_tile * TAIL_TILE + TAIL_TILE, used)
        is_live = i_tile <= used // TAIL_TILE
        new = tl.where(i_tile == used // TAIL_TILE, tokens, 0)
        i_row = layer.to(tl.int64) * stride_tl + i_row * stride_tb + i_h * slots
        p_k = tail_k + i_row * (D * BITS // 8)
        p_v = tail_v + i_row * (SV * BITS // 8)
    if is_live:
        if pool_k_scale is None:
            k_scale = None
            v_scale = None
        else:
            if i_p < num_pieces:
                k_scale = pool_k_scale + i_row
                v_scale = pool_v_scale + i_row
            else:
                k_scale = tail_k_scale + i_row
                v_scale = tail_v_scale + i_row
        head_begin = tl.load(p_bounds + i_h) - begin
        head_end = tl.load(p_bounds + i_h + 1) - begin
        pieces = tl.where(head_begin < head_end, (head_end - 1) // length - head_begin // length + 1, 0)
        first_piece = i_b * (chunks + K) + head_begin // length + i_h
        first_tail = num_pieces + (i_b * K + i_h) * tail_tiles - pieces

        i_r = tl.program_id(1)
        num_partials = tl.num_programs(0).to(tl.int64)
        o_r = i_r * BLOCK_R + tl.arange(0, BLOCK_R)
        o_t = o_r // G
        o_e = channels(BDV, BITS)
        m_r = o_r < G * tokens
        p_q = q + i_b.to(tl.int64) * stride_qb + (i_h * G + o_r % G).to(tl.int64) * stride_qh
        b_q = hold_queries(p_q + o_t.to(tl.int64) * stride_qt, m_r, D, BITS)
        state = empty_state(float("-inf"), BLOCK_R, BDV)
        logits = (scale, softcap)
        state = absorb_entries(
            b_q, state, (p_k, p_v, D, SV), first, last, o_t, logits, D, DV, BDV, BLOCK_S, False, k_scale, v_scale, BITS,
        )  # fmt: skip
        i_used = used.to(tl.int64)
        tail = (p_k + i_used * (D * BITS // 8), p_v + i_used * (SV * BITS // 8), D, SV)
        if k_scale is None:
            p_k_new = k + i_b.to(tl.int64) * stride_kb + i_h.to(tl.int64) * stride_kh
            p_v_new = v + i_b.to(tl.int64) * stride_vb + i_h.to(tl.int64) * stride_vh
            entries = (p_k_new, p_v_new, stride_kt, stride_vt)
            state = absorb_entries(b_q, state, entries, 0, new, o_t, logits, D, DV, BDV, BLOCK_T, True)
            if i_r == 0:
                append_entries(entries, tail, 0, new, slots - used, D, DV, BLOCK_T)
        else:
            state = absorb_entries(
                b_q, state, tail, 0, new, o_t, logits, D, DV, BDV, BLOCK_T, True, k_scale + used, v_scale + used, BITS,
            )  # fmt: skip
        b_m, b_l, b_acc = state
        o_partial = i_p * G * tokens.to(tl.int64) + o_r
        tl.store(partial_ml + o_partial, b_m, mask=m_r)
        tl.store(partial_ml + num_partials * G * tokens + o_partial, b_l, mask=m_r)
        m_acc = m_r[:, None] & (o_e < DV)[None, :]
        tl.store(partial + o_partial[:, None] * DV + o_e[None, :], b_acc, mask=m_acc)

        p_arrivals = arrivals + (i_b * K + i_h) * MOST_BLOCKS + i_r
        count = pieces + tl.minimum(used // TAIL_TILE + 1, tail_tiles)
        tl.debug_barrier()  # the stores of all threads, then the count
        before = tl.atomic_add(p_arrivals, 1, sem="acq_rel")
        if before == count - 1:
            tl.store(p_arrivals, 0)
            p_out = out + i_b.to(tl.int64) * tokens * K * G * DV
            _merge_head(
                partial, partial_ml, num_partials, sinks, p_out, i_h, tokens, first_piece, pieces, first_tail, count, K,
                G, DV, BDV, BLOCK_R, BLOCK_P, BLOCK_M,
            )  # fmt: skip


def attend_ragged(
    call: Attention, held: AppendBuffers, layer: int, config: triton.Config | None = None, chunks: int | None = None
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
        chunks: into how many the pool of each row is cut; None: :func:`chunks_of` the mean entries of a layer.

    Returns:
        ``[B, H, T, Dv]`` in the dtype of q, stored as ``[B, T, H, Dv]``. ValueError, before anything is written: an
        argument's shape, dtype, strides or device do not fit, or there are more query rows than counters.
    """
    q, (rows, heads, tokens, key_dim), (_, kv_heads, _, value_dim) = call.q, call.q.shape, call.v.shape
    if held.arrivals is None:
        raise ValueError("arrivals are None: kernels on CUDA need counters of the programs of a KV head")
    check_call(call, held, layer)
    if held.tail.k_scale is not None:
        append_codes(call, held, layer)
    query_rows, tail_tiles = heads // kv_heads * tokens, triton.cdiv(held.tail.k.shape[3], TAIL_TILE)
    chunks = chunks_of(held.pool.k.shape[1] // held.tail.k.shape[0]) if chunks is None else chunks
    num_pieces = rows * (chunks + kv_heads)
    num_partials = num_pieces + rows * kv_heads * tail_tiles
    partial = torch.empty(num_partials, query_rows, value_dim, dtype=torch.float32, device=q.device)
    partial_ml = torch.empty(2, num_partials, query_rows, dtype=torch.float32, device=q.device)
    block_rows = block_rows_of(q.dtype, key_dim, value_dim, query_rows)
    blocks, most = triton.cdiv(query_rows, block_rows), held.arrivals.shape[1]
    if blocks > most:
        raise ValueError(
            f"q has {query_rows} rows for a KV head, {blocks} blocks of {block_rows}: arrivals count {most} blocks"
        )
    arguments = {
        **shared_arguments(call, held, layer), "arrivals": held.arrivals,
        "partial": partial, "partial_ml": partial_ml, "chunks": chunks, "num_pieces": num_pieces,
        "tail_tiles": tail_tiles, "BK": triton.next_power_of_2(kv_heads), "TAIL_TILE": TAIL_TILE,
        "CHUNK_STEP": CHUNK_STEP, "BLOCK_R": block_rows, "MOST_BLOCKS": most,
    }  # fmt: skip
    launch(_attend_piece, (num_partials, blocks), arguments, case_of(q.dtype, key_dim, value_dim, held), config)
    out: Tensor = arguments["out"]
    return out.transpose(1, 2)
