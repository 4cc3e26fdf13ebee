"""What Inductor compiled once serves the next time."""

from __future__ import annotations

import pytest
from torch._dynamo.utils import counters

import kvpass
from kvpass.eval.start_time import measure_starts
from kvpass.testing import random_ids, tiny_model


def test_what_was_compiled_is_found_again():
    def start():
        fast = kvpass.compile(tiny_model("llama"), budget=20, window=8)
        counters.clear()
        out = fast(random_ids(1, 33), logits_to_keep=1)
        fast(random_ids(1, 1), past_key_values=out.past_key_values)
        found = counters["inductor"]
        return found["fxgraph_cache_miss"], found["fxgraph_cache_hit"]

    assert sum(start()) == 2
    assert start() == (0, 2)


@pytest.mark.exhaustive
def test_the_next_process_compiles_nothing_anew(micro):
    cold, warm = measure_starts(micro, 200, "lava")
    print(f"compile seconds: cold {cold.seconds:.1f}, warm {warm.seconds:.1f}")
    assert (cold.compiled, cold.reused) == (2, 0)
    assert (warm.compiled, warm.reused) == (0, 2)
