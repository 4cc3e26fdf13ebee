"""InfiniteBench (Zhang et al. 2024, arXiv 2402.13718): its 12 tasks and metrics.

Rows come from ``<data_dir>/infinitebench/<name>.jsonl[.gz]`` in the official format, or else from the hub. The wording
of the prompts is kvpass's own (the official one differs from model to model; lm-evaluation-harness has one of them),
so scores compare policies with each other. Long prompts lose their middle when they are encoded.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from kvpass.eval import metrics
from kvpass.eval.tasks.base import Sample, check_count, find_rows, hub_rows, read_rows

HUB = "xinrongzhang2022/InfiniteBench"


@dataclass(frozen=True)
class _Kind:
    """How one task is asked: prompt up to and after the context, the model's first words, length of the answer."""

    before: str
    after: str
    prefix: str
    length: int


_OPTIONS = "\nA. {A}\nB. {B}\nC. {C}\nD. {D}\n"
_KINDS = {
    "passkey": _Kind("A pass key is hidden in this text. Remember it.\n\n", "\n\n{input}", " The pass key is", 6),
    "number_string": _Kind(
        "A sequence of digits is hidden in this text. Remember it.\n\n", "\n\n{input}", " The sequence of digits is", 12
    ),
    "kv_retrieval": _Kind("This JSON object has a value for every key.\n\n", "\n\n{input}", "", 50),
    "longbook_sum_eng": _Kind("This is a book.\n\n", "\n\nSummarize the book.", " Summary:", 1200),
    "longbook_choice_eng": _Kind(
        "This is a book.\n\n", "\n\nQuestion: {input}" + _OPTIONS + "Answer with one letter.", " Answer:", 40
    ),
    "longbook_qa_eng": _Kind("This is a book.\n\n", "\n\nQuestion: {input}\nAnswer in a few words.", " Answer:", 40),
    "longbook_qa_chn": _Kind("这是一本书。\n\n", "\n\n问题：{input}\n请用几个词回答。", "答案：", 40),  # noqa: RUF001
    "longdialogue_qa_eng": _Kind(
        "In this script the name of one character is replaced by $$MASK$$ in one place.\n\n",
        "\n\nWhose name was it? Answer with the name only.",
        " The name is",
        40,
    ),
    "math_find": _Kind("This is a list of numbers.\n\n", "\n\n{input}", "", 3),
    "math_calc": _Kind(
        "For an expression such as 1 + 3 - 2, give its value after each number: [1, 4, 2]\n\n",
        "\n\nGive the value after each number.",
        " [",
        30_000,
    ),
    "code_run": _Kind("These are Python functions.\n\n", "\n\n{input}", " The return value is:", 5),
    "code_debug": _Kind(
        "One of the functions in this code has a deliberate error.\n\n",
        "\n\nWhich function has the error?" + _OPTIONS + "Answer with one letter.",
        " The answer is:",
        5,
    ),
}
NAMES = tuple(sorted(_KINDS))

_FIRST_ANSWER = {
    "passkey": metrics.first_number_score,
    "number_string": metrics.first_number_score,
    "kv_retrieval": metrics.word_score,
    "longdialogue_qa_eng": metrics.name_score,
    "math_find": metrics.first_value_score,
    "code_run": metrics.last_number_score,
    "longbook_sum_eng": metrics.rouge_lsum_score,
}
_BEST_ANSWER = {
    "longbook_qa_eng": metrics.qa_f1_score,
    "longbook_qa_chn": metrics.characters_f1_score,
}
_ALL_ANSWERS = {
    "math_calc": metrics.prefix_score,
    "longbook_choice_eng": metrics.choice_score,
    "code_debug": metrics.debug_score,
}


@dataclass(frozen=True)
class InfiniteBench:
    """One task.

    Args:
        dataset: one of :data:`NAMES`. data_dir: folder with ``infinitebench/``.
    """

    dataset: str
    data_dir: Path | None
    chat: bool = True

    @property
    def name(self) -> str:
        return f"infinitebench_{self.dataset}"

    def samples(self, tokenizer: PreTrainedTokenizerBase, tokens: int, count: int, seed: int) -> list[Sample]:
        """The first ``count`` rows, in order; ``tokens`` and ``seed`` play no part."""
        check_count(count)
        path = None if self.data_dir is None else find_rows(self.data_dir / "infinitebench", self.dataset)
        rows = hub_rows(HUB, None, self.dataset, count) if path is None else read_rows(path, count)
        return [self._sample(row, str(row.get("id", index))) for index, row in enumerate(rows)]

    def metric(self, prediction: str, sample: Sample) -> float:
        if self.dataset in _ALL_ANSWERS:
            return _ALL_ANSWERS[self.dataset](prediction, sample.answers)
        if self.dataset in _BEST_ANSWER:
            return metrics.best(_BEST_ANSWER[self.dataset], prediction, sample.answers)
        return _FIRST_ANSWER[self.dataset](prediction, sample.answers[0])

    def _sample(self, row: dict[str, Any], name: str) -> Sample:
        kind = _KINDS[self.dataset]
        given, options = _list(row["answer"]), _list(row.get("options") or [])
        if self.dataset in ("longbook_choice_eng", "code_debug"):
            given = [given[0], "ABCD"[options.index(given[0])]]
        question = kind.after.replace("{input}", row["input"].strip())
        for letter, option in zip("ABCD", options, strict=False):
            question = question.replace(f"{{{letter}}}", option)
        return Sample(
            id=name,
            context=kind.before + row["context"],
            question=question,
            answer_prefix=kind.prefix,
            answers=tuple(given),
            max_new_tokens=kind.length,
        )


def _list(value: Any) -> list[str]:
    """A list of strings, given as one, as one string, or as JSON text of a list."""
    if isinstance(value, str) and value.startswith("[") and value.endswith("]"):
        value = json.loads(value)
    return [str(item) for item in value] if isinstance(value, list | tuple) else [str(value)]
