"""Checks of policy options; every message gives the option's name, its value and its range."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence

MOST = 1 << 30
"""Largest number of tokens: positions are int32."""
MOST_NEIGHBOURS = 1 << 16
"""Largest width of pooling."""


def check_int(name: str, value: object, low: int, high: int = MOST) -> None:
    """Raise unless the value is an int from ``low`` to ``high``."""
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise ValueError(f"{name}={value!r}: must be an int >= {low}")
    if value > high:
        raise ValueError(f"{name}={value}: must be at most {high}")


def check_odd(name: str, value: object) -> None:
    """Raise unless the value is an odd int from 1 to :data:`MOST_NEIGHBOURS`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1 or value % 2 == 0:
        raise ValueError(f"{name}={value!r}: must be an odd int >= 1")
    check_int(name, value, 1, MOST_NEIGHBOURS)


def check_float(
    name: str, value: object, low: float, high: float = math.inf, *, open_low: bool = False, open_high: bool = False
) -> None:
    """Raise unless the value is a finite number from ``low`` to ``high``; ends included by default."""
    number = not isinstance(value, bool) and isinstance(value, int | float) and abs(value) <= sys.float_info.max
    if number:
        above = value > low if open_low else value >= low  # type: ignore[operator]
        below = value < high if open_high else value <= high  # type: ignore[operator]
        if above and below:
            return
    left = "(" if open_low else "["
    right = ")" if open_high or high == math.inf else "]"
    raise ValueError(f"{name}={value!r}: must be a number in {left}{low}, {high}{right}")


def check_choice(name: str, value: object, choices: Sequence[object]) -> None:
    """Raise unless the value is one of ``choices``."""
    if not any(value is choice or (type(value) is type(choice) and value == choice) for choice in choices):
        raise ValueError(f"{name}={value!r}: must be one of {', '.join(map(repr, choices))}")
