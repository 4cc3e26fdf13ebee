"""Another budget, and another policy, on a model that is already compiled."""

import threading

import pytest
import torch
from torch._dynamo.utils import counters

import kvpass
from compiled_models import compiled_apart, reloaded, two_layers
from kvpass.policies import resolve
from tiny_models import random_ids

IDS, TOKEN = random_ids(1, 60), random_ids(1, 1, seed=1)


@pytest.fixture
def fast():
    """A model with a report of its own."""
    return compiled_apart(budget=16)


def test_another_budget_holds_for_the_prompts_to_come_and_compiles_nothing(fast):
    before = fast(IDS).past_key_values
    fast(TOKEN, past_key_values=before)
    compiled = fast.report().compiled
    assert fast.policy == resolve("lava", window=8) and fast.budget == kvpass.Budget.parse(16)
    fast.set_budget(24)
    assert fast.budget == kvpass.Budget.parse(24)
    with pytest.raises(ValueError, match="no prompt yet with its policy and budget"):
        fast.report()
    after = fast(IDS).past_key_values
    expected = two_layers(budget=24)[1](IDS).past_key_values
    assert torch.equal(after.positions, expected.positions) and after.lengths.sum() == 24 * 4
    assert fast.report().budget == fast.budget and fast.report().compiled == compiled
    with pytest.raises(kvpass.CacheMismatchError):
        fast(TOKEN, past_key_values=before)
    with pytest.raises(ValueError, match="budget=8"):
        fast.set_budget(8)
    assert fast.budget == kvpass.Budget.parse(24)
    fast.set_budget(16)
    assert fast(TOKEN, past_key_values=before).past_key_values is before and before.lengths.sum() == 18 * 4


def test_another_policy_holds_for_the_prompts_to_come_and_captures_nothing(fast):
    before = fast(IDS).past_key_values
    fast(TOKEN, past_key_values=before)
    counters.clear()
    others = [("snapkv", 24, {"pool": None, "window": 6}), ("h2o", 20, {"window": 6}), ("full", None, {})]
    for policy, budget, options in others:
        fast.set_policy(policy, budget, **options)
        assert fast.policy == resolve(policy, **options)
        with pytest.raises(ValueError, match="no prompt yet with its policy and budget"):
            fast.report()
        cache = fast(IDS).past_key_values
        logits = fast(TOKEN, past_key_values=cache).logits
        assert not counters["stats"]["unique_graphs"], "captured again"
        _, alone = two_layers(policy=policy, budget=budget, **{"window": None, **options})
        expected = alone(IDS).past_key_values
        assert torch.equal(logits, alone(TOKEN, past_key_values=expected).logits), policy
        assert torch.equal(cache.positions, expected.positions)
        report = fast.report()
        assert report.policy == fast.policy and {record.phase for record in report.compiled} >= {"prefill", "decode"}
        counters.clear()
    with pytest.raises(kvpass.CacheMismatchError):
        fast(TOKEN, past_key_values=before)
    fast.set_policy("lava", 16, window=8)
    assert fast(TOKEN, past_key_values=before).past_key_values is before


def test_contract_10_a_policy_that_cannot_be_set_changes_nothing():
    fast = two_layers(budget=16, recompress="every_turn")[1]
    cache = fast(IDS).past_key_values
    for policy, budget, options, message in (
        ("lavva", 16, {}, "did you mean 'lava'"),
        ("lava", 16, {"window": 16}, r"window \+ 1 = 17"),
        ("full", None, {}, "recompress='every_turn'"),
    ):
        with pytest.raises(ValueError, match=message):
            fast.set_policy(policy, budget, **options)
        assert fast.policy == resolve("lava", window=8) and fast.report().budget == fast.budget
    fast(TOKEN, past_key_values=cache)


def test_budget_of_a_call_is_that_of_a_model_compiled_with_it(fast, tmp_path):
    ids, token = random_ids(2, 60), random_ids(2, 1, seed=1)
    _, other = two_layers(budget=24)
    expected = other.generate(ids, max_new_tokens=6, return_dict_in_generate=True)
    found = fast.generate(ids, max_new_tokens=6, return_dict_in_generate=True, budget=24)
    assert torch.equal(found.sequences, expected.sequences)
    assert torch.equal(found.past_key_values.positions, expected.past_key_values.positions)
    assert fast.report().budget == kvpass.Budget.parse(24) != fast.budget
    cache = fast.compress(ids, budget=24)
    found, expected = (one(token, past_key_values=held) for one, held in ((fast, cache), (other, other.compress(ids))))
    assert torch.equal(found.logits, expected.logits)
    assert fast.report(cache).budget == kvpass.Budget.parse(24)
    fast.set_budget(20)
    loaded = reloaded(cache, fast, tmp_path)
    call = {"max_new_tokens": 4, "attention_mask": torch.ones_like(token)}
    answer = fast.generate(token, past_key_values=cache, **call)
    assert torch.equal(fast.generate(token, past_key_values=loaded, budget=24, **call), answer)
    with pytest.raises(kvpass.CacheMismatchError, match=r"budget=\.\.\.\) is 20, but the cache has 24"):
        fast.generate(token, past_key_values=cache, budget=20, **call)
    with pytest.raises(ValueError, match="budget=8"):
        fast.compress(ids, budget=8)
    plain = fast.compress(ids)
    assert plain.budget == kvpass.Budget.parse(20)
    fast.set_budget(16)
    with pytest.raises(kvpass.CacheMismatchError):
        fast(token, past_key_values=plain)


def test_rules_set_during_a_call_do_not_change_it():
    _, fast = two_layers(budget=16)
    expected = fast.generate(IDS, max_new_tokens=6)
    settings = iter([lambda: fast.set_budget(24), lambda: fast.set_policy("snapkv", 20, window=6)] * 3)

    def changed_meanwhile(ids, scores):
        other = threading.Thread(target=next(settings))
        other.start()
        other.join()
        return scores

    found = fast.generate(IDS, max_new_tokens=6, logits_processor=[changed_meanwhile], return_dict_in_generate=True)
    assert torch.equal(found.sequences, expected)
    report = fast.report()
    assert report.policy == resolve("lava", window=8) and report.budget == kvpass.Budget.parse(16)
    assert fast.policy == resolve("snapkv", window=6)
