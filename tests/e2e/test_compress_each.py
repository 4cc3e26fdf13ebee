"""A prompt that is read once for several policies and budgets, against one that is read for each."""

import pytest
import torch

import kvpass
from compiled_models import compiled_apart, padded, two_layers
from kvpass.compiler.blocks import DecoderRun
from kvpass.policies import POLICIES, resolve
from pairwise import quick_rows
from policy_variants import BUILT_IN
from tiny_models import HEAD_MAP, HYBRIDS, added_in_place, compiled_once, in_blocks, kvzap_file, random_ids, tiny_model

OPTIONS = {"cake": {"tau1": 1.6, "tau2": 0.4}, "duo_attention": {"head_map": HEAD_MAP[:2]}}
KVZAP = {"weights": kvzap_file(2), "window": 4}
OF_LLAMA = [(resolve("kvzap", **KVZAP), 10), (resolve("kvzap", split="file", **KVZAP), 14)]
CONDITIONS = [
    (resolve(name, **OPTIONS.get(name, {})), (0.9 if i % 2 else 40) if POLICIES[name].needs_budget else None)
    for i, name in enumerate(BUILT_IN)
]


def assert_each_is_as_alone(fast, conditions, ids, mask=None):
    token, caches = random_ids(len(ids), 1, seed=3), fast.compress_each(ids, mask, conditions=conditions)
    for (policy, budget), cache in zip(conditions, caches, strict=True):
        fast.set_policy(policy, budget)
        alone = fast.compress(ids, mask)
        assert torch.equal(cache.positions, alone.positions), policy.name
        logits, expected = (fast(token, past_key_values=one).logits for one in (cache, alone))
        assert torch.equal(logits, expected), policy.name
        assert cache.nbytes == alone.nbytes and cache.record.nbytes == alone.record.nbytes


TRIED = [("llama", "eager"), ("gemma3", "eager"), *[("lfm2", "eager")] * ("lfm2" in HYBRIDS), ("llama", "inductor")]


@pytest.mark.parametrize(("family", "backend"), quick_rows(TRIED, TRIED[:1]))
def test_each_cache_is_that_of_its_condition_alone(family, backend):
    _, fast = two_layers(family, backend=backend)
    conditions = [pair for pair in CONDITIONS if pair[0].name != "duo_attention" or family == "llama"]
    conditions += OF_LLAMA if family == "llama" else []
    with in_blocks(fast, 40):
        assert_each_is_as_alone(fast, conditions, *padded(90, 71))


def test_it_runs_the_decoder_once_and_leaves_the_model_as_it_was(monkeypatch):
    fast = compiled_apart(budget=48, window=None)
    with pytest.raises(ValueError, match="name at least one"):
        fast.compress_each(random_ids(1, 60), conditions=[])
    with pytest.raises(ValueError, match="did you mean 'lava'"):
        fast.compress_each(random_ids(1, 60), conditions=[("snapkv", 40), ("lavva", 40)])
    runs = []
    forward = fast._kvpass.captures.run
    monkeypatch.setattr(fast._kvpass.captures, "run", lambda *args: runs.append(1) or forward(*args))
    fast.compress_each(random_ids(1, 60), conditions=[("snapkv", 40), ("tova", 40), ("full", None)])
    assert len(runs) == 1 and fast.policy == resolve("lava") and fast.budget == kvpass.Budget.parse(48)
    with pytest.raises(ValueError, match="nothing to report"):
        fast.report()


def test_a_decoder_that_does_not_run_in_blocks_fills_all_caches_too():
    fast = kvpass.compile(added_in_place(tiny_model("llama", layers=1)), policy="full", backend="eager")
    assert_each_is_as_alone(fast, [(resolve("lava"), 40), (resolve("snapkv"), 0.9)], random_ids(2, 60))


def test_policies_that_replay_the_same_share_the_replay(monkeypatch):
    _, fast = compiled_once("llama", layers=1, backend="eager", policy="full", budget=None)
    asked, run = [], DecoderRun.run_layer
    monkeypatch.setattr(DecoderRun, "run_layer", lambda *args, **kw: asked.append(kw.get("behind")) or run(*args, **kw))
    fast.compress_each(random_ids(1, 60), conditions=[("kvzip", 9), ("kvzip_plus", 9), (resolve("kvzip", sinks=2), 9)])
    assert sum(behind is not None for behind in asked) == 2
