"""Budgets as users write them."""

import itertools
from decimal import Decimal

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from compiled_models import greedy, two_layers
from kvpass.config import Budget
from tiny_models import random_ids


@given(st.integers(1, 1000), st.integers(1, 1_000_000))
@example(290, 100)
def test_a_fraction_is_the_decimal_that_was_written(thousandths, tokens):
    written = Decimal(thousandths) / 1000
    assert Budget.parse(float(written)).entries(tokens, 1) == int(written * tokens)


def test_a_budget_above_any_prompt_keeps_everything_and_one_of_numpy_is_the_one_that_was_written():
    ids = random_ids(2, 40)
    for above, policy in itertools.product((10**6, 10**30, "10000000GiB", "9" * 400 + "GiB"), ("lava", "h2o")):
        model, fast = two_layers(budget=above, policy=policy)
        out = greedy(fast, ids, 5, return_dict_in_generate=True)
        assert out.sequences.equal(greedy(model, ids, 5))
        assert int(out.past_key_values.lengths.min()) == 44
    for kind in (np.int64, np.int32, np.uint8):
        assert Budget.parse(kind(100)) == Budget.parse(100) and str(Budget.parse(kind(100))) == "100"
    for kind, fraction in itertools.product((np.float64, np.float32, np.float16), (0.25, 0.29, 0.58, 1.0)):
        assert Budget.parse(kind(fraction)) == Budget.parse(fraction), (kind, fraction)


@pytest.mark.parametrize(
    ("budget", "message"),
    [
        ("0.2", r"for the fraction of each prompt that is kept pass a float, budget=0.2$"),
        ("1024", r"a text is bytes and needs a unit, as in '512MiB'; for entries pass an int, budget=1024$"),
        ("1O24", "cannot read as bytes; write a number and one of B, kB"),
        ("0.1B", "at least one byte"),
        (np.float32(2), r"budget=2.0: a float is the fraction .* \(0, 1\]"),
        (np.int64(0), "budget=0: entries"),
        (np.True_, "budget=.*True.* of type bool.*: expected an int"),
        (True, "budget=True of type bool: expected an int"),
        (float("inf"), "budget=inf"),
        (float("nan"), "budget=nan"),
        ("lots", "budget='lots'"),
    ],
    ids=repr,
)
def test_an_unreadable_budget_is_refused_with_what_to_write(budget, message):
    with pytest.raises(ValueError, match=message):
        Budget.parse(budget)
