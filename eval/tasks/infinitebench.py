"""InfiniteBench (Zhang et al. 2024, arXiv 2402.13718): its 12 tasks and official metrics (``src/compute_scores.py``).

Rows come from ``<data_dir>/infinitebench/<name>.jsonl[.gz]`` in the official format, or else from the hub. The wording
of the prompts is kvpass's own (the official one differs from model to model), so scores compare policies only.
lm-evaluation-harness has 11 of the tasks; it names what is asked for before the context in some, and scores four of
them in another way than the official code. Long prompts lose their middle when they are encoded.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from kvpass.eval.tasks.base import Sample, check_count, library, local_or_hub_rows
from kvpass.eval.tasks.longbench import harness_metrics

HUB = "xinrongzhang2022/InfiniteBench"

_WORD_BREAKS = re.compile("[\n:\"'.,?!{}]")


# -- metrics: of a prediction and the references, in [0, 1] ------------------------------------------------------------


def first_number(prediction: str, answers: Sequence[str]) -> float:
    """1 if the first run of digits is the answer, digit for digit."""
    return float(re.findall(r"[0-9]+", prediction)[:1] == [answers[0]])


def first_value(prediction: str, answers: Sequence[str]) -> float:
    """1 if the first number, a decimal point included, equals the answer."""
    found = re.search(r"\d+\.\d+|\d+", prediction)
    return float(found is not None and float(found.group()) == float(answers[0]))


def last_number(prediction: str, answers: Sequence[str]) -> float:
    """1 if the last word is the whole number of the answer, punctuation aside."""
    word = (re.sub("[\n.`'\":]", " ", prediction).split() or [""])[-1]
    return float(re.fullmatch(r"[+-]?\d+", word) is not None and int(word) == int(answers[0]))


def one_of_the_words(prediction: str, answers: Sequence[str]) -> float:
    """1 if the answer is one of the words, punctuation aside."""
    return float(answers[0] in _WORD_BREAKS.sub(" ", prediction).split())


def one_of_the_names(prediction: str, answers: Sequence[str]) -> float:
    """1 if the answer is one of the words in capitals."""
    return one_of_the_words(prediction.upper(), answers)


def words_f1(prediction: str, answers: Sequence[str]) -> float:
    """LongBench's F1 of the bags of words; of several references, the best counts."""
    return float(max(harness_metrics().qa_f1_score(prediction, answer) for answer in answers))


def characters_f1(prediction: str, answers: Sequence[str]) -> float:
    """F1 of the bags of characters; of several references, the best counts."""
    metrics = harness_metrics()
    said, *known = map(metrics.normalize_zh_answer, (prediction, *answers))
    return float(max(metrics.f1_score(said, answer) for answer in known))


def rouge_lsum(prediction: str, answers: Sequence[str]) -> float:
    """ROUGE-Lsum F of the package ``rouge_score``, without stemming."""
    scorer = library("rouge_score.rouge_scorer").RougeScorer(["rougeLsum"], use_stemmer=False)
    return float(scorer.score(answers[0], prediction)["rougeLsum"].fmeasure)


def right_prefix(prediction: str, answers: Sequence[str]) -> float:
    """Share of a list of numbers that the prediction gets right before its first mistake."""
    numbers = [int(number) for number in re.findall(r"[0-9]+", prediction)]
    right = 0
    for number, answer in zip(numbers, answers, strict=False):
        if number != int(answer):
            break
        right += 1
    return right / len(answers)


def choice(prediction: str, answers: Sequence[str]) -> float:
    """1 if the prediction chooses the right letter; answers are the option and its letter.

    That is its first character, else what follows "answer is:" and the like, else the first of the words A to D.
    """
    if prediction[:1] and prediction[0] in "ABCD":
        return float(prediction[0] in answers)
    text = re.sub("[\n\"'.,?!{} ]+", " ", prediction)
    for mark in ("answer is:", "answer:", "answer is", "option is"):
        if mark in text:
            return float(text[text.index(mark) + len(mark) + 1 :].startswith(tuple(answers)))
    word = next((word for word in text.split() if word in "ABCD"), None)
    return float(word is not None and word in answers)


def choice_of_function(prediction: str, answers: Sequence[str]) -> float:
    """1 if the prediction chooses the right function; answers are its name and letter.

    Departure: the official scorer wants ``B.`` or ``B:`` in the first two columns, or an "answer is:" before it. The
    prompt of kvpass ends with those words and asks for one letter, so a prediction that begins with the letter or the
    function as a whole word is right, quotes, markdown and brackets aside.
    """
    if re.match(rf"(?:{'|'.join(map(re.escape, answers))})(?!\w)", prediction.lstrip(" \n\"'`*(")):
        return 1.0
    text = re.sub("(?:[\n`'\"* -]|[Oo]ption)+", " ", prediction.strip())
    for mark in ("answer is:", "is:", "answer:"):
        if mark in text:
            return float(text[text.index(mark) + len(mark) + 1 :].startswith(tuple(answers)))
    return 0.0


# -- tasks -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Kind:
    """Text before and after the context, first words and length of the answer, metric."""

    before: str
    after: str
    prefix: str
    length: int
    metric: Callable[[str, Sequence[str]], float]


_BOOK = "This is a book.\n\n"
_OPTIONS = "\nA. {A}\nB. {B}\nC. {C}\nD. {D}\nAnswer with one letter."
_KINDS = {
    "passkey": _Kind(
        "A pass key is hidden in this text. Remember it.\n\n", "\n\n{input}", " The pass key is", 6, first_number
    ),
    "number_string": _Kind(
        "A sequence of digits is hidden in this text. Remember it.\n\n",
        "\n\n{input}", " The sequence of digits is", 12, first_number,
    ),
    "kv_retrieval": _Kind("This JSON object has a value for every key.\n\n", "\n\n{input}", "", 50, one_of_the_words),
    "longbook_sum_eng": _Kind(_BOOK, "\n\nSummarize the book.", " Summary:", 1200, rouge_lsum),
    "longbook_choice_eng": _Kind(_BOOK, "\n\nQuestion: {input}" + _OPTIONS, " Answer:", 40, choice),
    "longbook_qa_eng": _Kind(_BOOK, "\n\nQuestion: {input}\nAnswer in a few words.", " Answer:", 40, words_f1),
    "longbook_qa_chn": _Kind(
        "这是一本书。\n\n", "\n\n问题：{input}\n请用几个词回答。", "答案：", 40, characters_f1  # noqa: RUF001
    ),
    "longdialogue_qa_eng": _Kind(
        "In this script the name of one character is replaced by $$MASK$$ in one place.\n\n",
        "\n\nWhose name was it? Answer with the name only.", " The name is", 40, one_of_the_names,
    ),
    "math_find": _Kind("This is a list of numbers.\n\n", "\n\n{input}", "", 3, first_value),
    "math_calc": _Kind(
        "For an expression such as 1 + 3 - 2, give its value after each number: [1, 4, 2]\n\n",
        "\n\nGive the value after each number.", " [", 30_000, right_prefix,
    ),
    "code_run": _Kind("These are Python functions.\n\n", "\n\n{input}", " The return value is:", 5, last_number),
    "code_debug": _Kind(
        "One of the functions in this code has a deliberate error.\n\n",
        "\n\nWhich function has the error?" + _OPTIONS, " The answer is:", 5, choice_of_function,
    ),
}  # fmt: skip
NAMES = tuple(sorted(_KINDS))


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
        """The first ``count`` rows, in order; ``tokens`` and ``seed`` are not used."""
        check_count(count)
        rows = local_or_hub_rows(
            self.data_dir, "infinitebench", self.dataset, count, repository=HUB, split=self.dataset
        )
        return [self._sample(row, str(row.get("id", index))) for index, row in enumerate(rows)]

    def metric(self, prediction: str, sample: Sample) -> float:
        return _KINDS[self.dataset].metric(prediction, sample.answers)

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
    """A list of strings, from a list, one string, or a JSON list."""
    if isinstance(value, str) and value.startswith("[") and value.endswith("]"):
        value = json.loads(value)
    return [str(item) for item in value] if isinstance(value, list | tuple) else [str(value)]
