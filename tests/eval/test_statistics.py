"""Intervals of mean scores and of paired differences, against brute force and by their coverage of made data."""

import math

import numpy as np
import pytest
from scipy import stats

from kvpass.eval import statistics
from kvpass.eval.statistics import Estimate, mean_difference, mean_of, mean_score, wilson_interval


def f1_scores(rng, shape):
    """Scores as an F1 has them: a third 0, a seventh 1, the others between (Beta 1.5, 2.5); mean 0.15 + 0.5 * 0.375."""
    kind = rng.random(shape)
    return np.where(kind < 0.35, 0.0, np.where(kind < 0.5, 1.0, rng.beta(1.5, 2.5, shape)))


def paired_scores(rng, shape):
    """Scores of two policies: half of the second's are the first's, the others drawn anew and a fifth lower."""
    first = f1_scores(rng, shape)
    return first, np.where(rng.random(shape) < 0.5, first, 0.8 * f1_scores(rng, shape))


TRUE_SCORE = 0.15 + 0.5 * 1.5 / 4
TRUE_DIFFERENCE = 0.5 * (0.8 - 1) * TRUE_SCORE


def test_an_interval_is_that_of_a_bootstrap_written_out():
    rng = np.random.default_rng(1)
    scores = f1_scores(rng, 17)
    means = scores[rng.integers(0, 17, (200_000, 17))].mean(1)
    tail = stats.norm.cdf(-math.sqrt(17 / 16) * stats.t.ppf(0.975, 16))
    written_out = np.quantile(means, [tail, 1 - tail])
    for estimate, shift in ((mean_score([*scores]), 0.0), (mean_difference([*(scores - 0.5)]), 0.5)):
        assert estimate.mean + shift == pytest.approx(scores.mean())
        np.testing.assert_allclose([estimate.low + shift, estimate.high + shift], written_out, atol=0.006)
    assert mean_score([*scores]) == mean_score([*scores]), "seeded"


def coverage(count, tables):
    """Shares of tables whose interval holds the true mean: of scores, of paired differences, of three tasks' mean."""
    rng = np.random.default_rng(7)
    held = np.zeros((tables, 3))
    for table in range(tables):
        tasks = [paired_scores(rng, count) for _ in range(3)]
        (first, second), *_ = tasks
        score, difference = mean_score([*first]), mean_difference([*(second - first)])
        every = mean_of([mean_difference([*(second - first)]) for first, second in tasks])
        for index, (estimate, truth) in enumerate(zip((score, difference, every), TRUTHS, strict=True)):
            held[table, index] = estimate.low <= truth <= estimate.high
    return held.mean(0)


TRUTHS = (TRUE_SCORE, TRUE_DIFFERENCE, TRUE_DIFFERENCE)


@pytest.mark.exhaustive
def test_intervals_hold_the_true_mean_in_95_of_100_tables(monkeypatch):
    monkeypatch.setattr(statistics, "RESAMPLES", 1_000)
    shares = {count: coverage(count, 1_000) for count in (50, 20, 8)}
    print(*(f"{count} samples: {[f'{share:.1%}' for share in found]}" for count, found in shares.items()), sep="\n")
    assert all(0.93 <= share <= 0.97 for share in shares[50])


def test_the_mean_over_tasks_of_scores_of_0_and_1_holds_the_true_mean():
    rng = np.random.default_rng(3)
    truth = np.array([0.95, 0.6, 0.2])
    held = []
    for _ in range(1_000):
        answered = rng.random((3, 20)) < truth[:, None]
        estimate = mean_of([mean_score([*map(float, scores)]) for scores in answered])
        assert 0 <= estimate.low <= estimate.mean <= estimate.high <= 1
        held.append(estimate.low <= truth.mean() <= estimate.high)
    assert 0.93 <= np.mean(held) <= 0.97


def test_scores_that_are_equal_have_an_interval():
    assert mean_difference([0.0, 0.0, 0.0]) == Estimate(0.0, 0.0, 0.0)
    assert mean_of([mean_difference([0.0, 0.0])] * 3) == Estimate(0.0, 0.0, 0.0)
    equal = mean_score([0.3] * 7)
    assert (equal.low, equal.high) == pytest.approx((0.3, 0.3)) and equal.low <= equal.mean <= equal.high
    assert mean_score([1.0] * 4) == Estimate(1.0, *wilson_interval(1.0, 4))


def test_one_sample_says_nothing_of_the_mean():
    assert mean_score([0.3]) == Estimate(0.3, 0.0, 1.0)
    assert mean_difference([0.3]) == Estimate(0.3, -1.0, 1.0)
    two = mean_score([0.25, 0.75])
    assert (two.low, two.mean, two.high) == (0.25, 0.5, 0.75)
