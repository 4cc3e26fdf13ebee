"""What one process compiled serves the next one, also where that has no compiler."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

START = """
import sys, torch, kvpass
from kvpass.eval.bench.settings import build, find_model
from torch._dynamo.utils import counters
fast = kvpass.compile(build(find_model(sys.argv[1]), seed=0), policy="lava", budget=0.25)
ids = torch.arange(200).repeat(int(sys.argv[2]), 1) % 60
print(fast.generate(ids, max_new_tokens=9, do_sample=False)[:, 200:].tolist())
print(*(counters["aot_autograd"][f"autograd_cache_{what}"] for what in ("miss", "hit", "bypass")))
"""


def start(model, rows=1, **environment):
    """What a fresh process says, on standard output and otherwise."""
    environment = {**os.environ, "PYTHONSAFEPATH": "1", **environment}
    ran = subprocess.run(
        [sys.executable, "-c", START, model, str(rows)], env=environment, capture_output=True, text=True
    )
    return ran.stdout.splitlines()[-2:], ran.stderr


@pytest.mark.exhaustive
def test_the_next_start_compiles_nothing_anew(micro):
    """The first process fills the cache, or finds it filled by an earlier run."""
    for _ in range(2):
        (_, counted), _ = start(micro)
        missed, found, never = map(int, counted.split())
        assert missed + found == 4, "three parts of the prefill and a decode step"
        assert never == 0
        if missed == 0:
            break
    assert missed == 0


@pytest.mark.exhaustive
def test_a_start_from_copied_folders_needs_no_compiler(micro, tmp_path):
    def in_folder(name):
        return {
            "KVPASS_CACHE": str(tmp_path / name / "kvpass"),
            "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / name / "inductor"),
        }

    no_compiler = {"PATH": str(tmp_path / "empty"), "CXX": "g++"}
    (tokens, _), _ = start(micro, **in_folder("built"))
    shutil.copytree(tmp_path / "built", tmp_path / "copied")
    (again, counted), _ = start(micro, **in_folder("copied"), **no_compiler)
    assert again == tokens
    assert counted == "0 4 0"
    for folder, rows in (("copied", 2), ("new", 1)):  # what must be compiled
        said, error = start(micro, rows, **in_folder(folder), **no_compiler)
        assert said == []
        assert "No working C++ compiler found" in error
