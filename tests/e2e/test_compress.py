"""Question-agnostic scope: compress a context once, ask it several questions."""

from __future__ import annotations

import logging

import pytest
import torch

from masked_oracle import MaskedOracle, kept_columns
from numeric_checks import assert_close
from pairwise import quick
from tiny_models import compiled_once, left_pad, random_ids

POLICIES = {"lava": {}, "h2o": {"window": 8}, "cake": {"tau1": 1.0, "tau2": 1.0}}


def compiled(policy="lava", backend="eager", **options):
    """A model and its compiled copy, both shared with other tests."""
    given = {"window": 8, **options}
    return compiled_once("llama", layers=2, policy=policy, budget=16, backend=backend, **given)


def context():
    return left_pad([random_ids(1, n, seed=n)[0] for n in (50, 33)])


@pytest.mark.parametrize("backend", quick(["eager", "inductor"], ["eager"]))
def test_a_question_is_answered_from_what_was_kept_at_its_true_positions(backend):
    model, fast = compiled(backend=backend)
    ids, mask = context()
    question = random_ids(2, 6, seed=7)
    cache = fast.compress(ids, mask)
    answer = fast.generate(question, past_key_values=cache, max_new_tokens=8, do_sample=False)
    keep = kept_columns(cache, ids.shape[1])
    sequence, seen = torch.cat([ids, question], 1), torch.cat([mask, torch.ones_like(question)], 1)
    for _ in range(8):
        logits = MaskedOracle(model).logits(sequence, seen, keep)
        sequence = torch.cat([sequence, logits[:, -1:].argmax(-1)], 1)
        seen = torch.cat([seen, torch.ones_like(seen[:, :1])], 1)
    assert torch.equal(answer, sequence[:, ids.shape[1] :])


@pytest.mark.parametrize("policy", POLICIES)
def test_several_questions_leave_the_cache_as_it_was(policy):
    _, fast = compiled(policy, **POLICIES[policy])
    ids, mask = context()
    cache = fast.compress(ids, mask)
    before = cache.positions
    questions = [random_ids(2, n, seed=n) for n in (5, 1, 9)]
    answers = [fast.generate(q, past_key_values=cache, max_new_tokens=5, do_sample=False) for q in questions]
    assert cache.get_seq_length() == ids.shape[1] and torch.equal(cache.positions, before)
    for question, answer in zip(questions, answers, strict=True):
        fresh = fast.compress(ids, mask)
        again = fast.generate(
            input_ids=question,
            attention_mask=torch.ones_like(question),
            past_key_values=fresh,
            max_new_tokens=5,
            do_sample=False,
        )
        assert torch.equal(answer, again)


def test_the_continuation_of_a_reusable_cache_is_a_cache_of_its_own():
    _, fast = compiled()
    cache = fast.compress(random_ids(1, 40))
    out = fast(random_ids(1, 3), past_key_values=cache)
    assert out.past_key_values is not cache and out.past_key_values.get_seq_length() == 43
    shared = out.past_key_values.full_layers[0].pool_k.data_ptr() == cache.full_layers[0].pool_k.data_ptr()
    assert shared, "the kept entries should be shared"
    again = fast(random_ids(1, 1), past_key_values=out.past_key_values)
    assert again.past_key_values is out.past_key_values


def test_what_is_kept_does_not_depend_on_the_question():
    _, fast = compiled()
    ids = random_ids(1, 40)
    agnostic = kept_columns(fast.compress(ids), 40)
    aware = kept_columns(fast(torch.cat([ids, random_ids(1, 9, seed=3)], 1)).past_key_values, 49)[..., :40]
    assert not torch.equal(agnostic, aware)
    assert_close("window", agnostic[..., 32:].float(), torch.ones(1, 2, 2, 8), atol=0)


def test_a_policy_that_needs_the_question_is_named_once_with_those_that_do_not(monkeypatch):
    said = []
    monkeypatch.setattr(logging.getLogger("kvpass"), "warning", lambda text, *args: said.append(text % args))
    ids, mask = context()
    for policy in ("keydiff", "snapkv", "snapkv"):
        _, fast = compiled(policy)
        fast.compress(ids, mask)
    assert len(said) == 1 and "'snapkv'" in said[0] and "keydiff" in said[0] and "lava" not in said[0]
