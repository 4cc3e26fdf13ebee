"""An exception at a line of kvpass that is drawn at random: then the same model and cache are right, or refuse."""

import functools
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

import pytest
import torch

import kvpass
from compiled_models import GIVEN, greedy, two_layers
from kvpass.policies import resolve
from line_faults import drawn_places, traced_lines
from pairwise import quick_rows
from tiny_models import random_ids, tiny_model

PROMPT, QUESTION = random_ids(2, 36), random_ids(2, 3, seed=1)
FAULTS = (KeyboardInterrupt, RuntimeError)
RAISED = (*FAULTS, ValueError)  # what fails in a capture is a ValueError about the decoder
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "appends": ("llama", {"policy": "lava"}),
    "evicts": ("llama", {"policy": "h2o"}),
    "codes": ("llama", {"policy": "lava", "entries": "rot4"}),
    "replays and compacts": ("llama", {"policy": "kvzip", "compact": True, "window": None}),
    "recompresses": ("llama", {"policy": "lava", "recompress": "every_turn"}),
    "slides": ("gemma3", {"policy": "lava"}),
    "recurrent": ("lfm2", {"policy": "lava"}),
}
CROPPED = ("appends", "codes", "replays and compacts")
PLAIN = ("appends", "evicts", "slides", "recurrent")


class Operation(NamedTuple):
    """A call and the cache that it begins with.

    Attributes:
        call: of model and cache; returns what is compared. begins: with an empty cache, one that holds an answer, one
            that is reusable, or one of a single row. cases: that allow it.
    """

    call: Callable[..., Any]
    begins: str = "answered"
    cases: tuple[str, ...] = tuple(CASES)


def from_prompt(fast, cache, **options):
    return greedy(fast, PROMPT, 4, past_key_values=cache, **options)


def generated(fast, cache, **options):
    return greedy(fast, QUESTION, 4, past_key_values=cache, **options)


def with_drafts(fast, cache):
    return greedy(fast, PROMPT[:1, :5], 4, past_key_values=cache, prompt_lookup_num_tokens=2)


def padded(fast, cache):
    mask = torch.cat([cache.attention_mask, torch.tensor([[1, 1, 1], [0, 1, 1]])], 1)
    return fast(QUESTION, attention_mask=mask, past_key_values=cache).logits


def several_caches(fast, cache):
    conditions = [(resolve(name, window=8), 12) for name in ("lava", "h2o")]
    return torch.cat([one.positions.flatten() for one in fast.compress_each(PROMPT, conditions=conditions)])


OPERATIONS = {
    "prompt": Operation(lambda fast, cache: fast(PROMPT, past_key_values=cache).logits, "empty"),
    "generate": Operation(from_prompt, "empty"),
    "budget of a call": Operation(lambda fast, cache: greedy(fast, PROMPT, 4, budget=17), "empty"),
    "compress": Operation(lambda fast, cache: fast.compress(PROMPT, budget=17).positions, "empty"),
    "compress_each": Operation(several_caches, "empty", PLAIN),
    "answer": Operation(generated),
    "answer from a copy": Operation(generated, "reusable"),
    "beams": Operation(lambda fast, cache: generated(fast, cache, num_beams=2), "reusable"),
    "drafts": Operation(with_drafts, "single", CROPPED),
    "decode": Operation(lambda fast, cache: fast(QUESTION[:, :1], past_key_values=cache).logits),
    "several tokens": Operation(lambda fast, cache: fast(QUESTION, past_key_values=cache).logits),
    "padded": Operation(padded),
    "rows": Operation(lambda fast, cache: cache.batch_select_indices(torch.tensor([1, 1]))),
    "crop": Operation(lambda fast, cache: cache.crop(-2), cases=CROPPED),
    "reset": Operation(lambda fast, cache: cache.reset()),
    "report": Operation(lambda fast, cache: str(fast.report(cache))),
}
DID_NOT_HAPPEN = {("appends", name) for name in ("prompt", "rows", "decode")}
"""A call of these that failed is as if it had not been made; others may leave a cache that is refused."""
ROWS = [(case, name, seed) for name, operation in OPERATIONS.items() for case in operation.cases for seed in range(2)]
QUICK = [
    (next(case for case in (("appends", "evicts")[i % 2], "appends") if case in operation.cases), name, 0)
    for i, (name, operation) in enumerate(OPERATIONS.items())
    if operation.begins != "single"  # which is captured apart
]


def begun(fast, begins):
    cache = fast.compress(PROMPT[: 1 if begins == "single" else 2], reusable=begins == "reusable")
    if begins == "empty":
        cache.reset()
    elif begins == "answered":
        fast(QUESTION, past_key_values=cache)
    return cache


def copied(cache):
    twin = cache.clone()
    twin.reusable = cache.reusable
    return twin


def facts(fast, cache):
    """What a cache says of itself, and logits of a token and of three more behind it."""
    if cache.is_empty:
        return [cache.columns, cache.nbytes, cache.reusable]
    new, twin = random_ids(cache.batch_size, 4, seed=2), cache.clone()
    logits = [fast(ids, past_key_values=twin).logits for ids in (new[:, :1], new[:, 1:])]
    tables = cache.ids, cache.positions, cache.lengths, cache.attention_mask
    return [cache.columns, cache.reusable, *tables, *logits]


def same(one, other):
    return len(one) == len(other) and all(
        torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y for x, y in zip(one, other, strict=True)
    )


def states_within(fast, cache, call):
    """The states of a cache while an answer is generated, after each of its tokens."""
    states = []

    def note(_, scores):
        states.append(facts(fast, cache))
        return scores

    call(fast, cache, logits_processor=[note])
    return states


@functools.cache
def undisturbed(case, name):
    """An operation without a fault: model, cache before it, result, states of the cache, lines, states of a new one."""
    family, options = CASES[case]
    operation, (_, fast) = OPERATIONS[name], two_layers(family, **options)
    template = begun(fast, operation.begins)
    for _ in range(3):  # the second time nothing is captured, the third time no module has changed
        cache = copied(template)
        with traced_lines() as lines:
            result = operation.call(fast, cache)
    states = [facts(fast, template), facts(fast, cache)]
    if operation.call in (from_prompt, generated):
        states += states_within(fast, copied(template), operation.call)
    return fast, template, result, states, lines, facts(fast, begun(fast, "answered"))


@pytest.mark.parametrize(("case", "name", "seed"), quick_rows(ROWS, QUICK))
def test_an_exception_at_any_line_leaves_model_and_cache_right_or_refused(case, name, seed):
    two_layers(CASES[case][0], **CASES[case][1])  # its policy: the model is shared
    fast, template, result, states, lines, other = undisturbed(case, name)
    call = OPERATIONS[name].call
    few = (case, name, seed) in QUICK and name not in ("rows", "crop", "reset")
    for i, place in enumerate(drawn_places(lines, seed, 4 if few else 12)):
        cache, done = copied(template), None
        with suppress(*RAISED), traced_lines(place, FAULTS[i % 2]) as ran:
            done = [call(fast, cache)]  # where kvpass goes on without what failed
        where = f"{FAULTS[i % 2].__name__} at {lines[place]}"
        assert len(ran) == place + 1 and (done is None or same(done, [result])), where
        assert same(facts(fast, begun(fast, "answered")), other), f"another cache: {where}"
        try:
            found = facts(fast, cache)
        except kvpass.CacheMismatchError as refused:
            assert "interrupted" in str(refused) and (case, name) not in DID_NOT_HAPPEN, where
            cache.reset()
            cache = copied(template)
        else:
            assert any(same(found, state) for state in states), where
            cache = cache if same(found, states[0]) else copied(template)
        assert same([call(fast, cache)], [result]), f"the same again: {where}"
        assert same(facts(fast, cache), states[1]), f"the cache after it: {where}"


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.exhaustive) for seed in range(1, 4))])
@pytest.mark.parametrize("action", ["save", "load"])
def test_an_exception_while_a_file_is_written_or_read_leaves_a_whole_one(tmp_path, action, seed):
    _, fast = two_layers()
    file, old = tmp_path / "cache.kv", begun(fast, "answered")
    new = old.clone()
    fast(QUESTION, past_key_values=new)
    known = [facts(fast, old), facts(fast, new)]

    def call():
        return new.save(file) if action == "save" else facts(fast, kvpass.load_cache(file, fast))

    old.save(file)
    with traced_lines() as lines:
        call()
    for i, place in enumerate(drawn_places(lines, seed, 6 if seed == 0 else 30)):
        old.save(file)
        with suppress(*RAISED), traced_lines(place, FAULTS[i % 2]):
            call()
        found = facts(fast, kvpass.load_cache(file, fast))
        where = f"{FAULTS[i % 2].__name__} at {lines[place]}"
        assert any(same(found, state) for state in (known if action == "save" else known[:1])), where
        assert same(facts(fast, old), known[0]) and same(facts(fast, new), known[1]), where
        new.save(file)
        assert same(facts(fast, kvpass.load_cache(file, fast)), known[1]), where


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", ["llama", "gemma3", "lfm2"])
def test_an_exception_in_a_first_call_leaves_a_model_that_is_captured_again(family):
    model, kept = tiny_model(family, layers=2), []

    def first_calls():
        kept.append(kvpass.compile(model, policy="lava", **GIVEN))
        return calls(kept[-1])

    def calls(fast):
        cache = fast.compress(PROMPT, reusable=False)
        step = fast(QUESTION[:, :1], past_key_values=cache).logits
        return [step, fast(QUESTION, past_key_values=cache).logits]

    def of_modules(decoder):
        with torch.no_grad():
            return decoder(PROMPT, use_cache=False).last_hidden_state

    with traced_lines() as lines:
        expected = first_calls()
    plain = of_modules(model.model)
    for i, place in enumerate(drawn_places(lines, 0, 12)):
        kept.clear()
        with suppress(*RAISED), traced_lines(place, FAULTS[i % 2]):
            first_calls()
        fast = kept[0] if kept else kvpass.compile(model, policy="lava", **GIVEN)
        where = f"{FAULTS[i % 2].__name__} at {lines[place]}"
        assert same(calls(fast), expected), where
        assert torch.equal(of_modules(fast.model), plain) and torch.equal(of_modules(model.model), plain), where
