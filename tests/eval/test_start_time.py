"""What Inductor compiled in one process serves the next one."""

from __future__ import annotations

from kvpass.eval.bench.start_time import measure_starts


def test_the_next_start_compiles_nothing_anew(micro):
    cold, warm = measure_starts(micro, 200, "lava")
    print(f"compile seconds: cold {cold.seconds:.1f}, warm {warm.seconds:.1f}")
    assert (cold.compiled, cold.reused) == (2, 0)
    assert (warm.compiled, warm.reused) == (0, 2)
