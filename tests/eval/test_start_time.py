"""What Inductor compiled in one process serves the next one."""

from __future__ import annotations

import json
import os
import subprocess
import sys

START = """
import json, sys, torch, kvpass
from kvpass.eval.bench.settings import build, find_model
from torch._dynamo.utils import counters
fast = kvpass.compile(build(find_model(sys.argv[1]), seed=0), policy="lava", budget=0.25)
ids = torch.zeros(1, 200, dtype=torch.int64)
fast(ids[:, :1], past_key_values=fast(ids, logits_to_keep=1).past_key_values)
print(json.dumps([counters["inductor"]["fxgraph_cache_miss"], counters["inductor"]["fxgraph_cache_hit"]]))
"""


def test_the_next_start_compiles_nothing_anew(micro, tmp_path):
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"), "PYTHONSAFEPATH": "1"}
    compiled_and_reused = []
    for _ in range(2):
        said = subprocess.run(
            [sys.executable, "-c", START, micro], env=environment, stdout=subprocess.PIPE, check=True, text=True
        ).stdout
        compiled_and_reused.append(json.loads(said.splitlines()[-1]))
    assert compiled_and_reused == [[2, 0], [0, 2]]
