"""The file of answered samples, which makes runs resumable, and tables of results."""

from __future__ import annotations

import hashlib
import itertools
import math
import os
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import msgspec

from kvpass.eval.runner import Kept
from kvpass.eval.tables import Cells, Tables
from kvpass.eval.tasks.longbench import CATEGORIES


class Question(msgspec.Struct, kw_only=True, frozen=True):
    """What decides an answer; model, code and prompt as digests, the policy with all its options."""

    task: str
    sample: str
    policy: str
    budget: str
    scope: str
    num_uncompressed_tokens: int
    model: str
    code: str
    backend: str
    device: str
    seed: int
    max_new_tokens: int
    stops: list[int]
    libraries: dict[str, str]
    prompt: str

    @property
    def key(self) -> str:
        """A digest, by which a sample already answered is known."""
        return hashlib.blake2s(msgspec.json.encode(self, order="sorted"), digest_size=12).hexdigest()


class Record(msgspec.Struct, kw_only=True, frozen=True):
    """One answered sample. ``label``: the policy as it was typed; ``kept``: what compression left of the prompt."""

    key: str
    label: str
    question: Question
    answers: list[str]
    prediction: str
    score: float
    generated_tokens: int
    kept: Kept
    labels: dict[str, int | float | str]


class RecordFile:
    """A file of JSON lines, one per sample.

    Each line is written in one append; of equal keys the last line counts. A last line that an interruption left
    without its end is cut off when the file is opened. Without ``writes`` new records are only remembered.

    Raises:
        ValueError: a line is no record of this version; path and line are named.
    """

    def __init__(self, path: Path, *, writes: bool = True) -> None:
        self.path, self.writes = path, writes
        self.records: dict[str, Record] = {}
        content = path.read_bytes() if path.is_file() else b""
        whole = content.rfind(b"\n") + 1
        if whole < len(content) and writes:
            os.truncate(path, whole)
        for number, line in enumerate(content[:whole].splitlines(), 1):
            try:
                record = msgspec.json.decode(line, type=Record)
            except msgspec.DecodeError as error:
                raise ValueError(
                    f"{path}, line {number}: not a record of this version of kvpass eval ({error}); give another output"
                ) from error
            self.records[record.key] = record

    def add(self, record: Record) -> None:
        """Append a record; it is on disk when this returns, or the file is as before if this raises."""
        if self.writes:
            with self.path.open("ab", buffering=0) as file:
                size, line = file.tell(), msgspec.json.encode(record) + b"\n"
                try:
                    while line:  # a disk that is nearly full takes a part, and fails at the next
                        line = line[file.write(line) :]
                    os.fsync(file)
                except BaseException:
                    file.truncate(size)
                    raise
        self.records[record.key] = record


@dataclass(frozen=True)
class Row:
    """All samples of one task under one policy, budget and scope: mean score and its 95 % Wilson interval.

    The interval takes samples as independent, those that share a context included. Of ``kept`` the means, None where
    a sample has None.
    """

    task: str
    policy: str
    budget: str
    scope: str
    samples: int
    score: float
    low: float
    high: float
    kept: Kept


def summarize(records: Iterable[Record]) -> list[Row]:
    """One row per task, policy, budget and scope, in order of first appearance."""
    groups: defaultdict[tuple[str, str, str, str], list[Record]] = defaultdict(list)
    for record in records:
        question = record.question
        groups[question.task, record.label, question.budget, question.scope].append(record)
    rows = []
    for condition, group in groups.items():
        score = sum(record.score for record in group) / len(group)
        interval = wilson_interval(min(score, 1.0), len(group))
        means = {field.name: _mean([getattr(record.kept, field.name) for record in group]) for field in fields(Kept)}
        rows.append(Row(*condition, len(group), score, *interval, Kept(**means)))
    return rows


def _mean(values: Sequence[float | None]) -> Any:
    return None if None in values else sum(values) / len(values)  # type: ignore[arg-type]


def wilson_interval(mean: float, count: int, z: float = 1.96) -> tuple[float, float]:
    """Wilson's score interval for a mean of ``count`` scores in [0, 1].

    Exact in its assumption for scores of 0 and 1; for scores between, whose variance is smaller, wider than needed. The
    mean is always inside, rounding errors at 0 and 1 notwithstanding.
    """
    spread = z * math.sqrt(mean * (1 - mean) / count + z * z / (4 * count * count))
    middle, scale = mean + z * z / (2 * count), 1 + z * z / count
    return max(0.0, min(mean, (middle - spread) / scale)), min(1.0, max(mean, (middle + spread) / scale))


_COLUMNS = "task,scope,policy,budget,n,score %,95 % interval,attention mass,entries,kept,kept KiB,cache KiB".split(",")
_LEFT = 4
_SPARE = ("cache KiB", "kept KiB", "entries", "attention mass", "kept", "95 % interval")


def _cells(row: Row) -> list[str]:
    return [
        row.task,
        row.scope,
        row.policy,
        row.budget,
        str(row.samples),
        f"{100 * row.score:.2f}",
        f"{100 * row.low:.1f}-{100 * row.high:.1f}",
        "-" if row.kept.attention_mass is None else f"{row.kept.attention_mass:.1%}",
        f"{row.kept.kept_entries:.1f}",
        f"{row.kept.kept_fraction:.1%}",
        f"{row.kept.kept_bytes / 1024:.1f}",
        f"{row.kept.cache_bytes / 1024:.1f}",
    ]


def results_tables(rows: Sequence[Row]) -> Tables:
    """A line for each row; of LongBench's tasks a second table, by category. A narrow terminal has no bytes."""
    tables: list[tuple[str, Sequence[str], Cells]] = [("", _COLUMNS, [*map(_cells, rows)])]
    scores: defaultdict[tuple[str, str, str], dict[str, float]] = defaultdict(dict)
    for row in rows:
        if row.task.startswith("longbench_"):
            scores[row.scope, row.policy, row.budget][row.task.removeprefix("longbench_")] = row.score
    lines = []
    for (category, names), (condition, by_task) in itertools.product(CATEGORIES.items(), scores.items()):
        if answered := [100 * by_task[name] for name in names if name in by_task]:
            label = f"{category} ({len(answered)} of {len(names)})"
            lines.append([label, *condition, f"{sum(answered) / len(answered):.2f}"])
    if lines:
        title = "LongBench by category: means of the tasks that were run"
        tables.append((title, ["category (tasks)", *_COLUMNS[1:_LEFT], "score %"], lines))
    return Tables(tables, left=_LEFT, spare=_SPARE)
