"""Launches of a decode step on CUDA, counted in the code that Inductor generates; no GPU is needed.

In a process of its own: torch is told of a CUDA device there. Run as a script, this file is that process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="stands in for a CUDA device, and there is one"),
    pytest.mark.exhaustive,
]


@cache
def generated(model, batch):
    pytest.importorskip("triton")
    root = Path(__file__).resolve().parents[2]
    environment = os.environ | {"TRITON_INTERPRET": "0"}
    command = [sys.executable, __file__, model, str(batch)]
    done = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_a_layer_of_one_row_is_eight_launches():
    code = generated("llama-3.1-8b", 1)
    assert code["per_layer"] <= 8
    assert code["launches"] <= 32 * 8 + 4  # embedding, last norm and head
    assert not [name for name in code["layer"] if name.startswith("extern_kernels")]


@pytest.mark.parametrize("batch", [1, 8])
def test_nothing_but_attention_touches_the_cache(batch):
    code = generated("llama-3.1-8b", batch)
    held = set(code["cache"])
    assert len(held) == 10, "pool, tail and their tables"
    others = [name for name, given in code["launched"] if "attend_cache" not in name and held & set(arguments(given))]
    assert not others, "a clone or copy of pool or tail"


def arguments(given):
    return given.replace(")", ",").replace("(", ",").replace(" ", "").split(",")


if __name__ == "__main__":
    from kvpass.eval.bench.decode_code import decode_code
    from kvpass.eval.bench.settings import find_model
    from kvpass.policies import resolve

    code = decode_code(find_model(sys.argv[1]).config, resolve("lava"), entries=1024, batch=int(sys.argv[2]))
    facts = {"layer": code.layer, "launches": code.launches(32), "launched": code.launched}
    print(json.dumps({**facts, "per_layer": code.launches_per_layer, "cache": sorted(code.cache_arguments)}))
