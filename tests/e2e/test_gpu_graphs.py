"""CUDA graphs of decode steps on a device: what is replayed is what would be launched; skipped without one."""

from typing import Any

import pytest
import torch
from torch import Tensor

import kvpass
from kvpass.compiler.cuda_graphs import CudaRecorder
from numeric_checks import assert_close
from tiny_models import random_ids, tiny_model

pytestmark = pytest.mark.gpu


def steps(model, cache, token: Tensor, count: int, tokens: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Greedy tokens, or the given ones ``[B, count]``, and all logits."""
    said, logits = [], []
    for index in range(count):
        out = model(token, past_key_values=cache)
        logits.append(out.logits)
        token = out.logits[:, -1:].argmax(-1) if tokens is None else tokens[:, index : index + 1]
        said.append(token)
    return torch.cat(said, 1), torch.cat(logits, 1)


def pair(family: str = "llama", dtype: torch.dtype = torch.float32, **options: Any) -> list[Any]:
    """A model whose steps are replayed, and one whose steps are launched."""
    model, given = tiny_model(family, dtype=dtype).cuda(), {"policy": "lava", "budget": 16, "window": 8, **options}
    return [kvpass.compile(model, **given, cuda_graphs=graphs) for graphs in (True, False)]


class CountingRecorder(CudaRecorder):
    recorded = 0

    def __call__(self, function):
        CountingRecorder.recorded += 1
        return super().__call__(function)


@pytest.fixture
def recorded(monkeypatch):
    """How many CUDA graphs have been captured."""
    CountingRecorder.recorded = 0
    monkeypatch.setattr("kvpass.compiler.backend.CudaRecorder", CountingRecorder)
    # What Dynamo leaves of a capture refers to the cache; tests/conftest.py tells it not to collect that garbage.
    with torch._dynamo.config.patch(run_gc_after_compile=True):
        yield lambda: CountingRecorder.recorded


@pytest.mark.parametrize("policy", ["lava", "full"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_replayed_steps_are_those_launched_one_by_one_while_the_tail_grows(policy, dtype, recorded):
    graphed, plain = pair(dtype=dtype, policy=policy, budget=None if policy == "full" else 16)
    ids, token = random_ids(2, 61).cuda(), random_ids(2, 1).cuda()
    expected, logits = steps(plain, plain(ids).past_key_values, token, 150)
    assert recorded() == 0
    _, replayed = steps(graphed, graphed(ids).past_key_values, token, 150, expected)
    assert recorded() == 3, "one graph for each length of the tail"
    assert_close("logits", replayed, logits, atol=1e-5 if dtype == torch.float32 else 1e-2)


@pytest.mark.parametrize(("policy", "options"), [("cake", {"tau1": 1.6, "tau2": 0.4}), ("tova", {}), ("h2o", {})])
def test_replayed_steps_evict_as_those_launched_one_by_one(policy, options, recorded):
    graphed, plain = pair(policy=policy, window=None if policy == "tova" else 8, **options)
    ids, token = random_ids(2, 61).cuda(), random_ids(2, 1).cuda()
    caches = [fast(ids).past_key_values for fast in (plain, graphed)]
    expected, logits = steps(plain, caches[0], token, 40)
    assert recorded() == 0
    _, replayed = steps(graphed, caches[1], token, 40, expected)
    assert recorded() >= 1
    assert_close("logits", replayed, logits, atol=1e-5)
    assert torch.equal(caches[0].positions, caches[1].positions)


@pytest.mark.parametrize(("family", "tokens"), [("gemma3", 1), ("gemma3", 4), ("llama", 2), ("llama", 8)])
def test_replayed_steps_on_rings_and_of_several_tokens(family, tokens, recorded):
    fast, plain = pair(family)
    ids, pieces = random_ids(2, 61).cuda(), random_ids(2, 6 * tokens, seed=1).cuda().split(tokens, 1)
    logits = []
    for compiled in (plain, fast):
        cache = compiled(ids).past_key_values
        logits.append(torch.cat([compiled(piece, past_key_values=cache).logits for piece in pieces], 1))
    assert recorded() == 1
    assert_close("logits", logits[1], logits[0], atol=1e-4 if family == "gemma3" else 1e-5)


def test_caches_that_take_turns_do_not_mix(recorded):
    fast, plain = pair()
    prompts = [random_ids(1, n, seed=n).cuda() for n in (61, 40)]
    token = random_ids(1, 1).cuda()
    expected = [steps(plain, plain(ids).past_key_values, token, 20) for ids in prompts]
    caches = [fast(ids).past_key_values for ids in prompts]
    logits: list[list[Tensor]] = [[], []]
    for index in range(20):
        for turn, cache in enumerate(caches):
            given = token if index == 0 else expected[turn][0][:, index - 1 : index]
            logits[turn].append(fast(given, past_key_values=cache).logits)
    for turn in range(2):
        assert_close(f"logits of cache {turn}", torch.cat(logits[turn], 1), expected[turn][1], atol=1e-5)
    assert recorded() == 2
