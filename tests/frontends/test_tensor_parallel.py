"""What cannot be right where several processes share the heads of a layer is refused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest

import kvpass
from kvpass.frontends.tensor_parallel import check_divided
from kvpass.policies.rules import read_rules
from kvpass.policies.snapkv import SnapKV
from kvpass.ranks import Ranks


@dataclass(frozen=True, kw_only=True)
class Inherits(SnapKV):
    name: ClassVar[str] = "inherits"


@dataclass(frozen=True, kw_only=True)
class Says(SnapKV):
    name: ClassVar[str] = "says"
    divisible: ClassVar[bool] = True


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvpass.policies.POLICIES", dict(kvpass.POLICIES))
    kvpass.register_policy(Inherits)
    kvpass.register_policy(Says)


def check(policy: str | kvpass.Policy, recompress: str = "never", **options: object) -> None:
    check_divided(read_rules(policy, 64, recompress, window=None, options=options, model_name=""), Ranks("", 0, 2))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"policy": "tova"}, "while decoding it evicts by the attention of all heads"),
        ({"policy": Inherits()}, "set divisible = True"),
        ({"policy": "lava", "recompress": "when_full"}, "recompress='when_full' with heads on 2 processes"),
    ],
    ids=["evicts", "own-policy", "recompress"],
)
def test_refused(given, message):
    with pytest.raises(ValueError, match=message):
        check(**given)


def test_policies_that_say_so_are_not_refused():
    check(Says())
    check("tova", evict_during_decode=False)
    check("h2o")
