"""The stages of scripts/gpu-check, with commands that need no GPU: limits, and what is kept."""

import importlib.machinery
import importlib.util
import json
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "gpu-check"
WRITE = "__import__('pathlib').Path(__import__('sys').argv[1]).write_text('{\"complete\":true}')"


@pytest.fixture
def gpu_check():
    loader = importlib.machinery.SourceFileLoader("gpu_check", str(SCRIPT))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("gpu_check", loader))
    loader.exec_module(module)
    return module


def test_what_is_complete_and_of_the_present_code_is_kept(gpu_check, tmp_path, monkeypatch):
    stages = {"writes": (60, f"-S -c {WRITE} {{}}"), "fails": (60, "-S -c raise(SystemExit(3))")}
    assert gpu_check.run(stages, tmp_path, 100) == {"writes": "passed", "fails": "failed"}
    fails = json.loads((tmp_path / "gpu-check.json").read_text())["stages"]["fails"]
    assert (fails["status"], fails["said"]) == ("failed", "")
    assert gpu_check.run(stages, tmp_path, 100) == {"writes": "kept", "fails": "failed"}
    other = {"writes": (60, f"-S -c {WRITE} {{}} more")}
    assert gpu_check.run(other, tmp_path, 100) == {"writes": "passed"}
    monkeypatch.setattr(gpu_check, "source_digest", lambda: "changed")
    assert gpu_check.run(other, tmp_path, 100) == {"writes": "passed"}


def test_a_stage_that_is_out_of_time_is_ended_and_the_rest_is_not_begun(gpu_check, tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_check, "LEAST", 1)
    stages = {"slow": (60, "-S -c __import__('time').sleep(100)"), "late": (60, f"-S -c {WRITE} {{}}")}
    assert gpu_check.run(stages, tmp_path, 1.5) == {"slow": "out of time", "late": "not run"}


def test_the_stages_name_files_that_are_there_and_the_first_ones_fit_in_a_call(gpu_check):
    assert sum(limit for limit, _ in list(gpu_check.STAGES.values())[:4]) <= 560
    for _, words in gpu_check.STAGES.values():
        assert all((SCRIPT.parents[1] / word).exists() for word in words.split() if word.endswith(".py"))


@pytest.mark.exhaustive  # ten seconds
def test_the_bench_is_run_and_its_figures_come_last_with_those_predicted_before(
    gpu_check, micro, tmp_path, monkeypatch, capsys
):
    """All but the device: a bench of the CPU, and what the kernel bench wrote."""
    options = (
        "--budget 16 --window 8 --policies lava --systems= --new-tokens 2 --repeats 1 --backend eager --batches 1,2"
    )
    bench = f"-m kvpass bench --json {{}} --model {micro} --contexts 48 --shared-prompt {options}"
    kernels = [{"batch": 8, "int8": {"us_per_layer": 7.0, "bytes": 9}, "rot4": {"failure": "no"}}]
    written = f"-S -c {WRITE.replace('true', 'true,' + json.dumps({'decode': kernels})[1:-1].replace(' ', ''))} {{}}"
    monkeypatch.setattr(gpu_check, "STAGES", {"kernels": (60, written), "decode-table": (300, bench)})
    monkeypatch.setattr("sys.argv", ["gpu-check", "--folder", str(tmp_path / "made")])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "none")
    assert gpu_check.main() == 0
    lines = capsys.readouterr().out.splitlines()
    said = lines[lines.index(f"gpu-check: results in {tmp_path / 'made'}") + 1 :]
    assert said[:2] == ["kernels 8  int8: 7.0 us a layer, 9 bytes", "kernels 8  rot4: no"]
    assert [line[: line.index(":")] for line in said[2:4]] == ["decode-table 48 x 1 lava", "decode-table 48 x 2 lava"]
    assert all(line.endswith(" ms") and "of the bound, generate" in line for line in said[2:4])
    predicted = json.loads((tmp_path / "made" / "gpu-check.json").read_text())["predicted"]
    assert said[4:] == [f"predicted for {name}: {text}" for name, text in predicted.items()]


@pytest.mark.skipif(torch.cuda.is_available(), reason="is for machines without a GPU")
def test_a_machine_without_a_gpu_is_told_so(gpu_check, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["gpu-check"])
    assert gpu_check.main() == 1
    assert "no CUDA device" in capsys.readouterr().err
