"""The stages of gpu-check, with commands that need no GPU: limits, what is kept, what is left out, the report."""

from __future__ import annotations

import json
import os
import signal
import sys
import tarfile
import time
from dataclasses import replace

import pytest
import torch

from kvpass.eval import gpu_check
from kvpass.eval.gpu_check import ROOT, STAGES, Stage, run_stages, send, write_report

WRITE = "import json, sys; json.dump({'complete': True}, open(sys.argv[1], 'w'))"


def python(name, program, *words, seconds=60, needs=None):
    return Stage(name, (sys.executable, "-S", "-c", program, *words), seconds, needs)


def statuses(outcomes):
    return {name: outcome.status for name, outcome in outcomes.items()}


def test_a_stage_with_a_complete_result_is_kept_and_others_are_run(tmp_path):
    stages = [python("first", WRITE, "{}"), python("second", WRITE, "{}")]
    (tmp_path / "second.json").write_text('{"complete": false}')
    seen = []
    assert statuses(run_stages(stages, tmp_path, 100, after=lambda outcomes: seen.append(len(outcomes)))) == {
        "first": "passed", "second": "passed"
    }  # fmt: skip
    assert seen == [1, 2]
    assert statuses(run_stages(stages, tmp_path, 100)) == {"first": "kept", "second": "kept"}


def test_a_result_of_other_code_or_of_another_command_is_not_kept(tmp_path, monkeypatch):
    stage = python("first", WRITE, "{}")
    run_stages([stage], tmp_path, 100)
    assert statuses(run_stages([python("first", WRITE, "{}", "more")], tmp_path, 100)) == {"first": "passed"}
    assert statuses(run_stages([stage], tmp_path, 100)) == {"first": "passed"}
    monkeypatch.setattr(gpu_check, "source_digest", lambda: "changed")
    assert statuses(run_stages([stage], tmp_path, 100)) == {"first": "passed"}
    assert statuses(run_stages([stage], tmp_path, 100)) == {"first": "kept"}


def test_a_stage_that_fails_is_named_with_its_last_words_and_the_next_one_runs(tmp_path):
    stages = [python("broken", "raise SystemExit('no such thing')"), python("fine", "print('3 passed')")]
    outcomes = run_stages(stages, tmp_path, 100)
    assert statuses(outcomes) == {"broken": "failed", "fine": "passed"}
    assert outcomes["broken"].reason == "exit status 1: no such thing"
    assert outcomes["fine"].reason == "3 passed"
    assert json.loads((tmp_path / "fine.json").read_text())["complete"]
    assert not json.loads((tmp_path / "broken.json").read_text())["complete"]
    assert statuses(run_stages(stages, tmp_path, 100)) == {"broken": "failed", "fine": "kept"}


def test_a_stage_out_of_time_is_ended_with_all_it_started_and_what_it_wrote_stays(tmp_path):
    program = (
        "import os, subprocess, sys, time\n"
        "open(sys.argv[1], 'w').write('{\"complete\": false, \"some\": 1}')\n"
        "child = subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(600)'])\n"
        "open(sys.argv[2], 'w').write(str(child.pid))\n"
        "time.sleep(600)"
    )
    pid = tmp_path / "pid"
    outcomes = run_stages([python("slow", program, "{}", str(pid), seconds=2)], tmp_path, 100)
    assert statuses(outcomes) == {"slow": "out of time"}
    assert json.loads((tmp_path / "slow.json").read_text()) == {"complete": False, "some": 1}
    for _ in range(100):
        if not running(int(pid.read_text())):
            break
        time.sleep(0.05)
    else:
        pytest.fail("the child of a stage outlived it")


@pytest.fixture(params=[signal.SIG_DFL, signal.SIG_IGN], ids=["in front", "in the background"])
def started(request):
    """How a shell starts gpu-check: what is in the background ignores interrupts."""
    before = signal.signal(signal.SIGINT, request.param)
    yield
    signal.signal(signal.SIGINT, before)


def test_a_stage_out_of_time_says_what_it_knows(tmp_path, capsys, started):
    program = (
        "import time\n"
        "try:\n"
        "    print('begun', flush=True)\n"
        "    time.sleep(600)\n"
        "except KeyboardInterrupt:\n"
        "    print('2 failed so far')"
    )
    outcomes = run_stages([python("tests", program, seconds=2)], tmp_path, 100)
    assert statuses(outcomes) == {"tests": "out of time"}
    assert (tmp_path / "tests.log").read_text() == "begun\n2 failed so far\n"
    assert "2 failed so far" in capsys.readouterr().out


def test_figures_of_a_run_cut_short_stay_until_the_code_changes(tmp_path, monkeypatch):
    partly = "import json, sys; json.dump({'complete': False, 'some': 1}, open(sys.argv[1], 'w'))"
    stage = python("slow", f"import os; os.path.exists('{tmp_path}/again') or exec({partly!r})", "{}")
    (tmp_path / "slow.json").write_text('{"complete": false, "some": "other code\'s"}')
    for _ in range(2):
        assert statuses(run_stages([stage], tmp_path, 100)) == {"slow": "passed"}
        assert json.loads((tmp_path / "slow.json").read_text()) == {"complete": False, "some": 1}
        (tmp_path / "again").touch()
    monkeypatch.setattr(gpu_check, "source_digest", lambda: "changed")
    run_stages([stage], tmp_path, 100)
    assert not (tmp_path / "slow.json").exists()


def running(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    with open(f"/proc/{pid}/stat") as stat:
        return stat.read().rpartition(")")[2].split()[0] != "Z"


def test_without_time_or_a_module_a_stage_is_listed_as_not_run(tmp_path):
    stages = [python("tests", "", needs="no_such_module_here"), python("late", "")]
    outcomes = run_stages(stages, tmp_path, gpu_check.LEAST_SECONDS - 1)
    assert statuses(outcomes) == {"tests": "not run", "late": "not run"}
    assert outcomes["tests"].reason == "no_such_module_here is not installed"
    assert outcomes["late"].reason.endswith(f"s left of {gpu_check.LEAST_SECONDS - 1}")


def spread(value):
    return dict.fromkeys(("median", "q1", "q3", "min", "max"), value)


def bench_result(complete=True):
    record = {
        "name": "lava", "failure": None, "prefill_s": spread(2.0), "decode_ms": spread(3.5), "first_steps_ms": [[9.0]],
        "tokens_per_s": 285.7, "cache_bytes": 2**27, "attended_bytes": 2**27, "peak_bytes": 2**34, "step_bytes": 2**20,
        "compile_s": 40.0, "scoring": {"seconds": 0.01, "prefill_s": 2.0, "share": 0.005}, "bound_ms": 3.15,
        "share_of_bound": 0.9, "largest_batch": 700, "decode_speedup": {"full": 1.9}, "prefill_ratio": {},
    }  # fmt: skip
    failed = {"name": "hf-eager", "failure": "CUDA out of memory."}
    budget = {"entries": 1024, "bytes": 2**27}
    return {
        "machine": {"cpu": "x", "name": "GPU", "threads": 1, "capability": "sm_90", "copy_bandwidth": 4.3e12},
        "versions": {"torch": "2.11", "transformers": "5.17"},
        "model": {"name": "llama-3.1-8b", "dtype": "bfloat16"},
        "new_tokens": 32, "repeats": 2, "shared_prompt": False, "warm_cache": True, "left_out": {},
        "complete": complete, "runs": [{"context": 131072, "batch": 1, "budget": budget, "systems": [record, failed]}],
    }  # fmt: skip


def test_the_report_has_outcomes_tables_and_pictures(tmp_path):
    decode = {"us_per_layer": 5.0, "bytes": 1, "share_of_copy": 0.8}
    kernels = {
        "complete": True,
        "decode": [{"batch": 8, "uniform": decode, "ragged": decode, "ragged_over_uniform": 1.0}],
        "prefill": [{"prompt": 8192, "policy": "lava", "attention_ms": 1.0, "added_ms": 0.01,
                     "added_over_attention": 0.01, "parts_ms": {"_window_kernel": 0.007}},
                    {"prompt": 32768, "policy": "lava", "failure": "CUDA out of memory."}],
    }  # fmt: skip
    (tmp_path / "decode-128k.json").write_text(json.dumps(bench_result(complete=False)))
    (tmp_path / "kernels.json").write_text(json.dumps(kernels))
    text = write_report(STAGES, {"tests": gpu_check.Outcome("not run", reason="pytest is not installed")}, tmp_path)
    assert text == (tmp_path / "RESULTS.md").read_text()
    assert "| tests | not run | 0 | pytest is not installed |" in text
    assert "## decode-128k (incomplete)" in text
    figures = "2 (2-2) | - | 0.50 | 3.50 (3.50-3.50) | - | - | 90 | 285.7 | - | 128.00 | 16.00 | 700 | 40.0"
    assert f"| lava | {figures} |" in text
    assert "hf-eager: CUDA out of memory." in text
    assert "| 8 | 5.0 | 80% | 5.0 | 80% | 1.000 |" in text
    assert "_window_kernel 0.007" in text
    assert "| 32768 | lava | failed | - | - |" in text
    for picture in ("ms-per-token-batch1.png", "memory-batch1.png"):
        assert f"({picture})" in text
        assert (tmp_path / picture).read_bytes().startswith(b"\x89PNG")


def test_what_there_is_goes_where_out_names(tmp_path):
    folder, out = tmp_path / "2026-01-01-gpu", tmp_path / "out"
    folder.mkdir()
    out.mkdir()
    write_report([], {}, folder)
    send(folder, out)
    assert sorted(path.name for path in out.iterdir()) == ["RESULTS.md", "gpu-check.tar.gz"]
    with tarfile.open(out / "gpu-check.tar.gz") as archive:
        assert "2026-01-01-gpu/RESULTS.md" in archive.getnames()


def test_every_stage_can_be_started_from_this_checkout():
    """Files exist, modules are found, and the bench accepts its words (but for the device)."""
    import importlib.util

    from typer.testing import CliRunner

    from kvpass.cli.main import app

    assert len({stage.name for stage in STAGES}) == len(STAGES)
    for stage in STAGES:
        for word in stage.command:
            if word.endswith(".py"):
                assert (ROOT / word).is_file()
        if "-m" in stage.command[:2]:
            assert importlib.util.find_spec(stage.command[2])
        if "bench" in stage.command and not torch.cuda.is_available():
            refused = CliRunner().invoke(app, stage.command[stage.command.index("bench") :])
            assert refused.stderr == "error: device='cuda': this machine has no CUDA device\n", refused.output


def test_a_stage_is_not_begun_with_less_time_than_it_needs(tmp_path):
    stages = [replace(python("long", "pass"), least=50), python("short", "pass")]
    outcomes = run_stages(stages, tmp_path, seconds=45)
    assert [outcomes[name].status for name in ("long", "short")] == ["not run", "passed"]


@pytest.mark.exhaustive
def test_what_was_begun_in_vain_comes_after_what_was_not_yet_begun(tmp_path, monkeypatch):
    hangs = replace(python("tests", "import time; time.sleep(600)", seconds=1), least=1)
    breaks = replace(python("broken", "raise SystemExit(3)"), least=1)
    stages = [hangs, breaks, replace(python("figure", WRITE, "{}"), least=1)]
    assert statuses(run_stages(stages, tmp_path, 1.5)) == {
        "tests": "out of time",
        "broken": "not run",
        "figure": "not run",
    }
    again = run_stages([stages[0], *stages[1:]], tmp_path, 60)
    assert list(statuses(again).items()) == [("broken", "failed"), ("figure", "passed"), ("tests", "out of time")]
    third = run_stages(stages, tmp_path, 60)
    assert list(statuses(third).items()) == [("broken", "failed"), ("figure", "kept"), ("tests", "out of time")]
    monkeypatch.setattr(gpu_check, "source_digest", lambda: "changed")
    assert list(run_stages(stages, tmp_path, 60)) == ["tests", "broken", "figure"], "new code, new tries"


COMPILES = """
import json, os, pathlib, sys
folders = [pathlib.Path(os.environ[name]) for name in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")]
warm = [(folder / "kernel").exists() for folder in folders]
for folder in folders:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "kernel").write_bytes(os.urandom(3000))
checks = [{"what": "lava: prompt", "error": 1e-3, "allowed": 2e-3, "ok": True}]
json.dump({"complete": "again" not in sys.argv or all(warm), "checks": checks}, open(sys.argv[1], "w"))
"""
BREAKS_HALFWAY = """
import json, sys
record = {"us_per_layer": 5.0, "bytes": 1, "share_of_copy": 0.8}
json.dump({"complete": False, "decode": [{"batch": 1, "uniform": record}]}, open(sys.argv[1], "w"))
raise RuntimeError("CUDA error: an illegal memory access was encountered")
"""


def test_a_check_that_is_cut_short_goes_on_elsewhere(tmp_path, monkeypatch, capsys):
    """End to end, with stages that pass, break halfway, hang and are not reached."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu_check, "device_name", lambda: "gpu")
    monkeypatch.setattr(gpu_check, "PART_BYTES", 4000)
    stages = [
        python("smoke", COMPILES, "{}"),
        python("kernels", BREAKS_HALFWAY, "{}"),
        replace(python("tests", "import time; time.sleep(600)", seconds=1), least=1),
        replace(python("qwen3-8b", COMPILES, "{}", "again"), least=10**6),
    ]
    for call, name in enumerate(("here", "there")):
        root, out = tmp_path / name, tmp_path / f"out-{name}"
        (root / "benchmarks" / "results").mkdir(parents=True)
        out.mkdir()
        monkeypatch.setattr(gpu_check, "ROOT", root)
        monkeypatch.setattr(gpu_check, "STAGES", stages)
        monkeypatch.setenv("OUT", str(out))
        if call == 1:
            came_back = tmp_path / "out-here"
            packed = b"".join(path.read_bytes() for path in sorted(came_back.glob("compiled.tar.gz.*")))
            (came_back / "compiled.tar.gz").write_bytes(packed)
            for archive in ("gpu-check.tar.gz", "compiled.tar.gz"):
                with tarfile.open(came_back / archive) as opened:
                    opened.extractall(root / "benchmarks" / "results", filter="data")
            stages[3] = replace(stages[3], least=1)
        assert gpu_check.main([]) == 1
        (folder,) = (root / "benchmarks" / "results").iterdir()
        found = {
            name: outcome["status"] for name, outcome in json.loads((folder / "outcomes.json").read_text()).items()
        }
        if call == 0:
            assert list(found.items()) == [
                ("smoke", "passed"), ("kernels", "failed"), ("tests", "out of time"), ("qwen3-8b", "not run")
            ]  # fmt: skip
            assert sorted(path.name for path in out.iterdir()) == [
                "RESULTS.md", "compiled.tar.gz.0", "compiled.tar.gz.1", "gpu-check.tar.gz"
            ]  # fmt: skip
            with tarfile.open(out / "gpu-check.tar.gz") as archive:
                assert not any("compiled" in name for name in archive.getnames())
    assert list(found.items()) == [
        ("qwen3-8b", "passed"), ("smoke", "kept"), ("kernels", "failed"), ("tests", "out of time")
    ]  # fmt: skip
    assert gpu_check.is_current(stages[3], folder / "qwen3-8b.json"), "it found what was compiled before"
    text = (folder / "RESULTS.md").read_text()
    assert "## kernels (incomplete)" in text and "| 1 | 5.0 | 80% | - |" in text
    assert "| lava: prompt | 1.0e-03 | 2.0e-03 | yes |" in text
    assert "CUDA error: an illegal memory access" in capsys.readouterr().out


def test_more_compiled_code_than_can_be_sent_stays(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gpu_check, "PART_BYTES", 50)
    folder, out = tmp_path / "results", tmp_path / "out"
    (folder / "compiled").mkdir(parents=True)
    out.mkdir()
    (folder / "compiled" / "kernel").write_bytes(os.urandom(3000))
    gpu_check.send_compiled(folder, out)
    assert not list(out.iterdir()) and "too much to send" in capsys.readouterr().out


def test_the_main_figures_fit_in_one_call():
    names = [stage.name for stage in STAGES]
    assert names[:3] == ["smoke", "kernels", "decode-128k"]
    assert sum(stage.seconds for stage in STAGES[:3]) <= gpu_check.SECONDS
    assert all(stage.least <= stage.seconds <= gpu_check.SECONDS for stage in STAGES)


def test_without_a_gpu_the_check_says_so(capsys):
    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    assert gpu_check.main([]) == 1
    assert "gpu-check: this machine has no CUDA device" in capsys.readouterr().err


def test_an_unknown_stage_is_refused(capsys):
    with pytest.raises(SystemExit):
        gpu_check.main(["--only", "kernel"])
    assert (
        "--only kernel: must be one of smoke, kernels, decode-128k, rows-128k, tests, graph-tests, "
        in capsys.readouterr().err
    )
