"""Options of policies: the default and the range of each, in the line that declares it.

``alpha: float = option(0.2, check_float, 0.0, 1.0)`` is a number from 0 to 1. The message of every check gives the
option's name, its value and its range.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Callable
from typing import Any, Literal, TypeVar, cast, get_args

import numpy as np

MOST = 1 << 30  # largest number of tokens: positions are int32
MOST_NEIGHBOURS = 1 << 16  # largest width of pooling

Parity = Literal["paper", "code"]
"""Rules of the paper, whose total is the budget, or of the released code, which misses it."""

T = TypeVar("T")


def option(default: T, check: Callable[..., None], *args: Any, **kwargs: Any) -> T:
    """Return a dataclass field checked by ``check(name, value, *args, **kwargs)``; a default of None needs no check."""

    def checked(name: str, value: object) -> None:
        if value is not None or default is not None:
            check(name, value, *args, **kwargs)

    return dataclasses.field(default=default, metadata={"check": checked})


def check_options(policy: Any) -> None:
    """Check every :func:`option` of a policy, inherited with other defaults too; make NumPy's numbers Python's."""
    kinds = [kind for kind in reversed(type(policy).__mro__) if dataclasses.is_dataclass(kind)]
    fields = [field for kind in kinds for field in dataclasses.fields(kind) if "check" in field.metadata]
    for name, check in {field.name: field.metadata["check"] for field in fields}.items():
        value = getattr(policy, name)
        if isinstance(value, np.number):
            value = int(value) if isinstance(value, np.integer) else float(str(value))  # as written
            object.__setattr__(policy, name, value)
        check(name, value)


def check_int(name: str, value: object, low: int, high: int = MOST) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise ValueError(f"{name}={value!r}: must be an int >= {low}")
    if value > high:
        raise ValueError(f"{name}={value}: must be at most {high}")


def check_odd(name: str, value: object) -> None:
    check_int(name, value, 1, MOST_NEIGHBOURS)
    if cast(int, value) % 2 == 0:
        raise ValueError(f"{name}={value}: must be odd")


def check_float(name: str, value: object, low: float, high: float = math.inf, *, open_low: bool = False) -> None:
    """Raise unless the value is a finite number from ``low`` to ``high``; with ``open_low``, above ``low``."""
    number = not isinstance(value, bool) and isinstance(value, int | float) and abs(value) <= sys.float_info.max
    if not number or not low <= cast(float, value) <= high or (open_low and value == low):
        left, right = "(" if open_low else "[", ")" if high == math.inf else "]"
        raise ValueError(f"{name}={value!r}: must be a number in {left}{low}, {high}{right}")


def check_ids(name: str, value: object) -> None:
    if not isinstance(value, tuple | list) or any(type(one) is not int or one < 0 for one in value):
        raise ValueError(f"{name}={value!r}: must be a list of token ids, ints >= 0")


def check_text(name: str, value: object, what: str = "the path of a file") -> None:
    """Raise unless the value is None or a text that is not empty."""
    if value is not None and (not isinstance(value, str) or not value):
        raise ValueError(f"{name}={value!r}: must be {what}, a str, or None")


def check_choice(name: str, value: object, choices: Any) -> None:
    """Raise unless the value is one of a sequence or of a ``typing.Literal``."""
    choices = get_args(choices) or choices
    if not any(value is choice or (type(value) is type(choice) and value == choice) for choice in choices):
        raise ValueError(f"{name}={value!r}: must be one of {', '.join(map(repr, choices))}")


def check_bool(name: str, value: object) -> None:
    check_choice(name, value, (True, False))
