"""Budgets as users write them."""

from __future__ import annotations

from decimal import Decimal

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvpass.config import Budget
from kvpass.testing import compiled_once, random_ids


@given(st.integers(1, 1000), st.integers(1, 1_000_000))
@example(290, 100)
def test_a_fraction_is_the_decimal_that_was_written(thousandths, tokens):
    written = Decimal(thousandths) / 1000
    assert Budget.parse(float(written)).entries(tokens, 1) == int(written * tokens)


@pytest.mark.parametrize(("fraction", "kept"), [(0.29, 29), (0.57, 57), (0.58, 58), (1 / 3, 33), (0.999, 99)])
def test_a_model_keeps_the_fraction_that_was_written(fraction, kept):
    fast = compiled_once("llama", layers=2, policy="lava", budget=fraction, window=8, backend="eager")[1]
    cache = fast(random_ids(1, 100)).past_key_values
    assert int(cache.lengths.sum()) == kept * 2 * 2
