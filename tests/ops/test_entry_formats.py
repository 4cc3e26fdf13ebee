"""Entries in fewer bits: codes and scales against the formula, and round trips."""

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from kvpass.config import EntryFormat
from kvpass.operands import BITS, LEVELS
from kvpass.ops.entry_formats import dequantise, pack, quantised, unpack
from kvpass.rotation import rotated, rotated_back, rotation

GOLDEN = Path(__file__).parents[1] / "golden"
FORMATS: list[EntryFormat] = ["int8", "fp8"]
ROTATED: list[EntryFormat] = ["rot4", "rot3", "rot2"]


@pytest.mark.parametrize("side", ["k", "v"])
@pytest.mark.parametrize("entry_format", FORMATS)
def test_codes_and_scales_of_the_golden_case(entry_format, side):
    case = load_file(GOLDEN / "kivi" / "per_entry" / "s2_gqa2__entry_int8_fp8_t32.safetensors")
    entries = load_file(GOLDEN / "inputs" / "s2_gqa2.safetensors")[side][0, None, :, :32].float()
    codes, scale = quantised(entries, entry_format)
    expected = case[f"{side}_int8"] if entry_format == "int8" else case[f"{side}_fp8_as_uint8"]
    assert torch.equal(codes, expected)
    assert torch.equal(scale, case[f"{side}_{entry_format}_scale"])


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_levels_have_the_least_error_for_normal_numbers(bits):
    """Lloyd-Max: each is the mean of the numbers that it stands for. Table of the source to four decimals."""
    level = torch.tensor(LEVELS[bits], dtype=torch.float64)
    edges = torch.cat([torch.tensor([-math.inf]), (level[1:] + level[:-1]) / 2, torch.tensor([math.inf])])
    mass = torch.special.ndtr(edges).diff()
    density = torch.exp(-edges.square() / 2) / math.sqrt(2 * math.pi)
    assert torch.allclose(-density.diff() / mass, level, atol=2e-4)
    error = 1 - (mass * level.square()).sum()
    assert float(error) == pytest.approx({2: 0.1175, 3: 0.0345, 4: 0.0095}[bits], abs=1e-4)


def test_rotations_keep_dot_products_and_are_those_of_files_written_before():
    for dim in (8, 24, 64, 72, 96, 128, 256):
        matrix = rotation(dim, torch.device("cpu"), torch.float64)
        assert torch.allclose(matrix @ matrix.T, torch.eye(dim, dtype=torch.float64), atol=1e-12)
        x = torch.randn(5, dim, generator=torch.Generator().manual_seed(0))
        assert torch.allclose(rotated_back(rotated(x)), x, atol=1e-5)
        first = rotation(dim, torch.device("cpu"), torch.float32)[0]
        assert first.abs().max() < 0.8 or dim == 8, "one number stays alone"
    signs = [1, 1, 1, -1, 1, -1, -1, -1]
    one = torch.tensor([[1.0]])
    for _ in range(3):
        one = torch.cat([torch.cat([one, one], 1), torch.cat([one, -one], 1)])
    x = torch.arange(8.0)
    expected = [sum(h * s * v for h, s, v in zip(row, signs, x.tolist(), strict=True)) / 8**0.5 for row in one.tolist()]
    assert torch.allclose(rotated(x), torch.tensor(expected), atol=1e-5)


@pytest.mark.parametrize("entry_format", ROTATED)
def test_codes_are_the_nearest_levels_and_scales_the_least_squares(entry_format):
    y = torch.randn(50, 24, generator=torch.Generator().manual_seed(2)) * 7
    y[4], y[5], y[6] = 0.0, 3.0, 0.0
    y[6, 2] = 1e4
    codes, scale = quantised(rotated_back(y), entry_format)
    level = torch.tensor(LEVELS[BITS[entry_format]])
    found = unpack(codes, BITS[entry_format]).long()
    for row, (numbers, own, factor) in enumerate(zip(y, found, scale, strict=True)):
        size = numbers.square().mean().sqrt()
        if row == 4:
            assert factor == 0
            continue
        distances = (numbers[:, None] / size - level).abs()
        assert torch.allclose(distances.gather(1, own[:, None])[:, 0], distances.amin(1), atol=1e-6)
        near = level[own]
        residual = numbers - factor * near
        assert abs(float(residual @ near)) <= 1e-4 * float(numbers.abs().sum())
    assert torch.equal(dequantise(codes, scale, 24), level[found] * scale[:, None])


@settings(max_examples=30, deadline=None)
@given(bits=st.sampled_from([2, 3, 4]), groups=st.integers(1, 5), seed=st.integers(0, 999))
def test_codes_lie_in_bytes_lowest_bits_first(bits, groups, seed):
    codes = torch.randint(0, 2**bits, (3, groups * 8), generator=torch.Generator().manual_seed(seed)).to(torch.uint8)
    packed = pack(codes, bits)
    for row, held in zip(codes.tolist(), packed.tolist(), strict=True):
        number = sum(code << (bits * i) for i, code in enumerate(row))
        assert number.to_bytes(groups * bits, "little") == bytes(held)
    assert torch.equal(unpack(packed, bits), codes)


@settings(max_examples=30, deadline=None)
@given(
    entry_format=st.sampled_from(FORMATS),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    shape=st.tuples(st.integers(1, 3), st.integers(1, 40), st.integers(1, 33)),
    exponent=st.integers(-12, 4),
    seed=st.integers(0, 999),
)
def test_round_trips(entry_format, dtype, shape, exponent, seed):
    generator = torch.Generator().manual_seed(seed)
    size = 10.0 ** torch.randint(-2, 2, shape[:2], generator=generator)[..., None]
    entries = (torch.randn(shape, generator=generator) * size * 2.0**exponent).to(dtype)
    entries[0, 0] = 0.0
    codes, scale = quantised(entries, entry_format)
    again = dequantise(codes, scale, shape[2])
    largest = entries.float().abs().amax(-1, keepdim=True)
    if entry_format == "int8":  # half a step of a row
        allowed = largest / 127 * 0.5001
    else:  # three bits of mantissa, and half a step of the subnormal codes
        allowed = torch.maximum(entries.float().abs() * 2**-4, largest / 448 * 2**-10) * 1.0001
    assert bool(((again - entries.float()).abs() <= allowed).all())
    assert not bool(again[0, 0].any()) and bool(scale[0, 0] == 0)
    once_more = quantised(again, entry_format)
    assert torch.allclose(dequantise(*once_more, shape[2]), again, rtol=1e-6)


@pytest.mark.parametrize("entry_format", [*FORMATS, *ROTATED])
def test_entries_that_are_not_finite_stay_visible_and_blocks_change_nothing(entry_format, monkeypatch):
    entries = torch.ones(3, 16)
    entries[0, 1], entries[1, 0] = float("inf"), float("nan")
    again = dequantise(*quantised(entries, entry_format), 16)
    assert not bool(again[:2].isfinite().any()) and bool(again[2].isfinite().all())
    entries = torch.randn(2, 50, 8, generator=torch.Generator().manual_seed(0))
    whole = quantised(entries, entry_format)
    monkeypatch.setattr("kvpass.ops.entry_formats._BLOCK", 7)
    assert all(map(torch.equal, whole, quantised(entries, entry_format)))
