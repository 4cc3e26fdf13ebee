"""Policies as they are typed."""

from __future__ import annotations

import pytest

import kvpass
from kvpass.eval.policy_spec import parse_policies


def test_policies_are_read_with_their_options():
    read = parse_policies("full, cake:tau1=1.6,tau2=0.4,snapkv:window=8,pool=avg,h2o:evict_during_decode=False")
    assert [spec.name for spec in read] == ["full", "cake", "snapkv", "h2o"]
    assert dict(read[1].options) == {"tau1": 1.6, "tau2": 0.4}
    assert dict(read[2].options) == {"window": 8, "pool": "avg"}
    assert dict(read[3].options) == {"evict_during_decode": False}
    assert str(read[1]) == "cake:tau1=1.6,tau2=0.4"
    assert parse_policies(",".join(map(str, read))) == read
    assert read[2].resolve() == kvpass.policies.resolve("snapkv", window=8, pool="avg")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "name at least one policy"),
        ("window=8,snapkv", "option 'window=8' has no policy"),
        ("snapkv:window", "'window' must be an option such as"),
        ("snapkw", "did you mean 'snapkv'"),
        ("snapkv:windo=8", "windo=8: not an option"),
        ("cake", "tau1=None"),
    ],
)
def test_policies_that_cannot_be_read_are_refused(text, message):
    with pytest.raises(ValueError, match=message):
        parse_policies(text)
