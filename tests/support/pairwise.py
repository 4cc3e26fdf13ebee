"""Samples of a product of parameters, for the quick suite; the rest of the product is marked ``exhaustive``."""

import itertools
from collections.abc import Collection, Sequence
from typing import Any

import pytest


def pairwise(**axes: Sequence[Any]) -> pytest.MarkDecorator:
    """Parametrize a test by the product of the axes, with a sample in which every pair of values meets.

    Greedy and deterministic: the next row of the sample is the first one with the most pairs that have not met yet.
    """
    rows = list(itertools.product(*(range(len(values)) for values in axes.values())))
    pairs = {row: set(itertools.combinations(enumerate(row), 2)) for row in rows}
    missing, sample = set().union(*pairs.values()), set()
    while missing:
        best = max(rows, key=lambda row: len(pairs[row] & missing))
        sample.add(best)
        missing -= pairs[best]
    return _parametrize(axes, sample)


def each_value(**axes: Sequence[Any]) -> pytest.MarkDecorator:
    """Parametrize a test by the product of the axes, with a sample that has every value of every axis."""
    longest = max(len(values) for values in axes.values())
    return _parametrize(axes, {tuple(i % len(values) for values in axes.values()) for i in range(longest)})


def _parametrize(axes: dict[str, Sequence[Any]], sample: Collection[tuple[int, ...]]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(
        list(axes),
        [
            pytest.param(
                *(values[i] for values, i in zip(axes.values(), row, strict=True)),
                marks=() if row in sample else pytest.mark.exhaustive,
            )
            for row in itertools.product(*(range(len(values)) for values in axes.values()))
        ],
    )


def quick(values: Sequence[Any], chosen: Collection[Any]) -> list[Any]:
    """Values of one parameter, those that are not chosen marked ``exhaustive``."""
    assert all(one in values for one in chosen), "a chosen value is not among the values"
    return [value if value in chosen else pytest.param(value, marks=pytest.mark.exhaustive) for value in values]


def quick_rows(rows: Sequence[tuple[Any, ...]], chosen: Collection[tuple[Any, ...]]) -> list[Any]:
    """The same of several parameters, a value of each in a row."""
    assert all(one in rows for one in chosen), "a chosen row is not among the rows"
    return [row if row in chosen else pytest.param(*row, marks=pytest.mark.exhaustive) for row in rows]
