"""Decode attention over reused slots on CUDA: a new token takes each line's first empty slot.

Split-KV decoding as in ``ragged_decode.py``, over the slots that hold an entry. The first launch attends, and stores
the new key and value. The second one merges, turns scores into attention weights and records the position of the new
entry; only this launch changes which slots are empty. There is no host synchronisation.

Legend: B batch, H query heads, K KV heads, G = H / K, D head dim of keys, Dv of values, L layers, E pool entries, C
tail capacity, S slots of a line, the last C of them the tail's.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvpass.kernels.append_codes import append_codes
from kvpass.kernels.cached_attention import (
    APPEND_BLOCK,
    absorb_entries,
    append_entries,
    begin_merge,
    channels,
    check_call,
    codes_case,
    empty_state,
    entry_arguments,
    hold_queries,
    merge_partials,
)
from kvpass.kernels.launch import kind, launch, strides
from kvpass.kernels.prefill_attention import FLOOR, block_dim, in_parts, wide_case
from kvpass.kernels.slot_lines import first_empty
from kvpass.operands import Attention, SlotCache

TILE = 64  # slots per program


@triton.jit(do_not_specialize=["stride_pb", "stride_ph", "layer", "rows", "entries", "slots", "width", "pool_tiles"])
def _attend_slots(  # type: ignore[no-untyped-def]
    q, k, v, pool_k, pool_v, pool_k_scale, pool_v_scale, offsets, tail_k, tail_v, tail_k_scale, tail_v_scale,
    position, weights, partial, partial_ml, stride_qb, stride_qh, stride_kb, stride_kh, stride_vb, stride_vh, stride_pb,
    stride_ph, scale, softcap, layer, rows, entries, slots, width, pool_tiles, segments, K: tl.constexpr,
    G: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, SV: tl.constexpr, BITS: tl.constexpr, BDV: tl.constexpr,
    TILE: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_L: tl.constexpr,
):  # fmt: skip
    """Attend one tile of the slots of one line.

    Stores acc ``[B*K, tiles, G, Dv]`` not divided by l, and (m, l) in base 2. Programs 0..pool_tiles-1 of a line handle
    its pool segment, the others its tail. The program with the first empty slot also attends the new entry and stores
    it there; if entries are codes, it is there already.
    """
    i_p = tl.program_id(0)
    i_line = tl.program_id(1)
    i_r = tl.program_id(2)
    num_tiles = tl.num_programs(0)
    i_b = i_line // K
    i_h = i_line % K
    p_position = position + i_b.to(tl.int64) * stride_pb + i_h.to(tl.int64) * stride_ph
    taken = first_empty(p_position, width, BLOCK_L)

    first = (i_p - pool_tiles) * TILE
    last = tl.minimum(first + TILE, slots)
    behind = width - slots
    i_row = ((layer.to(tl.int64) * rows + i_b) * K + i_h) * slots
    p_k = tail_k + i_row * (D * BITS // 8)
    p_v = tail_v + i_row * (SV * BITS // 8)
    p_k_scale = None
    p_v_scale = None
    if tail_k_scale is not None:
        p_k_scale = tail_k_scale + i_row
        p_v_scale = tail_v_scale + i_row
    if pool_k is not None:  # noqa: SIM102 (known at compile time, unlike the inner condition)
        if i_p < pool_tiles:
            p_offsets = offsets + i_b.to(tl.int64) * segments + layer * K + i_h
            begin = tl.load(p_offsets)
            first = i_p * TILE
            last = tl.minimum(first + TILE, tl.load(p_offsets + 1) - begin)
            behind = behind * 0
            i_row = i_b.to(tl.int64) * entries + begin
            p_k = pool_k + i_row * (D * BITS // 8)
            p_v = pool_v + i_row * (SV * BITS // 8)
            if pool_k_scale is not None:
                p_k_scale = pool_k_scale + i_row
                p_v_scale = pool_v_scale + i_row

    o_r = i_r * BLOCK_R + tl.arange(0, BLOCK_R)
    o_e = channels(BDV, BITS)
    m_r = o_r < G
    p_q = q + i_b.to(tl.int64) * stride_qb + (i_h * G + o_r).to(tl.int64) * stride_qh
    b_q = hold_queries(p_q, m_r, D, BITS)
    p_scores = None
    p_score = None
    if weights is not None:
        p_line = weights + (i_line.to(tl.int64) * G + o_r) * width
        p_scores = p_line + behind
        p_score = p_line + taken
    at = taken - behind
    at_codes = None if tail_k_scale is None else at
    logits = (scale, softcap)
    state = absorb_entries(
        b_q, empty_state(FLOOR, BLOCK_R, BDV), (p_k, p_v, D, SV), first, last, o_r, logits, D, DV, BDV, BLOCK_S, False,
        p_k_scale, p_v_scale, BITS, p_position + behind, p_scores, m_r, at_codes,
    )  # fmt: skip
    if tail_k_scale is None:
        tl.debug_barrier()  # the taken slot's score is stored twice; the new entry's score must come last
        mine = ((at >= first) & (at < last)).to(tl.int32)
        p_k_at = p_k + at.to(tl.int64) * D
        p_v_at = p_v + at.to(tl.int64) * SV
        p_k_new = k + i_b.to(tl.int64) * stride_kb + i_h.to(tl.int64) * stride_kh
        p_v_new = v + i_b.to(tl.int64) * stride_vb + i_h.to(tl.int64) * stride_vh
        entries = (p_k_new, p_v_new, D, DV)
        state = absorb_entries(
            b_q, state, entries, 0, mine, o_r, logits, D, DV, BDV, BLOCK_T, False, p_scores=p_score, m_r=m_r,
        )  # fmt: skip
        if i_r == 0:
            append_entries(entries, (p_k_at, p_v_at, D, SV), 0, mine, 1, D, DV, BLOCK_T)
    b_m, b_l, b_acc = state
    o_partial = (i_line.to(tl.int64) * num_tiles + i_p) * G + o_r
    tl.store(partial_ml + o_partial, b_m, mask=m_r)
    tl.store(partial_ml + tl.num_programs(1).to(tl.int64) * num_tiles * G + o_partial, b_l, mask=m_r)
    tl.store(partial + o_partial[:, None] * DV + o_e[None, :], b_acc, mask=m_r[:, None] & (o_e < DV)[None, :])


@triton.jit(do_not_specialize=["layer", "slots", "width", "num_tiles"])
def _finish_slots(  # type: ignore[no-untyped-def]
    offsets, position, now, weights, partial, partial_ml, sinks, out, layer, slots, width, num_tiles, segments,
    K: tl.constexpr, G: tl.constexpr, DV: tl.constexpr, BDV: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_L: tl.constexpr,
):  # fmt: skip
    """Merge the partial results of one query head by log-sum-exp; compute attention weights if wanted.

    The first query head of a KV head then records the new entry.
    """
    i_o = tl.program_id(0)
    i_line = i_o // G
    i_b = i_line // K
    i_h = i_line % K
    num_partials = tl.num_programs(0).to(tl.int64) * num_tiles
    o_e = tl.arange(0, BDV)
    state = begin_merge(sinks, i_o % (K * G), 1, BDV)
    for i_p in range(0, num_tiles, BLOCK_P):
        o_p = i_p + tl.arange(0, BLOCK_P)
        m_p = (o_p < num_tiles)[:, None]
        o_partial = ((i_line.to(tl.int64) * num_tiles + o_p) * G + i_o % G)[:, None]
        state = merge_partials(state, (partial, partial_ml, num_partials), o_partial, m_p, DV, BDV)
    b_m, b_l, b_acc = state
    b_out = b_acc / b_l[:, None]
    p_out = out + i_o.to(tl.int64) * DV + o_e[None, :]
    tl.store(p_out, b_out.to(out.dtype.element_ty), mask=(o_e < DV)[None, :])

    if weights is not None:
        p_offsets = offsets + i_b.to(tl.int64) * segments + layer * K + i_h
        length = tl.load(p_offsets + 1) - tl.load(p_offsets)
        p_weights = weights + i_o.to(tl.int64) * width
        for i_l in range(0, width, BLOCK_L):
            o_l = i_l + tl.arange(0, BLOCK_L)
            m_l = o_l < width
            m_scored = m_l & ((o_l < length) | (o_l >= width - slots))
            b_weight = tl.exp2(tl.load(p_weights + o_l, mask=m_scored, other=float("-inf")) - b_m) / b_l
            tl.store(p_weights + o_l, b_weight, mask=m_l)
        if i_o % G == 0:
            p_position = position + i_line.to(tl.int64) * width
            taken = first_empty(p_position, width, BLOCK_L)
            if taken < width:
                tl.store(p_position + taken, tl.load(now + i_b).to(tl.int32))


def attend_slots(call: Attention, lines: SlotCache, layer: int) -> tuple[Tensor, Tensor | None]:
    """CUDA version of :func:`kvpass.ops.slots.attend_slots`; arguments as of ``ragged_decode.attend_ragged``.

    A line without an empty slot attends to its entries and stores nothing. Position may repeat over rows and KV heads
    if the entry is not recorded; a recorded entry has a pool.
    """
    q, k, v, scale, softcap, sinks = call
    pool, offsets, tail, position, now = lines
    rows, heads, _, key_dim = q.shape
    kv_heads, value_dim = v.shape[1], v.shape[3]
    slots, width = tail.k.shape[3], position.shape[2]
    check_call(call, lines, layer)
    append_codes(call, lines, layer)
    group, num_lines = heads // kv_heads, rows * kv_heads
    pool_tiles = triton.cdiv(width - slots, TILE)
    num_tiles = pool_tiles + triton.cdiv(slots, TILE)
    partial = torch.empty(num_lines, num_tiles, group, value_dim, dtype=torch.float32, device=q.device)
    partial_ml = torch.empty(2, num_lines, num_tiles, group, dtype=torch.float32, device=q.device)
    out = torch.empty(rows, 1, heads, value_dim, dtype=q.dtype, device=q.device)
    weights = None if now is None else torch.empty(rows, heads, width, dtype=torch.float32, device=q.device)
    most = 16 if q.dtype == torch.float32 or in_parts(key_dim, value_dim) else 32
    block_rows = min(most, max(16, triton.next_power_of_2(group)))
    shared: dict[str, Any] = {
        "offsets": offsets, "position": position, "weights": weights, "partial": partial, "partial_ml": partial_ml,
        "layer": layer, "slots": slots, "width": width, "segments": tail.k.shape[0] * kv_heads + 1, "K": kv_heads,
        "G": group, "DV": value_dim, "BDV": block_dim(value_dim),
    }  # fmt: skip
    attend = {
        **shared, "q": q, "k": k, "v": v, **entry_arguments(lines, key_dim, value_dim),
        **strides("bh", q=q, k=k, v=v, p=position), "scale": scale, "softcap": softcap,
        "rows": rows, "entries": 0 if pool is None else pool.k.shape[1], "pool_tiles": pool_tiles, "TILE": TILE,
        "BLOCK_R": block_rows, "BLOCK_T": APPEND_BLOCK,
    }  # fmt: skip
    grid = (num_tiles, num_lines, triton.cdiv(group, block_rows))
    case = f"slots {kind(q.dtype)}{codes_case(lines, key_dim)}{wide_case(key_dim, value_dim)}"
    launch(_attend_slots, grid, attend, case)
    finish = {**shared, "now": now, "num_tiles": num_tiles, "sinks": sinks, "out": out}
    launch(_finish_slots, (rows * heads,), finish, "finish slots")
    return out.transpose(1, 2), weights
