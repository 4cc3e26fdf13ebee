"""Causal attention over a prompt in Triton, with the log-sum-exp that the window statistics need.

For what the libraries' kernels do not take: see :func:`kvpass.kernels.prompt_attention.choose`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvpass.kernels.checks import check_heads, check_tensors
from kvpass.kernels.launch import KernelConfig, blocks, kind, launch, strides
from kvpass.operands import Attention

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
FLOOR = tl.constexpr(-1e30)
"""Initial running maximum: finite, so a block without visible keys adds exp2(-inf - FLOOR) = 0."""

MAX_HEAD_DIM = 256
DTYPES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}


@triton.jit
def logits_base2(b_dot, scale, softcap):  # type: ignore[no-untyped-def]
    """Return attention logits in units of log 2 from dot products; softcap is None or a number."""
    if softcap is None:
        b_logits = b_dot * (scale * LOG2E)
    else:
        # tanh(x) = 1 - 2 / (1 + exp(2x)), right at both infinities
        b_tanh = 1.0 - 2.0 / (1.0 + tl.exp2(b_dot * (2.0 * LOG2E * scale / softcap)))
        b_logits = b_tanh * (softcap * LOG2E)
    return b_logits


@triton.jit
def _attend_keys(  # type: ignore[no-untyped-def]
    b_q, b_out, b_max, b_sum, p_k, p_v, o_q, first, last, length, scale, softcap, sliding_window,
    stride_kn, stride_vn, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_K: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Attend keys ``first <= column < last`` by online softmax (Milakov and Gimelshein, arXiv 1805.02867)."""
    o_d = tl.arange(0, BLOCK_D)
    o_dv = tl.arange(0, BLOCK_DV)
    for column in range(first, last, BLOCK_K):
        o_k = column + tl.arange(0, BLOCK_K)
        m_kd = (o_d < D)[:, None]
        m_kv = (o_dv < DV)[None, :]
        if MASKED:
            m_kd &= (o_k < length)[None, :]
            m_kv &= (o_k < length)[:, None]
        # [BLOCK_D, BLOCK_K]
        b_k = tl.load(p_k + o_k[None, :].to(tl.int64) * stride_kn + o_d[:, None], mask=m_kd, other=0.0)
        # [BLOCK_Q, BLOCK_K]
        b_logits = logits_base2(tl.dot(b_q, b_k, input_precision=PRECISION), scale, softcap)
        if MASKED:
            m_seen = o_k[None, :] <= o_q[:, None]
            if sliding_window is not None:
                m_seen &= o_q[:, None] - o_k[None, :] < sliding_window
            b_logits = tl.where(m_seen, b_logits, float("-inf"))
        b_new_max = tl.maximum(b_max, tl.max(b_logits, 1))
        b_probs = tl.exp2(b_logits - b_new_max[:, None])
        b_shrink = tl.exp2(b_max - b_new_max)
        b_sum = b_sum * b_shrink + tl.sum(b_probs, 1)
        b_out = b_out * b_shrink[:, None]
        # [BLOCK_K, BLOCK_DV]
        b_v = tl.load(p_v + o_k[:, None].to(tl.int64) * stride_vn + o_dv[None, :], mask=m_kv, other=0.0)
        b_out = tl.dot(b_probs.to(b_v.dtype), b_v, b_out, input_precision=PRECISION)
        b_max = b_new_max
    return b_out, b_max, b_sum


@triton.jit(do_not_specialize=["tokens", "queries", "sliding_window"])
def _prefill_kernel(  # type: ignore[no-untyped-def]
    q, k, v, out, lse, scale, softcap, sliding_window, tokens, queries,
    stride_qb, stride_qh, stride_qn, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Attend one block of queries of one head; blocks with the most keys start first."""
    i_q = tl.num_programs(0) - 1 - tl.program_id(0)
    i_b = (tl.program_id(1) // HEADS).to(tl.int64)
    i_h = (tl.program_id(1) % HEADS).to(tl.int64)
    o_d = tl.arange(0, BLOCK_D)
    o_dv = tl.arange(0, BLOCK_DV)
    o_r = i_q * BLOCK_Q + tl.arange(0, BLOCK_Q)
    m_q = o_r < queries
    p_q = q + i_b * stride_qb + i_h * stride_qh + o_r[:, None].to(tl.int64) * stride_qn + o_d[None, :]
    begin = tokens - queries + i_q * BLOCK_Q  # column of the first query
    o_q = tokens - queries + o_r
    # [BLOCK_Q, BLOCK_D]
    b_q = tl.load(p_q, mask=m_q[:, None] & (o_d < D)[None, :], other=0.0)
    p_k = k + i_b * stride_kb + (i_h // GROUP) * stride_kh
    p_v = v + i_b * stride_vb + (i_h // GROUP) * stride_vh
    b_out = tl.zeros([BLOCK_Q, BLOCK_DV], dtype=tl.float32)
    b_max = tl.full([BLOCK_Q], FLOOR, dtype=tl.float32)
    b_sum = tl.zeros([BLOCK_Q], dtype=tl.float32)
    last = tl.minimum(begin + BLOCK_Q, tokens)
    if sliding_window is not None:
        # [first, last) holds every visible key and a few others; the mask is applied to all of it
        first = tl.maximum(begin - sliding_window + 1, 0)
    else:
        # keys that every query of the block attends
        first = begin // BLOCK_K * BLOCK_K
        b_out, b_max, b_sum = _attend_keys(
            b_q, b_out, b_max, b_sum, p_k, p_v, o_q, 0, first, tokens, scale, softcap, sliding_window,
            stride_kn, stride_vn, D, DV, BLOCK_D, BLOCK_DV, BLOCK_K, False, PRECISION,
        )  # fmt: skip
    b_out, b_max, b_sum = _attend_keys(
        b_q, b_out, b_max, b_sum, p_k, p_v, o_q, first, last, tokens, scale, softcap, sliding_window,
        stride_kn, stride_vn, D, DV, BLOCK_D, BLOCK_DV, BLOCK_K, True, PRECISION,
    )  # fmt: skip
    p_row = out + (i_b * queries * HEADS + i_h) * DV + o_r[:, None].to(tl.int64) * (HEADS * DV) + o_dv[None, :]
    tl.store(p_row, (b_out / b_sum[:, None]).to(out.dtype.element_ty), mask=m_q[:, None] & (o_dv < DV)[None, :])
    tl.store(lse + (i_b * HEADS + i_h) * queries + o_r, (b_max + tl.log2(b_sum)) * LN2, mask=m_q)


def check_site(q: Tensor, k: Tensor, v: Tensor, start: Tensor | None = None, queries: int | None = None) -> None:
    """Raise if the kernels of one attention op would read an argument wrongly.

    Args:
        queries: the fewest rows that q may have; None: exactly as many as k.

    Raises:
        ValueError: a shape, dtype, stride or device that is not supported.
    """
    b, heads, rows, d = q.shape
    kv_heads, n = k.shape[1], k.shape[2]
    if not (rows == n if queries is None else queries <= rows <= n):
        raise ValueError(f"q has {rows} rows: must be {f'in {queries}..{n}' if queries is not None else n}")
    check_heads(heads, kv_heads)
    for name, tensor in (("q", q), ("v", v)):
        if not 1 <= tensor.shape[3] <= MAX_HEAD_DIM:
            raise ValueError(f"{name} has head dim {tensor.shape[3]}: must be in 1..{MAX_HEAD_DIM}")
    if q.dtype not in DTYPES:
        raise ValueError(f"q has dtype {q.dtype}: must be float32, float16 or bfloat16")
    expected = {
        "q": (q, q.shape, q.dtype),
        "k": (k, (b, kv_heads, n, d), q.dtype),
        "v": (v, (b, kv_heads, n, v.shape[3]), q.dtype),
    }
    if start is not None:
        if start.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"start has dtype {start.dtype}: must be int32 or int64")
        expected["start"] = (start, (b,), start.dtype)
    check_tensors(expected, q.device, strided=("q", "k", "v"))


def block_dim(dim: int) -> int:
    """Return the columns of a head-dim block: a power of two, at least a dot's minimum."""
    return max(16, triton.next_power_of_2(dim))


def precision(dtype: torch.dtype) -> str:
    """Return the ``input_precision`` of a dot: exact for fp32, ignored for other dtypes."""
    return "ieee" if dtype == torch.float32 else "tf32"


def dims_case(dtype: torch.dtype, *dims: int) -> str:
    """Return the part of a case that stands for dtype and head dims: the widest block decides what fits."""
    return f"{kind(dtype)} {max(64, *map(block_dim, dims))}"


def is_aligned(*dims: int) -> bool:
    """Return whether rows of these head dims are loaded in whole vectors; others need more registers."""
    return all(dim % 16 == 0 for dim in dims)


def prefill_attention(
    call: Attention, sliding_window: int | None = None, config: KernelConfig | None = None
) -> tuple[Tensor, Tensor]:
    """Causal attention of a prompt without padding; FlashAttention-2 (Dao, arXiv 2307.08691).

    Args:
        call: as in :func:`kvpass.kernels.prompt_attention.attend`; its sinks are not read.
        sliding_window: query i attends key j only if ``i - j < sliding_window``; >= 1.
        config: block sizes; None: the pinned ones.

    Returns:
        Output ``[B, H, T, Dv]`` in the dtype of q, stored as ``[B, T, H, Dv]``; natural log-sum-exp of each query's
        logits, fp32 ``[B, H, T]``.
    """
    q, k, v, scale, softcap, _ = call
    b, heads, t, d = q.shape
    n, dv = v.shape[2:]
    out = torch.empty(b, t, heads, dv, dtype=q.dtype, device=q.device)
    lse = torch.empty(b, heads, t, dtype=torch.float32, device=q.device)
    arguments = {
        "q": q, "k": k, "v": v, "out": out, "lse": lse,
        "scale": scale, "softcap": softcap, "sliding_window": sliding_window, "tokens": n, "queries": t,
        **strides("bhn", q=q, k=k, v=v),
        "HEADS": heads, "GROUP": heads // k.shape[1], "D": d, "DV": dv,
        "BLOCK_D": block_dim(d), "BLOCK_DV": block_dim(dv), "PRECISION": precision(q.dtype),
    }  # fmt: skip
    unaligned = q.dtype != torch.float32 and not is_aligned(d, dv)
    case = f"prefill {dims_case(q.dtype, d, dv)}" + " unaligned" * unaligned
    launch(_prefill_kernel, blocks(t, "BLOCK_Q", b * heads), arguments, case, config)
    return out.transpose(1, 2), lse
