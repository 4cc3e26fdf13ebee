"""LongBench (Bai et al. 2024, arXiv 2308.14508): prompts, answer lengths and metrics of lm-evaluation-harness.

The prompts are the official ones but for a line end in six of the 21 data sets. Rows come from
``<data_dir>/longbench/<name>.jsonl[.gz]`` in the official format, or else from the hub (:data:`HUB`). Departures from
the harness: long prompts lose their middle, as in LongBench; what the harness stops at a newline is cut there; ROUGE
of long texts is computed, where the package ``rouge`` exceeds Python's recursion limit and the harness scores 0.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Annotated, Any

import msgspec
from transformers import PreTrainedTokenizerBase

from kvpass.eval.tasks.base import Sample, library
from kvpass.eval.tasks.rows import ENDINGS, checked, read_rows

HUB = "Xnhyacinth/LongBench"
"""A copy of THUDM/LongBench without a loading script; its field ``question`` is the official ``input``."""

CATEGORIES: dict[str, tuple[str, ...]] = {
    "single-doc QA": ("narrativeqa", "qasper", "multifieldqa_en", "multifieldqa_zh"),
    "multi-doc QA": ("hotpotqa", "2wikimqa", "musique", "dureader"),
    "summarization": ("gov_report", "qmsum", "multi_news", "vcsum"),
    "few-shot": ("trec", "triviaqa", "samsum", "lsht"),
    "synthetic": ("passage_count", "passage_retrieval_en", "passage_retrieval_zh"),
    "code": ("lcc", "repobench-p"),
}
"""The benchmark's own (its table 1): data sets of each."""
NAMES = tuple(sorted(name for names in CATEGORIES.values() for name in names))
NO_CHAT = {*CATEGORIES["few-shot"], *CATEGORIES["code"]}
"""Completed as they are: examples of the task stand in the prompt, or it is code."""

_RECURSION = 50_000


@dataclass(frozen=True)
class LongBench:
    """One data set, of :data:`NAMES`; ``data_dir``: folder with ``longbench/``."""

    dataset: str
    data_dir: Path | None

    @property
    def name(self) -> str:
        return f"longbench_{self.dataset}"

    @property
    def chat(self) -> bool:
        return self.dataset not in NO_CHAT

    def samples(self, tokenizer: PreTrainedTokenizerBase, tokens: int, count: int, seed: int) -> list[Sample]:
        """The first ``count`` rows, in order; ``tokens`` and ``seed`` are not used."""
        config = harness_task(self.dataset)
        before, after = config["doc_to_text"].split("{{context}}")
        rows = _rows(self.data_dir, self.dataset, count)
        return [
            Sample(
                id=str(index),
                context=before + row.context,
                question=after.replace("{{question}}", row.input),
                answers=(row.answers,) if isinstance(row.answers, str) else tuple(row.answers),
                max_new_tokens=config["generation_kwargs"]["max_gen_toks"],
                classes=tuple(row.all_classes or ()),
                labels={"words": row.length},
            )
            for index, row in enumerate(rows)
        ]

    def metric(self, prediction: str, sample: Sample) -> float:
        """The harness's score; of several references, the best counts."""
        config = harness_task(self.dataset)
        if config["generation_kwargs"]["until"]:
            prediction = prediction.lstrip("\n").split("\n")[0]
        # not "get_..._with_score" itself, which strips the prediction: ROUGE counts what is stripped
        name = config["process_results"].replace("_with_", "_").removeprefix("metrics.get_")
        return harness_score(name, prediction, sample)


class _Row(msgspec.Struct):
    """What is read of a row; the hub calls ``input`` a question."""

    context: str
    input: str
    answers: Annotated[list[str], msgspec.Meta(min_length=1)] | Annotated[str, msgspec.Meta(min_length=1)]
    length: int
    all_classes: list[str] | None

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> _Row:
        return msgspec.convert({"input": fields.get("question"), **fields}, cls)


def _rows(data_dir: Path | None, dataset: str, count: int) -> list[_Row]:
    """The first ``count`` rows of a data set, from a file in the folder, or else from the hub.

    Raises:
        ImportError: the package ``datasets`` is not installed.
        ValueError: the hub cannot be reached, or has no such data set; or a row is none of LongBench's.
    """
    for ending in ENDINGS:
        path = None if data_dir is None else data_dir / "longbench" / f"{dataset}{ending}"
        if path is not None and path.is_file():
            return [row for _, row in read_rows(path, _Row.of, "LongBench", count)]
    try:
        rows = library("datasets").load_dataset(HUB, dataset, split="test")
    except OSError as error:
        raise ValueError(f"data set {dataset!r}: not in data_dir, and not on the hub: {error}") from error
    first = []
    for index in range(min(count, len(rows))):
        with checked(f"data set {dataset!r}, row {index}", "LongBench"):
            first.append(_Row.of(rows[index]))
    return first


@functools.cache
def harness_task(dataset: str) -> dict[str, Any]:
    """The harness's task file of a data set; functions are strings such as ``metrics.get_qa_f1_with_score``."""
    yaml, folder = library("yaml"), Path(library("lm_eval").__file__).parent / "tasks" / "longbench"
    loader: Any = type("Loader", (yaml.SafeLoader,), {})
    loader.add_constructor("!function", lambda loader, node: node.value)
    config: dict[str, Any] = yaml.load((folder / f"{dataset}.yaml").read_text(encoding="utf-8"), loader)
    return config


@functools.cache
def harness_metrics() -> ModuleType:
    """The harness's LongBench metrics, imported with ``rapidfuzz`` in the place of ``fuzzywuzzy``.

    ``fuzzywuzzy`` is unmaintained and under the GPL. Rounded to whole percent, the ratio of ``rapidfuzz`` is that of
    ``fuzzywuzzy`` with python-Levenshtein, which LongBench uses.
    """
    ratio = library("rapidfuzz.fuzz").ratio
    stand_in: Any = ModuleType("fuzzywuzzy")
    stand_in.fuzz = SimpleNamespace(ratio=lambda text, other: round(ratio(text, other)))
    for name in ("jieba", "rouge"):  # named in the error if missing
        library(name)
    sys.modules["fuzzywuzzy"] = stand_in
    try:
        return library("lm_eval.tasks.longbench.metrics")
    finally:
        del sys.modules["fuzzywuzzy"]


def harness_score(name: str, prediction: str, sample: Sample) -> float:
    """The score by a function of :func:`harness_metrics`; of several references, the best counts."""
    score, limit = getattr(harness_metrics(), name), sys.getrecursionlimit()
    sys.setrecursionlimit(max(limit, _RECURSION))
    try:
        return max(float(score(prediction, answer, all_classes=sample.classes)) for answer in sample.answers)
    finally:
        sys.setrecursionlimit(limit)
