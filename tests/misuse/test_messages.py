"""A message for every mistake of a newcomer: it says what is wrong, why, and what to do."""

from __future__ import annotations

import pickle
import re

import pytest
import torch
from transformers import BertConfig, BertForMaskedLM, DynamicCache, GenerationConfig, MambaConfig, StaticCache
from transformers.models.mamba import MambaForCausalLM

import kvpass
from tiny_models import compiled_once, random_ids, tiny_model

IDS = random_ids(1, 40)
TOKEN = IDS[:, :1]
NAMES_OF_THE_CACHE = ("past_key_values", "cache")
RIGHT_PADDED = torch.ones(1, 40).tril(29)
TINY = {"vocab_size": 128, "hidden_size": 16, "num_hidden_layers": 1}


def compiled(budget=16):
    """A model and its compiled copy, both shared with other tests."""
    return compiled_once("llama", layers=2, budget=budget, window=8, backend="eager")


@pytest.fixture
def model():
    return compiled()[0]


@pytest.fixture
def fast():
    return compiled()[1]


def bert():
    return BertForMaskedLM(BertConfig(**TINY, num_attention_heads=2, intermediate_size=16)).eval()


def mamba():
    return MambaForCausalLM(MambaConfig(**TINY, state_size=4)).eval()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy": "snapkw"}, "policy='snapkw': did you mean 'snapkv'? Must be one of ada_pyramidkv, "),
        ({"budget": "1O24"}, "budget='1O24': cannot read as bytes; write a number and one of B, kB, "),
        ({"budget": "0.2"}, "for the fraction of each prompt that is kept pass a float, budget=0.2"),
        ({"budget": "64"}, "a text is bytes and needs a unit, as in '512MiB'; for entries pass an int, budget=64"),
        ({"budget": 1024.0}, "a float is the fraction of the prompt kept and must be in (0, 1]"),
        ({"budget": 8}, "budget=8: must be at least window + 1 = 9"),
        ({"kernelsize": 5}, "not an option of policy 'lava'; did you mean 'kernel_size'? its options are window, "),
        ({"policy": "cake"}, "give both as options, for instance tau1=1.6, tau2=0.4 (published: llama-3.1-8b at "),
    ],
    ids=lambda given: ",".join(map(str, given.values())) if isinstance(given, dict) else "",
)
def test_options(model, options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        kvpass.compile(model, **{"budget": 16, "window": 8, "backend": "eager", **options})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: "gpt2", "load it with transformers.AutoModelForCausalLM.from_pretrained('gpt2') and give what it"),
        (lambda: tiny_model("llama").train(), "the model is in training mode; call model.eval() first"),
        (bert, "BertForMaskedLM is no causal language model: it has no head that predicts the next token; if its"),
        (
            lambda: torch.nn.Linear(2, 2),
            "takes a transformers model; for any other decoder use torch.compile(module, ba",
        ),
        (
            mamba,
            "(node MambaForCausalLM): it has recurrent layers and no attention, so no KV cache that could be compr",
        ),
    ],
    ids=["name", "training", "encoder", "module", "no attention"],
)
def test_models(make, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        kvpass.compile(make(), budget=100)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"input_ids": "how are you?"}, 'must be a tensor of token ids, such as tokenizer(text, return_tensors="pt")'),
        ({"input_ids": IDS, "attention_mask": RIGHT_PADDED}, 'make the batch with tokenizer.padding_side = "left"'),
        (
            {"inputs_embeds": torch.zeros(1, 64)},
            "inputs_embeds of torch.float32 [1, 64]: must be floating numbers [B, T, D] with B, T >= 1",
        ),
        ({"input_ids": IDS, "past_key_values": "doc.kv"}, "of type str: must be a kvpass.CompressedCache, or None for"),
    ],
    ids=["text", "right-padding", "inputs_embeds", "file-as-cache"],
)
def test_calls_of_forward_generate_and_compress(fast, call, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        fast(**call)
    with pytest.raises(ValueError, match=re.escape(message)):
        fast.generate(**call, max_new_tokens=2)
    if set(call) <= {"input_ids", "attention_mask"}:
        with pytest.raises(ValueError, match=re.escape(message)):
            fast.compress(**call)


def test_the_cache_is_taken_by_both_of_its_names_but_not_by_two_at_once(fast):
    cache = fast.compress(IDS)
    assert torch.equal(fast(TOKEN, cache=cache).logits, fast(TOKEN, past_key_values=cache).logits)
    answers = [fast.generate(TOKEN, max_new_tokens=3, do_sample=False, **{name: cache}) for name in NAMES_OF_THE_CACHE]
    assert torch.equal(*answers)
    for call in (fast, fast.generate):
        with pytest.raises(ValueError, match="past_key_values and cache are two names of one argument"):
            call(TOKEN, **dict.fromkeys(NAMES_OF_THE_CACHE, cache))


def test_a_text_is_no_prompt_of_kvpass_generate():
    with pytest.raises(ValueError, match="must be a tensor of token ids, such as tokenizer"):
        kvpass.generate(torch.nn.Identity(), "how are you?", max_new_tokens=2)


def test_a_cache_of_another_policy_or_budget_is_not_said_to_be_of_another_model(fast, model):
    cache = fast(IDS).past_key_values
    refusals = []

    def refused(subject):
        for call in (subject, lambda ids, **given: subject.generate(ids, max_new_tokens=2, **given)):
            with pytest.raises(kvpass.CacheMismatchError) as error:
                call(TOKEN, past_key_values=cache)
            refusals.append(str(error.value))
        assert refusals.pop() == refusals[-1]

    fast.set_budget(20)
    refused(fast)
    fast.set_policy("snapkv", 16, window=8)
    refused(fast)
    fast.set_policy("lava", 16, window=9, pool="avg")
    refused(fast)
    refused(kvpass.compile(model, policy="tova", budget=16, backend="eager"))
    refused(kvpass.compile(tiny_model("llama", num_hidden_layers=2, seed=1), budget=16, window=8, backend="eager"))
    budget, policy = "cache's budget (model.set_budget)", "cache's policy (model.set_policy)"
    assert refusals == [
        f"the cache has budget 16, the model 20: give the model the {budget}, or prefill the prompt again",
        f"the cache has policy 'lava', the model 'snapkv': give the model the {policy}, or prefill the prompt again",
        f"the cache has policy 'lava' with pool='max', window=8, the model 'lava' with pool='avg', window=9: give the "
        f"model the {policy}, or prefill the prompt again",
        f"the cache has policy 'lava', the model 'tova': give the model the {policy}, or prefill the prompt again",
        "the cache was filled by another model, with weights of its own: continue it with that model, or prefill the "
        "prompt again",
    ]
    fast.set_policy("lava", 16, window=8)
    assert fast(TOKEN, past_key_values=cache).past_key_values.columns == 41


def test_an_uncompiled_model_does_not_continue_our_cache(fast, model):
    cache = fast(IDS).past_key_values
    with pytest.raises(kvpass.CacheMismatchError, match=r"given to an uncompiled model: .* give the whole text and no"):
        model(TOKEN, past_key_values=cache)


def test_a_cache_of_transformers_is_refused_and_not_replaced(fast, model):
    """The empty one that generate makes by default is its own affair; one that the user holds would stay empty."""
    filled = DynamicCache(config=model.config)
    model(IDS, past_key_values=filled)
    empty = [DynamicCache(config=model.config), StaticCache(config=model.config, max_cache_len=64)]
    for call in (fast, lambda ids, **given: fast.generate(ids, max_new_tokens=2, **given)):
        with pytest.raises(
            kvpass.CacheMismatchError, match=r"DynamicCache with 40 tokens; .* the whole text and no cache"
        ):
            call(TOKEN, past_key_values=filled)
        for cache in empty:
            with pytest.raises(ValueError, match=rf"an empty {type(cache).__name__}, and would stay .* leave it out"):
                call(IDS, past_key_values=cache)
    for asked in (
        {"cache_implementation": "static"},
        {"cache_implementation": "quantized"},
        {"generation_config": GenerationConfig(cache_implementation="static")},
    ):
        with pytest.raises(ValueError, match=r"'cache_implementation' is not supported: .* leave it out"):
            fast.generate(IDS, max_new_tokens=2, **asked)


def test_a_compiled_model_is_not_pickled(fast, tmp_path):
    with pytest.raises(pickle.PicklingError, match=r"save the original model, and call kvpass.compile again after it"):
        torch.save(fast, tmp_path / "model.pt")


@pytest.mark.parametrize("budget", [10**30, f"{10**30}GB"])
def test_a_budget_beyond_every_prompt_keeps_everything(budget):
    _, fast = compiled(budget)
    assert int(fast(IDS).past_key_values.lengths.sum()) == 40 * 4


def test_a_module_runs_only_in_a_session(model):
    options = {"budget": 16, "window": 8, "compiler": "eager"}
    module = torch.compile(model, backend="kvpass", options=options, fullgraph=True, dynamic=True)
    with torch.no_grad(), pytest.raises(RuntimeError, match=re.escape("runs inside `with kvpass.session():`")):
        module(IDS, use_cache=False)
