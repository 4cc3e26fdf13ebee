"""Attention of the same queries to two sets of keys, merged into that of both in one pass.

Legend: B batch, T queries, H query heads, Dv head dim of values.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvpass.kernels.checks import check_tensors
from kvpass.kernels.launch import launch, strides
from kvpass.kernels.prefill_attention import LN2, LOG2E, block_dim
from kvpass.operands import PartialAttention


@triton.jit(do_not_specialize=["queries"])
def _merge_kernel(  # type: ignore[no-untyped-def]
    out_a, out_b, lse_a, lse_b, out, lse, queries,
    stride_out_ab, stride_out_ah, stride_out_aq, stride_out_bb, stride_out_bh, stride_out_bq,
    stride_lse_ab, stride_lse_ah, stride_lse_aq, stride_lse_bb, stride_lse_bh, stride_lse_bq,
    HEADS: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_Q: tl.constexpr,
):  # fmt: skip
    """Merge one block of queries of one head; the heads of a token run side by side, as they are stored."""
    i_h = tl.program_id(0).to(tl.int64)
    i_b = tl.program_id(2).to(tl.int64)
    o_q = tl.program_id(1).to(tl.int64) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    o_dv = tl.arange(0, BLOCK_DV)
    m_q = o_q < queries
    m_row = m_q[:, None] & (o_dv < DV)[None, :]
    b_lse_a = tl.load(lse_a + i_b * stride_lse_ab + i_h * stride_lse_ah + o_q * stride_lse_aq, mask=m_q, other=0.0)
    b_lse_b = tl.load(lse_b + i_b * stride_lse_bb + i_h * stride_lse_bh + o_q * stride_lse_bq, mask=m_q, other=0.0)
    b_max = tl.maximum(b_lse_a, b_lse_b)
    b_part_a = tl.exp2((b_lse_a - b_max) * LOG2E)
    b_part_b = tl.exp2((b_lse_b - b_max) * LOG2E)
    b_sum = b_part_a + b_part_b
    # [BLOCK_Q, BLOCK_DV]
    p_a = out_a + i_b * stride_out_ab + i_h * stride_out_ah + o_q[:, None] * stride_out_aq + o_dv[None, :]
    p_b = out_b + i_b * stride_out_bb + i_h * stride_out_bh + o_q[:, None] * stride_out_bq + o_dv[None, :]
    b_out = tl.load(p_a, mask=m_row, other=0.0).to(tl.float32) * (b_part_a / b_sum)[:, None]
    b_out += tl.load(p_b, mask=m_row, other=0.0).to(tl.float32) * (b_part_b / b_sum)[:, None]
    p_out = out + ((i_b * queries + o_q) * HEADS + i_h)[:, None] * DV + o_dv[None, :]
    tl.store(p_out, b_out.to(out.dtype.element_ty), mask=m_row)
    tl.store(lse + (i_b * HEADS + i_h) * queries + o_q, b_max + tl.log2(b_sum) * LN2, mask=m_q)


def merge_attention(one: PartialAttention, other: PartialAttention) -> PartialAttention:
    """Return the attention of the same queries to the keys of both, as :meth:`PartialAttention.merged` does.

    Outputs ``[B, H, T, Dv]`` are fp32, fp16 or bf16, with any strides but a contiguous last dim; log-sum-exps fp32
    ``[B, H, T]``, with any strides, for each query finite in at least one of them. The merged output is stored as
    ``[B, T, H, Dv]``.
    """
    shape, dtype, device = one.out.shape, one.out.dtype, one.out.device
    b, heads, t, dv = shape
    expected: dict[str, tuple[Tensor, tuple[int, ...], torch.dtype]] = {}
    for name, part in (("one", one), ("other", other)):
        expected[f"{name}.out"] = (part.out, shape, dtype)
        expected[f"{name}.lse"] = (part.lse[..., None], (b, heads, t, 1), torch.float32)  # any strides
    check_tensors(expected, device, strided=expected)
    out = torch.empty(b, t, heads, dv, dtype=dtype, device=device)
    lse = torch.empty(b, heads, t, dtype=torch.float32, device=device)
    arguments = {
        "out_a": one.out, "out_b": other.out, "lse_a": one.lse, "lse_b": other.lse,
        "out": out, "lse": lse, "queries": t,
        **strides("bhq", out_a=one.out, out_b=other.out, lse_a=one.lse, lse_b=other.lse),
        "HEADS": heads, "DV": dv, "BLOCK_DV": block_dim(dv),
    }  # fmt: skip
    launch(_merge_kernel, lambda given: (heads, triton.cdiv(t, given["BLOCK_Q"]), b), arguments, "merge")
    return PartialAttention(out.transpose(1, 2), lse)
