"""Needle texts: their answers against a reader that knows only the grammar, their lengths, and what is held out."""

import re
from collections import Counter
from itertools import pairwise

import pytest

from kvpass.eval.tasks import needle
from kvpass.eval.tasks import words as needle_words
from kvpass.eval.tasks.needle import TASKS, Task, hide
from kvpass.eval.tasks.words import HELD_OUT_NAMES

VALUE = r"(\d{3}(?: \d{3})?)"
GOLDEN = (
    "the blanket soon sold the old flute . the code of gope zulum is 887 688 . some sailor loudly lifted some bear . "
    "a chair rarely found the wooden mirror ."
)
GOLDEN_QUESTION = (" question the code of gope zulum is", ("887 688",), 3)
FIRST, SECOND = set(needle_words.FIRST_WORDS), set(needle_words.SECOND_WORDS)


def read(text: str, question: str) -> list[str]:
    """All answers to a question that stand in a text, found with regular expressions alone."""
    if match := re.fullmatch(r"question the value of (\w+) is", question):
        chain = [match[1]]
        while not chain[-1].isdigit():
            (word,) = re.findall(rf"(?:^|(?<=\. ))let {chain[-1]} = (\w+) \.", text)
            chain.append(word)
        return [" = ".join(chain[1:])]
    if match := re.fullmatch(r"question the (\w+)s of (\w+ \w+) are", question):
        return re.findall(rf"one {match[1]} of {match[2]} is {VALUE} \.", text)
    lead = question.removeprefix("question ")
    return re.findall(rf"(?:^|(?<=\. )){lead} {VALUE} \.", text)


def pairs(words: list[str]) -> set[tuple[str, str]]:
    return {(a, b) for a, b in pairwise(words) if a in FIRST and b in SECOND}


def test_the_examples_of_the_page_are_of_the_language(words):
    examples = re.findall(r"``(.*?)``", needle.__doc__.split("\n", 2)[2].replace("\n", " "))
    assert len(examples) > 5
    assert {word for example in examples for word in example.split()} <= words.get_vocab().keys()


def test_one_name_in_eight_is_held_out_and_each_of_its_words_is_in_others():
    assert len(HELD_OUT_NAMES) == 512
    seen = {(a, b) for a in FIRST for b in SECOND} - set(HELD_OUT_NAMES)
    assert {a for a, _ in seen} == {a for a, _ in HELD_OUT_NAMES} == FIRST
    assert {b for _, b in seen} == {b for _, b in HELD_OUT_NAMES} == SECOND


@pytest.mark.parametrize("task", TASKS)
def test_answers_are_what_the_text_says_and_their_numbers_stand_there_once(task):
    for seed in range(20):
        samples = hide(task, 600, seed)
        assert len({sample.question for sample in samples}) == len(samples) == TASKS[task].questions
        for sample in samples:
            numbers = Counter(sample.context.split())
            assert sorted(read(sample.context, sample.question.strip())) == sorted(sample.answers)
            assert all(
                numbers[number] == 1 for answer in sample.answers for number in answer.split() if number.isdigit()
            )
            assert sample.max_new_tokens == len(" , ".join(sample.answers).split()) + 1
            assert pairs(sample.question.split()) <= set(HELD_OUT_NAMES)


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("tokens", [220, 221, 222, 223, 224, 225, 226, 227, 1000, 4096])
def test_a_prompt_has_exactly_the_length_asked_for_and_no_unknown_token(task, tokens, words):
    for sample in hide(task, tokens, seed=tokens):
        ids = words(sample.context + sample.question)["input_ids"]
        assert len(ids) == tokens
        assert words.unk_token_id not in ids


@pytest.mark.parametrize("tokens", range(31, 46))
def test_the_shortest_texts_have_exactly_the_length_asked_for(tokens):
    (sample,) = hide("single", tokens, seed=0)
    assert len((sample.context + sample.question).split()) == tokens - 1  # <bos>


@pytest.mark.parametrize("facts", [1, 8, 40])
def test_any_number_of_facts_can_be_hidden_and_all_asked_for(facts):
    samples = hide(Task(keys=facts, questions=facts), 900, seed=1)
    found = re.findall(rf"(?:^|(?<=\. ))(the (?:code|pin|number) of \w+ \w+ is) {VALUE} \.", samples[0].context)
    assert sorted(found) == sorted((s.question.removeprefix(" question "), s.answers[0]) for s in samples)
    assert len(set(found)) == facts
    assert {len((sample.context + sample.question).split()) for sample in samples} == {899}


def test_tasks_hide_as_much_as_they_say():
    assert len(hide("multivalue", 300, 0)[0].answers) == 3
    assert len(re.findall(r"(?<!one) (?:code|pin|number) of", " " + hide("attributes", 400, 0)[0].context)) == 12
    assert len(re.findall(r"(?:code|pin|number) \w+ \w+ \d", hide("short12", 400, 0)[0].context)) == 12
    assert hide("tracking2", 300, 0)[0].context.count("let ") == 9
    assert {len(sample.answers[0].split()) for seed in range(20) for sample in hide("single", 60, seed)} == {1, 2}


def test_facts_lie_all_over_the_text():
    places = []
    for seed in range(40):
        (sample,) = hide("single", 600, seed)
        places.append(sample.context.index(f" {sample.answers[0]} .") / len(sample.context))
    assert sum(place < 0.25 for place in places) > 4
    assert sum(place > 0.75 for place in places) > 4


def test_filler_has_decoys_with_the_names_of_facts():
    (text,) = hide("single", 3000, 0)
    name = " ".join(next(iter(pairs(text.question.split()))))
    assert text.context.count(name) > 5
    assert 20 < sum(word.isdigit() for word in text.context.split()) < 80


def test_the_text_of_a_seed_does_not_change_between_versions():
    (text,) = hide("single", 40, 0)
    assert text.context == GOLDEN
    assert (text.question, text.answers, text.max_new_tokens) == GOLDEN_QUESTION


@pytest.mark.parametrize(
    ("task", "tokens", "message"),
    [
        ("needle", 500, "task='needle': must be one of single"),
        ("single", 25, "tokens=25"),
        ("multikey12", 110, "tokens=110"),
        ("single", -1, "tokens=-1"),
        ("single", 40000, "tokens=40000"),
        (Task(keys=100), 700, "tokens=700: 100 facts and a question need"),
        (Task(keys=500, attributes=3), 32000, "tokens=32000: 500 keys and filler need more than 1000 numbers"),
    ],
)
def test_what_cannot_be_met_is_refused(task, tokens, message):
    with pytest.raises(ValueError, match=message):
        hide(task, tokens, 0)
