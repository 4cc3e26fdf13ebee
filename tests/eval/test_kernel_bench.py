"""The kernel bench without a GPU: its inputs, its operators on the eager reference."""

import json

import pytest
import torch

from kvpass.eval.bench import kernels as kernel_bench
from kvpass.eval.bench.kernels import Shape, ragged_lengths
from kvpass.eval.bench.report import show

CPU = Shape(layers=2, heads=4, kv_heads=2, dim=32, dtype=torch.float32, device=torch.device("cpu"))
LATENT = Shape(layers=2, heads=4, kv_heads=1, dim=48, latent=32, dtype=torch.float32, device=torch.device("cpu"))


def test_ragged_lengths_are_unequal_and_of_equal_bytes():
    ragged = ragged_lengths(Shape(device=torch.device("cpu")), 3, 992)
    assert ragged.shape == (3, 32, 8)
    assert ragged.sum((1, 2)).tolist() == 3 * [32 * 8 * 992]
    assert ragged.min() >= 0
    assert ragged.float().std() > 500


@pytest.fixture
def command(monkeypatch, tmp_path):
    """The command on the CPU: a few sizes, the eager operator for the kernel, a clock that stands."""
    changes = {
        "AT_LEAST": 0.001, "BUDGET": 96, "WORST_ERROR": 1e-5, "BATCHES": (1, 2), "LATENT": LATENT, "Shape": lambda: CPU,
        "time_graph": lambda function: 1e-3 + 0 * len(function()), "ceilings": lambda *_: {"copy_bandwidth": 1e9},
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
    assert len(saved) == 2 * 6 + 2 + 1 and all(not json.loads(text)["complete"] for text in saved[:-1])
    assert list(json.loads(saved[0])["decode"][0]) == ["batch", "uniform"]
    assert [record["ragged_over_uniform"] for record in result["decode"][:2]] == [1.0, 1.0]
    assert [list(record) for record in result["decode"][2:]] == [["batch", "rows", "ragged"]] * 2

    def broken(call, held, layer):
        if not bool((held.offsets.diff(dim=1) == 64).all()):
            raise RuntimeError("no such kernel\nmore")
        return kernel_bench.reference.attend_cache(call, held, layer)

    monkeypatch.setattr(kernel_bench, "attend", broken)
    status, result = command()
    assert status == 1 and not result["complete"]
    assert result["decode"][1]["ragged"] == {"failure": "RuntimeError: no such kernel"}
    assert result["decode"][1]["uniform"]["us_per_layer"] > 0
    assert "RuntimeError: no such kernel" in capsys.readouterr().err
    row = show(result).tables[0][2][0]
    assert row[3:5] == ["failed", "failed"] and row[-1] == "-"


def test_a_kernel_that_computes_something_else_is_not_timed(command, monkeypatch):
    monkeypatch.setattr(kernel_bench, "attend", lambda call, *_: torch.ones_like(call.q[..., : call.v.shape[3]]))
    status, result = command()
    assert status == 1 and not result["complete"]
    assert "decode kernel, layer 0: relative error" in result["decode"][0]["uniform"]["failure"]


def test_without_a_gpu_the_command_says_so(tmp_path, capsys):
    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    assert kernel_bench.main(["--json", str(tmp_path / "out.json")]) == 1
    assert "no CUDA device" in capsys.readouterr().err
