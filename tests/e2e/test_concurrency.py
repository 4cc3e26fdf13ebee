"""Threads that share one compiled model; test_cache_fuzz.py has conversations that take turns."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch

import kvpass
from tiny_models import compiled_once, random_ids, tiny_model

OPTIONS = {"budget": 20, "window": 8, "backend": "eager"}
compiled = partial(compiled_once, layers=2, **OPTIONS)  # a model and its compiled copy, shared with other tests


def compile_anew(model=None, **options):
    return kvpass.compile(model or tiny_model("llama", num_hidden_layers=2), **OPTIONS | options)


def greedy(model, ids):
    return model.generate(ids, max_new_tokens=6, do_sample=False)


def at_once(work):
    """What ``work(0)``, ``work(1)`` and ``work(2)`` return, each called in a thread of its own at the same moment.

    Dynamo's settings, which some versions of torch have one of for all threads, must be left as they were.
    """
    gate, before = threading.Barrier(3), settings()

    def one(i):
        gate.wait()
        return work(i)

    with ThreadPoolExecutor(3) as threads:
        results = list(threads.map(one, range(3)))
    assert settings() == before
    return results


def settings():
    config = torch._dynamo.config
    return config.automatic_dynamic_shapes, config.assume_static_by_default


@pytest.mark.parametrize(
    ("family", "policy", "warm"),
    [
        ("llama", "lava", True),
        pytest.param("gemma3", "h2o", False, marks=pytest.mark.exhaustive),
        pytest.param("llama", "lava", False, marks=pytest.mark.exhaustive),
        pytest.param("gemma3", "h2o", True, marks=pytest.mark.exhaustive),
    ],
)
def test_threads_on_one_compiled_model_do_not_mix_caches(family, policy, warm):
    model, alone = compiled(family, policy=policy)
    prompts = [random_ids(1, 40 + 7 * i, seed=i) for i in range(3)]
    expected = [greedy(alone, ids) for ids in prompts]
    fast = compile_anew(model, policy=policy)
    if warm:
        greedy(fast, prompts[0])
    results = at_once(lambda i: [greedy(fast, prompts[i]) for _ in range(3)])
    for i, found in enumerate(results):
        assert len(found) == 3 and all(torch.equal(one, expected[i]) for one in found), f"thread {i}"


def test_threads_that_need_a_phase_at_once_compile_it_once():
    _, alone = compiled()
    fast = compile_anew()
    prompts = [random_ids(1, 40 + 7 * i, seed=i) for i in range(3)]
    question = random_ids(1, 9, seed=9)
    caches = [fast(ids).past_key_values for ids in prompts]
    answers = at_once(lambda i: fast(question, past_key_values=caches[i]).logits)
    assert [record.phase for record in fast.report().compiled] == ["prefill", "extend"]
    for i, ids in enumerate(prompts):
        expected = alone(question, past_key_values=alone(ids).past_key_values).logits
        assert torch.equal(answers[i], expected), f"thread {i}"
