"""Assisted generation: drafts are checked against the compressed cache, and taken back where they are not accepted."""

import functools
from typing import Any

import pytest
import torch
import torch._dynamo
from transformers import GenerationConfig

import compiled_models
import kvpass
from compiled_models import two_layers
from kvpass.transformers_compat import CACHE
from tiny_models import random_ids, tiny_model
from versions import STATES

NEW, DRAFTS = 24, 8
OPTIONS = {"budget": 24, "window": 8}
REPEATING = random_ids(1, 13, seed=5).repeat(1, 5)


greedy = functools.partial(compiled_models.greedy, new=NEW, return_dict_in_generate=True)


def drafts(model: Any, kind: str) -> dict[str, Any]:
    """By a good model, by a bad one, or by looking for repetitions in the text."""
    if kind == "lookup":
        return {"prompt_lookup_num_tokens": DRAFTS}
    return {"assistant_model": model if kind == "itself" else tiny_model("llama", layers=1, seed=7)}


def check_drafts(model, fast, kind, calls):
    expected = greedy(fast, REPEATING)
    calls.clear()
    found = greedy(fast, REPEATING, **drafts(model, kind))
    assert torch.equal(found.sequences, expected.sequences)
    assert calls[0] == REPEATING.shape[1], "the prompt was compressed with drafts in it"
    assert len(calls) < NEW or kind == "another", "no draft was accepted"
    assert found[CACHE].columns == expected[CACHE].columns
    assert torch.equal(found[CACHE].positions, expected[CACHE].positions)
    if kind == "lookup":
        assert max(calls[1:]) == 1 + DRAFTS
        assert {record.phase for record in fast.report().compiled} == {"prefill", "extend", "decode"}


@pytest.mark.parametrize(
    ("family", "kind", "policy"),
    [
        ("llama", "itself", "lava"),
        ("llama", "another", "lava"),
        ("llama", "lookup", "snapkv"),
        pytest.param("gpt2", "lookup", "lava", marks=pytest.mark.exhaustive),
    ],
)
def test_tokens_and_cache_are_those_without_drafts(family, kind, policy, calls):
    check_drafts(*two_layers(family, policy=policy, budget=24), kind, calls)


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_one_compiled_graph_checks_any_number_of_drafts(family, calls):
    model = tiny_model(family, layers=2)
    fast = kvpass.compile(model, policy="lava", **OPTIONS)  # what it compiles is counted
    check_drafts(model, fast, "lookup", calls)
    assert [record.phase for record in fast.report().compiled].count("extend") == 1
    with torch._dynamo.config.patch(error_on_recompile=True):
        for drafts in range(1, DRAFTS + 1):
            greedy(fast, REPEATING, prompt_lookup_num_tokens=drafts)


def test_sampled_drafts_can_be_taken_back_and_the_cache_continued():
    model, fast = two_layers(budget=24)
    torch.manual_seed(0)
    found = greedy(fast, REPEATING, assistant_model=model, do_sample=True, temperature=2.0)
    cache, text = found[CACHE], found.sequences
    fresh = fast.compress(REPEATING, reusable=False)
    logits = fast(text[:, REPEATING.shape[1] :], past_key_values=fresh).logits[:, -1:]
    behind = text[:, cache.get_seq_length() :]
    torch.testing.assert_close(fast(behind, past_key_values=cache).logits[:, -1:], logits, atol=1e-4, rtol=0)


@pytest.mark.parametrize("asked", ["prompt_lookup_num_tokens", "assistant_model"])
@pytest.mark.parametrize(
    ("family", "options", "rows", "message"),
    [
        ("llama", {"policy": "h2o"}, 1, "is not supported with policy 'h2o': for every draft it evicts"),
        ("llama", {"recompress": "every_turn"}, 1, "is not supported with recompress='every_turn'"),
        ("gemma3", {}, 1, r"cannot be cropped, as drafts .* need it: layers with a sliding window"),
        pytest.param("lfm2", {}, 1, "is not supported with recurrent layers: they hold", marks=STATES),
        ("llama", {}, 2, "assisted generate is only supported for batch_size = 1"),
    ],
    ids=["evicts", "recompress", "sliding", "recurrent", "rows"],
)
def test_refused_with_the_reason(family, options, rows, message, asked, calls):
    """Where a compressed model drafts, too: as the assistant of the uncompressed one."""
    model, fast = two_layers(family, **{"budget": 24, **options})
    subject, drafts = (model, fast) if asked == "assistant_model" else (fast, 4)
    named = f"'{asked}' {message}" if "supported with" in message else message
    with pytest.raises(ValueError, match=named):
        greedy(subject, REPEATING.expand(rows, -1), **{asked: drafts})
    assert not calls or family == "gemma3", "the prompt was read first"


def test_what_the_model_is_configured_with_counts_beside_a_given_configuration(monkeypatch):
    _, fast = two_layers(policy="h2o", budget=24)
    given = GenerationConfig(max_new_tokens=4)
    monkeypatch.setattr(fast.generation_config, "prompt_lookup_num_tokens", 4)
    with pytest.raises(ValueError, match="'prompt_lookup_num_tokens' is not supported with policy 'h2o'"):
        fast.generate(REPEATING, given)
    assert greedy(fast, REPEATING, prompt_lookup_num_tokens=None).sequences.shape[1] == REPEATING.shape[1] + NEW


@pytest.mark.parametrize("question", [1, 6])
def test_drafts_continue_a_filled_cache(question, calls):
    _, fast = two_layers(budget=24)
    document, ids = fast.compress(REPEATING), REPEATING[:, :question]
    expected = greedy(fast, ids, past_key_values=document).sequences
    calls.clear()
    found = greedy(fast, ids, past_key_values=document, prompt_lookup_num_tokens=4)
    assert torch.equal(found.sequences, expected)
    assert calls[0] == question and len(calls) < NEW, "no draft was accepted"
