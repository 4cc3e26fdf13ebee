"""What cannot be right where several processes share the heads of a layer is refused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest

import kvpass
from kvpass.adapt.tensor_parallel import check_divided
from kvpass.policies.snapkv import SnapKV
from kvpass.ranks import ONE_PROCESS, Ranks


@dataclass(frozen=True, kw_only=True)
class Inherits(SnapKV):
    name: ClassVar[str] = "inherits"


@dataclass(frozen=True, kw_only=True)
class Says(SnapKV):
    name: ClassVar[str] = "says"
    divisible: ClassVar[bool] = True


RANKS = Ranks("", 0, 2)


def test_a_policy_whose_class_does_not_say_so_is_refused():
    with pytest.raises(ValueError, match=r"policy 'inherits' with heads on 2 processes.*set divisible = True"):
        check_divided(Inherits(), RANKS)
    check_divided(Inherits(), ONE_PROCESS)


def test_policies_that_say_so_and_ours_are_not_refused():
    check_divided(Says(), RANKS)
    for name in ("lava", "h2o", "tova"):
        check_divided(kvpass.POLICIES[name](), RANKS)
