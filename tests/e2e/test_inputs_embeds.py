"""A prompt as embeddings: what eager transformers makes of it, and what the same prompt as ids keeps."""

import pytest
import torch

import kvpass
from compiled_models import greedy, padded, two_layers
from numeric_checks import assert_close
from pairwise import quick
from tiny_models import random_ids, tiny_model

IDS, MASK = padded(41, 30)


@pytest.mark.parametrize("family", quick(["llama", "qwen3", "gemma3", "gpt2", "qwen3_5", "lfm2"], ["llama"]))
def test_contract_1_tokens_are_those_of_eager_transformers(family):
    model, fast = two_layers(family, policy="full", budget=None, window=None)
    embeds = torch.randn(2, 41, model.config.get_text_config().hidden_size, generator=torch.Generator().manual_seed(1))
    given = {"inputs_embeds": embeds, "attention_mask": MASK}
    places = (MASK.cumsum(1) - 1).clamp(min=0)
    found, expected = (subject(**given, position_ids=places, logits_to_keep=1).logits for subject in (fast, model))
    assert_close("logits", found, expected, atol=1e-4)
    assert greedy(fast, **given).shape == (2, 6)
    for call in (given, {"ids": IDS, **given}, {"inputs_embeds": embeds[:1, -1:]}):
        assert torch.equal(greedy(fast, **call), greedy(model, **call))


@pytest.mark.parametrize("case", quick(["lava-eager", "h2o-eager", "lava-inductor"], ["lava-eager"]))
def test_what_is_kept_is_that_of_the_ids(case):
    policy, backend = case.split("-")
    model, fast = two_layers(policy=policy, budget=16, backend=backend)
    given = {"inputs_embeds": model.model.embed_tokens(IDS), "attention_mask": MASK}
    assert torch.equal(greedy(fast, **given), greedy(fast, IDS, attention_mask=MASK)[:, 41:])
    told, cache = fast.compress(IDS, MASK), fast.compress(**given)
    assert torch.equal(cache.lengths, told.lengths) and cache.ids is None
    assert torch.equal(*(greedy(fast, random_ids(2, 5, seed=3), past_key_values=one) for one in (told, cache)))


@pytest.mark.parametrize("rows", [1, 2], ids=["plain", "padded"])
def test_a_question_longer_than_the_prompt_is_read_whole(rows):
    """The cache does not know its ids, so the mask alone says that those of the question are new."""
    model, fast = two_layers(budget=10**6)
    ids, mask = IDS[:rows], MASK[:rows]
    longer = random_ids(rows, 60, seed=5)
    seen = torch.cat([mask, torch.ones_like(longer)], 1)
    cache = fast.compress(inputs_embeds=model.model.embed_tokens(ids), attention_mask=mask)
    expected = greedy(model, torch.cat([ids, longer], 1), attention_mask=seen)[:, 41:]
    assert torch.equal(greedy(fast, longer, attention_mask=seen, past_key_values=cache), expected)


def test_beams_and_prefill_chunks_read_embeddings():
    model, fast = two_layers(budget=16)
    for more in ({"num_beams": 3}, {"prefill_chunk_size": 8}):
        given = {"attention_mask": MASK, **more}
        found = greedy(fast, inputs_embeds=model.model.embed_tokens(IDS), **given)
        assert torch.equal(found, greedy(fast, IDS, **given)[:, 41:])


def test_prompt_tuning_of_peft_on_a_compiled_model():
    peft = pytest.importorskip("peft")
    model = tiny_model("llama", layers=1)
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=5)
    ids, results = random_ids(2, 30), []
    for subject in (model, kvpass.compile(model, policy="full", backend="eager")):
        torch.manual_seed(0)
        tuned = peft.get_peft_model(subject, config).eval()
        results.append(greedy(tuned, input_ids=ids, attention_mask=torch.ones_like(ids)))
    assert torch.equal(*results)


def test_contract_10_what_embeddings_cannot_be_used_for():
    model, fast = two_layers(policy="kvzip", budget=16, window=0)
    embeds = model.model.embed_tokens(random_ids(1, 40))
    for call in (fast, fast.generate, fast.compress):
        with pytest.raises(ValueError, match=r"inputs_embeds with policy 'kvzip' .* replays the ids of the prompt"):
            call(inputs_embeds=embeds)
    fast.set_policy("full")
    cache = fast.compress(inputs_embeds=embeds)
    for call in (fast, fast.generate):
        with pytest.raises(ValueError, match=r"inputs_embeds with a filled cache .* pass the new tokens as input_ids"):
            call(inputs_embeds=embeds, past_key_values=cache)
    told = r"repetition_penalty: only the ids of this call .* its prompt was inputs_embeds"
    with pytest.warns(UserWarning, match=told):
        greedy(fast, random_ids(1, 5), past_key_values=cache, repetition_penalty=1.5)
