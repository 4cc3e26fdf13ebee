"""Causal attention over a prompt in Triton, with the log-sum-exp that the window statistics need.

For what the libraries' kernels do not take: see :func:`kvpass.kernels.prompt_attention.choose`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvpass.kernels.checks import check_heads, check_tensors
from kvpass.kernels.launch import blocks, kind, launch, strides
from kvpass.operands import Attention

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
FLOOR = tl.constexpr(-1e30)
"""Initial running maximum: finite, so a block without visible keys adds exp2(-inf - FLOOR) = 0."""

PART = tl.constexpr(256)
"""Columns of a row that one block of a kernel holds at most: wider rows are loaded, and multiplied, in parts."""
FLOATS = tl.constexpr(64)  # columns of wide rows of fp32 that are multiplied at a time
WIDEST = (576, 512)  # head dims of keys and values, the widest: latent rows of DeepSeek-V3
DTYPES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}


@triton.jit
def as_floats(codes, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return entries in ``dtype``: floats as they are, int8 as numbers, the bits of fp8 e4m3 as the value / 256.

    The bits of an e4m3, without its sign, are those of an fp16 of that value, seven further left; so no architecture
    needs instructions for fp8.
    """
    if codes.dtype == tl.uint8:
        bits = codes.to(tl.uint16)
        codes = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True)
    return codes.to(dtype)


@triton.constexpr_function
def part_block(columns: int) -> int:
    """Return the columns of the block that holds the next part of ``columns`` columns: a power of two from 16 on."""
    return min(PART.value, max(16, triton.next_power_of_2(columns)))


@triton.jit
def load_parts(p_rows, m_rows, D: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the D columns of rows p_rows as a tuple of parts ``[rows, part_block]``; 0 where not m_rows."""
    b_parts = ()
    for i in tl.static_range(0, D, PART):
        o_d = i + tl.arange(0, part_block(D - i))
        b_part = tl.load(p_rows[:, None] + o_d[None, :], mask=m_rows[:, None] & (o_d < D)[None, :], other=0.0)
        b_parts += (b_part,)  # type: ignore[assignment]
    return b_parts


@triton.jit
def store_parts(p_rows, b_parts, m_rows, D: tl.constexpr):  # type: ignore[no-untyped-def]
    """Store what :func:`load_parts` returns to rows p_rows, where m_rows."""
    for i in tl.static_range(0, D, PART):
        o_d = i + tl.arange(0, part_block(D - i))
        tl.store(p_rows[:, None] + o_d[None, :], b_parts[i // PART], mask=m_rows[:, None] & (o_d < D)[None, :])


@triton.jit
def hold_rows(p_rows, m_rows, D: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return what :func:`dot_rows` takes of rows p_rows, 0 where not m_rows: their parts.

    Wide rows of fp32 do not fit in registers: of them pointers and mask, so that each product loads them anew.
    """
    if D > PART and p_rows.dtype.element_ty == tl.float32:  # noqa: SIM108 (known at compile time)
        held = (p_rows, m_rows)
    else:
        held = load_parts(p_rows, m_rows, D)
    return held


@triton.jit
def dot_rows(held, p_rows, m_rows, D: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the products ``[M, N]`` fp32 of M held rows and the rows p_rows, 0 where not m_rows (None: all)."""
    if D > PART and p_rows.dtype.element_ty == tl.float32:
        p_held, m_held = held
        b_dot = tl.zeros([p_held.shape[0], p_rows.shape[0]], dtype=tl.float32)
        for i in range(0, D, FLOATS):
            o_d = i + tl.arange(0, FLOATS)
            b_held = tl.load(p_held[:, None] + o_d[None, :], mask=m_held[:, None] & (o_d < D)[None, :], other=0.0)
            b_dot = tl.dot(b_held, _transposed(p_rows, m_rows, o_d, D), b_dot, input_precision="ieee")
    else:
        b_rows = as_floats(_transposed(p_rows, m_rows, tl.arange(0, part_block(D)), D), held[0].dtype)
        b_dot = tl.dot(held[0], b_rows, input_precision="ieee")
        for i in tl.static_range(PART, D, PART):
            b_rows = _transposed(p_rows, m_rows, i + tl.arange(0, part_block(D - i)), D)
            b_dot = tl.dot(held[i // PART], b_rows, b_dot, input_precision="ieee")
    return b_dot


@triton.jit
def _transposed(p_rows, m_rows, o_d, D: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return columns o_d of rows p_rows, ``[columns, rows]``."""
    m_d = (o_d < D)[:, None]
    if m_rows is not None:
        m_d &= m_rows[None, :]
    return tl.load(p_rows[None, :] + o_d[:, None], mask=m_d, other=0.0)


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
def attend_block(  # type: ignore[no-untyped-def]
    b_q, b_out, b_max, b_sum, p_k, p_v, o_q, o_k, length, scale, softcap, sliding_window,
    stride_kn, stride_vn, D: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Attend the keys of columns o_k by online softmax (Milakov and Gimelshein, arXiv 1805.02867).

    MASKED: only columns below ``length`` count, and each query sees those up to its own.
    """
    o_dv = tl.arange(0, BLOCK_DV)
    m_k = None
    m_kv = (o_dv < DV)[None, :]
    if MASKED:
        m_k = o_k < length
        m_kv &= m_k[:, None]
    b_dot = dot_rows(b_q, p_k + o_k.to(tl.int64) * stride_kn, m_k, D)
    # [BLOCK_Q, BLOCK_K]
    b_logits = logits_base2(b_dot, scale, softcap)
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
    b_out = tl.dot(b_probs.to(b_v.dtype), b_v, b_out, input_precision="ieee")
    return b_out, b_new_max, b_sum


@triton.jit
def attend_keys(  # type: ignore[no-untyped-def]
    b_q, b_out, b_max, b_sum, p_k, p_v, o_q, first, last, length, scale, softcap, sliding_window,
    stride_kn, stride_vn, D: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_K: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Attend keys ``first <= column < last``."""
    for column in range(first, last, BLOCK_K):
        o_k = column + tl.arange(0, BLOCK_K)
        b_out, b_max, b_sum = attend_block(
            b_q, b_out, b_max, b_sum, p_k, p_v, o_q, o_k, length, scale, softcap, sliding_window,
            stride_kn, stride_vn, D, DV, BLOCK_DV, MASKED,
        )  # fmt: skip
    return b_out, b_max, b_sum


@triton.jit(do_not_specialize=["tokens", "queries", "sliding_window"])
def _prefill_kernel(  # type: ignore[no-untyped-def]
    q, k, v, out, lse, scale, softcap, sliding_window, tokens, queries,
    stride_qb, stride_qh, stride_qn, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BLOCK_DV: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Attend one block of queries of one head; blocks with the most keys start first."""
    i_q = tl.num_programs(0) - 1 - tl.program_id(0)
    i_b = (tl.program_id(1) // HEADS).to(tl.int64)
    i_h = (tl.program_id(1) % HEADS).to(tl.int64)
    o_dv = tl.arange(0, BLOCK_DV)
    o_r = i_q * BLOCK_Q + tl.arange(0, BLOCK_Q)
    m_q = o_r < queries
    b_q = hold_rows(q + i_b * stride_qb + i_h * stride_qh + o_r.to(tl.int64) * stride_qn, m_q, D)
    begin = tokens - queries + i_q * BLOCK_Q  # column of the first query
    o_q = tokens - queries + o_r
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
        b_out, b_max, b_sum = attend_keys(
            b_q, b_out, b_max, b_sum, p_k, p_v, o_q, 0, first, tokens, scale, softcap, sliding_window,
            stride_kn, stride_vn, D, DV, BLOCK_DV, BLOCK_K, False,
        )  # fmt: skip
    b_out, b_max, b_sum = attend_keys(
        b_q, b_out, b_max, b_sum, p_k, p_v, o_q, first, last, tokens, scale, softcap, sliding_window,
        stride_kn, stride_vn, D, DV, BLOCK_DV, BLOCK_K, True,
    )  # fmt: skip
    p_row = out + (i_b * queries * HEADS + i_h) * DV + o_r[:, None].to(tl.int64) * (HEADS * DV) + o_dv[None, :]
    tl.store(p_row, (b_out / b_sum[:, None]).to(out.dtype.element_ty), mask=m_q[:, None] & (o_dv < DV)[None, :])
    tl.store(lse + (i_b * HEADS + i_h) * queries + o_r, (b_max + tl.log2(b_sum)) * LN2, mask=m_q)


def check_site(q: Tensor, k: Tensor, v: Tensor, queries: int, start: Tensor | None = None) -> None:
    """Raise if the kernels of one attention op would read an argument wrongly; ``queries``: the fewest rows of q."""
    b, heads, rows, d = q.shape
    kv_heads, n = k.shape[1], k.shape[2]
    if not queries <= rows <= n:
        raise ValueError(f"q has {rows} rows: must be in {queries}..{n}")
    check_heads(heads, kv_heads)
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


def check_dims(key_dim: int, value_dim: int) -> None:
    """Raise if the kernels do not take rows of so many columns."""
    for name, dim, most in zip(("keys", "values"), (key_dim, value_dim), WIDEST, strict=True):
        if not 1 <= dim <= most or (in_parts(dim) and not is_aligned(dim)):
            raise ValueError(
                f"{name} have head dim {dim}: kernels on CUDA take 1..{PART.value}, and up to {most} what 16 divides"
            )


def in_parts(*dims: int) -> bool:
    """Return whether rows of one of these head dims are loaded in parts."""
    return max(dims) > PART.value


def block_dim(dim: int) -> int:
    """Return the columns of a head-dim block: a power of two, at least a dot's minimum."""
    return max(16, triton.next_power_of_2(dim))


def dims_case(dtype: torch.dtype, *dims: int) -> str:
    """Return the part of a case that stands for dtype and head dims: the widest block decides what fits."""
    return f"{kind(dtype)}{wide_case(*dims) or f' {max(64, *map(block_dim, dims))}'}"


def wide_case(*dims: int) -> str:
    """Return the end of a case for head dims that are loaded in parts, of which the widest decide what fits."""
    return f" {WIDEST[0]}" if in_parts(*dims) else ""


def is_aligned(*dims: int) -> bool:
    """Return whether rows of these head dims are loaded in whole vectors; others need more registers."""
    return all(dim % 16 == 0 for dim in dims)


def prefill_attention(
    call: Attention, sliding_window: int | None = None, config: triton.Config | None = None
) -> tuple[Tensor, Tensor]:
    """Causal attention of a prompt without padding; FlashAttention-2 (Dao, arXiv 2307.08691).

    Arguments and results are those of :func:`kvpass.kernels.prompt_attention.attend`; sinks are not read.
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
        "BLOCK_DV": block_dim(dv),
    }  # fmt: skip
    unaligned = q.dtype != torch.float32 and not is_aligned(d, dv)
    case = f"prefill {dims_case(q.dtype, d, dv)}" + " unaligned" * unaligned
    launch(_prefill_kernel, blocks(t, "BLOCK_Q", b * heads), arguments, case, config)
    return out.transpose(1, 2), lse
