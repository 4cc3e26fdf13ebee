"""What the bench measured of one system, and the record of figures that comes of it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from kvpass.eval.bench.bound import least_step_seconds
from kvpass.eval.bench.measure import Scoring, spread
from kvpass.eval.bench.settings import WARM_UP_STEPS
from kvpass.eval.bench.systems import System


@dataclass
class Measurement:
    """What one system did with one context and batch.

    Attributes:
        prefill: seconds, one a repeat. steps: seconds of each timed decode step, one list a repeat.
        warm_up: seconds of the first prefill and the first decode steps, compilation included.
        first_steps: seconds of the steps before the timed ones, one list a repeat.
        tokens: greedy continuation of the first row, in the last repeat.
        cache_bytes: storages of the cache at its end. attended_bytes: of the entries the last step read.
        peak_bytes: most that was allocated at once, weights included. step_bytes: most that a decode step needed
            beside weights and cache; both None on the CPU.
        largest_batch: rows of the context that fit; None on the CPU.
        scoring: what compression adds to a prefill; None for systems that do not compress, or of others.
        failure: why there are no figures.
    """

    system: System
    prefill: list[float] = field(default_factory=list)
    steps: list[list[float]] = field(default_factory=list)
    warm_up: float = 0.0
    first_steps: list[list[float]] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    cache_bytes: int = 0
    attended_bytes: int = 0
    peak_bytes: int | None = None
    step_bytes: int | None = None
    largest_batch: int | None = None
    scoring: Scoring | None = None
    failure: str | None = None

    @property
    def decode_ms(self) -> list[float]:
        return [1e3 * seconds for repeat in self.steps for seconds in repeat]

    @property
    def compile_seconds(self) -> float | None:
        """First run minus a median run, Inductor's disk cache empty or not; None for what is not compiled."""
        if not self.system.compiled:
            return None
        usual = spread(self.prefill)["median"] + WARM_UP_STEPS * spread(self.decode_ms)["median"] / 1e3
        return max(0.0, self.warm_up - usual)


def record(
    measurement: Measurement, measured: Iterable[Measurement], batch: int, weights: int | None, bandwidth: float
) -> dict[str, Any]:
    """The figures of a system, beside those of the others.

    Args:
        measured: all systems with this context and batch. weights: bytes of them that a step reads; None: not known.
        bandwidth: of copies, bytes per second.
    """
    name = measurement.system.name
    if measurement.failure is not None:
        return {"name": name, "failure": measurement.failure}
    others = {other.system.name: other for other in measured if other.failure is None and other.steps}
    prefill, decode = spread(measurement.prefill), spread(measurement.decode_ms)
    bound = None if weights is None else 1e3 * least_step_seconds(weights, measurement.attended_bytes, bandwidth)
    eager = others.get("hf-eager")
    return {
        "name": name,
        "failure": None,
        "prefill_s": prefill | {"all": measurement.prefill},
        "decode_ms": decode | {"all": [[1e3 * s for s in steps] for steps in measurement.steps]},
        "first_steps_ms": [[1e3 * s for s in steps] for steps in measurement.first_steps],
        "tokens_per_s": 1e3 * batch / decode["median"],
        "cache_bytes": measurement.cache_bytes,
        "attended_bytes": measurement.attended_bytes,
        "peak_bytes": measurement.peak_bytes,
        "step_bytes": measurement.step_bytes,
        "compile_s": measurement.compile_seconds,
        "scoring": _scoring(measurement),
        "bound_ms": bound,
        "share_of_bound": None if bound is None else bound / decode["median"],
        "largest_batch": measurement.largest_batch,
        "decode_speedup": {
            other: spread(others[other].decode_ms)["median"] / decode["median"]
            for other in ("hf-eager", "hf-static", "full")
            if other in others
        },
        "prefill_ratio": {
            other: prefill["median"] / spread(others[other].prefill)["median"]
            for other in ("hf-static", "full")
            if other in others
        },
        "same_tokens_as_hf_eager": None if eager is None else measurement.tokens == eager.tokens,
    }


def _scoring(measurement: Measurement) -> dict[str, float] | None:
    found = measurement.scoring
    return None if found is None else {"seconds": found.seconds, "prefill_s": found.prefill, "share": found.share}
