"""Tables for a terminal and in Markdown: ``left`` columns are aligned to the left, the others to the right."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rich import box
from rich.table import Table

Cells = Iterable[Sequence[str]]


def rich_table(header: Sequence[str], rows: Cells, *, left: int = 1, **style: Any) -> Table:
    """A table for a terminal; ``style`` is that of :class:`rich.table.Table`."""
    usual: dict[str, Any] = {"box": box.SIMPLE_HEAD, "padding": (0, 1, 0, 0)}
    table = Table(**usual | style)
    for index, column in enumerate(header):
        table.add_column(column, justify="left" if index < left else "right", no_wrap=index >= left)
    for cells in rows:
        table.add_row(*cells)
    return table


def markdown_table(header: Sequence[str], rows: Cells, *, left: int = 1) -> str:
    """A table in Markdown."""
    divider = ["---"] * left + ["---:"] * (len(header) - left)
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (header, divider, *rows))
