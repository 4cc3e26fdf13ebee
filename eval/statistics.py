"""Means of scores and of paired differences, with 95 % intervals over samples."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np

from kvpass.eval.tasks.base import library

RESAMPLES = 10_000
SEED = 0


@dataclass(frozen=True)
class Estimate:
    """A mean and its 95 % interval, which takes samples as independent, those that share a context included."""

    mean: float
    low: float
    high: float


def mean_score(scores: Sequence[float]) -> Estimate:
    """Mean of scores in [0, 1]: Wilson's interval where all are 0 or 1, else a bootstrap."""
    if {*scores} <= {0.0, 1.0}:
        return Estimate(fmean(scores), *wilson_interval(fmean(scores), len(scores)))
    return bootstrap(scores, 0.0)


def mean_difference(differences: Sequence[float]) -> Estimate:
    """Mean of differences in [-1, 1], each of one sample that was answered twice: a bootstrap."""
    return bootstrap(differences, -1.0)


def mean_of(tasks: Sequence[Estimate]) -> Estimate:
    """Mean over tasks: their distances to each end are squared and added (Newcombe 1998; Zou and Donner 2008)."""
    mean = fmean(task.mean for task in tasks)
    low = math.hypot(*(task.mean - task.low for task in tasks)) / len(tasks)
    high = math.hypot(*(task.high - task.mean for task in tasks)) / len(tasks)
    return Estimate(mean, mean - low, mean + high)


def wilson_interval(mean: float, count: int, z: float = 1.96) -> tuple[float, float]:
    """Wilson's score interval for a mean of ``count`` scores of 0 and 1; the mean is in it in spite of rounding."""
    spread = z * math.sqrt(mean * (1 - mean) / count + z * z / (4 * count * count))
    middle, scale = mean + z * z / (2 * count), 1 + z * z / count
    return max(0.0, min(mean, (middle - spread) / scale)), min(1.0, max(mean, (middle + spread) / scale))


def bootstrap(values: Sequence[float], lowest: float) -> Estimate:
    """The percentile interval of resamples; from ``lowest`` to 1 where there is one value only.

    Resamples vary less than samples, by the factor (n - 1) / n, and their tails are those of a normal distribution. So
    the percentiles are widened to those of Student's t, and by that factor (Hesterberg 2015, arXiv 1411.5279).
    """
    mean, count = fmean(values), len(values)
    if count == 1:
        return Estimate(mean, lowest, 1.0)
    stats = library("scipy.stats")
    widened = math.sqrt(count / (count - 1)) * stats.t.ppf(0.975, count - 1)
    level = float(1 - 2 * stats.norm.sf(widened))
    settings: dict[str, Any] = {"n_resamples": RESAMPLES, "batch": 1_000, "method": "percentile", "rng": SEED}
    low, high = stats.bootstrap((sorted(values),), np.mean, confidence_level=level, **settings).confidence_interval
    return Estimate(mean, min(mean, float(low)), max(mean, float(high)))
