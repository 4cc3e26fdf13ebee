"""What Inductor compiled in one process serves the next one."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

START = """
import sys, torch, kvpass
from kvpass.eval.bench.settings import build, find_model
from torch._dynamo.utils import counters
fast = kvpass.compile(build(find_model(sys.argv[1]), seed=0), policy="lava", budget=0.25)
ids = torch.zeros(1, 200, dtype=torch.int64)
fast(ids[:, :1], past_key_values=fast(ids, logits_to_keep=1).past_key_values)
print(*(counters["aot_autograd"][f"autograd_cache_{what}"] for what in ("miss", "hit", "bypass")))
"""


@pytest.mark.exhaustive
def test_the_next_start_compiles_nothing_anew(micro):
    """The first process fills the cache, or finds it filled by an earlier run."""
    environment = {**os.environ, "PYTHONSAFEPATH": "1"}
    for _ in range(2):
        said = subprocess.run(
            [sys.executable, "-c", START, micro], env=environment, stdout=subprocess.PIPE, check=True, text=True
        ).stdout
        missed, found, never = map(int, said.splitlines()[-1].split())
        assert missed + found == 4, "three parts of the prefill and a decode step"
        assert never == 0
        if missed == 0:
            break
    assert missed == 0
