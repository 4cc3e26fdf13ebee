"""Decoders whose tokens attend their own chunk only in some layers, against transformers without compression."""

import pytest
import torch

import kvpass
from compiled_models import UNLIMITED, greedy, padded, prompts_of, reloaded, two_layers
from masked_oracle import assert_decodes_like_the_masked_model
from numeric_checks import assert_close
from pairwise import quick
from tiny_models import in_blocks, random_ids, tiny_model

CHUNK, NEW = 24, 40  # the answer crosses the end of a chunk, or two


@pytest.mark.parametrize("backend", quick(["eager", "inductor"], ["eager"]))
def test_contracts_1_and_4_over_the_ends_of_chunks(backend):
    (model, fast), lengths = two_layers("llama4", budget=UNLIMITED, backend=backend), (CHUNK, 5, 2 * CHUNK + 1)
    ids, mask = padded(*lengths)
    with in_blocks(fast, 13):
        in_parts = greedy(fast, ids, NEW, attention_mask=mask)[:, -NEW:]
    together = greedy(fast, ids, NEW, attention_mask=mask)[:, -NEW:]
    assert torch.equal(in_parts, together)
    for row, prompt in enumerate(prompts_of(*lengths)):
        assert torch.equal(together[row], greedy(model, prompt[None], NEW)[0, -NEW:])


def test_turns_and_a_loaded_cache_continue_in_the_chunk(tmp_path):
    model, fast = two_layers("llama4", budget=UNLIMITED)
    text = random_ids(2, 61)
    cache = fast(text).past_key_values
    for tokens in (7, 30, 1, 55):  # within a chunk, over one end, one token, over two ends
        new, loaded = random_ids(2, tokens, seed=tokens), reloaded(cache, fast, tmp_path)
        logits = fast(new, past_key_values=loaded).logits
        assert torch.equal(logits, fast(new, past_key_values=cache).logits)
        text = torch.cat([text, new], 1)
        assert_close(f"{tokens} tokens", logits, model(text).logits[:, -tokens:], atol=1e-4)


@pytest.mark.exhaustive
@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_contract_6_layers_without_chunks_decode_like_the_masked_model(backend):
    model, fast = two_layers("llama4", budget=14, backend=backend)
    assert_decodes_like_the_masked_model(model, fast, [61, 61], [*[1] * 80, 10])


def test_a_scale_of_queries_by_column_is_refused():
    fast = kvpass.compile(tiny_model("llama4", layers=2), policy="full", backend="eager")
    other = tiny_model("llama4", layers=2).model.layers[1].self_attn
    other.config = fast.model.config
    fast.model.layers[1].self_attn = other  # exchanged after kvpass.compile
    with pytest.raises(kvpass.UnsupportedAttentionError, match="scales queries by their columns"):
        fast(random_ids(1, 20))
