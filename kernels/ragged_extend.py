"""Attention of many new tokens (such as a follow-up question) to a compressed cache on CUDA.

One program per block of query rows reads the whole cache of its KV head: pool segment, tail, and the new tokens up to
the last one of the block. One launch, no workspace, no host synchronisation.

Legend as in ``cached_attention.py``.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kvpass.kernels.append_codes import append_codes
from kvpass.kernels.cached_attention import (
    absorb_entries,
    append_entries,
    case_of,
    channels,
    check_call,
    empty_state,
    held_row,
    hold_queries,
    shared_arguments,
)
from kvpass.kernels.launch import blocks, launch
from kvpass.kernels.prefill_attention import LOG2E
from kvpass.operands import AppendBuffers, Attention


@triton.jit(do_not_specialize=["stride_p", "stride_tl", "stride_tb", "layer", "layers", "pool_rows", "slots", "tokens"])
def _attend_queries(  # type: ignore[no-untyped-def]
    q, k, v, pool_k, pool_v, pool_k_scale, pool_v_scale, offsets, tail_k, tail_v, tail_k_scale, tail_v_scale,
    tail_start, tail_used, row_index, sinks, out, stride_qb, stride_qh, stride_qt, stride_kb, stride_kh, stride_kt,
    stride_vb, stride_vh, stride_vt, stride_p, stride_tl, stride_tb, scale, softcap, layer, layers, pool_rows, slots,
    tokens, K: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, SV: tl.constexpr,
    BITS: tl.constexpr, BDV: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Attend a block of query rows of one KV head to pool segment, tail and new tokens."""
    i_r = tl.num_programs(0) - 1 - tl.program_id(0)
    i_segment = tl.program_id(1)
    i_b = i_segment // K
    i_h = i_segment % K
    o_r = i_r * BLOCK_R + tl.arange(0, BLOCK_R)
    o_t = o_r // G
    o_e = channels(BDV, BITS)
    m_r = o_r < G * tokens
    o_h = (i_h * G + o_r % G).to(tl.int64)
    p_q = q + i_b.to(tl.int64) * stride_qb + o_h * stride_qh + o_t.to(tl.int64) * stride_qt
    b_q = hold_queries(p_q, m_r, D, BITS)
    state = empty_state(float("-inf"), BLOCK_R, BDV)
    logits = (scale, softcap)

    i_row, used = held_row(row_index, tail_used, i_b)
    begin = tl.load(tail_start + i_row).to(tl.int32)
    i_tail = layer.to(tl.int64) * stride_tl + i_row * stride_tb + i_h * slots
    p_offsets = offsets + i_row * (layers * K + 1) + layer * K + i_h
    i_row = tl.minimum(i_row, pool_rows - 1) * stride_p
    p_pool_k = pool_k + i_row * (D * BITS // 8)
    p_pool_v = pool_v + i_row * (SV * BITS // 8)
    first = tl.load(p_offsets)
    last = tl.load(p_offsets + 1)
    p_k_scale = None
    p_v_scale = None
    if pool_k_scale is not None:
        p_k_scale = pool_k_scale + i_row
        p_v_scale = pool_v_scale + i_row
    state = absorb_entries(
        b_q, state, (p_pool_k, p_pool_v, D, SV), first, last, o_t, logits, D, DV, BDV, BLOCK_S, False, p_k_scale,
        p_v_scale, BITS,
    )  # fmt: skip
    p_tail_k = tail_k + i_tail * (D * BITS // 8)
    p_tail_v = tail_v + i_tail * (SV * BITS // 8)
    if pool_k_scale is not None:
        p_k_scale = tail_k_scale + i_tail
        p_v_scale = tail_v_scale + i_tail
    state = absorb_entries(
        b_q, state, (p_tail_k, p_tail_v, D, SV), begin, used, o_t, logits, D, DV, BDV, BLOCK_S, False, p_k_scale,
        p_v_scale, BITS,
    )  # fmt: skip
    last = tl.minimum((i_r * BLOCK_R + BLOCK_R - 1) // G + 1, tokens)
    i_used = used.to(tl.int64)
    tail = (p_tail_k + i_used * (D * BITS // 8), p_tail_v + i_used * (SV * BITS // 8), D, SV)
    if pool_k_scale is None:
        p_k = k + i_b.to(tl.int64) * stride_kb + i_h.to(tl.int64) * stride_kh
        p_v = v + i_b.to(tl.int64) * stride_vb + i_h.to(tl.int64) * stride_vh
        entries = (p_k, p_v, stride_kt, stride_vt)
        state = absorb_entries(b_q, state, entries, 0, last, o_t, logits, D, DV, BDV, BLOCK_S, True)
        share = tl.cdiv(tokens, tl.num_programs(0))
        stop = tl.minimum(i_r * share + share, tokens)
        append_entries(entries, tail, i_r * share, stop, slots - used, D, DV, BLOCK_T)
    else:
        state = absorb_entries(
            b_q, state, tail, 0, last, o_t, logits, D, DV, BDV, BLOCK_S, True, p_k_scale + used, p_v_scale + used, BITS,
        )  # fmt: skip
    b_m, b_l, b_acc = state
    if sinks is not None:
        b_sink = tl.load(sinks + o_h).to(tl.float32) * LOG2E
        b_m_new = tl.maximum(b_m, b_sink)
        b_alpha = tl.exp2(b_m - b_m_new)
        b_l = b_l * b_alpha + tl.exp2(b_sink - b_m_new)
        b_acc = b_acc * b_alpha[:, None]
    p_out = out + ((i_b.to(tl.int64) * tokens + o_t) * (K * G) + o_h) * DV
    b_out = b_acc / b_l[:, None]
    tl.store(p_out[:, None] + o_e[None, :], b_out.to(out.dtype.element_ty), mask=m_r[:, None] & (o_e < DV)[None, :])


def attend_extend(call: Attention, held: AppendBuffers, layer: int, config: triton.Config | None = None) -> Tensor:
    """Append many new entries of one layer to its tail; attend pool, tail and new tokens.

    Contract as in ``ragged_decode.attend_ragged``; arrivals are not read.
    """
    rows, heads, tokens, _ = call.q.shape
    kv_heads = call.v.shape[1]
    check_call(call, held, layer)
    append_codes(call, held, layer)
    arguments = shared_arguments(call, held, layer)
    grid = blocks(heads // kv_heads * tokens, "BLOCK_R", rows * kv_heads)
    launch(_attend_queries, grid, arguments, case_of("extend", call, held), config)
    out: Tensor = arguments["out"]
    return out.transpose(1, 2)
