"""Threads that share one compiled model; test_cache_fuzz.py has conversations that take turns."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from compiled_models import compiled_anew, greedy, two_layers
from pairwise import quick_rows
from tiny_models import random_ids

PROMPTS = [random_ids(1, 40 + 7 * i, seed=i) for i in range(3)]


def at_once(work):
    """What ``work(0)``, ``work(1)`` and ``work(2)`` return, each called in a thread of its own at the same moment.

    Dynamo's settings, which some versions of torch have one of for all threads, must be left as they were.
    """
    gate, config = threading.Barrier(3), torch._dynamo.config
    before = config.automatic_dynamic_shapes, config.assume_static_by_default

    def one(i):
        gate.wait()
        return work(i)

    with ThreadPoolExecutor(3) as threads:
        results = list(threads.map(one, range(3)))
    assert (config.automatic_dynamic_shapes, config.assume_static_by_default) == before
    return results


TRIED = [("llama", "lava", True), ("gemma3", "h2o", False), ("llama", "lava", False), ("gemma3", "h2o", True)]


@pytest.mark.parametrize(("family", "policy", "warm"), quick_rows(TRIED, TRIED[:1]))
def test_threads_on_one_compiled_model_do_not_mix_caches(family, policy, warm):
    model, alone = two_layers(family, layers=1 if family == "llama" else 2, policy=policy)
    expected = [greedy(alone, ids) for ids in PROMPTS]
    fast = compiled_anew(model, policy=policy)
    if warm:
        greedy(fast, PROMPTS[0])
    results = at_once(lambda i: [greedy(fast, PROMPTS[i]) for _ in range(3)])
    for i, found in enumerate(results):
        assert len(found) == 3 and all(torch.equal(one, expected[i]) for one in found), f"thread {i}"


def test_threads_that_need_a_phase_at_once_compile_it_once():
    model, alone = two_layers(layers=1)
    fast = compiled_anew(model)
    question = random_ids(1, 9, seed=9)
    caches = [fast(ids).past_key_values for ids in PROMPTS]
    answers = at_once(lambda i: fast(question, past_key_values=caches[i]).logits)
    assert [record.phase for record in fast.report().compiled] == ["prefill", "extend"]
    for i, ids in enumerate(PROMPTS):
        expected = alone(question, past_key_values=alone(ids).past_key_values).logits
        assert torch.equal(answers[i], expected), f"thread {i}"
