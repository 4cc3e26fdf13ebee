"""``kvpass bench --tune`` without a device: the search, the table it writes, the case of every workload."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

from command_line import invoke
from kvpass.eval.bench import tune
from kvpass.kernels import launch as module
from kvpass.kernels.launch import KernelConfig

START = KernelConfig.of(4, 2, BLOCK_Q=64, BLOCK_K=64)


def test_the_search_goes_downhill_and_leaves_out_what_does_not_run() -> None:
    asked: Counter[KernelConfig] = Counter()

    def seconds(config: KernelConfig) -> float | None:
        asked[config] += 1
        if config.num_stages > 3:
            return None
        blocks = dict(config.blocks)
        return abs(blocks["BLOCK_Q"] - 256) + abs(blocks["BLOCK_K"] - 32) + abs(config.num_warps - 8) + 10

    assert tune.fastest(START, seconds) == KernelConfig.of(8, 2, BLOCK_Q=256, BLOCK_K=32)
    assert set(asked.values()) == {1}, "a config is timed twice"
    assert tune.fastest(START, lambda config: 1.0 if config == START else 0.98) == START, "noise decides"
    with pytest.raises(RuntimeError, match="pinned config"):
        tune.fastest(START, lambda config: None)


def test_a_row_is_written_beside_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = tmp_path / "configs.json"
    copy.write_bytes(module.TABLE.read_bytes())
    before = json.loads(copy.read_text())
    tune.write_row(copy, 89, {"decode half": str(START)}, "a device")
    after = json.loads(copy.read_text())
    assert after["measured"] == {"89": "a device"}
    assert list(after["cases"]["decode half"]) == ["80", "89", "90", "100"]
    module.table.cache_clear()
    with monkeypatch.context() as patched:
        patched.setattr(module, "TABLE", copy)
        found = [module.pinned("decode half", arch) for arch in (80, 89, 90)]
    module.table.cache_clear()  # after the patch: tests that follow in this process read the table of the repository
    assert found == [module.pinned("decode half", 80), START, module.pinned("decode half", 90)]
    for content in (before, after):
        content["cases"].pop("decode half")
    assert before["cases"] == after["cases"] and before["about"] == after["about"]


def test_every_workload_launches_its_case(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[str] = []

    def launch(kernel: Any, grid: Any, arguments: Any, case: str, config: Any = None) -> None:
        launched.append(case)

    launching = "append_codes prefill_attention ragged_decode ragged_extend slot_decode window_statistics"
    for name in launching.split():
        monkeypatch.setattr(f"kvpass.kernels.{name}.launch", launch)
    cases = []
    for case, work in tune.workloads("cpu", tokens=40, rows=2, budget=64, layers=2):
        launched.clear()
        tune.result(work(config=START))
        assert case in launched, f"{case}: {launched}"
        cases.append(case)
    assert set(cases) <= set(module.table()) and len(set(cases)) == len(cases)


def test_without_a_device_the_command_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune.torch.cuda, "is_available", lambda: False)
    ran = invoke("bench", "--tune")
    assert ran.exit_code == 2 and "no CUDA device" in ran.output
