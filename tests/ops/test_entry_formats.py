"""Entries in fewer bits: codes and scales against the formula, and round trips."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from kvpass.config import EntryFormat
from kvpass.ops.entry_formats import dequantise, quantise

GOLDEN = Path(__file__).parents[1] / "golden"
FORMATS: list[EntryFormat] = ["int8", "fp8"]


@pytest.mark.parametrize("side", ["k", "v"])
@pytest.mark.parametrize("entry_format", FORMATS)
def test_codes_and_scales_of_the_golden_case(entry_format: EntryFormat, side: str) -> None:
    case = load_file(GOLDEN / "kivi" / "per_entry" / "s2_gqa2__entry_int8_fp8_t32.safetensors")
    entries = load_file(GOLDEN / "inputs" / "s2_gqa2.safetensors")[side][0, None, :, :32].float()
    codes, scale = quantise(entries, entry_format)
    expected = case[f"{side}_int8"] if entry_format == "int8" else case[f"{side}_fp8_as_uint8"]
    assert torch.equal(codes.view(expected.dtype), expected)
    assert torch.equal(scale, case[f"{side}_{entry_format}_scale"])


@settings(max_examples=30, deadline=None)
@given(
    entry_format=st.sampled_from(FORMATS),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    shape=st.tuples(st.integers(1, 3), st.integers(1, 40), st.integers(1, 33)),
    exponent=st.integers(-12, 4),
    seed=st.integers(0, 999),
)
def test_round_trips(
    entry_format: EntryFormat, dtype: torch.dtype, shape: tuple[int, int, int], exponent: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    size = 10.0 ** torch.randint(-2, 2, shape[:2], generator=generator)[..., None]
    entries = (torch.randn(shape, generator=generator) * size * 2.0**exponent).to(dtype)
    entries[0, 0] = 0.0
    codes, scale = quantise(entries, entry_format)
    again = dequantise(codes, scale)
    largest = entries.float().abs().amax(-1, keepdim=True)
    if entry_format == "int8":  # half a step of a row
        allowed = largest / 127 * 0.5001
    else:  # three bits of mantissa, and half a step of the subnormal codes
        allowed = torch.maximum(entries.float().abs() * 2**-4, largest / 448 * 2**-10) * 1.0001
    assert bool(((again - entries.float()).abs() <= allowed).all())
    assert not bool(again[0, 0].any()) and bool(scale[0, 0] == 0)
    once_more = quantise(again, entry_format)
    assert torch.equal(dequantise(*once_more), again) or torch.allclose(dequantise(*once_more), again, rtol=1e-6)


def test_entries_that_are_not_finite_stay_visible() -> None:
    entries = torch.tensor([[1.0, float("inf")], [float("nan"), 2.0], [1.0, 2.0]])
    for entry_format in FORMATS:
        again = dequantise(*quantise(entries, entry_format))
        assert not bool(again[:2].isfinite().any()) and bool(again[2].isfinite().all())


def test_blocks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = torch.randn(2, 50, 8, generator=torch.Generator().manual_seed(0))
    whole = quantise(entries, "int8")
    monkeypatch.setattr("kvpass.ops.entry_formats._BLOCK", 7)
    assert all(torch.equal(a, b) for a, b in zip(whole, quantise(entries, "int8"), strict=True))
