"""Scores of a prediction, all in [0, 1]: LongBench, RULER, InfiniteBench, the needle; and confidence intervals.

A function named ``*_score`` that takes one ``answer`` is LongBench's own definition for one reference
(``LongBench/metrics.py`` of THUDM/LongBench); :func:`best` takes the highest over several. Its post-processing of
predictions is :func:`first_line`. Libraries are imported when a metric needs them: ``pip install 'kvpass[eval]'``.
"""

from __future__ import annotations

import importlib
import math
import re
import string
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

_CHINESE_PUNCTUATION = (
    "！？｡。＂＃＄％＆＇（）＊＋，－／：；＜＝＞＠［＼］＾＿｀｛｜｝～｟｠｢｣､、〃》「」『』【】〔〕〖〗〘〙〚〛〜〝〞〟〰〾〿"  # noqa: RUF001
    "–—‘’‛“”„‟…‧﹏."  # noqa: RUF001
)
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_PUNCTUATION_ZH = str.maketrans("", "", string.punctuation + _CHINESE_PUNCTUATION)
_WORD_BREAKS = re.compile("[\n:\"'.,?!{}]")
_RECURSION = 50_000
"""Frames for the ``rouge`` package, which recurses over the words of both texts."""


def library(name: str) -> Any:
    """Import a library of the extra ``eval``.

    Raises:
        ImportError: not installed; says how to install it.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ImportError(f"this evaluation needs the package {name!r}: pip install 'kvpass[eval]'") from error


# -- LongBench ---------------------------------------------------------------------------------------------------------


def first_line(prediction: str) -> str:
    """The first line that begins a prediction, leading newlines aside (trec, triviaqa, samsum, lsht)."""
    return prediction.lstrip("\n").split("\n")[0]


def best(metric: Callable[[str, str], float], prediction: str, answers: Sequence[str]) -> float:
    """The highest score over several references; 0 without any."""
    return max((metric(prediction, answer) for answer in answers), default=0.0)


def qa_f1_score(prediction: str, answer: str) -> float:
    """F1 of the bags of words after SQuAD's normalisation: lower case, no punctuation, no articles."""
    return _f1(_normalized(prediction).split(), _normalized(answer).split())


def qa_f1_zh_score(prediction: str, answer: str) -> float:
    """F1 of the bags of jieba's words, lower case, without Chinese and ASCII punctuation."""
    return _f1(_words_zh(prediction), _words_zh(answer))


def rouge_score(prediction: str, answer: str) -> float:
    """ROUGE-L F of the package ``rouge`` 1.0.1, the one LongBench uses; 0 if either text has no sentence.

    Departure: the package recurses over the words, and LongBench scores 0 where Python's recursion limit ends that;
    here the limit is raised.
    """
    rouge = library("rouge").Rouge(metrics=["rouge-l"])
    try:
        with _deep_recursion():
            return float(rouge.get_scores([prediction], [answer], avg=True)["rouge-l"]["f"])
    except ValueError:  # how the package says that a text is empty
        return 0.0


def rouge_zh_score(prediction: str, answer: str) -> float:
    """:func:`rouge_score` of jieba's words."""
    return rouge_score(" ".join(_cut(prediction)), " ".join(_cut(answer)))


def classification_score(prediction: str, answer: str, classes: Sequence[str]) -> float:
    """1 / number of the classes that the prediction names, if the true one is among them, else 0.

    A named class that is a proper part of the true one does not count, but the class named right after such a one is
    passed over unseen: the released loop removes from the list it walks, and published scores include that.
    """
    named = [name for name in classes if name in prediction]
    index = 0
    while index < len(named):
        if named[index] in answer and named[index] != answer:
            named.remove(named[index])
        index += 1
    return 1.0 / len(named) if answer in named else 0.0


def retrieval_score(prediction: str, answer: str) -> float:
    """Share of the prediction's integers that are the number N of the answer "Paragraph N"."""
    return _share_of_numbers(prediction, _number_after("Paragraph ", answer))


def retrieval_zh_score(prediction: str, answer: str) -> float:
    """Share of the prediction's integers that are the number N of the answer "段落N"."""
    return _share_of_numbers(prediction, _number_after("段落", answer))


def count_score(prediction: str, answer: str) -> float:
    """Share of the prediction's integers that are the answer."""
    return _share_of_numbers(prediction, answer)


def code_sim_score(prediction: str, answer: str) -> float:
    """Edit similarity of the first predicted line that has no backtick and no comment sign, in whole percent / 100.

    ``rapidfuzz`` rounded to a whole percent equals ``fuzzywuzzy`` with python-Levenshtein, which LongBench uses.
    """
    fuzz = library("rapidfuzz.fuzz")
    lines = prediction.lstrip("\n").split("\n")
    line = next((line for line in lines if not any(sign in line for sign in ("`", "#", "//"))), "")
    return round(fuzz.ratio(line, answer)) / 100


def _f1(prediction: Sequence[str], answer: Sequence[str]) -> float:
    common = (Counter(prediction) & Counter(answer)).total()
    return 2 * common / (len(prediction) + len(answer)) if common else 0.0


def _normalized(text: str) -> str:
    return re.sub(r"\b(?:a|an|the)\b", " ", text.lower().translate(_PUNCTUATION))


def _cut(text: str) -> list[str]:
    return list(library("jieba").cut(text, cut_all=False))


def _words_zh(text: str) -> list[str]:
    words = ("".join(word.lower().translate(_PUNCTUATION_ZH).split()) for word in _cut(text))
    return [word for word in words if word]


def _number_after(mark: str, answer: str) -> str:
    found = re.search(rf"{mark}(\d+)", answer)
    if found is None:
        raise ValueError(f"answer={answer!r}: must contain {mark!r} and a number")
    return found.group(1)


def _share_of_numbers(prediction: str, number: str) -> float:
    numbers = re.findall(r"\d+", prediction)
    return numbers.count(number) / len(numbers) if numbers else 0.0


@contextmanager
def _deep_recursion() -> Iterator[None]:
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(max(before, _RECURSION))
    try:
        yield
    finally:
        sys.setrecursionlimit(before)


# -- RULER -------------------------------------------------------------------------------------------------------------


def string_match_all(prediction: str, answers: Sequence[str]) -> float:
    """Share of the answers that occur in the prediction, case aside (RULER's retrieval, tracing and counting tasks)."""
    text = _printable(prediction)
    return sum(answer.lower() in text for answer in answers) / len(answers)


def _printable(prediction: str) -> str:
    return re.sub(r"[\x00-\x1f]", "\n", prediction).strip().lower()


# -- needle ------------------------------------------------------------------------------------------------------------


def code_match(prediction: str, answer: str) -> float:
    """1 if the answer's digits stand in the prediction as a whole number, spaces between digits aside."""
    said, code = (re.sub(r"(?<=\d) +(?=\d)", "", text) for text in (prediction, answer))
    return float(re.search(rf"(?<!\d){re.escape(code)}(?!\d)", said) is not None)


# -- InfiniteBench (``src/compute_scores.py`` of OpenBMB/InfiniteBench) ------------------------------------------------


def first_number_score(prediction: str, answer: str) -> float:
    """1 if the first run of digits is the answer, digit for digit (passkey, number_string)."""
    found = re.search(r"[0-9]+", prediction)
    return float(found is not None and found.group() == answer)


def first_value_score(prediction: str, answer: str) -> float:
    """1 if the first number, a decimal point included, equals the answer (math_find)."""
    found = re.search(r"\d+\.\d+|\d+", prediction)
    return float(found is not None and float(found.group()) == float(answer))


def last_number_score(prediction: str, answer: str) -> float:
    """1 if the last word, quotes and full stops aside, is the whole number of the answer (code_run)."""
    words = re.sub("[\n.`'\":]", " ", prediction).split()
    return float(bool(words) and re.fullmatch(r"[+-]?\d+", words[-1]) is not None and int(words[-1]) == int(answer))


def word_score(prediction: str, answer: str) -> float:
    """1 if the answer is one of the words, punctuation aside (kv_retrieval)."""
    return float(answer in _WORD_BREAKS.sub(" ", prediction).split())


def name_score(prediction: str, answer: str) -> float:
    """1 if the answer is one of the words in capitals (longdialogue_qa_eng)."""
    return word_score(prediction.upper(), answer)


def prefix_score(prediction: str, answers: Sequence[str]) -> float:
    """Share of a list of numbers that the prediction gets right before its first mistake (math_calc)."""
    numbers = [int(number) for number in re.findall(r"[0-9]+", prediction)]
    right = 0
    for number, answer in zip(numbers, answers, strict=False):
        if number != int(answer):
            break
        right += 1
    return right / len(answers)


def choice_score(prediction: str, answers: Sequence[str]) -> float:
    """1 if the letter the prediction settles on is among the answers (longbook_choice_eng).

    That is its first character, else what follows "answer is:" and the like, else the first word of letters from
    A to D. ``answers`` may hold the text of the option beside its letter.
    """
    if prediction[:1] and prediction[0] in "ABCD":
        return float(prediction[0] in answers)
    text = re.sub("[\n\"'.,?!{} ]+", " ", prediction)
    for mark in ("answer is:", "answer:", "answer is", "option is"):
        if mark in text:
            rest = text[text.index(mark) + len(mark) + 1 :]
            return float(any(rest.startswith(answer) for answer in answers) if rest else False)
    word = next((word for word in text.split() if word in "ABCD"), None)
    return float(word is not None and word in answers)


def debug_score(prediction: str, answers: Sequence[str]) -> float:
    """1 if the prediction settles on the function or on its letter (code_debug); ``answers`` = (function, letter).

    Departure: the official scorer wants ``B.`` or ``B:`` in the first two columns, or an "answer is:" before it. The
    prompt of kvpass ends with those words and asks for one letter, so a prediction that begins with the letter or the
    function as a whole word is right, quotes, markdown and brackets aside.
    """
    function, letter = answers
    start = prediction.lstrip(" \n\"'`*(")
    if re.match(rf"(?:{re.escape(letter)}|{re.escape(function)})(?!\w)", start):
        return 1.0
    text = re.sub("(?:[\n`'\"* -]|[Oo]ption)+", " ", prediction.strip())
    for mark in ("answer is:", "is:", "answer:"):
        if mark in text:
            rest = text[text.index(mark) + len(mark) + 1 :]
            return float(rest.startswith((letter, function)))
    return 0.0


def characters_f1_score(prediction: str, answer: str) -> float:
    """F1 of the bags of characters, punctuation and spaces aside (longbook_qa_chn)."""
    return _f1(*("".join(text.lower().translate(_PUNCTUATION_ZH).split()) for text in (prediction, answer)))


def rouge_lsum_score(prediction: str, answer: str) -> float:
    """ROUGE-Lsum F of the package ``rouge_score``, without stemming (longbook_sum_eng)."""
    scorer = library("rouge_score.rouge_scorer").RougeScorer(["rougeLsum"], use_stemmer=False)
    return float(scorer.score(answer, prediction)["rougeLsum"].fmeasure)


# -- statistics --------------------------------------------------------------------------------------------------------


def wilson_interval(mean: float, count: int, z: float = 1.96) -> tuple[float, float]:
    """Wilson's score interval for a mean of ``count`` scores in [0, 1]; 95 % by default.

    Exact in its assumption for scores of 0 and 1; for scores between, whose variance is smaller, wider than needed. The
    mean is always inside, rounding errors at 0 and 1 notwithstanding.

    Raises:
        ValueError: mean outside [0, 1], or count < 1.
    """
    if not 0.0 <= mean <= 1.0:
        raise ValueError(f"mean={mean}: must be in [0, 1]")
    if count < 1:
        raise ValueError(f"count={count}: must be >= 1")
    spread = z * math.sqrt(mean * (1 - mean) / count + z * z / (4 * count * count))
    middle, scale = mean + z * z / (2 * count), 1 + z * z / count
    return max(0.0, min(mean, (middle - spread) / scale)), min(1.0, max(mean, (middle + spread) / scale))
