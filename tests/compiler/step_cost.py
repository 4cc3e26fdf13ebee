"""Microseconds of a decode step outside of its graph: python tests/compiler/step_cost.py [LAYERS]"""

import sys
import time
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).parents[1] / "support"))

import kvpass
from kvpass.compiler.backend import Capture
from tiny_models import random_ids, tiny_model

torch.set_num_threads(1)
model = kvpass.compile(tiny_model("llama", layers=int([*sys.argv, 32][1])), policy="full", backend="eager")
cache, token = model(random_ids(1, 60)).past_key_values, random_ids(1, 1)
run, in_graph, outside = Capture.__call__, [], []


def timed(self, *args):
    begin = time.perf_counter()
    result = run(self, *args)
    in_graph.append(time.perf_counter() - begin)
    return result


Capture.__call__ = timed
for _ in range(500):
    begin = time.perf_counter()
    model(token, past_key_values=cache)
    outside.append(time.perf_counter() - begin - in_graph.pop())
looks = []
for _ in range(500):
    begin = time.perf_counter()
    model._kvpass.identity.state  # noqa: B018
    looks.append(time.perf_counter() - begin)
for name, seconds in (("step outside of its graph", outside), ("look at the model", looks)):
    print(f"{name}: {1e6 * sorted(seconds)[50]:.0f} us")
