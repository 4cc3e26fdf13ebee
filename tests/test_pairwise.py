"""The samples that are left in the quick suite."""

import itertools

import pytest

from pairwise import each_value, pairwise, quick

AXES = {"a": [1, 2, 3], "b": "xyzw", "c": [True, False], "d": [None, 0]}


@pytest.mark.parametrize(("sample", "together", "most"), [(pairwise, 2, 15), (each_value, 1, 4)])
def test_the_product_is_complete_and_every_pair_or_value_is_in_the_quick_suite(sample, together, most):
    params = sample(**AXES).args[1]
    assert [tuple(param.values) for param in params] == list(itertools.product(*AXES.values()))
    rows = [dict(zip(AXES, param.values, strict=True)) for param in params if not param.marks]
    assert len(rows) <= most
    for axes in itertools.combinations(AXES, together):
        met = {tuple(row[axis] for axis in axes) for row in rows}
        assert met == set(itertools.product(*(AXES[axis] for axis in axes)))


def test_values_that_are_not_chosen_are_exhaustive():
    first, second, third = quick("abc", "b")
    assert second == "b"
    for param, value in ((first, "a"), (third, "c")):
        assert (param.values, param.marks) == ((value,), (pytest.mark.exhaustive,))
    with pytest.raises(AssertionError, match="not among"):
        quick("abc", "d")
