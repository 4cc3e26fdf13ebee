"""The samples that are left in the quick suite."""

import itertools

import pytest

from pairwise import each_value, pairwise, quick

AXES = {"a": [1, 2, 3], "b": "xyzw", "c": [True, False], "d": [None, 0]}


def quick_rows(params):
    return [dict(zip(AXES, param.values, strict=True)) for param in params if not param.marks]


@pytest.mark.parametrize("sample", [pairwise, each_value])
def test_the_product_is_complete(sample):
    params = sample(**AXES).args[1]
    assert [tuple(param.values) for param in params] == list(itertools.product(*AXES.values()))


def test_every_pair_of_values_is_in_the_quick_suite():
    params = pairwise(**AXES).args[1]
    rows = quick_rows(params)
    assert len(rows) < len(params) / 3
    for one, other in itertools.combinations(AXES, 2):
        met = {(row[one], row[other]) for row in rows}
        assert met == set(itertools.product(AXES[one], AXES[other]))


def test_every_value_is_in_the_quick_suite():
    rows = quick_rows(each_value(**AXES).args[1])
    assert len(rows) == 4
    for name, values in AXES.items():
        assert {row[name] for row in rows} == set(values)


def test_values_that_are_not_chosen_are_exhaustive():
    first, second, third = quick("abc", "b")
    assert second == "b"
    for param, value in ((first, "a"), (third, "c")):
        assert (param.values, param.marks) == ((value,), (pytest.mark.exhaustive,))
    with pytest.raises(AssertionError, match="not among"):
        quick("abc", "d")
