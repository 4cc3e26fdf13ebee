"""Questions of your own: a file of JSON lines as a task."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from transformers import PreTrainedTokenizerBase

from kvpass.eval.tasks.base import Sample, contains
from kvpass.eval.tasks.longbench import harness_metrics, harness_score
from kvpass.eval.tasks.rows import read_rows

_HARNESS = {"f1": "qa_f1_score", "rouge": "rouge_score"}
"""Metrics that are LongBench's, by their names there."""

_Text = Annotated[str, msgspec.Meta(pattern=r"\S")]


class _Row(msgspec.Struct, forbid_unknown_fields=True):
    context: _Text
    question: _Text
    answers: Annotated[list[_Text], msgspec.Meta(min_length=1)] | _Text
    metric: Literal["contains", "exact", "f1", "rouge"] = "contains"
    prefix: str = ""
    category: str = ""
    max_new_tokens: Annotated[int, msgspec.Meta(ge=1)] = 64
    id: str | int | None = None


@dataclass(frozen=True)
class JsonLines:
    """Questions of a file, which a blank line divides from their contexts, as in :class:`kvpass.Document`.

    ``rows`` are by the sample's id: the field ``id``, or else the number of the line.
    """

    name: str
    path: Path
    rows: Mapping[str, _Row] = field(repr=False, compare=False)
    chat: bool = True

    @classmethod
    def read(cls, path: Path) -> JsonLines:
        """Read a file; the task has its name, without the ending.

        Raises:
            ImportError: a metric needs a package that is not installed.
            ValueError: it cannot be read, a line is no row, or two rows have one id.
        """
        rows: dict[str, _Row] = {}
        for number, row in read_rows(path, partial(msgspec.convert, type=_Row), "a task"):
            name = str(number if row.id is None else row.id)
            if name in rows:
                raise ValueError(f"{path}, line {number}: the id {name!r} is that of an earlier row")
            rows[name] = row
        if any(row.metric in _HARNESS for row in rows.values()):
            harness_metrics()
        return cls(path.name.removesuffix(".gz").removesuffix(".jsonl"), path, rows)

    def samples(self, tokenizer: PreTrainedTokenizerBase, tokens: int, count: int, seed: int) -> list[Sample]:
        """The first ``count`` rows, in order; the other arguments are not used."""
        return [
            Sample(
                id=name,
                context=row.context,
                question=f"\n\n{row.question}",
                answers=(row.answers,) if isinstance(row.answers, str) else tuple(row.answers),
                max_new_tokens=row.max_new_tokens,
                answer_prefix=row.prefix,
                labels={"category": row.category} if row.category else {},
            )
            for name, row in [*self.rows.items()][:count]
        ]

    def metric(self, prediction: str, sample: Sample) -> float:
        """The score by the metric of the row; of several answers, the best counts."""
        metric = self.rows[sample.id].metric
        if metric in _HARNESS:
            return harness_score(_HARNESS[metric], prediction, sample)
        right = contains if metric == "contains" else _same
        return float(any(right(prediction, answer) for answer in sample.answers))


def _same(prediction: str, answer: str) -> bool:
    """Return whether the texts are equal but for case, blanks and a full stop at the end."""
    first, second = (" ".join(text.split()).casefold().removesuffix(".") for text in (prediction, answer))
    return first == second
