"""The sample that `pairwise` leaves in the quick suite."""

from __future__ import annotations

import itertools

from pairwise import pairwise


def test_every_pair_of_values_is_in_the_quick_suite_and_the_product_is_complete():
    axes = {"a": [1, 2, 3], "b": "xyzw", "c": [True, False], "d": [None, 0]}
    params = pairwise(**axes).args[1]
    assert [tuple(param.values) for param in params] == list(itertools.product(*axes.values()))
    quick = [dict(zip(axes, param.values, strict=True)) for param in params if not param.marks]
    assert len(quick) < len(params) / 3
    for one, other in itertools.combinations(axes, 2):
        met = {(row[one], row[other]) for row in quick}
        assert met == set(itertools.product(axes[one], axes[other]))
