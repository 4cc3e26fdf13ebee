"""Arguments of ``generate``: each works as in transformers, or is refused by its name."""

import inspect

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationMixin, PreTrainedTokenizerFast

import kvpass
from tiny_models import random_ids, tiny_model

WORK = {
    *("self", "inputs", "generation_config", "kwargs", "logits_processor", "stopping_criteria", "streamer"),
    *("prefix_allowed_tokens_fn", "synced_gpus", "assistant_model"),
    *("negative_prompt_ids", "negative_prompt_attention_mask"),
    *("use_model_defaults",),
}
REFUSED = {
    "custom_generate": "x/y",
    "assistant_tokenizer": object(),
    "token_healing": True,
    "assistant_early_exit": 2,
    "cache_implementation": "paged",
}


@pytest.fixture(scope="module")
def plain():
    return tiny_model("llama")


@pytest.fixture(scope="module")
def fast(plain):
    return kvpass.compile(plain, policy="snapkv", window=8, budget=10**6, backend="eager")


def test_every_named_argument_is_known():
    assert set(inspect.signature(GenerationMixin.generate).parameters) - WORK - REFUSED.keys() == set()


@pytest.mark.parametrize("name", REFUSED)
def test_argument_is_refused_by_its_name(fast, name):
    with pytest.raises(ValueError, match=name):
        fast.generate(random_ids(1, 20), max_new_tokens=2, **{name: REFUSED[name]})


@pytest.mark.parametrize("name", ["generate_batch", "init_continuous_batching"])
def test_continuous_batching_is_refused(fast, name):
    with pytest.raises(ValueError, match="continuous batching"):
        getattr(fast, name)([[1, 2, 3]])


def test_stop_strings_end_an_answer():
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core)
    plain = tiny_model("llama", vocab_size=len(alphabet))
    fast = kvpass.compile(plain, policy="full", backend="eager")
    prompt, call = tokenizer("the quick brown fox", return_tensors="pt").input_ids, {"max_new_tokens": 12}
    answer = plain.generate(prompt, **call, do_sample=False)[0, prompt.shape[1] :]
    stop = next(letter for letter in map(tokenizer.decode, answer[3:, None]) if letter.isascii())
    call |= {"tokenizer": tokenizer, "stop_strings": [stop], "do_sample": False}
    expected = plain.generate(prompt, **call)
    assert expected.shape[1] < prompt.shape[1] + 12
    assert torch.equal(fast.generate(prompt, **call), expected)


@pytest.mark.parametrize(("tokens", "columns"), [(3, 40), (3, 42), (3, 60), (43, 40), (43, 50)])
def test_mask_of_another_length_is_refused(fast, tokens, columns):
    cache = fast.compress(random_ids(1, 40))
    with pytest.raises(ValueError, match="attention_mask of shape"):
        fast.generate(random_ids(1, tokens), attention_mask=torch.ones(1, columns), past_key_values=cache)


def test_pad_token_inside_a_prompt_is_named(fast):
    ids = random_ids(2, 20)
    ids[1, 7] = fast.generation_config.pad_token_id
    with pytest.raises(ValueError, match=r"row 1 has the pad token \(0\)"):
        fast.generate(ids, max_new_tokens=2)
    assert fast.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=2).shape == (2, 22)


def test_report_after_guidance_is_of_the_prompt(fast):
    fast.generate(
        random_ids(1, 40), guidance_scale=1.5, negative_prompt_ids=random_ids(1, 12), max_new_tokens=2, do_sample=False
    )
    assert fast.report().prompt_lengths.tolist() == [40]


@pytest.mark.parametrize(
    "read",
    [lambda c: c[0], list, lambda c: c.layers[0].keys, lambda c: c.max_cache_len, lambda c: c.max_batch_size],
)
def test_cache_read_as_layers_says_what_to_read(fast, read):
    cache = fast(random_ids(1, 20)).past_key_values
    with pytest.raises(kvpass.CacheMismatchError, match=r"read cache\.positions"):
        read(cache)


def test_changed_dtype_is_named():
    fast = kvpass.compile(tiny_model("llama"), policy="full", backend="eager")
    cache = fast(random_ids(1, 20)).past_key_values
    fast.to(torch.bfloat16)
    with pytest.raises(kvpass.CacheMismatchError, match=r"of torch.float32 was handed to a model of torch.bfloat16"):
        fast(random_ids(1, 1), past_key_values=cache)
