"""CPU decode attention against attention in float64."""

import ctypes
import itertools
import math
import platform
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor import config as inductor_config
from torch._inductor import cpp_builder

from kvpass.config import EntryFormat
from kvpass.kernels import cpu
from kvpass.operands import BITS, CODES, by_name
from numeric_checks import DecodeCase, decode_case
from pairwise import each_value, pairwise


def run(case: DecodeCase) -> Tensor:
    return cpu.attend_cache(*case.arguments)


def check(case: DecodeCase) -> None:
    case.check(run)


RAGGED = [[37, 0, 5], [1, 130, 16]]


@pytest.fixture
def threads() -> Iterator[None]:
    """More threads than units of work, so that units are cut."""
    count = torch.get_num_threads()
    torch.set_num_threads(5)
    yield
    torch.set_num_threads(count)


@pairwise(
    dtype=[torch.float32, torch.bfloat16, torch.float16],
    group=[1, 2, 4, 8],
    dims=[(32, 32), (64, 128), (80, 64), (128, 80), (20, 7), (8, 50)],
    tokens=[1, 3],
)
def test_equals_exact_attention(dtype, group, dims, tokens):
    given = {"group": group, "dim": dims[0], "value_dim": dims[1], "tokens": tokens, "start": [0, 3]}
    check(decode_case(RAGGED, **given, dtype=dtype))


@each_value(
    entry_format=["rot4", "int8", "fp8", "rot2", "rot3"],  # each with a dtype that other tests take too: same builds
    dtype=[torch.float32, torch.bfloat16, torch.float16],
    group=[1, 2, 4],
    dims=[(32, 32), (80, 64), (24, 8)],
    tokens=[1, 3],
    softcap=[None, 1.5],
)
def test_codes(entry_format, dtype, group, dims, tokens, softcap):
    given = {"group": group, "dim": dims[0], "value_dim": dims[1], "tokens": tokens, "start": [0, 3]}
    check(decode_case(RAGGED, **given, dtype=dtype, softcap=softcap).packed(entry_format))


LONG = {"group": 2, "tokens": 2, "dim": 64, "sinks": True}
LONG_TAIL = {"group": 4, "tokens": 5, "dim": 64, "slots": 4000, "used": 3995, "start": [1, 700]}
EVEN = [[37, 0, 5], [64, 130, 31]]
OF_BITS = {"dim": 72, "value_dim": 96, "tokens": 2, "start": [0, 3]}
IN_KEYS = {"group": 8, "dim": 72, "value_dim": 64, "start": [0, 3], "in_keys": True}
CASES: dict[str, tuple[list[list[int]], dict[str, Any], EntryFormat]] = {
    "one long segment": ([[9000]], LONG, "model"),
    "a short one between long ones": ([[3000, 10, 5000]], {**LONG, "dtype": torch.bfloat16}, "model"),
    "long and empty ones": ([[0, 4000], [4000, 0]], {**LONG, "dtype": torch.float16, "start": [0, 1]}, "model"),
    "many segments": ([[1000] * 8] * 2, {**LONG, "start": [0, 1]}, "model"),
    "a tail longer than the pool": ([[3, 0], [0, 7]], LONG_TAIL, "model"),
    "values in keys, half": ([[37], [130]], {**IN_KEYS, "tokens": 3, "dtype": torch.bfloat16}, "model"),
    "int8 of values in keys": ([[37], [130]], {**IN_KEYS, "tokens": 3}, "int8"),
    "fp8 of values in keys": ([[37], [130]], IN_KEYS, "fp8"),
    "rot4 of values in keys": ([[37], [130]], {**IN_KEYS, "tokens": 3}, "rot4"),
    "rot4, codes across bytes": (EVEN, {**OF_BITS, "group": 1}, "rot4"),
    "rot3, codes across bytes": (EVEN, {**OF_BITS, "group": 4}, "rot3"),
    "rot2, codes across bytes": (EVEN, {**OF_BITS, "group": 7}, "rot2"),
    "long segments of codes": ([[3000, 10, 5001], [0, 4000, 33]], {**LONG, "start": [0, 1]}, "rot4"),
}


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("name", CASES)
def test_lengths_scores_and_codes_cut_between_threads(name):
    """Of rotated keys, values that are stored in them are no part: whole keys are attended, and rotated back."""
    lengths, given, entry_format = CASES[name]
    check(decode_case(lengths, **given).packed(entry_format))


def test_nan_query_is_not_hidden():
    case = decode_case([[40, 40]], group=1)
    case.call.q[0, 1, 0, 3] = math.nan
    out = run(case)
    assert out[0, 1].isnan().all()
    assert out[0, 0].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_value_survives_and_means_round_to_even(dtype):
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    case = decode_case([[0] * 8], group=1, value_dim=2**13, used=0, slots=1, dtype=dtype)
    v = every.view(1, 8, 1, -1)
    torch.testing.assert_close(run(case.changed(v=v)), v, rtol=0, atol=0, equal_nan=True)

    finite = every[every.isfinite()]
    first, second = finite[:32000], finite[torch.randperm(len(finite), generator=torch.manual_seed(0))[:32000]]
    case = decode_case([[0]], group=1, value_dim=32000, used=1, slots=2, dtype=dtype)
    case.call.q.zero_()
    case.held.tail.v[1, 0, 0, 0] = first
    mean = ((first.float() + second.float()) / 2).to(dtype)
    torch.testing.assert_close(run(case.changed(v=second.view(1, 1, 1, -1))).flatten(), mean, rtol=0, atol=0)


def refused(case, message):
    """The case must be refused, and nothing written."""
    before = [tensor.clone() for tensor in case.buffers]
    with pytest.raises(ValueError, match=message):
        run(case)
    for after, original in zip(case.buffers, before, strict=True):
        assert torch.equal(*(x.contiguous().view(torch.uint8) for x in (after, original)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tail_used": torch.tensor(23)}, r"tail_used=23.*2 entries.*24 slots"),
        ({"tail_start": torch.tensor([0, 6])}, r"tail_start\[1\]=6: must be in 0..5"),
        ({"layer": 3}, "layer=3: must be in 0..2"),
        ({"sinks": torch.zeros(3)}, r"sinks has shape \(3,\)"),
        ({"q": torch.zeros(2, 6, 2, 32, device="meta")}, "on the CPU"),
    ],
)
def test_bad_arguments_change_nothing(change, message):
    case = decode_case(RAGGED, group=2, tokens=2)
    refused(case.changed(**change), message)
    check(case)


@pytest.mark.parametrize(("row", "place", "value"), [(0, 4, 150), (1, 6, 10**6)], ids=["falling", "outside"])
def test_offsets_outside_the_pool_change_nothing(row, place, value):
    case = decode_case(RAGGED)
    case.held.offsets[row, place] = value
    refused(case, "offsets of row")


def test_unknown_dtype():
    with pytest.raises(ValueError, match=r"torch.float64"):
        run(decode_case(RAGGED, dtype=torch.float64))


def test_empty_batch():
    case = decode_case(RAGGED, group=2)
    none = {name: getattr(case.call, name)[:0] for name in "qkv"}
    none |= {name: by_name(case.held)[name][:0] for name in ("pool_k", "pool_v", "offsets", "tail_start")}
    none |= {name: by_name(case.held)[name][:, :0] for name in ("tail_k", "tail_v")}
    assert run(case.changed(**none)).shape == (0, 6, 1, 32)


def test_no_compiler(monkeypatch):
    monkeypatch.setattr(cpu, "attend_function", cpu.attend_function.__wrapped__)
    cpp_builder.cpp_compiler_search.cache_clear()
    try:
        with (
            inductor_config.patch({"cpp.cxx": ("no-such-compiler",)}),
            pytest.raises(RuntimeError, match=r'g\+\+.*backend="eager"'),
        ):
            run(decode_case(RAGGED))
    finally:
        cpp_builder.cpp_compiler_search.cache_clear()


@pytest.mark.skipif(platform.machine() != "x86_64", reason="instruction sets of x86-64")
@pytest.mark.parametrize(
    ("arch", "dtype", "entry_format"),
    [
        ("x86-64-v2", torch.float16, "model"),
        pytest.param("x86-64-v3", torch.bfloat16, "model", marks=pytest.mark.exhaustive),
        pytest.param("x86-64-v2", torch.float32, "fp8", marks=pytest.mark.exhaustive),
        *(
            pytest.param(arch, torch.float32, entry_format, marks=pytest.mark.exhaustive)
            for arch, entry_format in itertools.product(("x86-64-v2", "x86-64-v3"), CODES)
            if (arch, entry_format) != ("x86-64-v2", "fp8")
        ),
    ],
)
def test_narrower_instruction_sets(arch, dtype, entry_format, tmp_path, monkeypatch):
    if arch == "x86-64-v3" and not torch.cpu._is_avx2_supported():
        pytest.skip("no AVX2")
    source, library = tmp_path / "decode.cpp", tmp_path / "decode.so"
    codes = "" if entry_format == "model" else cpu.CODE_TYPES[CODES[entry_format], BITS[entry_format]]
    source.write_text(cpu.attend_source(dtype, codes), encoding="utf-8")
    flags = ["-std=c++20", "-O1", f"-march={arch}", "-shared", "-fPIC", "-fopenmp"]
    subprocess.run([cpp_builder.get_cpp_compiler(), *flags, str(source), "-o", str(library)], check=True)
    function = ctypes.CDLL(str(library)).kvpass_attend_decode
    function.argtypes, function.restype = [ctypes.c_char_p], ctypes.c_int64
    monkeypatch.setattr(cpu, "attend_function", lambda *_: function)
    for group in (1, 2, 4, 7):
        value_dim = 40 if BITS.get(entry_format, 8) < 8 else 50
        given = {"group": group, "dim": 72, "value_dim": value_dim, "tokens": 3, "start": [0, 3]}
        check(decode_case(RAGGED, **given, dtype=dtype, sinks=True).packed(entry_format))
    if entry_format == "model":
        test_every_value_survives_and_means_round_to_even(dtype)
