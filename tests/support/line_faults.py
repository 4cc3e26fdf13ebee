"""The lines of kvpass that a call runs, and an exception at one of them."""

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import kvpass

_PACKAGE = str(Path(kvpass.__file__).parent)

Line = tuple[str, int]


@contextmanager
def traced_lines(at: int | None = None, error: type[BaseException] = KeyboardInterrupt) -> Iterator[list[Line]]:
    """Yield the lines of kvpass that this thread runs inside, in their order; at line ``at`` of them raise an error.

    It is raised once: Python ends the tracing with it.
    """
    lines: list[Line] = []

    def on_call(frame: FrameType, event: str, _: Any) -> Any:
        return on_line if frame.f_code.co_filename.startswith(_PACKAGE) else None

    def on_line(frame: FrameType, event: str, _: Any) -> Any:
        if event == "line":
            lines.append((frame.f_code.co_filename, frame.f_lineno))
            if len(lines) - 1 == at:
                raise error
        return on_line

    before = sys.gettrace()
    sys.settrace(on_call)
    try:
        yield lines
    finally:
        sys.settrace(before)


def drawn_places(lines: list[Line], seed: int, number: int) -> list[int]:
    """Draw places among the lines of a call: each line is as likely, however often it runs."""
    draw = random.Random(seed)
    places: dict[Line, list[int]] = {}
    for place, line in enumerate(lines):
        places.setdefault(line, []).append(place)
    return [draw.choice(places[draw.choice(sorted(places))]) for _ in range(number)]
