"""Attention of a prompt, the choice of its kernel, and the eager reference, against attention in double precision.

Triton's kernel runs on the interpreter. For the operators of torch that need a GPU stands that of its CPU, which takes
as many KV heads as query heads and no sliding window.
"""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from triton import Config

from pairwise import each_value, quick

pytest.importorskip("triton")

from kvpass.kernels import prompt_attention
from kvpass.kernels.prefill_attention import prefill_attention
from kvpass.kernels.prompt_attention import Machine, attend, choose
from kvpass.operands import Attention
from kvpass.ops.cuda import attend_prompt
from numeric_checks import Exact, PromptCase, assert_rounded, exact_attention, hidden_in_prompt, strided

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")  # in rows that are never stored

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SMALL = Config({"BLOCK_Q": 32, "BLOCK_K": 16}, 4, 1)
UNEVEN = Config({"BLOCK_Q": 16, "BLOCK_K": 64}, 4, 1)
LARGE = Config({"BLOCK_Q": 256, "BLOCK_K": 256}, 4, 1)


@dataclass(frozen=True)
class Case(PromptCase):
    sliding_window: int | None = None
    config: Config | None = None


CASES = [
    Case(1, 64),
    Case(33, 64, heads=8, starts=(0, 5)),
    Case(61, 80, heads=4, kv_heads=4, starts=(60, 31)),
    Case(61, 100, heads=4, kv_heads=1, config=SMALL),
    Case(65, 24, dv=40, starts=(64, 3), config=SMALL),
    Case(33, 96, dtype=torch.float16, softcap=20.0, sinks=True),
    Case(61, 64, starts=(0, 9), sliding_window=1, config=SMALL),
    Case(61, 64, heads=4, kv_heads=2, starts=(0, 33), sinks=True, sliding_window=17, config=UNEVEN),
    Case(61, 80, heads=4, starts=(0, 9), sliding_window=40, softcap=5.0, sinks=True),
    Case(19, 576, heads=3, dv=512, starts=(0, 11), softcap=20.0),
    Case(20, 576, heads=4, dv=512, starts=(0, 3), dtype=torch.float16),
]
MORE = [
    Case(513, 128, heads=1),
    Case(1025, 64, heads=1, config=LARGE),
    Case(130, 192, dv=128, starts=(1,)),
    Case(65, 256),
    Case(111, 64, starts=(0, 17), config=UNEVEN),
    Case(111, 128, heads=4, starts=(0, 40), dtype=torch.float16),
    Case(111, 64, heads=4, kv_heads=2, starts=(0, 63), softcap=2.0),
    Case(111, 64, starts=(0, 9), sliding_window=16, config=SMALL),
    Case(111, 64, starts=(90, 9), sliding_window=500),
    Case(65, 288, dv=256, starts=(0, 40), sinks=True, config=SMALL),
]


def exact(call: Attention, start: Tensor, sliding_window: int | None = None) -> list[Exact]:
    """Output and log-sum-exp; zeros and -inf in padding."""
    column = torch.arange(call.k.shape[2])
    hidden = hidden_in_prompt(column, column, start, sliding_window)
    found = exact_attention(call, hidden, rounds_weights=call.q.dtype != torch.float32)
    padding = (column < start.cpu()[:, None])[:, None]
    return [found.out, Exact(found.lse.value.masked_fill(padding, float("-inf")), found.lse.error)]


def attended(
    call: Attention, start: Tensor, sliding_window: int | None = None, config: Config | None = None
) -> tuple[Tensor, Tensor]:
    """By Triton's kernel, also on a machine that has others."""

    def triton(call: Attention, sliding_window: int | None) -> tuple[Tensor, Tensor]:
        return prefill_attention(call, sliding_window, config)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prompt_attention, "_KERNELS", dict.fromkeys(prompt_attention._KERNELS, triton))
        return attend_prompt(call, start.cpu(), sliding_window)


def check(found, expected, dtype):
    """Output and log-sum-exp but for rounding."""
    assert found[0].dtype == dtype and found[1].dtype == torch.float32
    for name, x, exactly in zip(("out", "lse"), found, expected, strict=True):
        assert_rounded(name, x, exactly)


@pytest.mark.parametrize("case", quick([*CASES, *MORE], CASES), ids=str)
def test_output_and_lse_are_those_of_a_masked_softmax(case):
    (call, start), config = case.call(), case.config if DEVICE == "cpu" else None
    found = attended(call, start, case.sliding_window, config)
    check(found, exact(call, start, case.sliding_window), case.dtype)


@pytest.mark.parametrize("sliding_window", [None, 20])
def test_contract_4_padding_changes_no_bit(sliding_window):
    q, k, v, start, _ = Case(51, 64, starts=(0, 0)).tensors()
    pads = torch.tensor([37, 8], device=DEVICE)
    call = Attention(q, k, v, 0.2)
    alone = [
        attended(call.rows(slice(row, row + 1), slice(pad, None)), start[:1], sliding_window, SMALL)
        for row, pad in enumerate(pads.tolist())
    ]
    together = attended(call, pads, sliding_window, SMALL)
    for row, pad in enumerate(pads.tolist()):
        assert all(torch.equal(x[row, :, pad:], own[0]) for x, own in zip(together, alone[row], strict=True))


def test_large_logits_do_not_overflow():
    q, k, v, start, _ = Case(40, 64, dtype=torch.float16).tensors()
    call = Attention(q * 30, k * 30, v, 1.0)
    check(attended(call, start), exact(call, start), q.dtype)


def test_any_strides_and_the_layout_of_the_output():
    q, k, v, start, _ = Case(37, 64, heads=4, kv_heads=2, starts=(3, 0)).tensors()
    views = [strided(x) for x in (q, k, v)]
    assert not any(x.is_contiguous() for x in views)
    found, expected = (attended(Attention(*x, 0.125), start) for x in (views, (q, k, v)))
    assert all(map(torch.equal, found, expected))
    in_chunks = attend_prompt(Attention(q, k, v, 0.125), torch.zeros(2, dtype=torch.int64), 16, chunked=True)
    for out, lse in (found, in_chunks):
        assert out.transpose(1, 2).is_contiguous() and lse.is_contiguous()


def broken(**changed: object) -> dict[str, object]:
    q, k, v, _, _ = Case(8, 16).tensors()
    given = {"q": q, "k": k, "v": v, "scale": 1.0, **changed}
    call = Attention(**{name: given.pop(name) for name in Attention._fields if name in given})  # type: ignore[arg-type]
    return {"call": call, **given}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"k": torch.zeros(1, 1, 9, 16)}, r"v is torch.float32 \[1, 1, 8, 16\]: expected .* \[1, 1, 9, 16\]"),
        ({"q": torch.zeros(1, 1, 9, 16)}, r"q has 9 rows: must be in 1\.\.8"),
        ({"k": torch.zeros(1, 1, 8, 32)}, r"k is torch.float32 \[1, 1, 8, 32\]: expected .* \[1, 1, 8, 16\]"),
        ({"q": torch.zeros(1, 3, 8, 16), "k": torch.zeros(1, 2, 8, 16)}, "q has 3 heads: must be a multiple of"),
        ({"q": torch.zeros(1, 2, 8, 16, dtype=torch.float64)}, "q has dtype torch.float64"),
        ({"k": torch.zeros(1, 1, 16, 8, device=DEVICE).mT}, r"k has strides \(.*, 8\): the last must be 1"),
        ({"k": torch.zeros(1, 1, 8, 16, device="meta")}, "k is on meta"),
        ({"v": torch.zeros(1, 1, 8, 257)}, r"values have head dim 257: kernels on CUDA take 1\.\.256, and up to 512"),
        ({"q": torch.zeros(1, 2, 8, 592), "k": torch.zeros(1, 1, 8, 592)}, "keys have head dim 592: kernels on CUDA"),
        ({"sinks": torch.zeros(3)}, r"sinks is torch.float32 \[3\]: expected torch.float32 \[2\]"),
        ({"sliding_window": 0}, "sliding_window=0: must be at least 1"),
    ],
)
def test_bad_input_is_refused_by_name_and_value(changed, message):
    with pytest.raises(ValueError, match=message):
        attend(**broken(**changed))  # type: ignore[arg-type]


HOPPER = Machine((9, 0), 91900, flash=True)


def wanted_machine(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One on which the kernel of this name takes a half-precision prompt of any length."""
    machine = HOPPER if name == "cudnn" else HOPPER._replace(cudnn=0, flash=name == "flash")
    monkeypatch.setattr(prompt_attention, "CUDNN_TOKENS", 2)
    if DEVICE == "cpu":
        monkeypatch.setattr(Machine, "of", lambda device: machine)
    else:
        here = Machine.of
        monkeypatch.setattr(Machine, "of", lambda device: machine._replace(capability=here(device).capability))


def flash_for_cpu(
    q: Tensor, k: Tensor, v: Tensor, scale: float, reach: int | None = None, first: int = 0, causal: bool = True
) -> tuple[Tensor, Tensor]:
    """By torch's own operator, as SDPA calls it on a CPU; in fp32, since in half precision it rounds the logits.

    Args:
        first: column of the first query. reach: how far it sees back; None: to the beginning.
    """
    dtype, group = q.dtype, q.shape[1] // k.shape[1]
    q, k, v = q.float(), k.float().repeat_interleave(group, 1), v.float().repeat_interleave(group, 1)
    distance = first + torch.arange(q.shape[2])[:, None] - torch.arange(k.shape[2])
    hidden = (distance < 0) | (distance > (k.shape[2] if reach is None else reach))
    mask = torch.zeros(distance.shape, dtype=q.dtype).masked_fill(hidden & causal, -torch.inf)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, attn_mask=mask, scale=scale)
    return out.to(dtype), lse.contiguous()  # as those of the GPU come


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """The operators that need a GPU, computed by torch's operator for the CPU; name and tokens of each call."""
    calls: list[tuple[str, int]] = []

    def cudnn(q, k, v, bias, with_lse, dropout, causal, debug, *, scale):  # type: ignore[no-untyped-def]
        assert (bias, with_lse, dropout, debug) == (None, True, 0.0, False)
        calls.append(("cudnn", q.shape[2]))
        out, lse = flash_for_cpu(q, k, v, scale, causal=causal)
        laid_out = torch.empty_like(q.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[3]).transpose(1, 2))
        return laid_out.copy_(out), lse[..., None], None, None, q.shape[2], k.shape[2], None, None, None

    def flash(q, k, v, bounds_q, bounds_k, rows, columns, dropout, causal, debug, **options):  # type: ignore[no-untyped-def]
        assert (bounds_q, bounds_k, dropout, causal, debug) == (None, None, 0.0, True, False)
        assert (rows, columns) == (q.shape[1], k.shape[1])
        assert options["window_size_right"] == (None if options["window_size_left"] is None else 0)
        calls.append(("flash", rows))
        each = (x.transpose(1, 2) for x in (q, k, v))
        out, lse = flash_for_cpu(*each, options["scale"], options["window_size_left"], columns - rows)
        return out.transpose(1, 2).contiguous(), lse, None, None, None

    if DEVICE == "cpu":
        monkeypatch.setattr(torch.ops.aten, "_scaled_dot_product_cudnn_attention", cudnn)
        monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", flash)
    return calls


LIBRARY_CASES = [
    ("cudnn", Case(129, 64, heads=4, kv_heads=2, dtype=torch.float16)),
    ("cudnn", Case(101, 128, heads=4, starts=(0, 72, 72), dtype=torch.float16)),
    ("flash", Case(70, 80, heads=4, starts=(0, 69, 3), dtype=torch.float16, sliding_window=7)),
    ("cudnn", Case(77, 64, heads=4, kv_heads=2, starts=(0, 13), dtype=torch.bfloat16, sinks=True)),
    ("flash", Case(129, 64, heads=4, kv_heads=2, dtype=torch.bfloat16)),
    ("flash", Case(70, 64, heads=4, starts=(3, 0), dtype=torch.float16, sliding_window=7, sinks=True)),
]
BANDED = {"starts": (0, 80, 40), "sliding_window": 20}
LAST_CASES = [
    *(("triton", Case(129, 64, heads=4, kv_heads=2, **given)) for given in ({"softcap": 3.0}, BANDED)),
    *LIBRARY_CASES[:3],
]


@pytest.mark.usefixtures("stand_ins")
@each_value(named=LAST_CASES, last=[1, 33, 60])
def test_queries_of_the_last_tokens_attend_what_they_do_in_the_whole_prompt(named, last, monkeypatch):
    name, case = named
    if name != "triton":
        wanted_machine(name, monkeypatch)
    call, start = case.call()
    expected = [x.tokens(slice(-last, None)) for x in exact(call, start, case.sliding_window)]
    call = call._replace(q=call.q[:, :, -last:])
    check(attend_prompt(call, start.cpu(), case.sliding_window), expected, case.dtype)


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize(("name", "case"), LIBRARY_CASES, ids=str)
def test_a_kernel_of_a_library_gets_the_rows_without_their_padding(name, case, stand_ins, monkeypatch):
    wanted_machine(name, monkeypatch)
    call, start = case.call()
    out, lse = attend_prompt(call, start.cpu(), case.sliding_window)
    assert out.transpose(1, 2).is_contiguous() and lse.is_contiguous()
    check((out, lse), exact(call, start, case.sliding_window), case.dtype)
    if DEVICE == "cpu":
        assert stand_ins == [(name, case.n - first) for first in dict.fromkeys(case.starts)]


@pytest.mark.parametrize("name", ["cudnn", "flash", "triton"])
def test_without_padding_nothing_is_copied_or_written_again(name, stand_ins, monkeypatch):
    wanted_machine(name, monkeypatch)
    q, k, v, start, _ = Case(40, 64, heads=4, kv_heads=2, starts=(0, 0), dtype=torch.float16).tensors()
    made: list[int] = []

    def kernel(call: Attention, sliding_window: int | None) -> tuple[Tensor, Tensor]:
        out, lse = torch.empty_like(call.q), torch.empty(call.q.shape[:3])
        made.extend((out.data_ptr(), lse.data_ptr()))
        return out, lse

    monkeypatch.setitem(prompt_attention._KERNELS, name, kernel)
    out, lse = attend_prompt(Attention(q, k, v, 0.1), start)
    assert made == [out.data_ptr(), lse.data_ptr()]


@pytest.mark.parametrize("name", ["cudnn", "flash"])
def test_queries_stored_by_head_give_an_output_stored_by_token(name, stand_ins, monkeypatch):
    wanted_machine(name, monkeypatch)
    q, k, v, start, _ = Case(40, 64, heads=4, kv_heads=2, starts=(0,), dtype=torch.float16).tensors()
    expected, _ = attend_prompt(Attention(q, k, v, 0.1), start)
    out, _ = attend_prompt(Attention(q.contiguous(), k.contiguous(), v.contiguous(), 0.1), start)
    assert torch.equal(out, expected) and out.transpose(1, 2).is_contiguous()


@pytest.mark.parametrize(("name", "sliding_window"), [("cudnn", None), ("flash", None), ("flash", 7)])
def test_the_calls_fit_the_schemas_of_torch(name, sliding_window, monkeypatch):
    wanted_machine(name, monkeypatch)
    q, k, v = (torch.empty(2, 40, heads, 64, dtype=torch.float16, device="meta") for heads in (4, 2, 2))
    call = Attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), 0.125)
    out, lse = attend_prompt(call, torch.tensor([3, 0]), sliding_window)
    assert (out.shape, out.dtype) == ((2, 4, 40, 64), torch.float16)
    assert (lse.shape, lse.dtype) == ((2, 4, 40), torch.float32)


AMPERE = HOPPER._replace(capability=(8, 0))
LONG = prompt_attention.CUDNN_TOKENS
HALF, FULL = torch.bfloat16, torch.float32


@pytest.mark.parametrize(
    ("machine", "tokens", "dtype", "dims", "softcap", "sliding_window", "expected"),
    [
        (HOPPER, LONG, HALF, (128, 128), None, None, "cudnn"),
        (HOPPER._replace(capability=(10, 0)), LONG, torch.float16, (64, 72), None, None, "cudnn"),
        (HOPPER, LONG, HALF, (192, 128), None, None, "cudnn"),
        (HOPPER._replace(cudnn=91000), LONG, HALF, (192, 128), None, None, "triton"),
        (HOPPER, LONG - 1, HALF, (128, 128), None, None, "flash"),
        (HOPPER, LONG, HALF, (128, 128), None, 512, "flash"),
        (HOPPER, LONG, HALF, (256, 256), None, None, "flash"),
        (HOPPER, LONG, HALF, (512, 512), None, None, "triton"),
        (HOPPER._replace(cudnn=90000), LONG, HALF, (128, 128), None, None, "flash"),
        (HOPPER._replace(flash_impl="FA3"), LONG, HALF, (128, 128), None, None, "flash"),
        (HOPPER._replace(flash_impl="FA3"), LONG, HALF, (64, 128), None, None, "cudnn"),
        (HOPPER._replace(capability=(12, 0)), LONG, HALF, (128, 128), None, None, "flash"),
        (AMPERE, 1, HALF, (40, 40), None, None, "flash"),
        (AMPERE, LONG, HALF, (192, 128), None, None, "triton"),
        (AMPERE, LONG, HALF, (100, 100), None, None, "triton"),
        (AMPERE._replace(flash=False), LONG, HALF, (128, 128), None, None, "triton"),
        (AMPERE._replace(capability=(7, 5)), LONG, torch.float16, (128, 128), None, None, "triton"),
        (HOPPER, LONG, FULL, (128, 128), None, None, "triton"),
        (HOPPER, LONG, HALF, (256, 256), 50.0, 4096, "triton"),
        (Machine(), LONG, HALF, (128, 128), None, None, "triton"),
    ],
)
def test_the_kernel_of_each_machine_and_shape(machine, tokens, dtype, dims, softcap, sliding_window, expected):
    q, k, v = (
        torch.empty(1, heads, tokens, dim, dtype=dtype, device="meta")
        for heads, dim in ((8, dims[0]), (2, dims[0]), (2, dims[1]))
    )
    sinks = torch.empty(8, device="meta")
    for call in (Attention(q, k, v, 0.1, softcap), Attention(q, k, v, 0.1, softcap, sinks)):
        assert choose(call, sliding_window, machine) == expected


def test_the_switches_of_torch_choose_too(monkeypatch):
    cuda = torch.device("cuda", 0)
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91900)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert Machine.of(cuda) == HOPPER
    assert Machine.of(torch.device("cpu")) == Machine()
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
        assert Machine.of(cuda) == HOPPER._replace(cudnn=0)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.CUDNN_ATTENTION):
        assert Machine.of(cuda) == HOPPER._replace(flash=False)
    monkeypatch.setattr(torch.nn.attention, "current_flash_attention_impl", lambda: "FA3")
    assert Machine.of(cuda) == HOPPER._replace(flash_impl="FA3")
