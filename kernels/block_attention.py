"""Causal attention of whole prompts over selected blocks of keys, and single columns besides, in Triton.

Legend: B batch, N tokens, H query heads, D head dim of keys, Dv of values.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvpass.kernels.checks import check_selection
from kvpass.kernels.launch import blocks, launch, strides
from kvpass.kernels.prefill_attention import (
    FLOOR,
    LN2,
    attend_block,
    attend_keys,
    block_dim,
    check_dims,
    check_site,
    dims_case,
    hold_rows,
)
from kvpass.operands import Attention, BlockSelection, PartialAttention


@triton.jit(do_not_specialize=["tokens", "num_blocks", "num_columns"])
def _blocks_kernel(  # type: ignore[no-untyped-def]
    q, k, v, out, lse, selected, listed, counts, columns, column_counts, scale, softcap, tokens, num_blocks,
    num_columns, stride_qb, stride_qh, stride_qn, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_DV: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Attend one tile of queries of one head; the last ones, which have the most keys, start first."""
    i_q = tl.num_programs(0) - 1 - tl.program_id(0)
    i_bh = tl.program_id(1).to(tl.int64)
    i_b, i_h = i_bh // HEADS, i_bh % HEADS
    o_dv = tl.arange(0, BLOCK_DV)
    o_q = i_q * BLOCK_Q + tl.arange(0, BLOCK_Q)
    m_q = o_q < tokens
    b_q = hold_rows(q + i_b * stride_qb + i_h * stride_qh + o_q.to(tl.int64) * stride_qn, m_q, D)
    p_k = k + i_b * stride_kb + (i_h // GROUP) * stride_kh
    p_v = v + i_b * stride_vb + (i_h // GROUP) * stride_vh
    b_out = tl.zeros([BLOCK_Q, BLOCK_DV], dtype=tl.float32)
    b_max = tl.full([BLOCK_Q], FLOOR, dtype=tl.float32)
    b_sum = tl.zeros([BLOCK_Q], dtype=tl.float32)
    i_block = i_q * BLOCK_Q // BLOCK
    row = i_bh * num_blocks + i_block
    for i in range(0, tl.load(counts + row)):
        first = tl.load(listed + row * num_blocks + i) * BLOCK
        b_out, b_max, b_sum = attend_keys(
            b_q, b_out, b_max, b_sum, p_k, p_v, o_q, first, first + BLOCK, tokens, scale, softcap, None,
            stride_kn, stride_vn, D, DV, BLOCK_DV, BLOCK_K, False,
        )  # fmt: skip
    in_front = tl.load(column_counts + row)
    for i in range(0, in_front, BLOCK_K):
        o_c = i + tl.arange(0, BLOCK_K)
        m_c = o_c < in_front
        o_k = tl.load(columns + i_bh * num_columns + o_c, mask=m_c, other=0)
        m_c &= tl.load(selected + row * num_blocks + o_k // BLOCK, mask=m_c, other=1) == 0
        b_out, b_max, b_sum = attend_block(
            b_q, b_out, b_max, b_sum, p_k, p_v, o_q, tl.where(m_c, o_k, tokens), tokens, scale, softcap, None,
            stride_kn, stride_vn, D, DV, BLOCK_DV, True,
        )  # fmt: skip
    last = tl.minimum(i_q * BLOCK_Q + BLOCK_Q, tokens)
    b_out, b_max, b_sum = attend_keys(
        b_q, b_out, b_max, b_sum, p_k, p_v, o_q, i_block * BLOCK, last, tokens, scale, softcap, None,
        stride_kn, stride_vn, D, DV, BLOCK_DV, BLOCK_K, True,
    )  # fmt: skip
    p_row = out + (i_b * tokens * HEADS + i_h) * DV + o_q[:, None].to(tl.int64) * (HEADS * DV) + o_dv[None, :]
    tl.store(p_row, (b_out / b_sum[:, None]).to(out.dtype.element_ty), mask=m_q[:, None] & (o_dv < DV)[None, :])
    tl.store(lse + i_bh * tokens + o_q, (b_max + tl.log2(b_sum)) * LN2, mask=m_q)


def attend_blocks(
    call: Attention, selection: BlockSelection, block: int, config: triton.Config | None = None
) -> PartialAttention:
    """See :func:`kvpass.ops.reference.attend_blocks`; D and Dv up to 256."""
    q, k, v, scale, softcap, _ = call
    b, heads, n, d = q.shape
    dv = v.shape[3]
    check_site(q, k, v, queries=n)
    check_dims(d, dv)
    check_selection(call, selection, block)
    if max(d, dv) > 256:
        raise ValueError(f"head dims {d} and {dv}: kernels of selected blocks take up to 256")
    before = selection.blocks.tril(-1)
    first_columns = torch.arange(0, n, block, dtype=torch.int32, device=q.device).expand(b, heads, -1).contiguous()
    out = torch.empty(b, n, heads, dv, dtype=q.dtype, device=q.device)
    lse = torch.empty(b, heads, n, dtype=torch.float32, device=q.device)
    arguments = {
        "q": q, "k": k, "v": v, "out": out, "lse": lse, "selected": selection.blocks.view(torch.uint8),
        "listed": before.view(torch.uint8).sort(dim=-1, descending=True, stable=True).indices.int(),
        "counts": before.sum(-1, dtype=torch.int32), "columns": selection.columns,
        "column_counts": torch.searchsorted(selection.columns, first_columns, out_int32=True),
        "scale": scale, "softcap": softcap, "tokens": n, "num_blocks": before.shape[-1],
        "num_columns": selection.columns.shape[-1], **strides("bhn", q=q, k=k, v=v),
        "HEADS": heads, "GROUP": heads // k.shape[1], "D": d, "DV": dv, "BLOCK": block, "BLOCK_DV": block_dim(dv),
    }  # fmt: skip
    launch(_blocks_kernel, blocks(n, "BLOCK_Q", b * heads), arguments, f"blocks {dims_case(q.dtype, d, dv)}", config)
    return PartialAttention(out.transpose(1, 2), lse)
