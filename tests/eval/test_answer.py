"""Answers against transformers, against batch 1, and what is read for them."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch

import kvpass
from kvpass import builtin
from kvpass.eval.answer import Answerer, Request
from kvpass.eval.harness.measured import Measured
from kvpass.eval.policy_spec import parse_policies
from kvpass.eval.prompt import Prompt
from kvpass.eval.run import stop_tokens
from kvpass.eval.tasks import encode, registry
from kvpass.policies import resolve
from tiny_models import tiny_model

pytestmark = pytest.mark.usefixtures("compile_once")


@pytest.fixture(scope="module")
def loaded():
    return builtin.load()


@pytest.fixture(scope="module")
def requests(loaded):
    """Eight prompts; the last four share a context; the first and the last but one have a longer question."""
    _, tokenizer = loaded
    samples = registry()["needle"].samples(tokenizer, 128, 2, 0) + registry()["needle"].samples(tokenizer, 150, 2, 1)
    samples += registry()["multi_needle"].samples(tokenizer, 160, 4, 2)
    for index in (0, 6):
        samples[index] = dataclasses.replace(samples[index], question=f" the fox .{samples[index].question}")
    return [Request(prompt=encode(tokenizer, s, chat=False), max_new_tokens=s.max_new_tokens) for s in samples]


def answerer(loaded, policy, budget=None, *, batch=3, hold=1):
    model, tokenizer = loaded
    (spec,) = parse_policies(policy)
    fast = kvpass.compile(model, policy=spec.resolve(), budget=budget, backend="eager")
    stops = stop_tokens(model, tokenizer)
    return Answerer(model=fast, tokenizer=tokenizer, stops=stops, batch=batch, hold=hold)


def all_answers(given, requests, scope):
    found = [pair for answers in given.answers(requests, scope) for pair in answers]
    assert sorted(index for index, _ in found) == list(range(len(requests)))
    return [answer for _, answer in sorted(found, key=lambda pair: pair[0])]


@pytest.fixture(scope="module")
def generated(loaded, requests):
    """What transformers generates, prompt by prompt."""
    model, tokenizer = loaded
    texts = []
    for request in requests:
        ids = torch.tensor([request.prompt.ids])
        out = model.generate(ids, max_new_tokens=request.max_new_tokens, do_sample=False)
        texts.append(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True))
    return texts


@pytest.mark.parametrize(("scope", "hold"), [("prompt", 1), ("prompt", 0), ("prompt", 3), ("context", 1)])
def test_without_a_budget_answers_are_those_of_transformers(loaded, requests, generated, scope, hold):
    given = answerer(loaded, "full", hold=hold)
    answers = all_answers(given, requests, scope)
    assert [answer.text for answer in answers] == generated
    for request, answer in zip(requests, answers, strict=True):
        tokens = len(request.prompt.head) if scope == "context" else len(request.prompt) - hold
        assert answer.kept.tokens == answer.kept.entries == answer.kept.budget_entries == tokens
        assert answer.kept.fraction == 1.0
        assert len(request.prompt.scoped(scope, hold).head) == tokens


@pytest.mark.parametrize("scope", ["prompt", "context"])
def test_a_row_of_a_compressed_batch_answers_what_it_does_alone(loaded, requests, scope):
    alone = all_answers(answerer(loaded, "lava:window=8", 0.3, batch=1), requests, scope)
    together = all_answers(answerer(loaded, "lava:window=8", 0.3), requests, scope)
    for one, other in zip(alone, together, strict=True):
        assert one.text == other.text
        assert (one.kept.tokens, one.kept.bytes, one.tokens) == (other.kept.tokens, other.kept.bytes, other.tokens)
        assert one.kept.entries == one.kept.budget_entries == int(0.3 * one.kept.tokens)
        assert one.kept.bytes == one.kept.budget_bytes == one.kept.entries * 6 * 4 * (64 + 64) * 4
        assert one.kept.fraction == pytest.approx(one.kept.entries / one.kept.tokens)
        assert one.kept.cache_bytes >= one.kept.bytes


def test_the_held_token_makes_the_first_generated_token_feel_the_compression(loaded, requests, generated):
    firsts = [text.split()[0] for text in generated]
    heard = []
    for hold in (0, 1):
        answers = all_answers(answerer(loaded, "streaming_llm", 12, hold=hold), requests, "prompt")
        heard.append([answer.text.split()[0] for answer in answers])
    assert heard[0] == firsts  # taken from the prefill, before anything was dropped
    assert heard[1] != firsts


def watch(given, monkeypatch):
    """Shapes of the ids the model is given from now on, decode steps left out."""
    fed: list[tuple[int, ...]] = []
    forward = given.model.forward

    def watched(ids, *rest, **more):
        fed.extend([tuple(ids.shape)] if ids.shape[1] > 1 else [])
        return forward(ids, *rest, **more)

    monkeypatch.setattr(given.model, "forward", watched)
    return fed


def test_every_context_is_compressed_once_and_batches_are_filled_up(loaded, requests, monkeypatch):
    given = answerer(loaded, "lava:window=8", 0.5)
    fed = watch(given, monkeypatch)
    all_answers(given, requests, "context")
    longer, question = len(requests[0].prompt.rest), len(requests[1].prompt.rest)
    assert (longer, question) == (10, 7)
    assert fed == [
        (3, 150 - question), (3, question), (3, longer),  # two contexts of 128, one of 150; one question is longer
        (3, 160 - question), (3, question), (3, question), (3, longer),  # one of 150, and the shared one: five in all
    ]  # fmt: skip


@pytest.mark.parametrize("hold", [0, 2])
def test_a_prompt_asked_twice_is_compressed_once(loaded, requests, monkeypatch, hold):
    given = answerer(loaded, "lava:window=8", 0.5, hold=hold)
    once = [answer.text for answer in all_answers(given, requests[:3], "prompt")]
    fed = watch(given, monkeypatch)
    twice = all_answers(given, [requests[index] for index in (0, 1, 0, 2, 0)], "prompt")
    assert [answer.text for answer in twice] == [once[index] for index in (0, 1, 0, 2, 0)]
    assert [shape for shape in fed if shape[1] > 2] == [(3, max(len(r.prompt) for r in requests[:3]) - hold)]


@pytest.mark.parametrize("scope", ["prompt", "context"])
def test_a_cache_that_nobody_needs_again_is_not_copied(loaded, requests, monkeypatch, scope):
    given = answerer(loaded, "lava:window=8", 0.5)
    expected = all_answers(given, requests[1:4], scope)
    monkeypatch.setattr(kvpass.CompressedCache, "clone", None)
    assert all_answers(given, requests[1:4], scope) == expected


def test_a_budget_changes_without_compiling_anything_again(loaded, requests):
    given = answerer(loaded, "snapkv:window=8", 0.2)
    kept, graphs = [], []
    for budget in (0.2, 0.6, 40, "192KiB"):
        given.model.set_budget(budget)
        kept.append(all_answers(given, requests[:3], "prompt")[0].kept.entries)
        graphs.append(len(given.model.report().compiled))
    assert len(set(graphs)) == 1
    assert kept == [26, 78, 40, 192 * 1024 // (6 * 4 * 128 * 4)]
    with pytest.raises(ValueError, match="must be at least window"):
        given.model.set_budget(8)


def test_numbers_out_of_range_are_refused():
    for name in ("batch", "hold"):
        with pytest.raises(ValueError, match=f"{name}=-1"):
            Answerer(model=None, tokenizer=SimpleNamespace(), stops=frozenset(), **{name: -1})


@pytest.mark.parametrize("scope", ["prompt", "context"])
def test_where_all_layers_slide_nothing_is_evicted(loaded, scope):
    fast = kvpass.compile(tiny_model("mistral_sliding"), policy=resolve("lava", window=8), budget=16, backend="eager")
    given = Answerer(model=fast, tokenizer=loaded[1], stops=frozenset(), batch=1)
    (answer,) = all_answers(given, [Request(prompt=Prompt(tuple(range(45)), 5), max_new_tokens=2)], scope)
    tokens, kept = 40 if scope == "context" else 44, answer.kept
    assert (kept.tokens, kept.entries, kept.fraction, kept.bytes, kept.budget_bytes) == (tokens, tokens, 1.0, 0, 0)
    measured = Measured()
    assert measured.to_dict()["kept_fraction"] is None
    measured.add(fast.report())
    assert measured.to_dict()["kept_fraction"] == 1.0 and measured.cache_bytes_peak == kept.cache_bytes
