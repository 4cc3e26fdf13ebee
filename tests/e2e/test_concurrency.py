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
def test_threads_on_one_compiled_model_do_not_mix_caches_and_compile_a_phase_once(family, policy, warm):
    model, alone = two_layers(family, layers=1 if family == "llama" else 2, policy=policy)
    fast, asked = compiled_anew(model, policy=policy), {"input_ids": random_ids(1, 9, seed=9), "logits_to_keep": 1}
    if warm:
        caches = [fast.compress(ids, reusable=False) for ids in PROMPTS]
        answers = at_once(lambda i: fast(past_key_values=caches[i], **asked).logits)
        assert [record.phase for record in fast.report().compiled] == ["prefill", "extend"]
        for i, ids in enumerate(PROMPTS):
            assert torch.equal(answers[i], alone(past_key_values=alone.compress(ids), **asked).logits), f"thread {i}"
    results = at_once(lambda i: [greedy(fast, PROMPTS[i]) for _ in range(3)])
    for i, found in enumerate(results):
        expected = greedy(alone, PROMPTS[i])
        assert len(found) == 3 and all(torch.equal(one, expected) for one in found), f"thread {i}"
