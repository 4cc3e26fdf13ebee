"""Metrics against cases computed by hand from the official definitions; intervals against published values."""

from __future__ import annotations

import sys

import pytest

from kvpass.eval import metrics
from kvpass.eval.tasks import longbench


@pytest.mark.parametrize(
    ("prediction", "answer", "score"),
    [
        ("The cat, sat!", "a cat sat", 1.0),  # articles, punctuation and case do not count
        ("cat dog", "cat", 2 / 3),  # precision 1/2, recall 1
        ("cat cat", "cat cat bird", 0.8),  # a bag: both cats count; precision 1, recall 2/3
        ("dog", "cat", 0.0),
        ("", "cat", 0.0),
        ("the", "a", 0.0),  # nothing is left of either
        ("U.S.A.", "usa", 1.0),
        ("theme", "me", 0.0),  # articles are whole words
    ],
)
def test_qa_f1(prediction, answer, score):
    assert metrics.qa_f1_score(prediction, answer) == pytest.approx(score)


def test_qa_f1_zh_counts_words_without_punctuation():
    pytest.importorskip("jieba")
    assert metrics.qa_f1_zh_score("厦门大学。", "厦门大学") == 1.0
    assert metrics.qa_f1_zh_score("北京 大学！", "北京 清华") == pytest.approx(0.5)  # noqa: RUF001
    assert metrics.qa_f1_zh_score("", "厦门大学") == 0.0
    assert metrics.qa_f1_zh_score("。，", "厦门大学") == 0.0  # noqa: RUF001


def test_rouge_is_the_longest_common_subsequence_of_words():
    pytest.importorskip("rouge")
    assert metrics.rouge_score("a b c", "a b c") == pytest.approx(1.0, abs=1e-6)
    assert metrics.rouge_score("a x b", "a b y z") == pytest.approx(2 * (2 / 3) * (2 / 4) / (2 / 3 + 2 / 4), abs=1e-6)
    for empty in ("", ".", " "):
        assert metrics.rouge_score(empty, "a b") == 0.0
    assert metrics.rouge_score("a b", "") == 0.0


def test_rouge_of_texts_longer_than_the_recursion_limit_and_the_limit_afterwards():
    pytest.importorskip("rouge")
    before = sys.getrecursionlimit()
    words = " ".join(f"w{index}" for index in range(before))
    assert metrics.rouge_score(words, words) == pytest.approx(1.0, abs=1e-6)
    assert sys.getrecursionlimit() == before


def test_rouge_zh_compares_words_not_texts():
    pytest.importorskip("rouge")
    pytest.importorskip("jieba")
    assert metrics.rouge_zh_score("今天天气很好", "今天天气很好") == pytest.approx(1.0, abs=1e-6)
    assert 0 < metrics.rouge_zh_score("今天天气很好", "今天天气不好") < 1
    assert metrics.rouge_zh_score("", "今天") == 0.0


@pytest.mark.parametrize(
    ("prediction", "answer", "score"),
    [
        ("Date", "Date", 1.0),
        ("Date or Food", "Date", 0.5),
        ("Food", "Date", 0.0),
        ("", "Date", 0.0),
        ("Other location", "Other location", 1.0),  # "location" is a part of the truth and does not count
        ("Date of Food location", "Other location", 0.0),
        ("Date, Date of birth", "Date", 0.5),  # a longer name does count
    ],
)
def test_classification(prediction, answer, score):
    classes = ["Food", "Date", "Date of birth", "location", "Other location"]
    assert metrics.classification_score(prediction, answer, classes) == pytest.approx(score)


def test_classification_passes_over_the_class_after_a_removed_one_as_the_released_loop_does():
    # "x" and "y" are parts of "x y"; removing "x" from the list that is walked makes the loop miss "y".
    assert metrics.classification_score("x y", "x y", ["x", "y", "x y"]) == 0.5
    assert metrics.classification_score("x y", "x y", ["x", "x y", "y"]) == 1.0


@pytest.mark.parametrize(
    ("prediction", "score"),
    [("Paragraph 15", 1.0), ("15 or 3", 0.5), ("Paragraph 150", 0.0), ("none", 0.0), ("", 0.0)],
)
def test_retrieval_is_the_share_of_right_numbers(prediction, score):
    assert metrics.retrieval_score(prediction, "Paragraph 15") == score
    assert metrics.retrieval_zh_score(prediction, "段落15") == score
    assert metrics.count_score(prediction, "15") == score


def test_a_retrieval_answer_without_a_number_is_an_error():
    with pytest.raises(ValueError, match="answer='Abstract'"):
        metrics.retrieval_score("1", "Abstract")


def test_code_similarity_takes_the_first_line_that_is_neither_markdown_nor_comment():
    pytest.importorskip("rapidfuzz")
    assert metrics.code_sim_score("\n```python\n# say it\nx = 1\ny = 2", "x = 1") == 1.0
    assert metrics.code_sim_score("x = 1 // one\nabcd", "abxx") == 0.5  # 2 of 4 letters on either side
    assert metrics.code_sim_score("abcde", "abcdefgh") == 0.77  # 2*5/13 = 0.769, whole percent
    assert metrics.code_sim_score("", "x = 1") == 0.0
    assert metrics.code_sim_score("# only a comment", "x = 1") == 0.0


def test_string_match_all_is_a_share():
    answers = ("Alpha", "beta", "gamma")
    assert metrics.string_match_all("ALPHA and\x00gamma", answers) == pytest.approx(2 / 3)
    assert metrics.string_match_all("", answers) == 0.0


@pytest.mark.parametrize(
    ("prediction", "answer", "right"),
    [
        ("4 8 2 1 3 .", "4 8 2 1 3", True),
        ("the code is 48213.", "4 8 2 1 3", True),
        ("482 913 .", "482 913", True),
        ("4 8 2 1", "4 8 2 1 3", False),
        ("4 8 2 1 3 9 .", "4 8 2 1 3", False),
        ("9 4 8 2 1 3 .", "4 8 2 1 3", False),
        ("", "482", False),
    ],
)
def test_a_code_must_be_a_whole_number(prediction, answer, right):
    assert metrics.code_match(prediction, answer) == right


@pytest.mark.parametrize(
    ("metric", "prediction", "answer", "score"),
    [
        (metrics.first_number_score, "the key is 71432, not 5", "71432", 1.0),
        (metrics.first_number_score, "5 or 71432", "71432", 0.0),
        (metrics.first_number_score, "", "71432", 0.0),
        (metrics.first_value_score, "it is 88.", "88", 1.0),
        (metrics.first_value_score, "8.5 then 88", "8.5", 1.0),
        (metrics.first_value_score, "", "88", 0.0),
        (metrics.last_number_score, "func_1(3) gives: -4.", "-4", 1.0),
        (metrics.last_number_score, "4 is it", "4", 0.0),
        (metrics.last_number_score, "", "4", 0.0),
        (metrics.word_score, '{"5e6b-01"}.', "5e6b-01", 1.0),
        (metrics.word_score, "5e6b-012", "5e6b-01", 0.0),
        (metrics.name_score, "It was Ace.", "ACE", 1.0),
        (metrics.prefix_score, "79, 59, 8", ("79", "59", "73", "78"), 0.5),
        (metrics.prefix_score, "59", ("79", "59"), 0.0),
        (metrics.prefix_score, "1 2 3", ("1", "2"), 1.0),
        (metrics.choice_score, "B. the second", ("the second", "B"), 1.0),
        (metrics.choice_score, "C", ("the second", "B"), 0.0),
        (metrics.choice_score, "The answer is: B", ("the second", "B"), 1.0),
        (metrics.choice_score, "my answer is the second", ("the second", "B"), 1.0),
        (metrics.choice_score, "surely (B) B", ("the second", "B"), 1.0),
        (metrics.choice_score, "", ("the second", "B"), 0.0),
        (metrics.debug_score, "B. helper", ("helper", "B"), 1.0),
        (metrics.debug_score, "The answer is: `helper`", ("helper", "B"), 1.0),
        (metrics.debug_score, "The answer is:helper", ("helper", "B"), 0.0),  # one character is skipped, whatever it is
        (metrics.debug_score, "The answer is: B", ("helper", "B"), 1.0),
        *((metrics.debug_score, said, ("helper", "B"), 1.0) for said in ("B", " B", " B.", "B) helper", "`helper`")),
        *((metrics.debug_score, said, ("helper", "B"), 0.0) for said in ("A", "Be", "helper_2", "the B", "")),
        (metrics.characters_f1_score, "贾宝玉。", "贾宝玉", 1.0),
        (metrics.characters_f1_score, "宝玉", "贾宝玉", 0.8),
        (metrics.characters_f1_score, "", "贾宝玉", 0.0),
    ],
)
def test_infinitebench(metric, prediction, answer, score):
    assert metric(prediction, answer) == pytest.approx(score)


def test_longbench_takes_the_best_reference_and_the_first_line_where_the_official_code_does():
    assert longbench.score("hotpotqa", "Rome", ("Paris", "in Rome")) == pytest.approx(2 / 3)
    assert longbench.score("hotpotqa", "\nRome\nParis", ("Rome",)) == pytest.approx(2 / 3)  # both lines count
    assert longbench.score("triviaqa", "\n\nRome\nParis", ("Rome",)) == 1.0
    assert longbench.score("trec", "\nFood\nDate", ("Food",), ("Food", "Date")) == 1.0
    assert longbench.score("hotpotqa", "Rome", ()) == 0.0


def test_every_one_of_the_21_data_sets_has_a_metric():
    assert len(longbench.NAMES) == 21
    assert {*longbench.METRICS, *longbench.CLASSIFICATION} == set(longbench.NAMES)
    assert set(longbench.NAMES) >= longbench.FIRST_LINE
    assert set(longbench.NAMES) >= longbench.NO_CHAT


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
    assert metrics.wilson_interval(mean, count) == pytest.approx((low, high), abs=5e-5)


def test_wilson_interval_is_symmetric_and_refuses_what_is_no_mean():
    low, high = metrics.wilson_interval(0.2, 50)
    assert metrics.wilson_interval(0.8, 50) == pytest.approx((1 - high, 1 - low))
    with pytest.raises(ValueError, match=r"mean=1\.1"):
        metrics.wilson_interval(1.1, 5)
    with pytest.raises(ValueError, match="count=0"):
        metrics.wilson_interval(0.5, 0)


@pytest.mark.parametrize("mean", [0.0, 1.0])
def test_wilson_interval_holds_its_mean_in_spite_of_rounding(mean):
    for count in range(1, 200):
        low, high = metrics.wilson_interval(mean, count)
        assert 0.0 <= low <= mean <= high <= 1.0


def test_a_missing_library_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "rouge", None)
    with pytest.raises(ImportError, match=r"'rouge': pip install 'kvpass\[eval\]'"):
        metrics.rouge_score("a", "a")
