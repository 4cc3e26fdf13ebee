"""The file of answered samples, from which an interrupted run goes on, and tables made of it."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from kvpass.eval.markdown import markdown_table

Record = dict[str, Any]

KEY_FIELDS = (
    "task",
    "sample",
    "policy",
    "budget",
    "scope",
    "hold",
    "model",
    "code",
    "backend",
    "device",
    "seed",
    "max_new_tokens",
    "stops",
    "libraries",
    "prompt",
)
"""What decides an answer: equal fields, equal answer. ``policy`` has all its options; model, code and prompt are
digests; ``stops`` are token ids, ``libraries`` versions."""


_GROUP = ("task", "label", "budget", "scope")
_MEANS = ("budget_entries", "budget_bytes", "kept_entries", "kept_fraction", "kept_bytes", "cache_bytes")


def record_key(fields: Mapping[str, Any]) -> str:
    """A digest of :data:`KEY_FIELDS`, by which a sample already answered is known."""
    text = json.dumps([fields[name] for name in KEY_FIELDS], sort_keys=True)
    return hashlib.blake2s(text.encode(), digest_size=12).hexdigest()


class RecordFile:
    """JSON lines, one a sample, each written whole in one append; later lines win over earlier ones of equal key.

    A last line that an interruption left without its end is cut off when the file is opened.

    Args:
        path: made when the first record is written.

    Raises:
        ValueError: a line is no record; path and line are named.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.records: dict[str, Record] = {}
        if not path.is_file():
            return
        content = path.read_bytes()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            os.truncate(path, whole)
        for number, line in enumerate(content[:whole].splitlines(), 1):
            try:
                record = json.loads(line)
                if missing := {"key", "score", *_GROUP, *_MEANS} - record.keys():
                    raise KeyError(*missing)
                self.records[record["key"]] = record
            except (ValueError, AttributeError, KeyError) as error:
                raise ValueError(f"{path}, line {number}: not a record of kvpass eval") from error

    def __contains__(self, key: str) -> bool:
        return key in self.records

    def add(self, record: Record) -> None:
        """Append a record; it is on disk when this returns."""
        # half of a surrogate pair has no UTF-8; with a backslash it is JSON again
        line = (json.dumps(record, ensure_ascii=False) + "\n").encode(errors="backslashreplace")
        file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        try:
            os.write(file, line)
            os.fsync(file)
        finally:
            os.close(file)
        self.records[record["key"]] = record


@dataclass(frozen=True, kw_only=True)
class Row:
    """All samples of one task under one policy, budget and scope.

    Attributes:
        samples: their number. score, low, high: mean and its 95 % Wilson interval (which takes samples as independent,
            those that share a context included).
        budget_entries, kept_entries: per KV head per layer. budget_bytes, kept_fraction, kept_bytes, cache_bytes: as in
            :class:`~kvpass.eval.answer.Kept`. All are means over the samples.
    """

    task: str
    policy: str
    budget: str
    scope: str
    samples: int
    score: float
    low: float
    high: float
    budget_entries: float
    budget_bytes: float
    kept_entries: float
    kept_fraction: float
    kept_bytes: float
    cache_bytes: float


def summarize(records: Iterable[Record]) -> list[Row]:
    """One row a task, policy, budget and scope, in the order in which they first appear."""
    groups: dict[tuple[str, str, str, str], list[Record]] = {}
    for record in records:
        task, policy, budget, scope = (record[name] for name in _GROUP)
        groups.setdefault((task, policy, budget, scope), []).append(record)
    rows = []
    for (task, policy, budget, scope), group in groups.items():

        def mean(name: str, group: list[Record] = group) -> float:
            return sum(record[name] for record in group) / len(group)

        score = mean("score")
        low, high = wilson_interval(min(score, 1.0), len(group))
        rows.append(
            Row(
                task=task,
                policy=policy,
                budget=budget,
                scope=scope,
                samples=len(group),
                score=score,
                low=low,
                high=high,
                **{name: mean(name) for name in _MEANS},
            )
        )
    return rows


def wilson_interval(mean: float, count: int, z: float = 1.96) -> tuple[float, float]:
    """Wilson's score interval for a mean of ``count`` scores in [0, 1]; 95 % by default.

    Exact in its assumption for scores of 0 and 1; for scores between, whose variance is smaller, wider than needed. The
    mean is always inside, rounding errors at 0 and 1 notwithstanding.
    """
    spread = z * math.sqrt(mean * (1 - mean) / count + z * z / (4 * count * count))
    middle, scale = mean + z * z / (2 * count), 1 + z * z / count
    return max(0.0, min(mean, (middle - spread) / scale)), min(1.0, max(mean, (middle + spread) / scale))


_COLUMNS = (
    "task",
    "scope",
    "policy",
    "budget",
    "n",
    "score %",
    "95 % interval",
    "entries",
    "kept",
    "kept KiB",
    "cache KiB",
)


def _cells(row: Row) -> list[str]:
    return [
        row.task,
        row.scope,
        row.policy,
        row.budget,
        str(row.samples),
        f"{100 * row.score:.2f}",
        f"{100 * row.low:.1f}-{100 * row.high:.1f}",
        f"{row.kept_entries:.1f}",
        f"{row.kept_fraction:.1%}",
        f"{row.kept_bytes / 1024:.1f}",
        f"{row.cache_bytes / 1024:.1f}",
    ]


def rich_table(rows: Sequence[Row]) -> Table:
    """The rows for a terminal."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for index, column in enumerate(_COLUMNS):
        table.add_column(column, justify="left" if index < 4 else "right", no_wrap=index > 3)
    for row in rows:
        table.add_row(*_cells(row))
    return table


def results_markdown(rows: Sequence[Row]) -> str:
    """The rows as a Markdown table."""
    return markdown_table(_COLUMNS, map(_cells, rows), left=4)


def csv_table(rows: Sequence[Row]) -> str:
    """The rows as CSV, every attribute of :class:`Row` a column."""
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(Row.__dataclass_fields__), lineterminator="\n")
    writer.writeheader()
    writer.writerows(asdict(row) for row in rows)
    return text.getvalue()
