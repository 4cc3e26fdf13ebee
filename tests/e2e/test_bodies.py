"""The modules of a compiled model called alone compute what those of the user's model do, masks included."""

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from transformers import AutoModelForSequenceClassification

import kvpass
from compiled_models import compiled_anew, padded, two_layers
from pairwise import quick
from tiny_models import compiled_once

IDS, MASK = padded(12, 7)
REAL = MASK.bool()
FULL = {"policy": "full", "budget": None, "window": None}


@torch.no_grad()
def hidden(model, ids=IDS, mask=MASK):
    return model.model(ids, mask).last_hidden_state


@pytest.fixture
def model():
    return compiled_once("llama", layers=1, backend="eager", **FULL)[0]


@pytest.fixture
def fast():
    return compiled_once("llama", layers=1, backend="eager", **FULL)[1]


@pytest.mark.parametrize(
    "family", quick(["llama", "gemma3", "deepseek_v3", "llama4", "lfm2", "qwen3_next"], ["gemma3"])
)
def test_body_called_alone_reads_its_mask(family):
    model, fast = two_layers(family, **FULL)
    before = fast(IDS[:1]).logits
    assert torch.equal(hidden(fast)[REAL], hidden(model)[REAL])
    compiled = len(fast.report().compiled)
    assert torch.equal(fast(IDS[:1]).logits, before)  # the body's run changed nothing
    assert len(fast.report().compiled) == compiled


def test_body_takes_a_mask_of_its_own_and_reads_its_mask_where_the_user_compiles_it(model, fast):
    mask = torch.full((1, 1, 9, 9), float("-inf")).triu(1)
    mask[..., 4:, 3] = float("-inf")
    ids = torch.arange(1, 10)[None]
    assert torch.equal(hidden(fast, ids, mask), hidden(model, ids, mask))
    body = torch.compile(fast.model, backend="eager")
    with torch.no_grad():
        found = body(IDS, MASK).last_hidden_state
    torch.testing.assert_close(found[REAL], hidden(model)[REAL])


def test_configuration_names_the_users_attention_and_makes_plain_models(model, fast):
    fast(IDS[:1])
    assert fast.config._attn_implementation == model.config._attn_implementation == "sdpa"
    assert type(pickle.loads(pickle.dumps(fast.config))) is type(model.config)
    assert fast.config.to_dict() == model.config.to_dict()
    config = copy.deepcopy(fast.config)
    config.num_labels, config.pad_token_id = 2, 0
    judge = AutoModelForSequenceClassification.from_config(config).eval()
    judge.model.load_state_dict(model.model.state_dict())
    assert torch.equal(hidden(judge)[REAL], hidden(model)[REAL])


def test_body_is_plain_while_another_thread_captures(model):
    fast, expected = compiled_anew(model, **FULL), hidden(model)
    with ThreadPoolExecutor(2) as threads:
        captured = threads.submit(lambda: fast(IDS).logits)
        while not captured.done():
            assert torch.equal(hidden(fast)[REAL], expected[REAL])
        captured.result()


@pytest.mark.parametrize("policy", quick(["lava", "tova"], ["lava"]))
def test_default_device_of_torch_is_not_the_models(policy, model, tmp_path):
    ids, mask = padded(33, 40)
    expected = compiled_once("llama", layers=1, backend="eager", policy=policy, budget=36)[1](ids, mask).logits
    torch.set_default_device("meta")
    try:
        fast = compiled_anew(model, policy=policy, budget=36, window=None)
        out = fast(ids, mask)
        cache = out.past_key_values
        for tokens in (1, 3):
            fast(ids[:, :tokens], past_key_values=cache)
        cache.batch_repeat_interleave(2)
        cache.save(tmp_path / "kv")
        assert kvpass.load_cache(tmp_path / "kv", fast).positions.equal(cache.positions)
        assert str(fast.report())
    finally:
        torch.set_default_device(None)
    assert torch.equal(out.logits, expected)
