"""Rows of files of JSON lines."""

from __future__ import annotations

import contextlib
import gzip
import itertools
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec

Row = TypeVar("Row")

ENDINGS = (".jsonl", ".jsonl.gz")
"""Of the names of such files."""


@contextlib.contextmanager
def checked(place: str, of: str) -> Iterator[None]:
    """Raise ``ValueError`` with the place for a row that msgspec refuses, whose message names the field."""
    try:
        yield
    except msgspec.DecodeError as error:
        raise ValueError(f"{place}: is no row of {of}: {error}") from None


def read_rows(
    path: Path, convert: Callable[[dict[str, Any]], Row], of: str, count: int | None = None
) -> list[tuple[int, Row]]:
    """Return the first ``count`` rows of a file, with the numbers of their lines; ``.gz`` is decompressed.

    Blank lines and a byte order mark are skipped.

    Args:
        convert: makes a row of the object in a line. of: whose rows they are, for errors.

    Raises:
        ValueError: the file cannot be read, or a line is no row; the message names file, line and field.
    """
    opener: Any = gzip.open if path.suffix == ".gz" else open
    rows = []
    try:
        with opener(path, "rt", encoding="utf-8-sig") as file:
            lines = ((number, line) for number, line in enumerate(file, 1) if line.strip())
            for number, line in itertools.islice(lines, count):
                with checked(f"{path}, line {number}", of):
                    rows.append((number, convert(msgspec.json.decode(line, type=dict[str, Any]))))
    except (EOFError, OSError, UnicodeDecodeError, zlib.error) as error:
        raise ValueError(f"{path}: cannot be read: {error}") from None
    return rows
