"""The kernel bench without a GPU: its inputs, its operators on the eager reference, its kernel in the interpreter."""

import itertools
import json
import os
import subprocess
import sys

import pytest
import torch

from kvpass.eval.bench import kernels as kernel_bench
from kvpass.eval.bench.kernels import Shape, ragged_lengths, time_prompt
from kvpass.eval.bench.report import show

CPU = Shape(layers=2, heads=4, kv_heads=2, dim=32, dtype=torch.float32, device=torch.device("cpu"))
LATENT = Shape(layers=2, heads=4, kv_heads=1, dim=48, latent=32, dtype=torch.float32, device=torch.device("cpu"))

INTERPRETED = """
import torch
from kvpass.eval.bench import kernels as bench

calls = []
def once(function):
    calls.append(function())
    return 1e-3

bench.time_graph = once
bench.WORST_ERROR = 1e-5
assert torch.ops.kvpass.site, "the command itself imports what defines the operators"
shape = bench.Shape(layers=2, heads=4, kv_heads=2, dim=32, dtype=torch.float32, device=torch.device("cpu"))
lengths = bench.ragged_lengths(shape, 2, 40)
found = bench.time_decode(shape, lengths, 1e9, check=True)
assert found["error"] < 1e-5 and len(calls[0]) == 2
assert found["bytes"] == (2 * 2 * 2 * 40 + 2 * 2 * 2 * 33) * 2 * 32 * 4
assert abs(found["share_of_copy"] - found["bytes"] / 1e-3 / 1e9) < 1e-9
for entry_format, bits in (("int8", 8 + 1), ("rot4", 4 + 1), ("rot3", 3 + 1), ("rot2", 2 + 1)):  # and scale
    found = bench.time_decode(shape, lengths, 1e9, True, entry_format)
    assert found["bytes"] == 2 * 2 * 2 * (40 + 33) * 2 * 4 * bits, (entry_format, found)
latent = bench.Shape(layers=2, heads=4, kv_heads=1, dim=48, latent=32, dtype=torch.float32, device=torch.device("cpu"))
found = bench.time_decode(latent, bench.ragged_lengths(latent, 2, 40), 1e9, check=True)
assert found["error"] < 1e-5 and found["bytes"] == (2 * 2 * 40 + 2 * 2 * 33) * 48 * 4, found
bench.reference.attend_cache = lambda *arguments: torch.ones(2, 4, 1, 32)
try:
    bench.time_decode(shape, lengths, 1e9, check=True)
except RuntimeError as error:
    assert "decode kernel, layer 0: relative error" in str(error)
else:
    raise SystemExit("a wrong kernel was timed")
print("done")
"""


def test_ragged_lengths_are_unequal_and_of_equal_bytes():
    ragged = ragged_lengths(Shape(device=torch.device("cpu")), 3, 992)
    assert ragged.shape == (3, 32, 8)
    assert ragged.sum((1, 2)).tolist() == 3 * [32 * 8 * 992]
    assert ragged.min() >= 0
    assert ragged.float().std() > 500


@pytest.mark.exhaustive
def test_the_kernel_is_compared_before_it_is_timed():
    pytest.importorskip("triton")
    run = subprocess.run(
        [sys.executable, "-c", INTERPRETED], env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True
    )
    assert run.stdout.strip() == "done", run.stderr


def test_a_prompt_is_compressed_by_the_operators_of_the_package(monkeypatch):
    monkeypatch.setattr(kernel_bench, "BUDGET", 48)
    monkeypatch.setattr(kernel_bench, "AT_LEAST", 0.01)
    for shape, policy in itertools.product((CPU, LATENT), ("lava", "cake")):
        found = time_prompt(shape, 160, policy)
        assert found["added_ms"] > 0
        assert found["added_over_attention"] == pytest.approx(found["added_ms"] / found["attention_ms"])
        assert "aten::scaled_dot_product_attention" not in found["parts_ms"]


@pytest.fixture
def command(monkeypatch, tmp_path):
    """The command on the CPU: a few sizes, the eager operator for the kernel, a clock that stands."""
    changes = {
        "AT_LEAST": 0.01, "BUDGET": 96, "WORST_ERROR": 1e-5, "BATCHES": (1, 2), "PROMPTS": (160,),
        "LATENT_PROMPTS": (160,), "LATENT": LATENT, "Shape": lambda: CPU,
        "time_graph": lambda function: 1e-3 + 0 * len(function()), "copy_bandwidth": lambda device: 1e9,
        "attend": kernel_bench.reference.attend_cache,
    }  # fmt: skip
    for name, value in changes.items():
        monkeypatch.setattr(kernel_bench, name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    path = tmp_path / "out.json"

    def run():
        status = kernel_bench.main(["--json", str(path)])
        return status, json.loads(path.read_text())

    return run


def test_every_figure_is_saved_when_it_is_there_and_a_failure_loses_no_other(command, monkeypatch, capsys):
    saved, save = [], kernel_bench.save_json
    monkeypatch.setattr(
        kernel_bench, "save_json", lambda path, result: (saved.append(json.dumps(result)), save(path, result))
    )
    status, result = command()
    assert status == 0 and result["complete"]
    assert len(saved) == 2 * 6 + 2 + 2 + 2 + 1 and all(not json.loads(text)["complete"] for text in saved[:-1])
    assert list(json.loads(saved[0])["decode"][0]) == ["batch", "uniform"]
    assert [record["ragged_over_uniform"] for record in result["decode"][:2]] == [1.0, 1.0]
    assert [list(record) for record in result["decode"][2:]] == [["batch", "rows", "ragged"]] * 2
    assert [record.get("rows") for record in result["prefill"]] == [None, None, "latent", "latent"]

    def broken(call, held, layer):
        if not bool((held.offsets.diff(dim=1) == 64).all()):
            raise RuntimeError("no such kernel\nmore")
        return kernel_bench.reference.attend_cache(call, held, layer)

    monkeypatch.setattr(kernel_bench, "attend", broken)
    status, result = command()
    assert status == 1 and not result["complete"]
    assert result["decode"][1]["ragged"] == {"failure": "RuntimeError: no such kernel"}
    assert result["decode"][1]["uniform"]["us_per_layer"] > 0 and len(result["prefill"]) == 4
    assert "RuntimeError: no such kernel" in capsys.readouterr().err
    row = show(result).tables[0][2][0]
    assert row[3:5] == ["failed", "failed"] and row[-1] == "-"


def test_without_a_gpu_the_command_says_so(tmp_path, capsys):
    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    assert kernel_bench.main(["--json", str(tmp_path / "out.json")]) == 1
    assert "no CUDA device" in capsys.readouterr().err
