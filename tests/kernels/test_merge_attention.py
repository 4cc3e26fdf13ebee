"""Two attentions merged into one, against double precision."""

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from kvpass.kernels.merge_attention import merge_attention
from kvpass.operands import PartialAttention
from numeric_checks import EPS, Exact, assert_rounded

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ON_DEVICE = pytest.mark.skipif(DEVICE == "cpu", reason="the interpreter does not round to bf16, it cuts off")
DTYPES = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=ON_DEVICE)], ids=["fp32", "fp16", "bf16"]
)


def part(rows: int, heads: int, tokens: int, dim: int, dtype: torch.dtype, seed: int) -> PartialAttention:
    """Of random numbers, stored by token as kernels give it; log-sum-exps between -20 and 20."""
    generator = torch.Generator().manual_seed(seed)
    out = torch.randn(rows, tokens, heads, dim, generator=generator).to(DEVICE, dtype).transpose(1, 2)
    return PartialAttention(out, (torch.rand(rows, heads, tokens, generator=generator) * 40 - 20).to(DEVICE))


def exact(one: PartialAttention, other: PartialAttention) -> tuple[Exact, Exact]:
    """Output and log-sum-exp."""
    outs, lses = ([x.cpu().double() for x in both] for both in zip(one, other, strict=True))
    lse = torch.logaddexp(*lses)
    weights = [(x - lse).exp()[..., None] for x in lses]
    # Of an exponential d below the larger one: EPS * d for its argument, twice since it is in the sum too, and some EPS
    # for exponentials, division, products and sums, which GPUs approximate.
    error = EPS * (8 + 2 * (lses[0] - lses[1]).abs().nan_to_num(posinf=0.0))[..., None]
    size = sum(w * x.abs() for w, x in zip(weights, outs, strict=True))
    merged = sum(w * x for w, x in zip(weights, outs, strict=True))
    assert isinstance(size, Tensor) and isinstance(merged, Tensor)
    limits = torch.finfo(one.out.dtype)
    return Exact(merged, error * size + limits.smallest_normal * limits.eps / 2), Exact(lse, EPS * (8 + lse.abs()))


def check(one: PartialAttention, other: PartialAttention) -> PartialAttention:
    found = merge_attention(one, other)
    out, lse = exact(one, other)
    assert found.out.dtype == one.out.dtype and found.lse.dtype == torch.float32
    assert found.out.transpose(1, 2).is_contiguous() and found.lse.is_contiguous()
    assert_rounded("out", found.out, out)
    assert_rounded("lse", found.lse, lse)
    return found


@DTYPES
@pytest.mark.parametrize(
    ("rows", "heads", "tokens", "dim"), [(2, 3, 33, 64), (1, 4, 17, 100), (3, 1, 1, 128), (1, 2, 5, 256)]
)
def test_it_is_the_attention_to_both(dtype, rows, heads, tokens, dim):
    check(*(part(rows, heads, tokens, dim, dtype, seed) for seed in range(2)))


def test_any_strides():
    one, other = (part(2, 3, 20, 64, torch.float16, seed) for seed in range(2))
    by_head = PartialAttention(one.out.contiguous(), one.lse.transpose(1, 2).contiguous().transpose(1, 2))
    wide = torch.zeros(2, 4, 41, 80, dtype=torch.float16, device=DEVICE)
    cut = wide[:, 1:, 1:41:2, 8:72].copy_(other.out)
    assert all(map(torch.equal, merge_attention(by_head, other._replace(out=cut)), merge_attention(one, other)))


@DTYPES
def test_no_weight_overflows_and_one_of_nothing_adds_nothing(dtype):
    one, other = (part(1, 2, 16, 32, dtype, seed) for seed in range(2))
    check(one._replace(lse=one.lse + 1e4), other._replace(lse=other.lse + 1e4))
    check(one._replace(lse=one.lse - 1e4), other._replace(lse=other.lse - 1e4))
    for lse in (torch.full_like(one.lse, -torch.inf), one.lse - 1e4):
        for found in (check(one._replace(lse=lse), other), check(other, one._replace(lse=lse))):
            assert torch.equal(found.out, other.out)
            torch.testing.assert_close(found.lse, other.lse, atol=0, rtol=EPS)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"out": torch.zeros(1, 2, 5, 32, device=DEVICE)}, r"other.out is torch.float32 \[1, 2, 5, 32\]: expected"),
        ({"lse": torch.zeros(1, 2, 5, device=DEVICE)}, r"other.lse is torch.float32 \[1, 2, 5, 1\]: expected"),
    ],
)
def test_parts_that_do_not_fit_together_are_refused_by_name(changed, message):
    one, other = (part(1, 2, 4, 32, torch.float32, seed) for seed in range(2))
    with pytest.raises(ValueError, match=message):
        merge_attention(one, other._replace(**changed))
