"""LongBench (Bai et al. 2024, arXiv 2308.14508): its 21 data sets, official prompts, lengths and metrics.

Prompts and answer lengths are read from ``<data_dir>/longbench/dataset2prompt.json`` and ``dataset2maxlen.json``, the
files of ``LongBench/config`` in THUDM/LongBench. Rows come from ``<data_dir>/longbench/<name>.jsonl[.gz]`` in the
official format, or else from the hub (:data:`HUB`). Long prompts lose their middle when they are encoded.

Departure: samsum is generated to its full length and cut at the newline where LongBench stops generating.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from kvpass.eval import metrics
from kvpass.eval.tasks.base import Sample, check_count, find_rows, hub_rows, read_rows

HUB = "Xnhyacinth/LongBench"
"""A copy of THUDM/LongBench without a loading script; its field ``question`` is the official ``input``."""

_METRICS = {
    metrics.qa_f1_score: "narrativeqa qasper multifieldqa_en hotpotqa 2wikimqa musique triviaqa",
    metrics.qa_f1_zh_score: "multifieldqa_zh",
    metrics.rouge_score: "gov_report qmsum multi_news samsum",
    metrics.rouge_zh_score: "dureader vcsum",
    metrics.retrieval_score: "passage_retrieval_en",
    metrics.retrieval_zh_score: "passage_retrieval_zh",
    metrics.count_score: "passage_count",
    metrics.code_sim_score: "lcc repobench-p",
}
METRICS = {name: metric for metric, names in _METRICS.items() for name in names.split()}
"""Score of a prediction and one answer; the classification data sets are not in it."""

CLASSIFICATION = frozenset({"trec", "lsht"})
FIRST_LINE = frozenset({"trec", "triviaqa", "samsum", "lsht"})
"""Only the first line of the prediction counts."""

NO_CHAT = FIRST_LINE | {"lcc", "repobench-p"}
"""Completed as they are: examples of the task stand in the prompt, or it is code."""

NAMES = tuple(sorted({*METRICS, *CLASSIFICATION}))


def score(dataset: str, prediction: str, answers: tuple[str, ...], classes: tuple[str, ...] = ()) -> float:
    """LongBench's score of a prediction, in [0, 1], its post-processing included.

    Args:
        dataset: one of :data:`NAMES`. answers: references, of which the best counts. classes: of a classification.
    """
    if dataset in FIRST_LINE:
        prediction = metrics.first_line(prediction)
    if dataset in CLASSIFICATION:
        return metrics.best(
            lambda said, answer: metrics.classification_score(said, answer, classes), prediction, answers
        )
    return metrics.best(METRICS[dataset], prediction, answers)


@dataclass(frozen=True)
class LongBench:
    """One data set.

    Args:
        dataset: one of :data:`NAMES`. data_dir: folder with ``longbench/``.
    """

    dataset: str
    data_dir: Path | None

    @property
    def name(self) -> str:
        return f"longbench_{self.dataset}"

    @property
    def chat(self) -> bool:
        return self.dataset not in NO_CHAT

    def samples(self, tokenizer: PreTrainedTokenizerBase, tokens: int, count: int, seed: int) -> list[Sample]:
        """The first ``count`` rows, in order; ``tokens`` and ``seed`` play no part."""
        check_count(count)
        template, length = self._official("dataset2prompt.json"), int(self._official("dataset2maxlen.json"))
        before, after = template.split("{context}")
        assert self.data_dir is not None
        path = find_rows(self.data_dir / "longbench", self.dataset)
        rows = hub_rows(HUB, self.dataset, "test", count) if path is None else read_rows(path, count)
        return [
            Sample(
                id=str(index),
                context=before + row["context"],
                question=after.replace("{input}", row["input"] if "input" in row else row["question"]),
                answers=tuple(row["answers"]),
                max_new_tokens=length,
                classes=tuple(row["all_classes"] or ()),
                labels={"words": int(row["length"])},
            )
            for index, row in enumerate(rows)
        ]

    def metric(self, prediction: str, sample: Sample) -> float:
        return score(self.dataset, prediction, sample.answers, sample.classes)

    def _official(self, file: str) -> str:
        if self.data_dir is None:
            raise ValueError(f"data_dir=None: task {self.name!r} reads its prompt from <data_dir>/longbench/{file}")
        path = self.data_dir / "longbench" / file
        if not path.is_file():
            raise ValueError(f"data_dir={str(self.data_dir)!r}: task {self.name!r} needs {path}")
        return str(json.loads(path.read_text(encoding="utf-8"))[self.dataset])
