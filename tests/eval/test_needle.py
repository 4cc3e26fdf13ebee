"""Needle prompts: what they promise about length, vocabulary and facts, and that the built-in model can read them."""

from __future__ import annotations

import re

import pytest

from kvpass import builtin
from kvpass.eval.needle import Fact, make_prompt, names_of

GOLDEN_FACTS = (Fact("sunu", "09498"), Fact("riges", "93821"))
GOLDEN_CONTEXT = (
    "the code of sunu is 0 9 4 9 8 . the dusty basket cleaned the heavy bucket toward the castle . the short engine "
    "quietly moved the wooden engine . the frozen writer followed the wooden table across the school . the code of "
    "riges is 9 3 8 2 1 ."
)


@pytest.fixture(scope="module")
def loaded():
    return builtin.load()


@pytest.fixture(scope="module")
def tokenizer(loaded):
    return loaded[1]


@pytest.fixture(scope="module")
def names(tokenizer):
    return names_of(tokenizer)


def test_names_are_the_512_pseudo_words_of_the_vocabulary(names):
    assert len(names) == len(set(names)) == 512
    assert not {"the", "value", "some", "before", "remember", "table", "farmer"} & set(names)


def test_the_same_seed_gives_the_same_prompt_and_another_seed_another(names):
    prompts = [make_prompt(names, tokens=400, facts=5, seed=seed) for seed in (3, 3, 4)]
    assert prompts[0] == prompts[1]
    assert prompts[0].context != prompts[2].context
    assert {f.name for f in prompts[0].facts} != {f.name for f in prompts[2].facts}


def test_the_prompt_of_a_seed_does_not_change_between_versions():
    prompt = make_prompt(["riges", "sunu"], tokens=60, facts=2, seed=0)
    assert prompt.facts == GOLDEN_FACTS
    assert prompt.context == GOLDEN_CONTEXT


@pytest.mark.parametrize("tokens", [63, 64, 65, 66, 67, 68, 69, 70, 71, 72, 73, 74, 75, 128, 1000, 2560])
def test_every_question_makes_a_prompt_of_exactly_the_length_asked_for_without_unknown_tokens(tokenizer, names, tokens):
    prompt = make_prompt(names, tokens=tokens, facts=3, seed=tokens)
    for fact in prompt.facts:
        ids = tokenizer(prompt.ask(fact))["input_ids"]
        assert len(ids) == tokens
        assert tokenizer.unk_token_id not in ids


@pytest.mark.parametrize("facts", [1, 8, 40])
def test_every_fact_appears_exactly_once_whole_and_in_order(names, facts):
    prompt = make_prompt(names, tokens=900, facts=facts, seed=1)
    found = re.findall(r"(?:^|(?<=\. ))the code of (\S+) is (\d(?: \d)*) \.", prompt.context)
    assert [(name, code.replace(" ", "")) for name, code in found] == [(f.name, f.code) for f in prompt.facts]
    assert len({f.name for f in prompt.facts}) == facts
    assert all(len(f.code) == 5 for f in prompt.facts)
    assert len(re.findall(r"\d", prompt.context)) == 5 * facts


def test_facts_lie_all_over_the_text(names):
    places = []
    for seed in range(20):
        prompt = make_prompt(names, tokens=600, facts=4, seed=seed)
        places += [prompt.context.index(fact.sentence) / len(prompt.context) for fact in prompt.facts]
    assert sum(place < 0.25 for place in places) > 8
    assert sum(place > 0.75 for place in places) > 8


@pytest.mark.parametrize(
    ("tokens", "facts", "message"),
    [(500, 0, "facts=0"), (500, 513, "facts=513"), (31, 1, "tokens=31"), (0, 1, "tokens=0"), (-4, 1, "tokens=-4")],
)
def test_numbers_that_cannot_be_met_are_refused(names, tokens, facts, message):
    with pytest.raises(ValueError, match=message):
        make_prompt(names, tokens=tokens, facts=facts, seed=0)


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("4 8 2 1 3 .", True),
        ("48213.", True),
        ("4 8 2 1 3", False),
        ("4 8 2 1 4 .", False),
        ("4 8 2 1 3 . 5", False),
        ("", False),
    ],
)
def test_an_answer_is_right_when_all_digits_and_the_stop_are(text, right):
    assert Fact("riges", "48213").answered_by(text) is right


def test_the_built_in_model_answers_from_its_full_cache(loaded, names):
    model, tokenizer = loaded
    right = asked = 0
    for seed in range(6):
        prompt = make_prompt(names, tokens=512, facts=4, seed=seed)
        for fact in prompt.facts:
            inputs = tokenizer(prompt.ask(fact), return_tensors="pt", return_token_type_ids=False)
            out = model.generate(**inputs, max_new_tokens=6, do_sample=False)
            right += fact.answered_by(tokenizer.decode(out[0, 512:]))
            asked += 1
    assert right >= 0.9 * asked, f"{right} of {asked}"
