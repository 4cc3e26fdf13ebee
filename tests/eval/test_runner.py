"""Batches of prompts: answers against transformers, against batch 1, and what is read for them."""

import dataclasses
import functools
from typing import NamedTuple

import pytest
import torch

import kvpass
from eval_models import MODEL, TOKENIZER
from kvpass.eval.policy_spec import parse_policies
from kvpass.eval.prompt import Prompt
from kvpass.eval.run import stop_tokens
from kvpass.eval.runner import Kept, Runner
from kvpass.eval.tasks import encode, registry
from kvpass.policies import resolve
from tiny_models import tiny_model

pytestmark = pytest.mark.usefixtures("compile_once")


class Request(NamedTuple):
    prompt: Prompt
    max_new_tokens: int


class Answer(NamedTuple):
    text: str
    tokens: int
    kept: Kept


@pytest.fixture(scope="module")
def requests():
    """Eight prompts; the last four share a context; the first and the last but one have a longer question."""
    samples = registry()["needle"].samples(TOKENIZER, 128, 2, 0) + registry()["needle"].samples(TOKENIZER, 150, 2, 1)
    samples += registry()["multi_needle"].samples(TOKENIZER, 160, 4, 2)
    for index in (0, 6):
        samples[index] = dataclasses.replace(samples[index], question=f" the fox .{samples[index].question}")
    return [Request(encode(TOKENIZER, s, chat=False), s.max_new_tokens) for s in samples]


def runner(policy, budget=None, *, batch=3, **options):
    (spec,) = parse_policies(policy)
    fast = kvpass.compile(MODEL, policy=spec.resolve(), budget=budget, backend="eager", **options)
    return Runner(model=fast, tokenizer=TOKENIZER, batch=batch)


def all_answers(given, requests, scope, left=1):
    """Answers in the order of the requests; ``left``: tokens that scope "prompt" does not compress."""
    prompts = [request.prompt.scoped(scope, left) for request in requests]
    limits = [request.max_new_tokens for request in requests]
    asked = given.greedy(prompts, limits, stop_tokens(MODEL, TOKENIZER), [(given.model.policy, given.model.budget)])
    found = [one for answers in asked for _, *one in answers]
    assert sorted(index for index, *_ in found) == list(range(len(requests)))
    return [
        Answer(TOKENIZER.decode(tokens, skip_special_tokens=True), len(tokens), kept)
        for _, tokens, kept in sorted(found, key=lambda one: one[0])
    ]


@pytest.fixture(scope="module")
def generated(requests):
    """What transformers generates, prompt by prompt."""
    texts = []
    for request in requests:
        ids = torch.tensor([request.prompt.ids])
        out = MODEL.generate(ids, max_new_tokens=request.max_new_tokens, do_sample=False)
        texts.append(TOKENIZER.decode(out[0, ids.shape[1] :], skip_special_tokens=True))
    return texts


@pytest.mark.parametrize(("scope", "left"), [("prompt", 1), ("prompt", 0), ("prompt", 3), ("context", 1)])
def test_without_a_budget_answers_are_those_of_transformers(requests, generated, scope, left):
    answers = all_answers(runner("full"), requests, scope, left)
    assert [answer.text for answer in answers] == generated
    for request, answer in zip(requests, answers, strict=True):
        tokens = len(request.prompt.head) if scope == "context" else len(request.prompt) - left
        kept = answer.kept
        assert kept.compressed_tokens == kept.kept_entries == kept.budget_entries == tokens
        assert kept.kept_fraction == 1.0 and kept.attention_mass == pytest.approx(1, abs=1e-5)
        assert len(request.prompt.scoped(scope, left).head) == tokens


@pytest.mark.parametrize("scope", ["prompt", "context"])
def test_a_row_of_a_compressed_batch_answers_what_it_does_alone(requests, scope):
    alone = all_answers(runner("lava:window=8", 0.3, batch=1), requests, scope)
    together = all_answers(runner("lava:window=8", 0.3), requests, scope)
    for one, other in zip(alone, together, strict=True):
        assert (one.text, one.tokens, one.kept.kept_bytes) == (other.text, other.tokens, other.kept.kept_bytes)
        kept = one.kept
        assert kept.compressed_tokens == other.kept.compressed_tokens
        assert kept.kept_entries == kept.budget_entries == int(0.3 * kept.compressed_tokens)
        assert kept.kept_bytes == kept.budget_bytes == kept.kept_entries * 2 * (16 + 16) * 4
        assert kept.kept_fraction == pytest.approx(kept.kept_entries / kept.compressed_tokens)
        assert kept.cache_bytes >= kept.kept_bytes
        assert kept.attention_mass == pytest.approx(other.kept.attention_mass, abs=1e-5)


@pytest.mark.parametrize(
    ("scope", "batch", "entries"),
    [("context", 2, "model"), pytest.param("prompt", 1, "rot4", marks=pytest.mark.exhaustive)],
)
def test_conditions_that_are_rows_of_one_batch_answer_what_each_does_alone(
    requests, monkeypatch, scope, batch, entries
):
    specs = parse_policies("full,lava:window=8,h2o:window=8,random:window=8")
    conditions = [(spec.resolve(), None if spec.name == "full" else 0.3) for spec in specs]
    given = runner("full", batch=batch, entries=entries)
    prompts = [request.prompt.scoped(scope, 3) for request in requests[:3]]
    limits = [request.max_new_tokens for request in requests[:3]]

    def answers(conditions):
        asked = given.greedy(prompts, limits, stop_tokens(MODEL, TOKENIZER), conditions)
        found = [one for some in asked for one in some]
        return {(number, index): (tokens, kept.kept_bytes, kept.cache_bytes) for number, index, tokens, kept in found}

    alone = {
        (number, index): answer
        for number, one in enumerate(conditions)
        for (_, index), answer in answers([one]).items()
    }
    monkeypatch.setattr("kvpass.eval.runner.MOST_ROWS", 2 * batch)
    fed = watch(given, monkeypatch)
    assert answers(conditions) == alone
    continued = {rows for rows, tokens in fed if tokens <= 10}
    assert continued == {batch, 2 * batch}  # h2o evicts; of three that append two are together


def test_the_attention_mass_of_a_row_is_that_of_the_report_on_its_prompt_alone(requests):
    given = runner("lava:window=8", 0.3)
    masses = [answer.kept.attention_mass for answer in all_answers(given, requests, "prompt")]
    for request, mass in zip(requests, masses, strict=True):
        given.model.compress(torch.tensor([request.prompt.scoped("prompt", 1).head]))
        reported = given.model.report().attention_mass
        assert mass == pytest.approx(float(reported.mean()), abs=1e-5) and float(reported.std()) > 0.001
    assert len(set(masses)) > 1 and all(0.1 < mass < 0.999 for mass in masses)


def watch(given, monkeypatch):
    """Shapes of the ids the model is given from now on, decode steps left out."""
    fed: list[tuple[int, ...]] = []
    forward = given.model.forward

    @functools.wraps(forward)  # generate reads its signature
    def watched(*given, **named):
        ids = given[0] if given else named["input_ids"]
        fed.extend([tuple(ids.shape)] if ids.shape[1] > 1 else [])
        return forward(*given, **named)

    monkeypatch.setattr(given.model, "forward", watched)
    return fed


def test_every_context_is_compressed_once_and_batches_are_filled_up(requests, monkeypatch):
    given = runner("lava:window=8", 0.5)
    fed = watch(given, monkeypatch)
    all_answers(given, requests, "context")
    longer, question = len(requests[0].prompt.rest), len(requests[1].prompt.rest)
    assert (longer, question) == (10, 7)
    assert fed == [
        (3, 160 - question), (3, question), (3, question), (3, longer),  # the shared context, and two of 150
        (3, 128 - question), (3, question), (3, longer),  # two of 128, and a copy
    ]  # fmt: skip


@pytest.mark.parametrize("scope", ["prompt", "context"])
def test_a_cache_that_nobody_needs_again_is_not_copied(requests, monkeypatch, scope):
    given = runner("lava:window=8", 0.5)
    expected = all_answers(given, requests[1:4], scope)
    monkeypatch.setattr(kvpass.CompressedCache, "clone", None)
    assert all_answers(given, requests[1:4], scope) == expected


@pytest.mark.parametrize("scope", ["prompt", "context"])
def test_where_all_layers_slide_nothing_is_evicted(scope):
    fast = kvpass.compile(
        tiny_model("mistral_sliding", layers=1), policy=resolve("lava", window=8), budget=16, backend="eager"
    )
    given = Runner(model=fast, tokenizer=TOKENIZER)
    assert given.totals.to_dict()["kept_fraction"] is None
    (answer,) = all_answers(given, [Request(Prompt(tuple(range(45)), 5), 2)], scope)
    tokens, kept = 40 if scope == "context" else 44, answer.kept
    assert (kept.compressed_tokens, kept.kept_entries, kept.kept_fraction) == (tokens, tokens, 1.0)
    assert kept.kept_bytes == kept.budget_bytes == 0 and kept.attention_mass is None
    assert given.totals.to_dict()["kept_fraction"] == 1.0 and given.totals.cache_bytes_peak >= kept.cache_bytes
