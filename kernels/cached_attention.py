"""Code shared by the decode and the extend kernel: attend entries, append new ones, check arguments.

Both kernels are free of races: no program reads a slot that another program writes. New entries are read from k and v;
of a cache of codes from the tail, where a launch before (``append_codes.py``) put them. Else tail slots are read only
below ``tail_used``, where no program writes. Each new slot has one writer.

Legend: B batch, T new tokens, H query heads, K KV heads, G = H / K, D head dim of keys, Dv of values, L layers, E pool
slots, C tail capacity. A query row is one token of one query head; the G*T query rows of a KV head are ordered by
token.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from kvpass.kernels.checks import check_cache, check_slots, values_in_keys
from kvpass.kernels.launch import kind, strides
from kvpass.kernels.prefill_attention import (
    FLOOR,
    LOG2E,
    PART,
    as_floats,
    block_dim,
    check_dims,
    dot_rows,
    hold_rows,
    in_parts,
    is_aligned,
    load_parts,
    logits_base2,
    part_block,
    store_parts,
    wide_case,
)
from kvpass.operands import AppendBuffers, Attention, Entries, SlotCache, by_name

LEVEL_TERMS = {
    2: (1.7858666666666667, 0.4053333333333333),
    3: (1.9542232589285715, 0.41921555555555556, 0.10424888888888889, 0.2743669841269841),
    4: (
        2.052463752899356, 0.49615329203831054, -0.13414934758519945, 3.327186318322555, -13.234063282886817,
        28.43085500325299, -29.33433782029219, 11.795619078574727,
    ),
}  # fmt: skip
"""Coefficients c by bits: level i of LEVELS is ``x (c[0] + c[1] x^2 + ..)`` at ``x = (2 i + 1) / 2^bits - 1``."""
HALF_TERMS = LEVEL_TERMS | {
    4: (2.052734375, 0.48974609375, 0.0902099609375, 0.78369140625, -1.1435546875, 0.9736328125)
}
"""The same for sums in fp16: with fewer terms, the levels rounded to fp16."""
APPEND_BLOCK = 16  # new entries per loop step, when they are appended and when the decode kernel attends them


@triton.jit
def held_row(row_index, tail_used, i_b):  # type: ignore[no-untyped-def]
    """Return the row of the buffers that row i_b of a call has, and how many slots of its tail are used."""
    i_row = i_b.to(tl.int64)
    p_used = tail_used
    if row_index is not None:
        i_row = tl.load(row_index + i_b)
        p_used += i_row
    return i_row, tl.load(p_used).to(tl.int32)


@triton.constexpr_function
def level_terms(bits: int, dtype: tl.dtype) -> tuple[float, ...]:
    """Return the coefficients of :data:`LEVEL_TERMS` for sums in a dtype."""
    return (HALF_TERMS if dtype == tl.float16 else LEVEL_TERMS)[bits]


@triton.jit
def channels(BD: tl.constexpr, BITS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the channel that each column of a block holds: of codes of BITS bits as :func:`levels_of` returns them."""
    o_d = tl.arange(0, BD)
    if BITS < 8:
        o_d = o_d // 8 * 8 + o_d % 2 * 4 + o_d % 8 // 2
    return o_d


@triton.jit
def hold_queries(p_rows, m_rows, D: tl.constexpr, BITS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return query rows as :func:`absorb_entries` takes them for entries of BITS bits."""
    b_q = hold_rows(p_rows, m_rows, D)
    if BITS < 8:
        b_halves = tl.reshape(b_q[0], [p_rows.shape[0], part_block(D) // 8, 2, 4])
        b_q = (tl.reshape(tl.permute(b_halves, (0, 1, 3, 2)), [p_rows.shape[0], part_block(D)]),)
    return b_q


@triton.jit
def load_words(p_codes, o_row, m_row, D: tl.constexpr, BD: tl.constexpr, BITS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the codes of BITS bits of rows o_row, eight to an int32, four in each half: ``[rows, BD / 8]``.

    The first codes lie in the lowest bits. Rows where not m_row, and columns from D on, hold any codes.
    """
    o_w = tl.arange(0, BD // 8)
    m_w = m_row[:, None] & (o_w < D // 8)[None, :]
    o_word = o_row[:, None] * (D // 8) + o_w[None, :]
    if BITS == 4:
        b_word = tl.load(p_codes.to(tl.pointer_type(tl.int32), bitcast=True) + o_word, mask=m_w, other=0)
    elif BITS == 2:
        b_bits = tl.load(p_codes.to(tl.pointer_type(tl.int16), bitcast=True) + o_word, mask=m_w, other=0).to(tl.int32)
        b_word = (b_bits & 0xFF) | ((b_bits & 0xFF00) << 8)
    else:
        if D % 32 == 0:  # rows of whole int32: three hold the codes of four words; rows last, so that loads coalesce
            o_g = tl.arange(0, BD // 32)
            m_g = m_row[None, :] & (o_g < D // 32)[:, None]
            p_bits = p_codes.to(tl.pointer_type(tl.int32), bitcast=True)
            p_bits += o_row[None, :] * (D * 3 // 32) + (o_g * 3)[:, None]
            b_0 = tl.load(p_bits, mask=m_g, other=0)
            b_1 = tl.load(p_bits + 1, mask=m_g, other=0)
            b_2 = tl.load(p_bits + 2, mask=m_g, other=0)
            b_even = tl.join(b_0, ((b_1 >> 16) & 0xFFFF) | (b_2 << 16))
            b_odd = tl.join(((b_0 >> 24) & 0xFF) | (b_1 << 8), b_2 >> 8)
            b_bits = tl.permute(tl.join(b_even, b_odd), (1, 0, 2, 3))
            b_bits = tl.reshape(b_bits, [o_row.shape[0], BD // 8])
        else:
            p_byte = p_codes + o_word * 3
            b_bits = tl.load(p_byte, mask=m_w, other=0).to(tl.int32)
            b_bits |= tl.load(p_byte + 1, mask=m_w, other=0).to(tl.int32) << 8
            b_bits |= tl.load(p_byte + 2, mask=m_w, other=0).to(tl.int32) << 16
        b_word = (b_bits & 0xFFF) | ((b_bits & 0xFFF000) << 4)
    return b_word


@triton.jit
def _pair(b_word, FIRST: tl.constexpr, BITS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return codes FIRST and FIRST + 4 of words, as bits of fp16 numbers 2^(10 - BITS) + (2 code + 1) / 2^BITS."""
    MASK: tl.constexpr = ((2 << BITS) - 2) * 0x10001
    ONES: tl.constexpr = (((25 - BITS) << 10) + 1) * 0x10001
    b_shifted = b_word << 1 if FIRST == 0 else b_word >> (FIRST * BITS - 1)
    b_bits = (b_shifted & MASK) | ONES
    return tl.join(b_bits.to(tl.int16), (b_bits >> 16).to(tl.int16))


@triton.jit
def levels_of(b_word, dtype: tl.constexpr, BITS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return what the codes of words ``[rows, N]`` stand for, without their scales, in ``dtype``: ``[rows, 8 N]``.

    Of 8 columns the codes are 0, 4, 1, 5, 2, 6, 3 and 7 of the word: in fp16 one instruction computes two neighbours.
    """
    SUM: tl.constexpr = tl.float32 if dtype == tl.float32 else tl.float16
    TERMS: tl.constexpr = level_terms(BITS, SUM)
    b_even = tl.join(_pair(b_word, 0, BITS), _pair(b_word, 2, BITS))
    b_odd = tl.join(_pair(b_word, 1, BITS), _pair(b_word, 3, BITS))
    b_bits = tl.permute(tl.join(b_even, b_odd), (0, 1, 3, 4, 2))
    b_bits = tl.reshape(b_bits, [b_word.shape[0], b_word.shape[1] * 8])
    b_x = (b_bits.to(tl.float16, bitcast=True) - (1.0 + (1 << (10 - BITS)))).to(SUM)
    b_square = b_x * b_x
    b_slope = b_square * TERMS[len(TERMS) - 1] + TERMS[len(TERMS) - 2]
    for i in tl.static_range(2, len(TERMS)):
        b_slope = b_slope * b_square + TERMS[len(TERMS) - 1 - i]
    return (b_x * b_slope).to(dtype)


@triton.jit
def absorb_entries(  # type: ignore[no-untyped-def]
    b_q, state, entries, first, last, o_t, logits, D: tl.constexpr, DV: tl.constexpr, BDV: tl.constexpr,
    BLOCK_S: tl.constexpr, IS_CAUSAL: tl.constexpr, p_k_scale=None, p_v_scale=None, BITS: tl.constexpr = 8,
    p_position=None, p_scores=None, m_r=None, taken=None,
):  # fmt: skip
    """Attend entries first..last-1 by online softmax, base 2. Queries are in parts of :func:`load_parts`.

    state: maximum, mass and output of each query row so far, which are returned anew. entries: pointers of keys and
    values, and their strides. logits: scale and soft-capping.

    If causal, each query row attends only up to entry o_t. The first block has an entry that every query row attends
    (entry 0 if causal), so the maximum is finite from then on. If p_position is given, rows with a negative position,
    but row ``taken``, hold no entry, and the maximum must be finite at the start. If p_scores is given, one pointer per
    query row, the scores of query rows m_r are stored there, -inf for rows without an entry. With scales an entry is
    its codes, as :func:`as_floats` has them, times its scale; of BITS below 8 as :func:`levels_of` has them, and
    strides are not read.
    """
    b_m, b_l, b_acc = state
    p_k, p_v, k_stride, v_stride = entries
    scale, softcap = logits
    UNIT: tl.constexpr = 256.0 if p_k.dtype.element_ty == tl.uint8 and BITS == 8 else 1.0
    LEVEL: tl.constexpr = tl.float32 if b_q[0].dtype == tl.float32 else tl.float16
    o_e = tl.arange(0, BDV)
    for i_s in range(first, last, BLOCK_S):
        o_s = i_s + tl.arange(0, BLOCK_S)
        o_row = o_s.to(tl.int64)
        m_s = o_s < last
        m_held = m_s
        if p_position is not None:
            m_held = tl.load(p_position + o_s, mask=m_s, other=-1) >= 0
            if taken is not None:
                m_held |= m_s & (o_s == taken)
        # b_dot: [BLOCK_R, BLOCK_S], b_v: [BLOCK_S, BDV]
        if BITS < 8:
            b_k_word = load_words(p_k, o_row, m_held, D, part_block(D), BITS)
            b_v_word = load_words(p_v, o_row, m_held, DV, BDV, BITS)
            b_k_scale = tl.load(p_k_scale + o_s, mask=m_held, other=0.0)
            b_v_scale = tl.load(p_v_scale + o_s, mask=m_held, other=0.0)
            b_k = levels_of(b_k_word, b_q[0].dtype, BITS)
            b_dot = tl.dot(b_q[0], tl.trans(b_k), input_precision="ieee") * b_k_scale[None, :]
            b_v = (levels_of(b_v_word, LEVEL, BITS) * b_v_scale[:, None]).to(b_q[0].dtype)
        else:
            b_dot = dot_rows(b_q, p_k + o_row * k_stride, m_held, D)
            b_v = tl.load(
                p_v + o_row[:, None] * v_stride + o_e[None, :], mask=m_held[:, None] & (o_e < DV)[None, :], other=0.0
            )
            if p_k_scale is not None:
                b_dot = b_dot * (tl.load(p_k_scale + o_s, mask=m_held, other=0.0) * UNIT)[None, :]
                b_v_scale = tl.load(p_v_scale + o_s, mask=m_held, other=0.0) * UNIT
                b_v = (as_floats(b_v, tl.float32) * b_v_scale[:, None]).to(b_q[0].dtype)
        b_s = logits_base2(b_dot, scale, softcap)
        m_visible = m_held[None, :]
        if IS_CAUSAL:
            m_visible = m_visible & (o_s[None, :] <= o_t[:, None])
        b_s = tl.where(m_visible, b_s, float("-inf"))
        if p_scores is not None:
            tl.store(p_scores[:, None] + o_s[None, :], b_s, mask=m_r[:, None] & m_s[None, :])
        b_m_new = tl.maximum(b_m, tl.max(b_s, 1))
        b_alpha = tl.exp2(b_m - b_m_new)
        b_p = tl.exp2(b_s - b_m_new[:, None])
        b_l = b_l * b_alpha + tl.sum(b_p, 1)
        b_acc = tl.dot(b_p.to(b_v.dtype), b_v, b_acc * b_alpha[:, None], input_precision="ieee")
        b_m = b_m_new
    return b_m, b_l, b_acc


@triton.jit
def empty_state(maximum, BLOCK_M: tl.constexpr, BDV: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return maximum, mass and output of query rows that have attended nothing."""
    b_m = tl.full([BLOCK_M], maximum, tl.float32)
    return b_m, tl.zeros([BLOCK_M], tl.float32), tl.zeros([BLOCK_M, BDV], tl.float32)


@triton.jit
def begin_merge(sinks, o_h, BLOCK_M: tl.constexpr, BDV: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return maximum, mass and output of query rows, whose query heads are o_h, that have attended their sinks."""
    b_m, b_l, b_acc = empty_state(FLOOR, BLOCK_M, BDV)
    if sinks is not None:
        b_m = tl.zeros([BLOCK_M], tl.float32) + tl.load(sinks + o_h).to(tl.float32) * LOG2E
        b_l = tl.full([BLOCK_M], 1.0, tl.float32)
    return b_m, b_l, b_acc


@triton.jit
def merge_partials(state, partials, o_partial, m_p, DV: tl.constexpr, BDV: tl.constexpr):  # type: ignore[no-untyped-def]
    """Merge the partial results o_partial ``[BLOCK_P, BLOCK_M]`` of some query rows, where m_p, by log-sum-exp.

    state: as of :func:`absorb_entries`. partials: pointer of outputs not divided by their mass, pointer of their maxima
    and then their masses, and how many there are. They are read past the first-level cache, which may hold older values
    of what other programs wrote.
    """
    b_m, b_l, b_acc = state
    partial, partial_ml, num_partials = partials
    o_e = tl.arange(0, BDV)
    # [BLOCK_P, BLOCK_M]
    b_m_tile = tl.load(partial_ml + o_partial, mask=m_p, other=float("-inf"), cache_modifier=".cg")
    # [BLOCK_P, BLOCK_M]
    b_l_tile = tl.load(partial_ml + num_partials + o_partial, mask=m_p, other=0.0, cache_modifier=".cg")
    # [BLOCK_P, BLOCK_M, BDV]
    b_tile = tl.load(
        partial + o_partial[:, :, None] * DV + o_e[None, None, :],
        mask=m_p[:, :, None] & (o_e < DV)[None, None, :],
        other=0.0,
        cache_modifier=".cg",
    )
    b_m_new = tl.maximum(b_m, tl.max(b_m_tile, 0))
    b_alpha = tl.exp2(b_m - b_m_new)
    b_w = tl.exp2(b_m_tile - b_m_new[None, :])
    b_l = b_l * b_alpha + tl.sum(b_w * b_l_tile, 0)
    b_acc = b_acc * b_alpha[:, None] + tl.sum(b_w[:, :, None] * b_tile, 0)
    return b_m_new, b_l, b_acc


@triton.jit
def append_entries(  # type: ignore[no-untyped-def]
    entries, tail, first, last, room, D: tl.constexpr, DV: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Copy new entries first..last-1, as of :func:`absorb_entries`, to the same rows of a tail of ``room`` rows."""
    for i_t in range(first, tl.minimum(last, room), BLOCK_T):
        o_t = (i_t + tl.arange(0, BLOCK_T)).to(tl.int64)
        m_t = (o_t < last) & (o_t < room)
        b_k = load_parts(entries[0] + o_t * entries[2], m_t, D)
        b_v = load_parts(entries[1] + o_t * entries[3], m_t, DV)
        store_parts(tail[0] + o_t * tail[2], b_k, m_t, D)
        store_parts(tail[1] + o_t * tail[3], b_v, m_t, DV)


def check_call(call: Attention, held: AppendBuffers | SlotCache, layer: int) -> None:
    """Raise if a kernel would read out of bounds; checks shapes, strides and dtypes only."""
    key_dim, value_dim = call.q.shape[3], call.v.shape[3]
    check_dims(key_dim, value_dim)
    if in_parts(key_dim, value_dim) and held.tail.k_scale is not None:
        raise ValueError(f"tail_k holds codes of {key_dim} columns: kernels on CUDA read codes of at most {PART.value}")
    if isinstance(held, SlotCache):
        check_slots(call, held, layer)
    else:
        check_cache(call, by_name(held), layer)


def entry_arguments(held: AppendBuffers | SlotCache, key_dim: int, value_dim: int) -> dict[str, Any]:
    """Return the arguments of a kernel that say what pool and tail hold; values stored in keys are the keys."""
    found: dict[str, Any] = {}
    in_keys = values_in_keys(held.tail.v, key_dim, value_dim)
    for side, entries in (("pool", held.pool), ("tail", held.tail)):
        if entries is not None and in_keys:
            entries = Entries(entries.k, entries.k, entries.k_scale, entries.k_scale)
        found |= {f"{side}_{name}": getattr(entries, name, None) for name in Entries._fields}
    bits = 8 * held.tail.k.shape[-1] // key_dim  # 8 of floats too
    return {
        **found, "BITS": bits, "D": key_dim, "DV": value_dim, "SV": key_dim if in_keys else value_dim,
        "BDV": block_dim(value_dim),
    }  # fmt: skip


def codes_case(held: AppendBuffers | SlotCache, key_dim: int) -> str:
    """Return the part of a case that stands for entries held as codes, which take registers: of 8 bits, or fewer."""
    if held.tail.k_scale is None:
        return ""
    return " codes" if held.tail.k.shape[-1] == key_dim else " levels"


def case_of(kernel: str, call: Attention, held: AppendBuffers) -> str:
    """Return the case: what fits in registers, with the addresses of unaligned rows and what belongs to codes."""
    dtype, dims = call.q.dtype, (call.q.shape[3], call.v.shape[3])
    wide = wide_case(*dims)
    if not wide and dtype != torch.float32 and (sum(map(block_dim, dims)) > 256 or not is_aligned(*dims)):
        wide = " wide"
    return f"{kernel} {kind(dtype)}{wide}{codes_case(held, dims[0])}"


def shared_arguments(call: Attention, held: AppendBuffers, layer: int) -> dict[str, Any]:
    """Return the common arguments of the decode and the extend kernel; ``out``, which they write, is new."""
    q, k, v, scale, softcap, sinks = call
    rows, heads, tokens, key_dim = q.shape
    kv_heads, value_dim = v.shape[1], v.shape[3]
    pool_k, tail_k = held.pool.k, held.tail.k
    row = tail_k.shape[-1]  # strides of pool and tails are in entries
    out = torch.empty(rows, tokens, heads, value_dim, dtype=q.dtype, device=q.device)
    return {
        "q": q, "k": k, "v": v, **entry_arguments(held, key_dim, value_dim), "offsets": held.offsets, "sinks": sinks,
        "out": out, "tail_start": held.tail_start, "tail_used": held.tail_used, "row_index": held.row_index,
        **strides("bht", q=q, k=k, v=v), "stride_p": pool_k.stride(0) // row,
        "stride_tl": tail_k.stride(0) // row, "stride_tb": tail_k.stride(1) // row,
        "scale": scale, "softcap": softcap, "layer": layer,
        "layers": tail_k.shape[0], "pool_rows": pool_k.shape[0], "slots": tail_k.shape[3],
        "tokens": tokens, "K": kv_heads, "G": heads // kv_heads, "BLOCK_T": APPEND_BLOCK,
    }  # fmt: skip
