"""Tables for a terminal and in Markdown: ``left`` columns are aligned to the left, the others to the right."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

Cells = Sequence[Sequence[str]]


def rich_table(header: Sequence[str], rows: Iterable[Sequence[str]], *, left: int = 1, **style: Any) -> Table:
    """A table for a terminal; ``style`` is that of :class:`rich.table.Table`."""
    usual: dict[str, Any] = {"box": box.SIMPLE_HEAD, "padding": (0, 1, 0, 0)}
    table = Table(**usual | style)
    for index, column in enumerate(header):
        is_number = index >= left
        table.add_column(column, justify="right" if is_number else "left", no_wrap=is_number, overflow="fold")
    for cells in rows:
        table.add_row(*cells)
    return table


@dataclass(frozen=True)
class Tables:
    """Tables and notes: prints in a terminal, or as Markdown. Names and cells may have a second line."""

    tables: Sequence[tuple[str, Sequence[str], Cells]]  # title, names of columns and cells of each
    notes: Sequence[str] = ()  # paragraphs
    left: int = 1  # columns aligned to the left; in a narrow terminal they wrap behind commas and colons
    spare: Sequence[str] = ()  # columns that a narrow terminal has no room for, the first ones first
    heading: Sequence[str] = ()  # lines above

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from map(Text, self.heading)
        for title, header, rows in self.tables:
            spare = [name for name in self.spare if name in header]
            for count in range(len(spare) + 1):  # without as many of the spare columns as there is no room for
                missing = 0
                for _ in range(2):  # once more with names that wrap, if there is no room
                    table = self._table(title, header, rows, spare[:count], narrower=missing)
                    width = Measurement.get(console, options.update(width=10_000), table).maximum
                    missing = max(0, width - options.max_width)
                if not missing:
                    break
            yield table
        yield from map(Text, self.notes)

    def _table(
        self, title: str, header: Sequence[str], rows: Cells, left_out: Sequence[str], *, narrower: int
    ) -> Table:
        shown = [index for index, name in enumerate(header) if name not in left_out]
        said = ", ".join(" ".join(name.split()) for name in left_out)
        columns: list[Sequence[str]] = [[row[index] for row in rows] for index in shown]
        columns[: self.left] = [_wrapped(column, narrower) for column in columns[: self.left]]
        style: dict[str, Any] = {"title_justify": "left", "caption_justify": "left"}
        return rich_table(
            [header[index] for index in shown],
            zip(*columns, strict=True),
            left=self.left,
            title=title or None,
            caption=f"no room for: {said}" if said else None,
            **style | ({"padding": 0} if {*self.spare} & {*header} else {}),
        )

    def markdown(self) -> str:
        parts = ["".join(f"- {line}\n" for line in self.heading)] if self.heading else []
        for title, header, rows in self.tables:
            cells = [[cell.replace("\n", " (") + ")" * ("\n" in cell) for cell in row] for row in rows]
            names = [" ".join(name.split()) for name in header]
            parts.append(f"**{title}**\n\n" * bool(title) + markdown_table(names, cells, left=self.left))
        return "\n".join([*parts, *(f"{note}\n" for note in self.notes)])


def _wrapped(column: Sequence[str], narrower: int) -> Sequence[str]:
    """Names in lines that end with a comma or colon, by so many characters narrower as they allow."""
    if not narrower:
        return column
    width = max(1, max(map(len, column), default=0) - narrower)
    wrap = partial(textwrap.fill, width=width, break_long_words=False, break_on_hyphens=False)
    ends = re.compile(r"(?<=[,:])")
    return [re.sub(r"([,:]) ", r"\1", wrap(ends.sub(" ", name))) if ends.search(name) else name for name in column]


def markdown_table(header: Sequence[str], rows: Cells, *, left: int = 1) -> str:
    divider = ["---"] * left + ["---:"] * (len(header) - left)
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (header, divider, *rows))
