"""Prefill attention on Triton's interpreter, and the eager reference, against attention in double precision."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from pairwise import quick

pytest.importorskip("triton")

from kvpass.kernels import prefill_attention as module
from kvpass.kernels.launch import KernelConfig
from kvpass.kernels.prefill_attention import flash_attention_varlen, flash_takes, prefill_attention
from kvpass.operands import Attention
from kvpass.ops.reference import causal_attention
from numeric_checks import EPS, Exact, assert_rounded, exact_attention

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")  # in rows that are never stored

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SMALL = KernelConfig.of(4, 1, BLOCK_Q=32, BLOCK_K=16)
UNEVEN = KernelConfig.of(4, 1, BLOCK_Q=16, BLOCK_K=64)
LARGE = KernelConfig.of(4, 1, BLOCK_Q=256, BLOCK_K=256)


@dataclass(frozen=True)
class Case:
    n: int
    d: int
    heads: int = 2
    kv_heads: int = 1
    dv: int | None = None
    starts: tuple[int, ...] = (0,)
    dtype: torch.dtype = torch.float32
    softcap: float | None = None
    sinks: bool = False
    sliding_window: int | None = None
    config: KernelConfig | None = None

    def __str__(self) -> str:
        given = [f"N{self.n}", f"D{self.d}", f"H{self.heads}", f"K{self.kv_heads}", f"start{self.starts}"]
        given += [str(self.dtype).removeprefix("torch.")] if self.dtype != torch.float32 else []
        given += [f"{name}{value}" for name in ("dv", "softcap", "sliding_window") if (value := getattr(self, name))]
        return "-".join([*given, *["sinks"] * self.sinks])

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
        """q, k, v stored as ``[B, N, heads, dim]``, as projections give them; start; sinks."""
        b, dv = len(self.starts), self.dv or self.d
        q = torch.randn(b, self.n, self.heads, self.d, device=DEVICE, dtype=self.dtype).transpose(1, 2)
        k = torch.randn(b, self.n, self.kv_heads, self.d, device=DEVICE, dtype=self.dtype).transpose(1, 2)
        v = torch.randn(b, self.n, self.kv_heads, dv, device=DEVICE, dtype=self.dtype).transpose(1, 2)
        sinks = torch.randn(self.heads, device=DEVICE) * 3 if self.sinks else None
        return q, k, v, torch.tensor(self.starts, device=DEVICE), sinks


CASES = [
    Case(1, 64),
    Case(33, 64, heads=8, starts=(0, 5)),
    Case(111, 80, heads=4, kv_heads=4, starts=(110, 31)),
    Case(111, 100, heads=4, kv_heads=1, config=SMALL),
    Case(513, 128, heads=1),
    Case(4097, 64, heads=1, config=LARGE),
    Case(130, 192, dv=128, starts=(1,)),
    Case(65, 256, starts=(0,)),
    Case(65, 24, dv=40, starts=(64, 3), config=SMALL),
    Case(111, 64, starts=(0, 17), config=UNEVEN),
    Case(111, 128, heads=4, starts=(0, 40), dtype=torch.float16),
    Case(33, 96, dtype=torch.float16, softcap=20.0, sinks=True),
    Case(111, 64, heads=4, kv_heads=2, starts=(0, 63), softcap=2.0),
    Case(111, 64, heads=4, kv_heads=2, starts=(0, 63), sinks=True, config=SMALL),
    Case(111, 64, starts=(0, 9), sliding_window=1, config=SMALL),
    Case(111, 64, starts=(0, 9), sliding_window=16, config=SMALL),
    Case(111, 64, starts=(0, 9), sliding_window=17, config=UNEVEN),
    Case(111, 64, starts=(90, 9), sliding_window=500),
    Case(111, 80, heads=4, starts=(0, 9), sliding_window=40, softcap=5.0, sinks=True),
]


@pytest.fixture(autouse=True)
def unwritten_is_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs begin as NaN, so that a storage_order no program writes shows."""
    empty = torch.empty

    def filled(*args, **kwargs):  # type: ignore[no-untyped-def]
        made = empty(*args, **kwargs)
        return made.fill_(float("nan")) if made.is_floating_point() else made

    monkeypatch.setattr(module.torch, "empty", filled)


def exact(
    q: Tensor, k: Tensor, v: Tensor, start: Tensor, scale: float, case: Case, sinks: Tensor | None = None
) -> tuple[Exact, Exact]:
    """Output and log-sum-exp; zeros and -inf in padding."""
    group = q.shape[1] // k.shape[1]
    start, n = start.cpu(), q.shape[2]
    row, column = torch.arange(n)[:, None], torch.arange(n)
    seen = (column <= row) & (column >= start[:, None, None])
    if case.sliding_window is not None:
        seen &= row - column < case.sliding_window
    found = exact_attention(
        q,
        k.repeat_interleave(group, 1),
        v.repeat_interleave(group, 1),
        scale,
        hidden=~seen[:, None],
        softcap=case.softcap,
        sinks=None if sinks is None else sinks[:, None],
        rounds_weights=case.dtype != torch.float32,
    )
    padding = (column < start[:, None])[:, None]
    return found.out, Exact(found.lse.value.masked_fill(padding, float("-inf")), found.lse.error)


@pytest.mark.parametrize("case", quick(CASES, [*CASES[:4], *CASES[5:18:2], CASES[18]]), ids=str)
def test_output_and_lse_are_those_of_a_masked_softmax(case: Case) -> None:
    q, k, v, start, sinks = case.tensors()
    scale = case.d**-0.5
    call, config = Attention(q, k, v, scale, case.softcap, sinks), case.config if DEVICE == "cpu" else None
    out, lse = prefill_attention(call, start, case.sliding_window, config)
    expected_out, expected_lse = exact(q, k, v, start, scale, case, sinks)
    assert out.dtype == q.dtype
    assert lse.dtype == torch.float32
    assert_rounded("out", out, expected_out)
    assert_rounded("lse", lse, expected_lse)


@pytest.mark.parametrize(("softcap", "with_sinks"), [(None, False), (3.0, True)])
def test_the_eager_reference_computes_the_same_of_each_row_alone(softcap: float | None, with_sinks: bool) -> None:
    case = Case(70, 64, heads=4, kv_heads=2, starts=(0, 13, 69), softcap=softcap, sinks=with_sinks)
    q, k, v, start, sinks = case.tensors()
    expected, _ = exact(q, k, v, start, 0.3, case, sinks)
    call = Attention(q, k, v, 0.3, softcap, sinks)
    assert_rounded("kernel", prefill_attention(call, start)[0], expected)
    out = torch.zeros_like(q)
    for row, first in enumerate(case.starts):
        live = slice(row, row + 1), slice(first, None)
        out[live[0], :, live[1]] = causal_attention(call.rows(*live))
    assert_rounded("eager", out, expected)


@pytest.mark.parametrize("sliding_window", [None, 20])
def test_contract_4_padding_changes_no_bit(sliding_window: int | None) -> None:
    q, k, v, start, _ = Case(99, 64, starts=(0, 0)).tensors()
    pads = torch.tensor([37, 8], device=DEVICE)
    call = Attention(q, k, v, 0.2)
    alone = [
        prefill_attention(call.rows(slice(row, row + 1), slice(pad, None)), start[:1], sliding_window, config=SMALL)
        for row, pad in enumerate(pads.tolist())
    ]
    out, lse = prefill_attention(call, pads, sliding_window, config=SMALL)
    for row, pad in enumerate(pads.tolist()):
        assert torch.equal(out[row, :, pad:], alone[row][0][0])
        assert torch.equal(lse[row, :, pad:], alone[row][1][0])


def test_equal_scores_average_the_values() -> None:
    q, k, v, start, _ = Case(50, 64).tensors()
    out, lse = prefill_attention(Attention(q, torch.zeros_like(k), v, 1.0), start)
    count = torch.arange(1, 51, dtype=torch.float64)
    rounding = EPS * (count**0.5 + 4)
    v = v.cpu().double().expand(out.shape)
    mean, size = (x.cumsum(2) / count[:, None] for x in (v, v.abs()))
    assert_rounded("out", out, Exact(mean, rounding[:, None] * size))
    assert_rounded("lse", lse, Exact(count.log().expand(lse.shape), rounding.expand(lse.shape)))


def test_large_logits_do_not_overflow() -> None:
    case = Case(40, 64, dtype=torch.float16)
    q, k, v, start, _ = case.tensors()
    out, lse = prefill_attention(Attention(q * 30, k * 30, v, 1.0), start)
    expected_out, expected_lse = exact(q * 30, k * 30, v, start, 1.0, case)
    assert_rounded("out", out, expected_out)
    assert_rounded("lse", lse, expected_lse)


@pytest.mark.parametrize("start_dtype", [torch.int32, torch.int64])
def test_any_strides_and_the_layout_of_the_output(start_dtype: torch.dtype) -> None:
    q, k, v, start, _ = Case(37, 64, heads=4, kv_heads=2, starts=(3, 0)).tensors()
    views = []
    for x in (q, k, v):
        wide = torch.randn(2, 9, 80, 200, device=DEVICE)
        views.append(wide[:, 1 : 1 + x.shape[1], ::2][:, :, 2:39, 5:69].copy_(x))
        assert not views[-1].is_contiguous()
    out, lse = prefill_attention(Attention(*views, 0.125), start.to(start_dtype))
    expected_out, expected_lse = prefill_attention(Attention(q, k, v, 0.125), start)
    assert torch.equal(out, expected_out)
    assert torch.equal(lse, expected_lse)
    assert out.transpose(1, 2).is_contiguous()
    assert lse.is_contiguous()


def broken(**changed: object) -> dict[str, object]:
    q, k, v, start, _ = Case(8, 16).tensors()
    given = {"q": q, "k": k, "v": v, "scale": 1.0, "start": start, **changed}
    call = Attention(**{name: given.pop(name) for name in Attention._fields if name in given})  # type: ignore[arg-type]
    return {"call": call, **given}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"k": torch.zeros(1, 1, 9, 16)}, "q has 8 rows: must be 9"),
        ({"k": torch.zeros(1, 1, 8, 32)}, r"k is torch.float32 \[1, 1, 8, 32\]: expected .* \[1, 1, 8, 16\]"),
        ({"v": torch.zeros(1, 2, 8, 16)}, "v is"),
        (
            {"q": torch.zeros(1, 3, 8, 16), "k": torch.zeros(1, 2, 8, 16)},
            "q has 3 heads: must be a multiple of",
        ),
        ({"q": torch.zeros(1, 2, 8, 16, dtype=torch.float64)}, "q has dtype torch.float64"),
        ({"k": torch.zeros(1, 1, 8, 16, dtype=torch.float16)}, "k is torch.float16"),
        ({"k": torch.zeros(1, 1, 16, 8, device=DEVICE).mT}, r"k has strides \(.*, 8\): the last must be 1"),
        ({"k": torch.zeros(1, 1, 8, 16, device="meta")}, "k is on meta"),
        ({"v": torch.zeros(1, 1, 8, 257)}, r"v has head dim 257: must be in 1\.\.256"),
        ({"start": torch.zeros(2, dtype=torch.int64)}, r"start is torch.int64 \[2\]: expected torch.int64 \[1\]"),
        ({"start": torch.zeros(1, dtype=torch.int64, device="meta")}, "start is on meta"),
        ({"start": torch.zeros(1)}, "start has dtype torch.float32"),
        ({"sinks": torch.zeros(3)}, r"sinks is torch.float32 \[3\]: expected torch.float32 \[2\]"),
        ({"sinks": torch.zeros(2, 3, device=DEVICE)[:, 0]}, r"sinks has strides \(3,\): must be contiguous"),
        ({"sliding_window": 0}, "sliding_window=0: must be at least 1"),
    ],
)
def test_bad_input_is_refused_by_name_and_value(changed: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        prefill_attention(**broken(**changed))  # type: ignore[arg-type]


def varlen_attention(q, k, v, bounds_q, bounds_k, max_q, max_k, dropout, causal, debug, **options):  # type: ignore[no-untyped-def]
    """What ``aten::_flash_attention_forward`` computes, one packed sequence after another."""
    assert torch.equal(bounds_q, bounds_k)
    assert bounds_q.dtype == torch.int32
    assert (dropout, causal, debug) == (0.0, True, False)
    out, lse = torch.zeros_like(q), torch.full((q.shape[1], q.shape[0]), float("nan"))
    for first, last in zip(bounds_q[:-1].tolist(), bounds_q[1:].tolist(), strict=True):
        assert last - first <= max_q == max_k
        rows = torch.arange(last - first)
        seen = rows[None] <= rows[:, None]
        if options["window_size_left"] is not None:
            assert options["window_size_right"] == 0
            seen &= rows[:, None] - rows[None] <= options["window_size_left"]
        each = [x[first:last].float().transpose(0, 1) for x in (q, k, v)]
        group = q.shape[1] // k.shape[1]
        each[1:] = [x.repeat_interleave(group, 0) for x in each[1:]]
        out[first:last] = F.scaled_dot_product_attention(*each, attn_mask=seen, scale=options["scale"]).transpose(0, 1)
        logits = (each[0] @ each[1].mT * options["scale"]).masked_fill(~seen, float("-inf"))
        lse[:, first:last] = logits.logsumexp(2)
    return out, lse, None, None, None


@pytest.mark.skipif(DEVICE != "cpu", reason="the operator of torch runs on CUDA: see the next test but one")
@pytest.mark.parametrize("sliding_window", [None, 7])
def test_flash_attention_gets_the_padding_as_sequences_of_their_own(
    sliding_window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(40, 64, heads=4, kv_heads=2, starts=(0, 11, 39), dtype=torch.float16, sliding_window=sliding_window)
    q, k, v, start, _ = case.tensors()
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", varlen_attention)
    out, lse = flash_attention_varlen(q, k, v, start, 0.125, sliding_window)
    expected_out, expected_lse = exact(q, k, v, start, 0.125, case)
    assert_rounded("out", out, expected_out)
    assert_rounded("lse", lse, expected_lse)
    assert out.transpose(1, 2).is_contiguous()
    assert lse.is_contiguous()


@pytest.mark.skipif(DEVICE != "cpu", reason="the operator of torch runs on CUDA")
@pytest.mark.parametrize("rows", [1, 2])
def test_flash_attention_of_queries_stored_by_head_is_stored_by_token(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(40, 64, heads=4, kv_heads=2, starts=(3, 0)[:rows], dtype=torch.float16)
    q, k, v, start, _ = case.tensors()
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", varlen_attention)
    expected, _ = flash_attention_varlen(q, k, v, start, 0.125)
    out, lse = flash_attention_varlen(q.contiguous(), k.contiguous(), v.contiguous(), start, 0.125)
    assert torch.equal(out, expected)
    assert out.transpose(1, 2).is_contiguous()
    assert lse.is_contiguous()


@pytest.mark.parametrize("sliding_window", [None, 7])
def test_flash_attention_fits_the_schema_of_torch(sliding_window: int | None) -> None:
    q, k, v = (torch.empty(2, 40, heads, 64, dtype=torch.float16, device="meta") for heads in (4, 2, 2))
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out, lse = flash_attention_varlen(q, k, v, torch.empty(2, dtype=torch.int64, device="meta"), 0.125, sliding_window)
    assert (out.shape, out.dtype) == ((2, 4, 40, 64), torch.float16)
    assert (lse.shape, lse.dtype) == ((2, 4, 40), torch.float32)


@pytest.fixture
def ampere(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine with a GPU of compute capability 8.0 and a torch that has FlashAttention."""
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))


def taken(
    tokens: int = 9, dim: int = 64, dv: int = 64, dtype: torch.dtype = torch.float16, storage_order: str = "cuda:0"
) -> bool:
    with FakeTensorMode():
        q, v = (torch.empty(1, 4, tokens, size, dtype=dtype, device=storage_order) for size in (dim, dv))
        return flash_takes(q, v)


@pytest.mark.usefixtures("ampere")
@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, True),
        ({"tokens": 2, "dtype": torch.bfloat16, "dim": 40, "dv": 40}, True),
        ({"tokens": 1}, False),
        ({"dtype": torch.float32}, False),
        ({"dv": 128}, False),
        ({"dim": 100, "dv": 100}, False),
        ({"storage_order": "cpu"}, False),
    ],
    ids=str,
)
def test_what_flash_attention_takes(changed: dict[str, Any], expected: bool) -> None:
    assert taken(**changed) is expected


@pytest.mark.usefixtures("ampere")
def test_flash_attention_needs_a_gpu_and_a_torch_that_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as older:
        older.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
        assert not taken()
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: False)
    assert not taken()


@pytest.mark.gpu
@pytest.mark.parametrize("sliding_window", [None, 7, 64])
def test_flash_attention_is_the_kernel_on_a_gpu(sliding_window: int | None) -> None:
    q, k, v, start, _ = Case(300, 128, heads=8, kv_heads=2, starts=(0, 77), dtype=torch.float16).tensors()
    for flash, ours in zip(
        flash_attention_varlen(q, k, v, start, 0.1, sliding_window),
        prefill_attention(Attention(q, k, v, 0.1), start, sliding_window),
        strict=True,
    ):
        torch.testing.assert_close(flash, ours, atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (Case(8, 64), "q has dtype torch.float32: FlashAttention takes"),
        (Case(8, 64, dv=32, dtype=torch.float16), "D=64, Dv=32"),
        (Case(8, 100, dtype=torch.float16), "D=100, Dv=100"),
    ],
    ids=str,
)
def test_flash_attention_refuses_what_it_cannot_take(case: Case, message: str) -> None:
    q, k, v, start, _ = case.tensors()
    with pytest.raises(ValueError, match=message):
        flash_attention_varlen(q, k, v, start, 1.0)
