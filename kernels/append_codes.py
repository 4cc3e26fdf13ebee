"""New entries as codes on CUDA, stored where the attention kernels then read them: in the tail, or in reused slots.

One program for each new token of a KV head quantises its key and its value, as ``entry_formats.py`` says. Divisions
are rounded as IEEE 754 has it (``/`` is not): codes of 8 bits are those of the eager reference.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvpass.kernels.cached_attention import held_row
from kvpass.kernels.launch import launch, strides
from kvpass.kernels.prefill_attention import block_dim
from kvpass.kernels.slot_lines import first_empty
from kvpass.operands import AppendBuffers, Attention, Entries, SlotCache, by_name, levels

ROUNDING = tl.constexpr(12582912.0)
"""1.5 * 2^23: added and subtracted, it rounds a small fp32 to the nearest even integer."""


@triton.jit
def _encode(  # type: ignore[no-untyped-def]
    p_x, p_codes, p_scale, p_levels, D: tl.constexpr, BD: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """Store the codes and the scale of a row of D numbers."""
    o_d = tl.arange(0, BD)
    m_d = o_d < D
    b_x = tl.load(p_x + o_d, mask=m_d, other=0.0).to(tl.float32)
    if BITS < 8:
        size = tl.sqrt(tl.sum(b_x * b_x, 0) / D)
        b_z = tl.div_rn(b_x, tl.where(size == 0.0, 1.0, size))
        b_code = tl.zeros([BD], tl.int32)
        for i in tl.static_range(0, (1 << BITS) - 1):
            b_code += (b_z > (tl.load(p_levels + i) + tl.load(p_levels + i + 1)) / 2).to(tl.int32)
        b_near = tl.load(p_levels + b_code, mask=m_d, other=0.0)
        tl.store(p_scale, tl.sum(b_x * b_near, 0) / tl.sum(b_near * b_near, 0))
        b_bits = tl.where(m_d, b_code, 0) << (o_d % 8 * BITS)
        b_word = tl.sum(tl.reshape(b_bits, [BD // 8, 8]), 1)  # of eight codes
        o_word = tl.arange(0, BD // 8)
        o_byte = tl.arange(0, 4)
        b_byte = (b_word[:, None] >> (8 * o_byte)[None, :]) & 255
        m_byte = (o_word * 8 < D)[:, None] & (o_byte < BITS)[None, :]
        tl.store(p_codes + o_word[:, None] * BITS + o_byte[None, :], b_byte.to(tl.uint8), mask=m_byte)
    else:
        MOST: tl.constexpr = 127.0 if p_codes.dtype.element_ty == tl.int8 else 448.0
        scale = tl.div_rn(tl.max(tl.abs(b_x), 0), MOST) + tl.sum(b_x * 0.0, 0)  # NaN if one number is
        tl.store(p_scale, scale)
        b_z = tl.minimum(tl.maximum(tl.div_rn(b_x, tl.where(scale == 0.0, 1.0, scale)), -MOST), MOST)
        if p_codes.dtype.element_ty == tl.int8:
            b_code = (b_z + ROUNDING - ROUNDING).to(tl.int32)
        else:
            b_bits = tl.abs(b_z).to(tl.int32, bitcast=True)
            b_normal = ((b_bits + 0x7FFFF + ((b_bits >> 20) & 1)) >> 20) - (120 << 3)
            b_subnormal = (tl.abs(b_z) * 512.0 + ROUNDING - ROUNDING).to(tl.int32)  # multiples of 2^-9
            b_code = tl.where(tl.abs(b_z) < 0.015625, b_subnormal, b_normal) | tl.where(b_z < 0.0, 0x80, 0)
        tl.store(p_codes + o_d, b_code.to(p_codes.dtype.element_ty), mask=m_d)


@triton.jit(
    do_not_specialize=["stride_tl", "stride_tb", "stride_pb", "stride_ph", "layer", "entries", "slots", "width"]
)
def _append_codes(  # type: ignore[no-untyped-def]
    k, v, pool_k, pool_v, pool_k_scale, pool_v_scale, tail_k, tail_v, tail_k_scale, tail_v_scale, levels, tail_used,
    row_index, position, offsets, stride_kb, stride_kh, stride_kt, stride_vb, stride_vh, stride_vt, stride_tl,
    stride_tb, stride_pb, stride_ph, layer, entries, slots, width, segments, K: tl.constexpr, D: tl.constexpr,
    DV: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr, BITS: tl.constexpr, BLOCK_L: tl.constexpr,
):  # fmt: skip
    """Store one new token of one KV head: behind ``tail_used``, or in the first empty slot if position is given."""
    i_t = tl.program_id(0)
    i_line = tl.program_id(1)
    i_b = i_line // K
    i_h = i_line % K
    p_codes_k = tail_k
    p_codes_v = tail_v
    p_k_scale = tail_k_scale
    p_v_scale = tail_v_scale
    if position is None:
        i_held, used = held_row(row_index, tail_used, i_b)
        at = used + i_t
        is_live = at < slots
        i_row = layer.to(tl.int64) * stride_tl + i_held * stride_tb + i_h * slots + at
    else:
        at = first_empty(position + i_b.to(tl.int64) * stride_pb + i_h.to(tl.int64) * stride_ph, width, BLOCK_L)
        is_live = at < width
        i_row = layer.to(tl.int64) * stride_tl + i_b.to(tl.int64) * stride_tb + i_h * slots + at - (width - slots)
        if at < width - slots:
            i_row = i_b.to(tl.int64) * entries + tl.load(offsets + i_b.to(tl.int64) * segments + layer * K + i_h) + at
            p_codes_k = pool_k
            p_codes_v = pool_v
            p_k_scale = pool_k_scale
            p_v_scale = pool_v_scale
    if is_live:
        p_k = k + i_b.to(tl.int64) * stride_kb + i_h.to(tl.int64) * stride_kh + i_t.to(tl.int64) * stride_kt
        p_v = v + i_b.to(tl.int64) * stride_vb + i_h.to(tl.int64) * stride_vh + i_t.to(tl.int64) * stride_vt
        _encode(p_k, p_codes_k + i_row * (D * BITS // 8), p_k_scale + i_row, levels, D, BD, BITS)
        if tail_v_scale is not None:  # else values are stored in keys
            _encode(p_v, p_codes_v + i_row * (DV * BITS // 8), p_v_scale + i_row, levels, DV, BDV, BITS)


def append_codes(call: Attention, held: AppendBuffers | SlotCache, layer: int) -> None:
    """Store the new entries of a layer that holds codes: behind ``tail_used``, or in each line's first empty slot.

    Entries beyond the last slot of a tail, or of a line without an empty slot, are not stored. Arguments are those of
    the attention kernels, which call this when they have checked them.
    """
    if held.tail.k_scale is None:
        return
    k, v = call.k, call.v
    (rows, kv_heads, tokens, key_dim), value_dim = k.shape, v.shape[3]
    named, tail_k = by_name(held), held.tail.k
    names = (f"{side}_{name}" for side in ("pool", "tail") for name in Entries._fields)
    position = held.position if isinstance(held, SlotCache) else None
    row_stride, head_stride, width = (0, 0, 0) if position is None else (*position.stride()[:2], position.shape[2])
    bits, row = 8 * tail_k.shape[-1] // key_dim, tail_k.shape[-1]
    tail_used, row_index = (held.tail_used, held.row_index) if isinstance(held, AppendBuffers) else (None, None)
    arguments = {
        "k": k, "v": v, **{name: named.get(name) for name in names},
        "levels": levels(bits, k.device) if bits < 8 else None,
        "tail_used": tail_used, "row_index": row_index, "position": position, "offsets": held.offsets,
        **strides("bht", k=k, v=v),
        "stride_tl": tail_k.stride(0) // row, "stride_tb": tail_k.stride(1) // row,
        "stride_pb": row_stride, "stride_ph": head_stride, "layer": layer,
        "entries": 0 if held.pool is None else held.pool.k.shape[1],
        "slots": tail_k.shape[3], "width": width,
        "segments": tail_k.shape[0] * kv_heads + 1, "K": kv_heads, "D": key_dim, "DV": value_dim,
        "BD": block_dim(key_dim), "BDV": block_dim(value_dim), "BITS": bits,
    }  # fmt: skip
    launch(_append_codes, (tokens, rows * kv_heads), arguments, "append codes")
