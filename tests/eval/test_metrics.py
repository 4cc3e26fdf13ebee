"""Metrics against cases computed by hand from the official definitions; intervals against published values."""

import itertools
import sys

import pytest

from kvpass.eval.statistics import wilson_interval
from kvpass.eval.tasks import Sample, longbench, registry
from kvpass.eval.tasks.base import library
from kvpass.eval.tasks.needle import code_match


def score(name: str, prediction: str, *answers: str, classes: tuple[str, ...] = ()) -> float:
    """Of a data set of LongBench."""
    pytest.importorskip("lm_eval", reason="needs lm-evaluation-harness: pip install 'kvpass[eval]'")
    sample = Sample(id="", context="", question="", answers=answers, max_new_tokens=1, classes=classes)
    return longbench.LongBench(name, None).metric(prediction, sample)


@pytest.mark.parametrize(
    ("name", "prediction", "answer", "expected"),
    [
        ("hotpotqa", "The cat, sat!", "a cat sat", 1.0),  # articles, punctuation and case do not count
        ("hotpotqa", "\nRome\nParis", "Rome", 2 / 3),  # both lines count
        ("triviaqa", "\n\nRome\nParis", "Rome", 1.0),  # where the harness stops at a newline, the first line
        ("multifieldqa_zh", "北京 大学！", "北京 清华", 0.5),  # noqa: RUF001
        ("gov_report", "a x b", "a b y z", 2 * (2 / 3) * (2 / 4) / (2 / 3 + 2 / 4)),
        ("passage_retrieval_en", "15 or 3", "Paragraph 15", 0.5),
        ("lcc", "abcde", "abcdefgh", 0.77),  # 2*5/13 = 0.769, whole percent
    ],
)
def test_longbench(name, prediction, answer, expected):
    assert score(name, prediction, answer) == pytest.approx(expected, abs=1e-6)
    assert score(name, prediction, answer, answer) == score(name, prediction, answer)


def test_longbench_takes_the_best_reference_and_knows_classes():
    assert score("hotpotqa", "Rome", "Paris", "in Rome") == pytest.approx(2 / 3)
    classes = ("Food", "Date", "Date of birth")
    assert score("trec", "\nFood\nDate", "Food", classes=classes) == 1.0
    assert score("trec", "Date or Food", "Date", classes=classes) == 0.5


def test_rouge_of_texts_longer_than_the_recursion_limit_and_the_limit_afterwards():
    before = sys.getrecursionlimit()
    words = " ".join(f"w{index}" for index in range(before))
    assert score("gov_report", words, words) == pytest.approx(1.0, abs=1e-6)
    assert sys.getrecursionlimit() == before
    assert "fuzzywuzzy" not in sys.modules, "the harness is imported without it, and nothing is left in its place"


def test_ruler_is_the_share_of_answers_that_occur():
    pytest.importorskip("lm_eval", reason="needs lm-evaluation-harness: pip install 'kvpass[eval]'")
    sample = Sample(id="", context="", question="", answers=("Alpha", "beta", "gamma"), max_new_tokens=1)
    task = registry()["niah_multivalue"]
    assert task.metric("ALPHA and\x00gamma", sample) == pytest.approx(2 / 3)
    assert task.metric("", sample) == 0.0


@pytest.mark.parametrize(
    ("answers", "right", "wrong"),
    [
        (["4 8 2 1 3"], ["4 8 2 1 3 .", "the code is 48213."], ["4 8 2 1", "4 8 2 1 3 9 .", "9 4 8 2 1 3 .", ""]),
        (["482 913"], ["482 913 ."], ["482"]),
        (["482", "913"], ["913 , 482 ."], ["913 , 913 ."]),  # every value of a list, in any order
    ],
)
def test_a_code_must_be_a_whole_number(answers, right, wrong):
    assert all(code_match(said, answers) for said in right) and not any(code_match(said, answers) for said in wrong)


@pytest.mark.parametrize(
    ("mean", "count", "low", "high"),
    [  # Newcombe 1998, Statistics in Medicine 17, table I, method 3
        (81 / 263, 263, 0.2553, 0.3662),
        (15 / 148, 148, 0.0624, 0.1605),
        (0.0, 20, 0.0, 0.1611),
        (1 / 29, 29, 0.0061, 0.1718),
    ],
)
def test_wilson_interval_against_published_values(mean, count, low, high):
    assert wilson_interval(mean, count) == pytest.approx((low, high), abs=5e-5)


def test_wilson_interval_is_symmetric_and_holds_its_mean_in_spite_of_rounding():
    low, high = wilson_interval(0.2, 50)
    assert wilson_interval(0.8, 50) == pytest.approx((1 - high, 1 - low))
    for mean, count in itertools.product((0.0, 1.0), range(1, 200)):
        low, high = wilson_interval(mean, count)
        assert 0.0 <= low <= mean <= high <= 1.0


def test_a_missing_library_names_the_extra():
    with pytest.raises(ImportError, match=r"'no_such_library': pip install 'kvpass\[eval\]'"):
        library("no_such_library")
