"""Window statistics on Triton's interpreter, and those of `Observation`, against attention in double precision."""

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from triton import Config

from pairwise import quick

pytest.importorskip("triton")

from kvpass.kernels.window_statistics import column_sums, window_statistics
from kvpass.operands import Attention
from kvpass.ops.cuda import KernelObservation
from kvpass.policies.observation import Observation
from numeric_checks import EPS, Exact, PromptCase, assert_rounded, exact_attention, hidden_in_prompt, strided

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")  # in rows that are never stored

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SMALL = Config({"BLOCK_K": 16, "BLOCK_R": 16}, 4, 1)
WIDE = Config({"BLOCK_K": 64, "BLOCK_R": 32}, 4, 1)
LARGE = Config({"BLOCK_K": 256, "BLOCK_R": 32}, 4, 1)
SPREAD = ("mean", "variance", "entropy")


@dataclass(frozen=True)
class Case(PromptCase):
    window: int = 0
    rows: int = 0
    config: Config | None = None


CASES = [
    Case(1, 64, window=8, rows=1),
    Case(33, 64, window=1, heads=8, starts=(0, 5), rows=40),
    Case(33, 64, window=0, heads=4, kv_heads=2, starts=(0, 5)),
    Case(61, 80, window=32, heads=4, kv_heads=4, starts=(60, 31), rows=40),
    Case(61, 100, window=8, heads=4, dv=64, starts=(40,), config=SMALL),
    Case(70, 64, window=50, starts=(0, 25), rows=33, config=WIDE),
    Case(61, 96, window=8, starts=(0, 40), dtype=torch.float16, softcap=20.0, sinks=True, rows=64),
    Case(61, 64, window=40, heads=4, kv_heads=2, starts=(0, 33), sinks=True, rows=64, config=WIDE),
    Case(17, 576, window=4, heads=3, dv=512, starts=(0, 9), softcap=20.0, rows=17),
    Case(9, 576, window=2, heads=16, dv=512, starts=(3,), dtype=torch.float16, rows=9),
]
MORE = [
    Case(97, 64, window=32, heads=8, starts=(3, 80), rows=97, config=WIDE),
    Case(65, 128, window=200, heads=1, starts=(0, 20), rows=200),
    Case(513, 64, window=32, heads=1, rows=30),
    Case(1025, 64, window=32, heads=1, rows=30, config=LARGE),
    Case(40, 192, window=8, dv=128, rows=20),
    Case(40, 256, window=8, heads=1, rows=20),
    Case(40, 24, window=17, dv=40, starts=(39, 7), rows=5, config=WIDE),
    Case(111, 128, window=32, heads=4, starts=(0, 100), dtype=torch.float16, rows=111),
    Case(81, 64, window=32, heads=4, kv_heads=2, starts=(0, 43), softcap=2.0, rows=64, config=SMALL),
    Case(9, 576, window=4, heads=128, dv=512, starts=(0, 3), dtype=torch.float16, rows=9),
    Case(40, 288, window=8, heads=3, dv=256, starts=(11,), dtype=torch.float16, rows=20, config=WIDE),
]


def everything(q, k, v, start, lse, scale, window, *, rows=0, softcap=None, config=None):  # type: ignore[no-untyped-def]
    """All statistics by name; ``column_sum`` over the last ``rows`` rows, where there are any."""
    call = Attention(q, k, v, scale, softcap)
    found = dict(zip(SPREAD, window_statistics(call, start, lse, window, spread=True, config=config), strict=True))
    sums = column_sums(call, start, lse, rows, config=config) if rows else None
    return SimpleNamespace(**found, column_sum=sums)


def true_lse(call: Attention, start: Tensor) -> Tensor:
    """Log-sum-exp of every prompt query, not from the kernel under test; NaN in padding, where none may look."""
    column = torch.arange(call.k.shape[2])
    lse = exact_attention(call, hidden_in_prompt(column, column, start)).lse.value.float()
    return lse.masked_fill((column < start.cpu()[:, None])[:, None], torch.nan).to(DEVICE)


def exact_statistics(q: Tensor, k: Tensor, v: Tensor, case: Case, sinks: Tensor | None) -> dict[str, Exact]:
    """By name, of one row of a batch without its padding; an error of the weights goes into each by its derivative."""
    n = k.shape[2]
    hidden = torch.ones(n, n, dtype=torch.bool).triu(1)
    attention = exact_attention(Attention(q, k, v, case.d**-0.5, case.softcap, sinks), hidden)

    def last(rows: int) -> tuple[Tensor, Tensor]:
        return (x[0, :, max(n - rows, 0) :] for x in (attention.weights.value, attention.weights.error))  # type: ignore[return-value]

    a, error = last(max(case.window, 1))
    rows = a.shape[1]
    adding = EPS * rows**0.5
    mean = a.mean(1)
    away = a - mean[:, None]
    # a mean of few equal numbers may be off by a rounding of its own
    error_of_away = error + error.mean(1, keepdim=True) + adding * mean[:, None]
    logarithm = (a + 1e-10).log()
    norm = v[0].cpu().double().abs().sum(-1)
    found = {
        "mean": Exact(mean, error.mean(1) + adding * mean),
        "variance": Exact(
            (away**2).sum(1) / max(rows - 1, 1),
            ((2 * away.abs() + error_of_away) * error_of_away + adding * away**2).sum(1) / max(rows - 1, 1),
        ),
        "entropy": Exact(
            -(a * logarithm).sum(1), ((logarithm + 1).abs() * error + (adding + EPS) * (a * logarithm).abs()).sum(1)
        ),
        "value_norm": Exact(norm, EPS * v.shape[3] ** 0.5 * norm),
    }
    if case.rows:
        a, error = last(case.rows)
        total = a.sum(1)
        found["column_sum"] = Exact(total, error.sum(1) + EPS * a.shape[1] ** 0.5 * total)
    return found


def compare_all(statistics: SimpleNamespace, q: Tensor, k: Tensor, v: Tensor, case: Case, sinks: Tensor | None) -> None:
    """Both the kernels' and the observation's; zeros in padding."""
    for row, first in enumerate(case.starts):
        live = (slice(row, row + 1), slice(None), slice(first, None))
        window = min(case.window, case.n - first)
        obs = Observation(q[live], k[live], v[live], case.d**-0.5, window, 0, 1, case.softcap, sinks)
        exact = exact_statistics(q[live], k[live], v[live], case, sinks)
        of_kernels = KernelObservation(**vars(obs), site=None, rows=slice(1), column=0)  # type: ignore[arg-type]
        for each in (obs, of_kernels):
            assert_rounded("value_norm", each.value_norm[0], exact["value_norm"])
        for name in exact.keys() - {"value_norm"}:
            expected, found = exact[name], getattr(statistics, name)[row]
            assert found.dtype == torch.float32
            assert not found[..., :first].any(), name
            assert_rounded(name, found[..., first:], expected)
            observed = obs.recent_sum(case.rows) if name == "column_sum" else getattr(obs, name)
            assert_rounded(f"{name} of the observation", observed[0], expected)


@pytest.mark.parametrize("case", quick([*CASES, *MORE], CASES), ids=str)
def test_every_statistic_is_that_of_the_attention(case):
    q, k, v, start, sinks = case.tensors()
    scale = case.d**-0.5
    lse = true_lse(Attention(q, k, v, scale, case.softcap, sinks), start)
    last = slice(case.n - min(max(case.window, case.rows, 1), case.n), None)
    given = {"softcap": case.softcap, "rows": case.rows, "config": case.config if DEVICE == "cpu" else None}
    statistics = everything(q[:, :, last], k, v, start, lse[:, :, last], scale, case.window, **given)
    compare_all(statistics, q, k, v, case, sinks)


def test_variance_of_nearly_equal_rows_does_not_cancel():
    """Every row puts all its attention on column 0: the mean of squares less the square of the mean would be noise."""
    case = Case(100, 64, window=64)
    _, k, _, start, _ = case.tensors()
    k, q = torch.zeros_like(k), torch.zeros(1, 2, 100, 64, device=DEVICE)
    k[:, :, 0, 0] = 1.0
    q[:, :, :, 0] = 14.0 + torch.rand(1, 2, 100, device=DEVICE) * 1e-2
    lse = true_lse(Attention(q, k, k, 1.0), start)
    a = (q[:, :, 36:, 0].double() - lse[:, :, 36:].double()).exp()
    _, variance, _ = window_statistics(Attention(q, k, k, 1.0), start, lse, 64, spread=True, config=SMALL)
    torch.testing.assert_close(variance[:, :, 0].double(), a.var(2, unbiased=True), atol=0.0, rtol=0.1)


def test_contract_4_padding_changes_no_bit():
    case = Case(51, 64, window=12, heads=2, starts=(37, 8), rows=51)
    q, k, v, start, _ = case.tensors()
    lse = true_lse(Attention(q, k, v, 0.2), start)
    both = everything(q, k, v, start, lse, 0.2, 12, rows=51, config=SMALL)
    zero = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    for row, first in enumerate(case.starts):
        live = (slice(row, row + 1), slice(None), slice(first, None))
        alone = everything(q[live], k[live], v[live], zero, lse[live], 0.2, 12, rows=51, config=SMALL)
        for name in ("mean", "variance", "entropy", "column_sum"):
            assert torch.equal(getattr(both, name)[row, :, first:], getattr(alone, name)[0]), name


def test_only_what_is_asked_for_is_computed():
    q, k, v, start, _ = Case(40, 64, window=8, starts=(0, 3)).tensors()
    lse = true_lse(call := Attention(q, k, v, 0.1), start)
    (alone,), (mean, *_) = (window_statistics(call, start, lse, 8, spread=spread) for spread in (False, True))
    assert torch.equal(alone, mean)


def test_any_strides():
    q, k, v, start, _ = Case(37, 64, window=8, heads=4, kv_heads=2, starts=(3, 0), rows=37).tensors()
    lse = true_lse(Attention(q, k, v, 0.1), start)
    views = [strided(x) for x in (q, k, v)]
    assert not any(x.is_contiguous() for x in views)
    wide_lse = torch.randn(2, 6, 50, device=DEVICE)[:, 1:5, 7:44].copy_(lse)
    found = everything(*views, start.int(), wide_lse, 0.1, 8, rows=37)
    expected = everything(q, k, v, start, lse, 0.1, 8, rows=37)
    for name in ("mean", "variance", "entropy", "column_sum"):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"window": -1}, "window=-1: must be at least 0"),
        ({"window": 5}, r"q has 4 rows: must be in 5\.\.8"),
        ({"lse": torch.zeros(1, 2, 8)}, r"lse is torch.float32 \(1, 2, 8\)"),
        ({"lse": torch.zeros(1, 2, 4, dtype=torch.float64)}, "lse is torch.float64"),
        ({"lse": torch.zeros(1, 4, 2).mT}, "contiguous in the last dim"),
        ({"k": torch.zeros(1, 1, 16, 8).mT}, r"k has strides \(.*, 8\): the last must be 1"),
    ],
)
def test_bad_input_is_refused_by_name_and_value(changed, message):
    q, k, v, start, _ = Case(8, 16, window=4).tensors()
    given = {"k": k, "start": start, "lse": torch.zeros(1, 2, 4), "window": 4, **changed}
    call = Attention(q[:, :, 4:], given.pop("k"), v, 1.0)
    with pytest.raises(ValueError, match=message):
        window_statistics(call, **given)  # type: ignore[arg-type]


def test_column_sums_refuse_rows_they_do_not_have():
    q, k, v, start, _ = Case(8, 16, window=4).tensors()
    lse, call = torch.zeros(1, 2, 4), Attention(q[:, :, 4:], k, v, 1.0)
    with pytest.raises(ValueError, match="rows=0: must be at least 1"):
        column_sums(call, start, lse, 0)
    with pytest.raises(ValueError, match=r"q has 4 rows: must be in 8\.\.8"):
        column_sums(call, start, lse, 100)
