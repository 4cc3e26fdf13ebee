"""Tasks: what a prompt promises is read off the prompt itself, by other means than those that made it."""

from __future__ import annotations

import re
from collections import Counter
from types import SimpleNamespace

import pytest

from kvpass.eval.tasks import GROUPS, Sample, encode, find_tasks, registry
from kvpass.eval.tasks.needle import DEPTHS, LENGTHS, NAMES, move_fact
from pairwise import each_value

TEMPLATE = "{% for m in messages %}<user>{{ m['content'] | trim }}</user>{% endfor %}<model>"


def text_of(sample: Sample) -> str:
    return sample.context + sample.question + sample.answer_prefix


def sample_of(context: str, question: str, **more) -> Sample:
    return Sample(id="0", context=context, question=question, answers=("x",), max_new_tokens=1, **more)


# --- encoding --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chat", [False, True])
def test_the_ids_are_those_of_the_whole_string_and_the_question_begins_where_it_should(pieces, chat):
    sample = sample_of("The old farmer slept.", "\nWho slept?", answer_prefix=" It was")
    got = encode(pieces, sample, chat=chat)  # without a template, chat changes nothing
    assert list(got.ids) == pieces(text_of(sample))["input_ids"][:-1]  # <bos> stays, <eos> does not
    assert pieces.decode(got.rest) == "\nWho slept? It was"
    assert got.ids == got.head + got.rest


def test_a_chat_template_surrounds_the_prompt_and_the_answer_prefix_follows_it(pieces):
    sample = sample_of("  The old farmer slept.", "\nWho slept?", answer_prefix=" It was")
    pieces.chat_template = TEMPLATE
    try:
        chat, plain = encode(pieces, sample, chat=True), encode(pieces, sample, chat=False)
    finally:
        pieces.chat_template = None
    assert pieces.decode(chat.head) == "<user>The old farmer slept."
    assert pieces.decode(chat.rest) == "\nWho slept?</user><model> It was"
    assert pieces.decode(plain.head) == "<bos>  The old farmer slept."


@pytest.mark.parametrize("limit", [6, 7, 10, 11, 31])
def test_a_long_prompt_loses_its_middle(words, limit):
    sample = sample_of("one fox slept . " * 10 + "the end .", " question the code of bear is")
    whole, cut = encode(words, sample, chat=False), encode(words, sample, chat=False, limit=limit)
    tail = limit - limit // 2
    assert cut.ids == whole.ids[: limit // 2] + whole.ids[len(whole) - tail :]
    assert cut.rest == whole.rest[-tail:]
    assert cut.head == cut.ids[: limit - len(cut.rest)]
    assert encode(words, sample, chat=False, limit=len(whole)) == whole


def test_a_part_without_a_token_and_a_slow_tokenizer_are_refused(words):
    with pytest.raises(ValueError, match="question of sample '0' has no token"):
        encode(words, sample_of("one fox slept .", ""), chat=False)
    with pytest.raises(ValueError, match="must be a fast one"):
        encode(SimpleNamespace(is_fast=False), sample_of("a", "b"), chat=False)


# --- registry --------------------------------------------------------------------------------------------------------


def test_the_registry_knows_every_task_by_its_own_name():
    known = registry()
    assert all(name == task.name for name, task in known.items())
    assert len(known) == 11 + 11 + 21
    groups = [find_tasks([group]) for group in GROUPS]
    assert [len(group) for group in groups] == [11, 21]


def test_names_are_found_once_and_unknown_ones_refused():
    names = [task.name for task in find_tasks(["vt", "ruler", "needle"])]
    assert names[0] == "vt"
    assert len(names) == len(set(names)) == 12
    with pytest.raises(ValueError, match="tasks='niah_singel_1': did you mean 'niah_single_1'"):
        find_tasks(["niah_singel_1"])
    with pytest.raises(ValueError, match="at least one task"):
        find_tasks([])


GENERATED = [name for name in registry() if not name.startswith("longbench")]


@each_value(name=GENERATED, kind=["words", "pieces"])
def test_generated_prompts_fill_the_length_asked_for_with_any_tokenizer(name, kind, request):
    if "needle" not in name:
        pytest.importorskip("lm_eval", reason="needs lm-evaluation-harness: pip install 'kvpass[eval]'")
    tokenizer, task = request.getfixturevalue(kind), registry()[name]
    samples = task.samples(tokenizer, 1024, 6, seed=5)
    assert samples[:2] == task.samples(tokenizer, 1024, 2, seed=5)
    assert {text_of(sample) for sample in samples}.isdisjoint(map(text_of, task.samples(tokenizer, 1024, 2, seed=6)))
    assert len(samples) == len({sample.id for sample in samples}) == 6
    for sample in samples:
        wanted = sample.labels.get("length", 1024)
        assert 0.9 * wanted < len(encode(tokenizer, sample, chat=task.chat)) <= wanted
        assert task.metric(" , ".join(sample.answers), sample) == 1.0
        assert task.metric("", sample) == 0.0


@pytest.mark.parametrize("name", GENERATED)
def test_impossible_numbers_are_refused(words, name):
    with pytest.raises(ValueError, match=r"tokens=\d+: "):
        registry()[name].samples(words, 24, 1, 0)
    with pytest.raises(ValueError, match="count=0"):
        registry()[name].samples(words, 1024, 0, 0)


# --- needle ----------------------------------------------------------------------------------------------------------


def test_the_needle_in_the_built_in_vocabulary_has_no_unknown_word_and_exactly_the_length(words):
    for name in NAMES:
        for sample in registry()[name].samples(words, 300, 6, 0):
            ids = encode(words, sample, chat=False).ids
            assert len(ids) == 300
            assert words.unk_token_id not in ids
            assert sample.max_new_tokens == len(" , ".join(sample.answers).split()) + 1
            if name in ("needle", "multi_needle"):
                lead = sample.question.removeprefix(" question ")
                assert f"{lead} {sample.answers[0]} ." in sample.context


def test_several_needles_share_a_context_and_each_is_asked_for_once(words):
    samples = registry()["multi_needle"].samples(words, 300, 16, 0)
    contexts = Counter(sample.context for sample in samples)
    assert set(contexts.values()) == {4}
    assert len({(sample.context, sample.question) for sample in samples}) == 16
    assert len({sample.context for sample in registry()["needle"].samples(words, 300, 6, 0)}) == 6


@pytest.mark.parametrize("kind", ["words", "pieces"])
def test_the_grid_puts_the_fact_at_every_depth_of_every_length(kind, request):
    tokenizer = request.getfixturevalue(kind)
    cells = len(LENGTHS) * len(DEPTHS)
    samples = registry()["needle_grid"].samples(tokenizer, 800, 2 * cells, 0)
    assert Counter((s.labels["length"], s.labels["depth"]) for s in samples) == Counter(
        {(round(part * 800), depth): 2 for part in LENGTHS for depth in DEPTHS}
    )
    for sample in samples:
        sentences = re.findall(r"[^.]+\.", sample.context)
        lead = sample.question.removeprefix(" question ")
        (place,) = [i for i, sentence in enumerate(sentences) if sentence.strip().startswith(lead)]
        assert place / (len(sentences) - 1) == pytest.approx(sample.labels["depth"], abs=1 / len(sentences))


def test_moving_a_fact_changes_its_place_alone():
    text = "a b . the code of x is 1 . c d . e f ."
    assert move_fact(text, "the code of x is", 0.0) == "the code of x is 1 . a b . c d . e f ."
    assert move_fact(text, "the code of x is", 1.0) == "a b . c d . e f . the code of x is 1 ."
