"""A sample of a product of parameters in which every pair of values meets; the rest of the product is exhaustive."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest


def pairwise(**axes: Sequence[Any]) -> pytest.MarkDecorator:
    """Parametrize a test by the product of the axes; rows that the sample does not need are marked ``exhaustive``.

    Greedy and deterministic: the next row of the sample is the first one with the most pairs that have not met yet.
    """
    rows = list(itertools.product(*(range(len(values)) for values in axes.values())))
    pairs = {row: set(itertools.combinations(enumerate(row), 2)) for row in rows}
    missing, sample = set().union(*pairs.values()), set()
    while missing:
        best = max(rows, key=lambda row: len(pairs[row] & missing))
        sample.add(best)
        missing -= pairs[best]
    return pytest.mark.parametrize(
        list(axes),
        [
            pytest.param(
                *(values[i] for values, i in zip(axes.values(), row, strict=True)),
                marks=() if row in sample else pytest.mark.exhaustive,
            )
            for row in rows
        ],
    )
