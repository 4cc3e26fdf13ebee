"""The modules of a compiled model called alone compute what those of the user's model do, masks included."""

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from transformers import AutoModelForSequenceClassification

import kvpass
from pairwise import quick
from tiny_models import random_ids, tiny_model

LENGTHS = (12, 7)


@pytest.fixture(scope="module")
def padded():
    ids = torch.randint(1, 100, (2, max(LENGTHS)), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    for row, length in enumerate(LENGTHS):
        mask[row, : max(LENGTHS) - length] = 0
    return {"input_ids": ids, "attention_mask": mask}


def hidden(model, inputs):
    with torch.no_grad():
        return model.model(**inputs).last_hidden_state


@pytest.mark.parametrize(
    "family", quick(["llama", "gemma3", "deepseek_v3", "llama4", "lfm2", "qwen3_next"], ["gemma3", "lfm2"])
)
def test_body_called_alone_reads_its_mask(family, padded):
    model = tiny_model(family, layers=2)
    fast = kvpass.compile(model, policy="full", backend="eager")
    ids = padded["input_ids"][:1]
    before = fast(ids).logits
    expected, found = hidden(model, padded), hidden(fast, padded)
    real = padded["attention_mask"].bool()
    assert torch.equal(found[real], expected[real])
    compiled = len(fast.report().compiled)
    assert torch.equal(fast(ids).logits, before)  # the body's run changed nothing
    assert len(fast.report().compiled) == compiled


def test_body_takes_a_mask_of_its_own():
    model = tiny_model("llama", layers=1)
    fast = kvpass.compile(model, policy="full", backend="eager")
    mask = torch.full((1, 1, 9, 9), float("-inf")).triu(1)
    mask[..., 4:, 3] = float("-inf")
    inputs = {"input_ids": torch.arange(1, 10)[None], "attention_mask": mask}
    assert torch.equal(hidden(fast, inputs), hidden(model, inputs))


def test_configuration_names_the_users_attention_and_makes_plain_models(padded, tmp_path):
    model = tiny_model("llama", layers=1)
    fast = kvpass.compile(model, policy="full", backend="eager")
    fast(padded["input_ids"][:1])
    assert fast.config._attn_implementation == model.config._attn_implementation == "sdpa"
    assert type(pickle.loads(pickle.dumps(fast.config))) is type(model.config)
    assert fast.config.to_dict() == model.config.to_dict()
    config = copy.deepcopy(fast.config)
    config.num_labels, config.pad_token_id = 2, 0
    judge = AutoModelForSequenceClassification.from_config(config).eval()
    judge.model.load_state_dict(model.model.state_dict())
    real = padded["attention_mask"].bool()
    assert torch.equal(hidden(judge, padded)[real], hidden(model, padded)[real])


def test_body_is_plain_while_another_thread_captures(padded):
    model = tiny_model("llama", layers=1)
    expected = hidden(model, padded)
    real = padded["attention_mask"].bool()
    with ThreadPoolExecutor(2) as threads:
        fast = kvpass.compile(model, policy="full", backend="eager")
        captured = threads.submit(lambda: fast(padded["input_ids"]).logits)
        while not captured.done():
            assert torch.equal(hidden(fast, padded)[real], expected[real])
        captured.result()


def test_body_compiled_by_the_user_reads_its_mask(padded):
    model = tiny_model("llama", layers=1)
    fast = kvpass.compile(model, policy="full", backend="eager")
    fast(padded["input_ids"][:1])
    body = torch.compile(fast.model, backend="eager")
    with torch.no_grad():
        found = body(**padded).last_hidden_state
    real = padded["attention_mask"].bool()
    torch.testing.assert_close(found[real], hidden(model, padded)[real])


@pytest.mark.parametrize("policy", quick(["lava", "tova"], ["lava"]))
def test_default_device_of_torch_is_not_the_models(policy, tmp_path):
    model, ids = tiny_model("llama", layers=1), random_ids(2, 40)
    mask = torch.ones_like(ids)
    mask[0, :7] = 0
    expected = kvpass.compile(model, policy=policy, budget=36, backend="eager")(ids, mask).logits
    torch.set_default_device("meta")
    try:
        fast = kvpass.compile(model, policy=policy, budget=36, backend="eager")
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
