"""The kernel bench without a GPU: its inputs, its operators on the eager reference, its kernel in the interpreter."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from kvpass.eval.bench import kernels as kernel_bench
from kvpass.eval.bench.kernels import Shape, prompt_figures, prompt_run, ragged_lengths, uniform_lengths

CPU = Shape(layers=2, heads=4, kv_heads=2, dim=16, dtype=torch.float32, place="cpu")

INTERPRETED = """
import torch
from kvpass.eval.bench import kernels as bench

calls = []
def once(function):
    calls.append(function())
    return 1e-3

bench.time_graph = once
bench.WORST_ERROR = 1e-5
shape = bench.Shape(layers=2, heads=4, kv_heads=2, dim=16, dtype=torch.float32, place="cpu")
lengths = bench.ragged_lengths(shape, 2, 40)
found = bench.time_decode(shape, lengths, 1e9, check=True)
assert found["error"] < 1e-5 and len(calls[0]) == 2
assert found["bytes"] == (2 * 2 * 2 * 40 + 2 * 2 * 2 * 33) * 2 * 16 * 4
assert abs(found["share_of_copy"] - found["bytes"] / 1e-3 / 1e9) < 1e-9
bench.reference.attend_cache = lambda *arguments: torch.ones(2, 4, 1, 16)
try:
    bench.time_decode(shape, lengths, 1e9, check=True)
except RuntimeError as error:
    assert "decode kernel, layer 0: relative error" in str(error)
else:
    raise SystemExit("a wrong kernel was timed")
print("done")
"""


def test_ragged_lengths_are_unequal_and_of_equal_bytes():
    shape = Shape(place="cpu")
    ragged, uniform = ragged_lengths(shape, 3, 992), uniform_lengths(shape, 3, 992)
    assert ragged.shape == uniform.shape == (3, 32, 8)
    assert torch.equal(ragged.sum((1, 2)), uniform.sum((1, 2)))
    assert ragged.min() >= 0
    assert ragged.float().std() > 500


def test_the_kernel_is_compared_before_it_is_timed():
    pytest.importorskip("triton")
    run = subprocess.run(
        [sys.executable, "-c", INTERPRETED], env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True
    )
    assert run.stdout.strip() == "done", run.stderr


def test_a_prompt_is_compressed_by_the_operators_of_the_package(monkeypatch):
    monkeypatch.setattr(kernel_bench, "BUDGET", 48)
    compress, attend = prompt_run(CPU, 160, "lava")
    compress()
    assert attend().shape == (1, 4, 160, 16)
    records = prompt_figures(CPU, (160,))
    assert [record["policy"] for record in records] == ["lava", "cake"]
    for record in records:
        assert record["added_ms"] > 0
        assert record["added_over_attention"] == pytest.approx(record["added_ms"] / record["attention_ms"])
        assert "aten::scaled_dot_product_attention" not in record["parts_ms"]


def test_without_a_gpu_the_command_says_so(tmp_path, capsys):
    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    assert kernel_bench.main(["--json", str(tmp_path / "out.json")]) == 1
    assert "no CUDA device" in capsys.readouterr().err
