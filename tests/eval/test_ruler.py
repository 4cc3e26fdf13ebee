"""RULER: the answers are read off the text itself, by other means than those that made it."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from kvpass.eval.tasks import registry

NEEDLE = re.compile(r"A magic (number|uuid) of (\S+) is (\S+)\.")
UUID = r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}"
NIAH = {  # name: needles (None: all of the text), answers, form of keys and values
    "niah_single_1": (1, 1, r"[a-z-]+", r"\d{7}"),
    "niah_single_2": (1, 1, r"[a-z-]+", r"\d{7}"),
    "niah_single_3": (1, 1, r"[a-z-]+", UUID),
    "niah_multikey_1": (4, 1, r"[a-z-]+", r"\d{7}"),
    "niah_multikey_2": (None, 1, r"[a-z-]+", r"\d{7}"),
    "niah_multikey_3": (None, 1, UUID, UUID),
    "niah_multivalue": (4, 4, r"[a-z-]+", r"\d{7}"),
    "niah_multiquery": (4, 4, r"[a-z-]+", r"\d{7}"),
}


@pytest.mark.parametrize("name", NIAH)
def test_the_answers_are_what_the_needles_say_of_the_keys_asked_for(pieces, name):
    count, answers, key_form, value_form = NIAH[name]
    for sample in registry()[name].samples(pieces, 1500, 4, 0):
        needles = NEEDLE.findall(sample.context)
        assert len(needles) == count or (count is None and len(needles) > 15)
        values = [value for _, _, value in needles]
        assert len(set(values)) == len(values)
        for _, key, value in needles:
            assert re.fullmatch(key_form, key)
            assert re.fullmatch(value_form, value)
        asked = {key for _, key, _ in needles if re.search(rf"\b{key}\b", sample.question)}
        said = {value for _, key, value in needles if key in asked}
        assert said == set(sample.answers)
        assert len(sample.answers) == answers
        assert all(key in sample.answer_prefix for key in asked)
        assert not any(value in sample.question + sample.answer_prefix for value in said)


def test_needles_lie_all_over_the_text(pieces):
    samples = registry()["niah_single_2"].samples(pieces, 1000, 40, 0)
    places = [sample.context.index("A magic number") / len(sample.context) for sample in samples]
    assert sum(place < 0.3 for place in places) > 5
    assert sum(place > 0.7 for place in places) > 5


def test_the_chain_of_variables_has_the_value_and_no_other_does(pieces):
    for sample in registry()["vt"].samples(pieces, 1500, 4, 0):
        (value,) = re.findall(r"value (\d{5})", sample.question)
        known: dict[str, str] = {}
        for left, right in re.findall(r"VAR (\w+) = (?:VAR )?(\w+)", sample.context):
            known[left] = known.get(right, right)
        assert len(known) == 10  # the worked example has five more
        assert {name for name, number in known.items() if number == value} == set(sample.answers)
        example = sample.context.split("\n\nFollow")[0]
        assert all(name in example.rsplit(":", 1)[1].split() for name, number in known.items() if number != value)


@pytest.mark.parametrize(("tokens", "often", "seldom"), [(1024, 6, 1), (4096, 30, 3)])
def test_common_words_occur_as_often_as_in_ruler(pieces, tokens, often, seldom):
    (sample,) = registry()["cwe"].samples(pieces, tokens, 1, 0)
    listed = re.findall(r"(\d+)\. (\w+)", sample.context.split("\n\n")[-1])
    assert [int(number) for number, _ in listed] == list(range(1, len(listed) + 1))
    counts = Counter(word for _, word in listed)
    assert {word for word, count in counts.items() if count == often} == set(sample.answers)
    assert len(sample.answers) == 10
    assert set(counts.values()) == {often, seldom}


def test_frequent_words_fall_with_the_square_of_the_rank(pieces):
    (sample,) = registry()["fwe"].samples(pieces, 4096, 1, 0)
    counts = Counter(re.findall(r"\.\.\.|\b[a-z]{6}\b", sample.context.split("frequent? ")[1])).most_common()
    assert counts[0][0] == "..."
    assert tuple(word for word, _ in counts[1:4]) == sample.answers
    assert counts[3][1] > counts[4][1]
    assert counts[0][1] / counts[1][1] == pytest.approx(4, rel=0.05)
    assert counts[0][1] / counts[2][1] == pytest.approx(9, rel=0.05)
