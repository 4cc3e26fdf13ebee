"""Statistics of the window's attention: over the last prompt rows of the attention matrix.

``a[h, i, j] = exp(logits - lse)`` is rebuilt block by block from queries, keys and the log-sum-exp of each query, so no
``[H, window, N]`` tensor ever exists. Blocks start at each row's first real column.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvpass.kernels.launch import blocks, launch, strides
from kvpass.kernels.prefill_attention import LOG2E, check_dims, check_site, dims_case, dot_rows, hold_rows, logits_base2
from kvpass.operands import Attention


@triton.jit
def _attention_rows(  # type: ignore[no-untyped-def]
    b_k, p_q, p_lse, o_k, o_r, m_r, scale, softcap, D: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """Return probabilities ``[BLOCK_K, BLOCK_R]`` of keys o_k for the queries at p_q, of rows o_r; zero outside m_r."""
    # [BLOCK_R]; without a query, exp(0 - inf) = 0
    b_lse = tl.load(p_lse, mask=m_r, other=float("inf"))
    # [BLOCK_K, BLOCK_R]
    b_logits = logits_base2(dot_rows(b_k, p_q, m_r, D), scale, softcap)
    b_probs = tl.exp2(b_logits - (b_lse * LOG2E)[None, :])
    if CAUSAL:
        b_probs = tl.where(o_k[:, None] <= o_r[None, :], b_probs, 0.0)
    return b_probs


@triton.jit
def _store_columns(p_out, b_column, o_k, m_out, pad, tokens):  # type: ignore[no-untyped-def]
    """Store a statistic of real columns o_k, and zeros to padding columns o_k, where m_out."""
    tl.store(p_out + pad + o_k, b_column, mask=m_out & (o_k < tokens - pad))
    tl.store(p_out + o_k, tl.zeros_like(b_column), mask=m_out & (o_k < tl.minimum(pad, tokens)))


@triton.jit(do_not_specialize=["tokens", "queries", "rows"])
def _window_kernel(  # type: ignore[no-untyped-def]
    q, k, lse, start, mean, variance, entropy, scale, softcap, tokens, queries, rows,
    stride_qb, stride_qh, stride_qn, stride_kb, stride_kh, stride_kn, stride_lb, stride_lh,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr,
    GROUP_BLOCK: tl.constexpr, WINDOW_BLOCK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Compute window statistics of a block of keys, read once, for a KV head's query heads.

    One product takes the block and up to BLOCK_R query rows: as many rows of the window as fit, of as many heads.
    """
    ROWS_FIT: tl.constexpr = WINDOW_BLOCK if WINDOW_BLOCK < BLOCK_R else BLOCK_R
    HEADS: tl.constexpr = GROUP_BLOCK if GROUP_BLOCK < BLOCK_R // ROWS_FIT else BLOCK_R // ROWS_FIT
    ROWS: tl.constexpr = ROWS_FIT if ROWS_FIT * HEADS > 16 else 16 // HEADS
    i_k = tl.program_id(0)
    i_b = (tl.program_id(1) // KV_HEADS).to(tl.int64)
    i_kh = (tl.program_id(1) % KV_HEADS).to(tl.int64)
    pad = tl.load(start + i_b).to(tl.int32)
    length = tokens - pad
    rows = tl.minimum(rows, length)
    o_k = i_k * BLOCK_K + tl.arange(0, BLOCK_K)
    p_k = k + i_b * stride_kb + i_kh * stride_kh + (pad + o_k).to(tl.int64) * stride_kn
    b_k = hold_rows(p_k, o_k < length, D)
    o_c = tl.arange(0, HEADS * ROWS)
    for i_g in range(0, GROUP, HEADS):
        o_g = i_g + o_c // ROWS
        o_h = i_kh * GROUP + o_g
        # q holds the last rows of the prompt; shift it so that rows, like columns, count from the first real one
        p_q = q + i_b * stride_qb + o_h * stride_qh + (queries - length).to(tl.int64) * stride_qn
        p_lse = lse + i_b * stride_lb + o_h * stride_lh + (queries - length)
        b_mean = tl.zeros([BLOCK_K, HEADS], dtype=tl.float32)
        b_squares = tl.zeros([BLOCK_K, HEADS], dtype=tl.float32)
        b_entropy = tl.zeros([BLOCK_K, HEADS], dtype=tl.float32)
        for first in range(length - rows, length, ROWS):
            o_r = first + o_c % ROWS
            m_c = (o_g < GROUP) & (o_r < length)
            b_rows = _attention_rows(
                b_k, p_q + o_r.to(tl.int64) * stride_qn, p_lse + o_r, o_k, o_r, m_c, scale, softcap, D, True,
            )  # fmt: skip
            # [BLOCK_K, HEADS, ROWS]
            b_probs = tl.reshape(b_rows, [BLOCK_K, HEADS, ROWS])
            # Merge mean and squared deviations of this block into those of the rows before it (Chan et al. 1979).
            before = (first - (length - rows)).to(tl.float32)
            here = tl.minimum(length - first, ROWS).to(tl.float32)
            b_here = tl.sum(b_probs, 2) / here
            b_shift = b_here - b_mean
            b_mean += b_shift * (here / (before + here))
            if variance is not None:
                m_row = (first + tl.arange(0, ROWS) < length)[None, None, :]
                b_deviation = tl.where(m_row, b_probs - b_here[:, :, None], 0.0)
                b_squares += tl.sum(b_deviation * b_deviation, 2)
                b_squares += b_shift * b_shift * (before * here / (before + here))
            if entropy is not None:
                b_entropy -= tl.sum(b_probs * tl.log(b_probs + 1e-10), 2)
        # [1, HEADS]
        o_g = i_g + tl.arange(0, HEADS)[None, :]
        at = (i_b * KV_HEADS * GROUP + i_kh * GROUP + o_g) * tokens
        _store_columns(mean + at, b_mean, o_k[:, None], o_g < GROUP, pad, tokens)
        if variance is not None:
            b_variance = b_squares / tl.maximum(rows - 1, 1).to(tl.float32)
            _store_columns(variance + at, b_variance, o_k[:, None], o_g < GROUP, pad, tokens)
        if entropy is not None:
            _store_columns(entropy + at, b_entropy, o_k[:, None], o_g < GROUP, pad, tokens)


@triton.jit(do_not_specialize=["tokens", "queries", "rows"])
def _column_sum_kernel(  # type: ignore[no-untyped-def]
    q, k, lse, start, out, scale, softcap, tokens, queries, rows,
    stride_qb, stride_qh, stride_qn, stride_kb, stride_kh, stride_kn, stride_lb, stride_lh,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Sum the attention of later rows to a block of keys; blocks with most rows start first."""
    i_k = tl.program_id(0)
    i_b = (tl.program_id(1) // (KV_HEADS * GROUP)).to(tl.int64)
    i_h = (tl.program_id(1) % (KV_HEADS * GROUP)).to(tl.int64)
    pad = tl.load(start + i_b).to(tl.int32)
    length = tokens - pad
    o_k = i_k * BLOCK_K + tl.arange(0, BLOCK_K)
    p_k = k + i_b * stride_kb + (i_h // GROUP) * stride_kh + (pad + o_k).to(tl.int64) * stride_kn
    b_k = hold_rows(p_k, o_k < length, D)
    p_q = q + i_b * stride_qb + i_h * stride_qh + (queries - length).to(tl.int64) * stride_qn
    p_lse = lse + i_b * stride_lb + i_h * stride_lh + (queries - length)
    b_sum = tl.zeros([BLOCK_K], dtype=tl.float32)
    first = tl.maximum(length - tl.minimum(rows, length), i_k * BLOCK_K)
    # rows that do not attend every key of the block
    partial = tl.maximum((i_k + 1) * BLOCK_K - 1 - first, 0)
    inner = tl.minimum(first + tl.cdiv(partial, BLOCK_R) * BLOCK_R, length)
    for row in range(first, inner, BLOCK_R):
        o_r = row + tl.arange(0, BLOCK_R)
        b_probs = _attention_rows(
            b_k, p_q + o_r.to(tl.int64) * stride_qn, p_lse + o_r, o_k, o_r, o_r < length, scale, softcap, D, True,
        )  # fmt: skip
        b_sum += tl.sum(b_probs, 1)
    for row in range(inner, length, BLOCK_R):
        o_r = row + tl.arange(0, BLOCK_R)
        b_probs = _attention_rows(
            b_k, p_q + o_r.to(tl.int64) * stride_qn, p_lse + o_r, o_k, o_r, o_r < length, scale, softcap, D, False,
        )  # fmt: skip
        b_sum += tl.sum(b_probs, 1)
    at = (i_b * KV_HEADS * GROUP + i_h) * tokens
    _store_columns(out + at, b_sum, o_k, o_k < tokens, pad, tokens)


def window_statistics(
    call: Attention, start: Tensor, lse: Tensor, window: int, *, spread: bool = False,
    config: triton.Config | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Compute statistics of the window rows of a left-padded prompt.

    In a batch row shorter than the window, all tokens are window.

    Args:
        call: q are the last R prompt queries, RoPE applied, ``[B, H, R, D]`` fp32, fp16 or bf16; any strides but a
            contiguous last dim (keys alike). ``R >= min(max(window, 1), N)``. D up to 576. Values are not read.
        start: first real column of each row, int32 or int64 ``[B]``.
        lse: natural log-sum-exp of the same R queries, sinks included, fp32 ``[B, H, R]``, as attention gave it.
        window: rows that observe; 0 means the last row alone.

    Returns:
        fp32 ``[B, H, N]``, zero in padding columns: the mean of a over the window rows; with ``spread`` also the
        unbiased variance, zero for a single row, and the sum of ``-a ln(a + 1e-10)`` (CAKE, arXiv 2503.12491).
    """
    if window < 0:
        raise ValueError(f"window={window}: must be at least 0")
    site = _site(call, start, lse, max(window, 1))
    keys, rows = call.k, max(window, 1)
    b, heads, n, d = *call.q.shape[:2], keys.shape[2], keys.shape[3]
    sums = [torch.empty(b, heads, n, dtype=torch.float32, device=keys.device) for _ in range(3 if spread else 1)]
    mean, variance, entropy = sums if spread else (*sums, None, None)
    fit = {"GROUP_BLOCK": triton.next_power_of_2(site["GROUP"]), "WINDOW_BLOCK": triton.next_power_of_2(rows)}
    arguments = {**site, **fit, "mean": mean, "variance": variance, "entropy": entropy, "rows": rows}
    grid = blocks(n, "BLOCK_K", b * keys.shape[1])
    launch(_window_kernel, grid, arguments, f"window {dims_case(keys.dtype, d)}", config)
    return tuple(sums)


def column_sums(
    call: Attention, start: Tensor, lse: Tensor, rows: int, *, config: triton.Config | None = None
) -> Tensor:
    """Sum a over the last ``rows`` rows (N or more: all): H2O's score (2306.14048), fp32 ``[B, H, N]``.

    Zero in padding. ``R >= min(rows, N)``; other arguments as in :func:`window_statistics`.
    """
    if rows < 1:
        raise ValueError(f"rows={rows}: must be at least 1")
    site = _site(call, start, lse, rows)
    keys = call.k
    b, heads, n, d = *call.q.shape[:2], keys.shape[2], keys.shape[3]
    sums = torch.empty(b, heads, n, dtype=torch.float32, device=keys.device)
    arguments = {**site, "out": sums, "rows": rows}
    case = f"column sums {dims_case(keys.dtype, d)}"
    launch(_column_sum_kernel, blocks(n, "BLOCK_K", b * heads), arguments, case, config)
    return sums


def _site(call: Attention, start: Tensor, lse: Tensor, rows: int) -> dict[str, Any]:
    """Check and return the arguments that the kernels over queries and keys share."""
    b, heads, queries, d = call.q.shape
    kv_heads, n = call.k.shape[1:3]
    check_site(call.q, call.k, call.k, min(rows, n), start)
    check_dims(d, 1)
    if lse.shape != (b, heads, queries) or lse.dtype != torch.float32 or (queries > 1 and lse.stride(2) != 1):
        raise ValueError(
            f"lse is {lse.dtype} {tuple(lse.shape)} with strides {lse.stride()}: "
            f"expected torch.float32 {(b, heads, queries)}, contiguous in the last dim"
        )
    return {
        "q": call.q, "k": call.k, "lse": lse, "start": start, "scale": call.scale, "softcap": call.softcap,
        "tokens": n, "queries": queries, **strides("bhn", q=call.q, k=call.k), **strides("bh", l=lse),
        "KV_HEADS": kv_heads, "GROUP": heads // kv_heads, "D": d,
    }  # fmt: skip
