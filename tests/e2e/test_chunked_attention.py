"""Decoders whose tokens attend their own chunk only in some layers, against transformers without compression."""

from __future__ import annotations

import pytest
import torch

import kvpass
from masked_oracle import assert_decodes_like_the_masked_model
from numeric_checks import assert_close
from tiny_models import compiled_once, left_pad, random_ids, tiny_model

CHUNK, NEW = 24, 40  # the answer crosses the end of a chunk, or two
UNLIMITED = 10**6
GREEDY = {"max_new_tokens": NEW, "do_sample": False}


BACKENDS = ["eager", pytest.param("inductor", marks=pytest.mark.exhaustive)]


def pair(budget, backend="eager"):
    return compiled_once("llama4", layers=2, backend=backend, policy="lava", budget=budget, window=8)


@pytest.mark.parametrize("backend", BACKENDS)
def test_contracts_1_and_4_over_the_ends_of_chunks(backend):
    model, fast = pair(UNLIMITED, backend)
    prompts = [random_ids(1, tokens, seed=tokens)[0] for tokens in (CHUNK, 5, 2 * CHUNK + 1)]
    ids, mask = left_pad(prompts)
    together = fast.generate(ids, attention_mask=mask, **GREEDY)[:, -NEW:]
    for row, prompt in enumerate(prompts):
        assert torch.equal(together[row], model.generate(prompt[None], **GREEDY)[0, -NEW:])


def test_turns_and_a_loaded_cache_continue_in_the_chunk(tmp_path):
    model, fast = pair(UNLIMITED)
    ids, given = random_ids(1, 61), []
    cache = fast.compress(ids, reusable=False)
    for tokens in (7, 30, 1, 55):  # within a chunk, over one end, one token, over two ends
        cache.save(tmp_path / "cache.kv")
        new = random_ids(1, tokens, seed=tokens)
        logits = fast(new, past_key_values=kvpass.load_cache(tmp_path / "cache.kv", fast)).logits
        assert torch.equal(logits, fast(new, past_key_values=cache).logits)
        given.append(new)
        with torch.no_grad():
            expected = model(torch.cat([ids, *given], 1)).logits[:, -tokens:]
        assert_close(f"{tokens} tokens", logits, expected, atol=1e-4)


@pytest.mark.exhaustive
@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_contract_6_layers_without_chunks_decode_like_the_masked_model(backend):
    assert_decodes_like_the_masked_model(*pair(14, backend), [61, 61], [*[1] * 80, 10])


def test_a_scale_of_queries_by_column_is_refused():
    fast = kvpass.compile(tiny_model("llama4", layers=2), policy="full", backend="eager")
    other = tiny_model("llama4", layers=2).model.layers[1].self_attn
    other.config = fast.model.config
    fast.model.layers[1].self_attn = other  # exchanged after kvpass.compile
    with pytest.raises(kvpass.UnsupportedAttentionError, match="scales queries by their columns"):
        fast(random_ids(1, 20))
