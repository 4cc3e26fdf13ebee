"""Entries in fewer bits: codes and scales against the formula, and round trips."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from kvpass.config import EntryFormat
from kvpass.operands import AppendBuffers
from kvpass.ops.entry_formats import (
    dequantise,
    dequantise_groups,
    pool_rows,
    quantise,
    quantise_keys,
    quantise_values,
    unpack,
)

GOLDEN = Path(__file__).parents[1] / "golden"
FORMATS: list[EntryFormat] = ["int8", "fp8"]
GROUPED = sorted((GOLDEN / "kivi" / "grouped").glob("*.json"))


@pytest.mark.parametrize("side", ["k", "v"])
@pytest.mark.parametrize("entry_format", FORMATS)
def test_codes_and_scales_of_the_golden_case(entry_format: EntryFormat, side: str) -> None:
    case = load_file(GOLDEN / "kivi" / "per_entry" / "s2_gqa2__entry_int8_fp8_t32.safetensors")
    entries = load_file(GOLDEN / "inputs" / "s2_gqa2.safetensors")[side][0, None, :, :32].float()
    codes, scale = quantise(entries, entry_format)
    expected = case[f"{side}_int8"] if entry_format == "int8" else case[f"{side}_fp8_as_uint8"]
    assert torch.equal(codes.view(expected.dtype), expected)
    assert torch.equal(scale, case[f"{side}_{entry_format}_scale"])


@pytest.mark.parametrize("path", GROUPED, ids=lambda path: path.stem)
def test_groups_of_the_golden_cases(path: Path) -> None:
    """KIVI's own code: each KV head is a segment of the pool; a number is equal to the last bit."""
    told, case = json.loads(path.read_text()), load_file(path.with_suffix(".safetensors"))
    given = told["params"]
    inputs = load_file(GOLDEN / "inputs" / f"{told['scenario']}.safetensors")
    keys, values = (
        inputs[side][given["layers"][0], :, : given["tokens"]].to(getattr(torch, given["dtype"])) for side in "kv"
    )
    heads, tokens, dim = keys.shape
    size, of_head = given["group_size"], given["tokens"] // given["group_size"]
    offsets = (torch.arange(heads + 1) * tokens)[None].int()
    codes, steps = quantise_keys(keys.reshape(1, -1, dim), offsets, given["bits"], size=size)
    group = torch.arange(heads)[:, None] * (of_head + 1) + torch.arange(tokens) // size
    assert torch.equal(unpack(codes, given["bits"]).view(heads, tokens, dim), case["k_codes"][0])
    assert torch.equal(steps[0, 0, group[:, ::size]], case["k_scale"][0])
    assert torch.equal(steps[1, 0, group[:, ::size]], case["k_min"][0])
    again = dequantise_groups(unpack(codes, given["bits"]).view(heads, tokens, dim), *steps[:, 0, group])
    assert torch.equal(again, case["k_dequantised"][0])
    codes, steps = quantise_values(values, given["bits"], size=given["value_group_size"])
    assert torch.equal(codes.view(torch.int32), case["v_packed"][0])
    assert torch.equal(steps[0], case["v_scale"][0]) and torch.equal(steps[1], case["v_min"][0])
    again = unpack(codes, given["bits"]).unflatten(-1, (-1, given["value_group_size"]))
    assert torch.equal(dequantise_groups(again, *steps[..., None]).flatten(-2), case["v_dequantised"][0])


@settings(max_examples=30, deadline=None)
@given(
    bits=st.sampled_from([4, 2]),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    lengths=st.lists(st.lists(st.integers(0, 70), min_size=3, max_size=3), min_size=1, max_size=2),
    spare=st.integers(0, 40),
    seed=st.integers(0, 999),
)
def test_groups_of_ragged_segments(
    bits: int, dtype: torch.dtype, lengths: list[list[int]], spare: int, seed: int
) -> None:
    """What is read back is within half a step of each group by itself; slots behind the last segment do not matter."""
    generator = torch.Generator().manual_seed(seed)
    offsets = torch.nn.functional.pad(torch.tensor(lengths).cumsum(1), (1, 0)).int()
    entries = max(int(offsets[:, -1].max()) + spare, 1)
    pools = [torch.randn(len(lengths), entries, 64, generator=generator).mul(3).to(dtype) for _ in range(2)]
    for row, end in enumerate(offsets[:, -1].tolist()):
        pools[0][row, end:] = torch.nan
    k, k_steps = quantise_keys(pools[0], offsets, bits)
    v, v_steps = quantise_values(pools[1], bits)
    assert k.shape == v.shape == (len(lengths), entries, 64 * bits // 8)
    assert bool(k_steps.isfinite().all())
    nothing = torch.zeros(0)
    held = AppendBuffers(k, v, offsets, *[nothing] * 4, pool_k_steps=k_steps, pool_v_steps=v_steps)
    rounding = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]  # of step and minimum
    for row, bounds in enumerate(offsets.tolist()):
        for segment, (begin, end) in enumerate(pairwise(bounds)):
            read = pool_rows(held, row, segment, slice(begin, end))
            if begin == end:
                continue
            for side, groups_of in enumerate((lambda x: x.split(32, 0), lambda x: x.unflatten(1, (-1, 32)).unbind(1))):
                exact = pools[side][row, begin:end].float()
                for group, found in zip(groups_of(exact), groups_of(read[side]), strict=True):
                    spread = group.amax(side, keepdim=True) - group.amin(side, keepdim=True)
                    allowed = spread / (2**bits - 1) * 0.501 + rounding * group.abs().amax(side, keepdim=True) * 2
                    assert bool(((found - group).abs() <= allowed).all())


def test_groups_that_are_not_finite_stay_visible() -> None:
    entries = torch.ones(1, 64, 32)
    for strange in (float("inf"), float("-inf"), float("nan")):
        entries[0, 3, 5] = strange
        codes, (step, lowest) = quantise_keys(entries, torch.tensor([[0, 64]]), 4)
        again = dequantise_groups(unpack(codes, 4)[0], step[0, [0] * 32 + [1] * 32], lowest[0, [0] * 32 + [1] * 32])
        assert not bool(again[:32, 5].isfinite().any())
        again[:32, 5] = 1.0
        assert torch.equal(again, torch.ones(64, 32))
        codes, (step, lowest) = quantise_values(entries, 4)
        again = dequantise_groups(unpack(codes, 4), step, lowest)
        assert not bool(again[0, 3].isfinite().any()) and bool(again[0, 4:].isfinite().all())


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
