"""What is refused, and in what words: models, options, calls, arguments of generate; nothing is lost by it."""

import copy
import inspect
import pickle
import re
from functools import partial
from pathlib import Path

import pytest
import torch
import transformers
from torch import nn
from transformers import BatchEncoding, DynamicCache, GenerationConfig, MambaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.mamba import MambaForCausalLM

import kvpass
from compiled_models import compiled_apart, greedy, padded, two_layers
from numeric_checks import assert_close
from pairwise import quick
from small_decoders import SmallDecoder
from tiny_models import random_ids, raw, tiny_model
from versions import before

IDS = random_ids(1, 40)
TOKEN = IDS[:, :1]
NAMES_OF_THE_CACHE = ("past_key_values", "cache")
RIGHT_PADDED = torch.ones(1, 40).tril(29)
TINY = {"vocab_size": 128, "hidden_size": 16, "num_hidden_layers": 1}


@pytest.fixture
def tight():
    return two_layers(budget=16, layers=1)[1]


@pytest.fixture
def model():
    return two_layers(budget=16, layers=1)[0]


@pytest.mark.skipif(not before("5.22"), reason="make test-versions has older ones")
@pytest.mark.parametrize(
    "family", ["lfm2", "lfm2_moe", "bamba", "falcon_h1", "zamba2", "qwen3_next", "qwen3_5", "jamba"]
)
def test_hybrids_name_the_version_that_they_need(family):
    with pytest.raises(kvpass.UnsupportedAttentionError, match=r"needs transformers >= 5\.22; here is 5\.\d+\.\d+$"):
        kvpass.compile(tiny_model(family), policy="full")


def test_a_rotary_embedding_that_takes_no_frequencies_by_row_is_refused(monkeypatch):
    def forward(self, x, position_ids):  # as before transformers 5.23
        angles = (self.inv_freq[None, :, None].expand(len(position_ids), -1, 1) @ position_ids[:, None].float()).mT
        return torch.cat([angles, angles], -1).cos(), torch.cat([angles, angles], -1).sin()

    monkeypatch.setattr(LlamaRotaryEmbedding, "forward", forward)
    dynamic = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    with pytest.raises(ValueError, match=r"LlamaRotaryEmbedding does not take frequencies .* transformers >= 5\.23"):
        kvpass.compile(tiny_model("llama", layers=1, rope_parameters=dynamic), budget=100)


def test_contract_7_a_decoder_that_is_no_single_graph_and_a_layer_without_attention_are_refused():
    branching = tiny_model("llama", num_hidden_layers=1)
    branching.model.norm.forward = lambda x: x if x.sum() > 0 else -x
    place = r"one graph: test_refusals.py, line \d+, `branching.model.norm.forward = .*`: Data-dependent branching"
    with pytest.raises(ValueError, match=place) as refused:
        kvpass.compile(branching, budget=100, backend="eager")(IDS)
    assert "\n" not in str(refused.value) and "Explanation" in str(refused.value.__cause__)
    model = tiny_model("llama", num_hidden_layers=2)
    model.model.layers[1].self_attn.forward = lambda hidden_states, **kwargs: (hidden_states, None)
    with pytest.raises(kvpass.UnsupportedAttentionError, match=r"found 1 attention ops in 1 modules .* of 2 layers"):
        kvpass.compile(model, budget=100, backend="eager")(IDS)


@pytest.mark.parametrize("what", quick(["dict", "list", "counter", "counter in a dict"], ["counter"]))
def test_contract_7_a_hook_that_keeps_or_counts_is_refused(what):
    """Each call would be captured anew, as it finds other values."""
    model, kept, last, calls = tiny_model("llama", layers=1), {}, [], {"n": 0}

    def hook(module, given, output):
        if what == "dict":
            kept[module] = output
        elif what == "list":
            last.append(output)
        elif what == "counter":
            module.calls = getattr(module, "calls", 0) + 1
        else:
            calls["n"] += 1

    model.model.layers[0].mlp.register_forward_hook(hook)
    with pytest.raises(
        kvpass.UnsupportedAttentionError, match=r"layers\.0\.mlp.*: it counts, or keeps results in a dict"
    ):
        kvpass.compile(model, budget=100, backend="eager")(IDS)


def bert(kind=transformers.BertForMaskedLM):
    return kind(transformers.BertConfig(**TINY, num_attention_heads=2, intermediate_size=16)).eval()


def adapted():
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(tiny_model("llama"), peft.LoraConfig(target_modules=["q_proj"]))


def t5():
    sizes = {"vocab_size": 50, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    config = transformers.T5Config(**sizes, decoder_start_token_id=0)
    return transformers.T5ForConditionalGeneration(config).eval()


def trocr():
    sizes = {"decoder_layers": 1, "decoder_attention_heads": 2, "decoder_ffn_dim": 16}
    return transformers.TrOCRForCausalLM(transformers.TrOCRConfig(vocab_size=50, d_model=16, **sizes)).eval()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: "gpt2", "load it with transformers.AutoModelForCausalLM.from_pretrained('gpt2') and give what it"),
        (lambda: Path("folder/gpt2"), "is a name: load it with transformers.AutoModelForCausalLM.from_pretrained("),
        (lambda: nn.Linear(2, 2), "takes a transformers model; for any other decoder use torch.compile(module, ba"),
        (lambda: torch.compile(tiny_model("llama")), "is around a LlamaForCausalLM: compile model._orig_mod"),
        (lambda: nn.Sequential(tiny_model("llama")), "Sequential is around a LlamaForCausalLM: compile model.0"),
        (adapted, "is around a LlamaForCausalLM: compile model.merge_and_unload() or model.get_base_model(), which"),
        (lambda: tiny_model("llama").train(), "the model is in training mode; call model.eval() first"),
        (lambda: two_layers(budget=16, layers=1)[1], "already compiled"),
        (lambda: tiny_model("gpt2", output_hidden_states=True), "config.output_hidden_states=True"),
        (t5, "encoder-decoder"),
        (bert, "BertForMaskedLM is no causal language model: it has no head that predicts the next token; if its"),
        (lambda: tiny_model("llama").model, "LlamaModel is no causal language model: "),
        (trocr, "TrOCRForCausalLM is not supported: its forward has no argument logits_to_keep"),
        pytest.param(
            lambda: MambaForCausalLM(MambaConfig(**TINY, state_size=4)).eval(),
            "(node MambaForCausalLM): it has recurrent layers and no attention, so no KV cache that could be comp",
            marks=pytest.mark.skipif(not hasattr(MambaConfig(), "layer_types"), reason="older: refused when called"),
        ),
    ],
    ids=lambda given: given[:40] if isinstance(given, str) else "",
)
def test_contract_10_models_that_cannot_be_compiled_are_refused(make, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        kvpass.compile(make(), budget=100)


def test_contract_10_models_that_cannot_be_called_are_refused():
    with pytest.raises(ValueError, match="training mode"):
        kvpass.compile(tiny_model("llama", num_hidden_layers=1), budget=100).train()(IDS)
    with pytest.raises(kvpass.UnsupportedAttentionError, match=r"is_decoder=False, .* needs is_decoder=True"):
        kvpass.compile(bert(transformers.BertLMHeadModel), budget=100, backend="eager")(IDS)


def test_contract_10_bad_calls_leave_the_cache_as_it_was(model, tight):
    ids, embeds = random_ids(2, 40), torch.zeros(2, 40, 64)
    cache = tight(ids).past_key_values
    token = random_ids(2, 1, seed=3)
    expected = tight(token, past_key_values=tight(ids).past_key_values).logits
    foreign = DynamicCache(config=model.config)
    model(ids, past_key_values=foreign)
    bad = [
        ({"input_ids": token[:1], "past_key_values": cache}, "1 rows"),
        ({"input_ids": token, "past_key_values": cache, "attention_mask": torch.ones(2, 3)}, r"\[2, 41\]"),
        ({"input_ids": ids, "attention_mask": torch.ones(2, 41)}, r"\[2, 40\]"),
        ({"input_ids": ids, "attention_mask": torch.zeros(2, 40)}, "no real token"),
        ({"input_ids": ids, "past_key_values": foreign}, "DynamicCache"),
        ({"input_ids": ids, "past_key_values": transformers.EncoderDecoderCache(foreign, DynamicCache())}, "Cache"),
        ({"input_ids": None}, "input_ids=None"),
        ({"input_ids": torch.empty(1, 0, dtype=torch.int64)}, r"\[1, 0\]: must be \[B, T\] with B, T >= 1$"),
        ({"input_ids": ids.bool()}, r"torch.bool: .* use input_ids.long\(\)"),
        ({"input_ids": ids.to("meta")}, r"on meta, but the model is on cpu: use input_ids.to\(model.device\)"),
        ({"input_ids": token.to("meta"), "past_key_values": cache}, "on meta, but the model is on cpu"),
        ({"inputs_embeds": ids}, r"inputs_embeds of torch.int64 \[2, 40\]: must be floating numbers \[B, T, D\]"),
        ({"inputs_embeds": [1.0]}, "inputs_embeds of list: must be floating numbers"),
        ({"inputs_embeds": embeds.to("meta")}, "inputs_embeds on meta, but the model is on cpu"),
        ({"input_ids": ids, "inputs_embeds": embeds}, "input_ids and inputs_embeds are two forms of one prompt"),
        ({"inputs_embeds": embeds[..., :5]}, "the decoder fails on an input of 40 tokens"),
        ({"input_ids": ids, "labels": ids}, "'labels' is not supported: .* compute it from the logits"),
        ({"input_ids": ids, "speed": 3}, "'speed' is not supported: a kvpass model takes input_ids"),
        ({"input_ids": ids, "logits_to_keep": -1}, "logits_to_keep=-1"),
        ({"input_ids": ids, "position_ids": torch.zeros(2, 3, dtype=torch.int64)}, "position_ids"),
        ({"input_ids": ids, "position_ids": torch.arange(320).view(4, 2, 40)}, r"\[4, 2, 40\]: must .*; .*M-RoPE"),
    ]
    for call, message in bad:
        with pytest.raises(ValueError, match=message):
            tight(**call)
        assert cache.get_seq_length() == 40
    assert_close("logits", tight(token, past_key_values=cache).logits, expected, atol=0)


def test_an_uncompiled_model_refuses_the_cache_of_a_compiled_one(model, tight):
    cache = tight(IDS).past_key_values
    calls = [(model, IDS[:, :3], {}), (model, TOKEN, {}), (model, TOKEN, {"attention_mask": torch.zeros(1, 1, 1, 41)})]
    calls.append((model.generate, torch.cat([IDS, IDS], 1), {"max_new_tokens": 2}))
    if not hasattr(model, "_cache_dependant_input_preparation"):  # there, transformers fails at fewer ids by itself
        calls.append((model.generate, IDS[:, :3], {"max_new_tokens": 2}))
    for call, ids, options in calls:
        with pytest.raises(kvpass.CacheMismatchError, match=r"uncompiled model: .* give the whole text and no"):
            call(ids, past_key_values=cache, **options)
    assert cache.get_seq_length() == 40
    assert tight(TOKEN, past_key_values=cache).logits.isfinite().all()


def test_a_compiled_model_and_its_cache_are_copied_but_not_pickled_and_a_copy_has_weights_of_its_own(model, tmp_path):
    tight = compiled_apart(1, model, budget=16)
    ids, token = random_ids(2, 40), random_ids(2, 1, seed=3)
    cache = tight(ids).past_key_values
    refusals = {
        "LlamaForCausalLM cannot be pickled, .* save the original model, and call kvpass.compile again after it": tight,
        "a CompressedCache cannot be pickled: use cache.save": cache,
    }
    for message, value in refusals.items():
        for pickled in (value, {"held": value}):
            for write in (lambda x: torch.save(x, tmp_path / "pickled.pt"), pickle.dumps):
                with pytest.raises(pickle.PicklingError, match=message):
                    write(pickled)
    torch.save(tight.state_dict(), tmp_path / "weights.pt")
    expected = tight(token, past_key_values=copy.deepcopy(cache)).logits
    assert cache.get_seq_length() == 40
    assert torch.equal(tight(token, past_key_values=copy.copy(cache).clone()).logits, expected)
    for twin in (copy.copy(tight), copy.deepcopy(tight)):
        assert type(twin) is type(tight)
        assert torch.equal(twin(token, past_key_values=twin(ids).past_key_values).logits, expected)
    cache = twin(ids).past_key_values
    with torch.no_grad():
        twin.lm_head.weight.mul_(2)
    assert torch.equal(twin(token, past_key_values=twin(ids).past_key_values).logits, 2 * expected)
    assert torch.equal(tight(token, past_key_values=tight(ids).past_key_values).logits, expected)
    with pytest.raises(kvpass.CacheMismatchError, match="another model"):
        tight(token, past_key_values=cache)


# -- calls of forward, generate and compress -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"input_ids": "how are you?"}, 'must be a tensor of token ids, such as tokenizer(text, return_tensors="pt")'),
        ({"input_ids": IDS, "attention_mask": RIGHT_PADDED}, 'make the batch with tokenizer.padding_side = "left"'),
        ({"inputs_embeds": torch.zeros(1, 64)}, "of torch.float32 [1, 64]: must be floating numbers [B, T, D] with B"),
        ({"input_ids": IDS, "past_key_values": "doc.kv"}, "of type str: must be a kvpass.CompressedCache, or None for"),
        ({"input_ids": BatchEncoding({"input_ids": IDS})}, "of type BatchEncoding: "),
        ({"input_ids": IDS[0]}, "of shape [40]: must be [B, T] with B, T >= 1, use input_ids[None]"),
        ({"input_ids": IDS, "token_type_ids": IDS}, "return_token_type_ids=False"),
        ({"input_ids": IDS, "output_attentions": True}, "use the uncompiled model"),
    ],
    ids=lambda given: next(reversed(given)) if isinstance(given, dict) else "",
)
def test_calls_of_forward_generate_and_compress(tight, call, message):
    of_compress = [tight.compress] if set(call) <= {"input_ids", "attention_mask"} else []
    for method in (tight, partial(tight.generate, max_new_tokens=2), *of_compress):
        with pytest.raises(ValueError, match=re.escape(message)):
            method(**call)


def test_the_cache_is_taken_by_both_of_its_names_but_not_by_two_at_once(tight):
    cache = tight.compress(IDS)
    assert torch.equal(tight(TOKEN, cache=cache).logits, tight(TOKEN, past_key_values=cache).logits)
    assert torch.equal(*(greedy(tight, TOKEN, 3, **{name: cache}) for name in NAMES_OF_THE_CACHE))
    for call in (tight, tight.generate):
        with pytest.raises(ValueError, match="past_key_values and cache are two names of one argument"):
            call(TOKEN, **dict.fromkeys(NAMES_OF_THE_CACHE, cache))


def test_a_cache_of_another_policy_or_budget_is_not_said_to_be_of_another_model(tight, model):
    cache = tight(IDS).past_key_values
    refusals = []

    def refused(subject):
        for call in (subject, partial(subject.generate, max_new_tokens=2)):
            with pytest.raises(kvpass.CacheMismatchError) as error:
                call(TOKEN, past_key_values=cache)
            refusals.append(str(error.value))
        assert refusals.pop() == refusals[-1]

    tight.set_budget(20)
    refused(tight)
    tight.set_policy("lava", 16, window=9, pool="avg")
    refused(tight)
    refused(kvpass.compile(model, policy="tova", budget=16, backend="eager"))
    refused(kvpass.compile(tiny_model("llama", layers=1, seed=1), budget=16, window=8, backend="eager"))
    budget, policy = "cache's budget (model.set_budget)", "cache's policy (model.set_policy)"
    assert refusals == [
        f"the cache has budget 16, the model 20: give the model the {budget}, or prefill the prompt again",
        'the cache has policy lava {"window": 8}, the model lava {"pool": "avg", "window": 9}: give the '
        f"model the {policy}, or prefill the prompt again",
        f'the cache has policy lava {{"window": 8}}, the model tova: give the model the {policy}, or prefill the '
        "prompt again",
        "the cache was filled by another model, with weights of its own: continue it with that model, or prefill the "
        "prompt again",
    ]
    tight.set_policy("lava", 16, window=8)
    assert tight(TOKEN, past_key_values=cache).past_key_values.columns == 41


def test_a_cache_of_transformers_is_refused_and_not_replaced(tight, model):
    """The empty one that generate makes by default is its own affair; one that the user holds would stay empty."""
    filled = DynamicCache(config=model.config)
    model(IDS, past_key_values=filled)
    empty = [DynamicCache(config=model.config), transformers.StaticCache(config=model.config, max_cache_len=64)]
    for call in (tight, partial(tight.generate, max_new_tokens=2)):
        said = r"DynamicCache with 40 tokens; .* the whole text and no cache"
        with pytest.raises(kvpass.CacheMismatchError, match=said):
            call(TOKEN, past_key_values=filled)
        for cache in empty:
            with pytest.raises(ValueError, match=rf"an empty {type(cache).__name__}, and would stay .* leave it out"):
                call(IDS, past_key_values=cache)
    static = GenerationConfig(cache_implementation="static")
    for options in (*({"cache_implementation": x} for x in ("static", "quantized")), {"generation_config": static}):
        with pytest.raises(ValueError, match=r"'cache_implementation' is not supported: .* leave it out"):
            tight.generate(IDS, max_new_tokens=2, **options)


# -- inputs that compiled code would take for others ------------------------------------------------------------------


@pytest.mark.parametrize("use_cache", [True, False])
def test_positions_that_fall_back_or_jump_are_refused(tight, use_cache):
    ids = random_ids(2, 40)
    counted = torch.arange(40)
    packed = torch.cat([torch.arange(25), torch.arange(15)])
    gap = torch.where(counted < 30, counted, counted + 5)
    for positions, message in ((packed, "row 1 goes from 24 to 0"), (gap, "row 1 goes from 29 to 35")):
        rows = torch.stack([counted, positions])
        with pytest.raises(ValueError, match=f"position_ids: {message}.*packed sequences"):
            tight(ids, position_ids=rows, use_cache=use_cache)
    with pytest.raises(ValueError, match="row 0 goes from 24 to 0"):
        tight(ids, position_ids=packed[None], use_cache=use_cache)


def test_ascending_positions_are_taken_from_any_start_and_padding_may_have_any():
    model, fast = two_layers(budget=100, layers=1)
    ids = random_ids(1, 40)
    later = torch.arange(7, 47)[None]
    assert_close("at 7", fast(ids, position_ids=later).logits, model(ids, position_ids=later).logits, atol=1e-4)
    ids, mask = padded(40, 23)
    positions = (mask.cumsum(1) - 1).masked_fill(mask == 0, 1)
    given = fast(ids, attention_mask=mask, position_ids=positions).logits
    assert torch.equal(given[mask.bool()], fast(ids, attention_mask=mask).logits[mask.bool()])


@pytest.mark.parametrize("tokens", [1, 3])
def test_a_mask_that_hides_columns_of_the_prompt_is_refused(tight, tokens):
    ids, mask = padded(40, 23)
    cache = tight(ids, attention_mask=mask).past_key_values
    new = random_ids(2, tokens, seed=1)
    right = torch.cat([mask, torch.ones_like(new)], 1)
    expected = tight(new, past_key_values=cache.clone(), attention_mask=right).logits
    for row, columns, message in ((0, slice(5, 20), "row 0 hides"), (1, slice(30, 31), "row 1 hides")):
        hiding = right.clone()
        hiding[row, columns] = 0
        with pytest.raises(kvpass.CacheMismatchError, match=message):
            tight(new, past_key_values=cache, attention_mask=hiding)
    with pytest.raises(kvpass.CacheMismatchError, match="row 1 hides other columns"):
        tight(new, past_key_values=cache, attention_mask=torch.ones_like(right))
    empty = right.clone()
    empty[0, 40:] = 0
    with pytest.raises(ValueError, match="row 0 has no real new token"):
        tight(new, past_key_values=cache, attention_mask=empty)
    assert torch.equal(tight(new, past_key_values=cache, attention_mask=right).logits, expected)


def test_ids_beyond_the_embedding_are_refused_and_the_cache_is_as_it_was(tight):
    cache = tight(IDS).past_key_values
    expected = tight(TOKEN, past_key_values=cache.clone()).logits
    for wrong in (128, -1, 10**12):
        for tokens, options in ((1, {"past_key_values": cache}), (4, {"past_key_values": cache}), (40, {})):
            new = IDS[:, :tokens].index_fill(1, torch.tensor([tokens - 1]), wrong)
            with pytest.raises(ValueError, match=f"input_ids has the value {wrong}, .*embed_tokens.* 128 rows"):
                tight(new, **options)
    assert torch.equal(tight(TOKEN, past_key_values=cache).logits, expected)


class Learned(SmallDecoder):
    """With a table of positions in which an index may be negative."""

    def embedded(self, ids, where):
        return self.embed(ids) + self.places.weight[where]

    def forward(self, ids, where):
        return super().forward(ids, where)


def test_a_raw_module_is_not_given_numbers_beyond_its_tables():
    decoder = raw(Learned(longest=64), {"policy": "lava", "budget": 24, "window": 8, "compiler": "eager"})
    with torch.no_grad(), kvpass.session() as session:
        decoder(IDS, torch.arange(40)[None])
        for wrong, where, message in (
            (128, 40, "ids has the value 128"),
            (3, 64, "where has the value 64, .* 64 rows"),
        ):
            with pytest.raises(ValueError, match=message):
                decoder(torch.tensor([[wrong]]), torch.tensor([[where]]))
        decoder(TOKEN, torch.tensor([[40]]))
        assert session.cache.columns == 41 and session.calls == 2
    with torch.no_grad(), kvpass.session() as session:
        decoder(IDS, torch.arange(40)[None] - 64)  # a negative index counts from the end of the table
        assert session.cache.columns == 40


# -- arguments of generate: each works as in transformers, or is refused by its name ----------------------------------


WORK = {
    *("self", "inputs", "generation_config", "kwargs", "logits_processor", "stopping_criteria", "streamer"),
    *("prefix_allowed_tokens_fn", "synced_gpus", "assistant_model"),
    *("negative_prompt_ids", "negative_prompt_attention_mask"),
    *("use_model_defaults",),
}
REFUSED = {
    "custom_generate": ("x/y", "'custom_generate' is not supported: .* from the Hub .* give the loop itself"),
    "assistant_tokenizer": (object(), "'assistant_tokenizer' is not supported"),
    "token_healing": (True, "'token_healing' is not supported"),
    "assistant_early_exit": (2, "'assistant_early_exit' is not supported: the compiled decoder runs all"),
    "cache_implementation": ("paged", "'cache_implementation' is not supported: .* not a paged one; leave it out"),
}


def test_every_named_argument_works_or_is_refused_by_its_name(tight):
    assert set(inspect.signature(transformers.GenerationMixin.generate).parameters) - WORK - REFUSED.keys() == set()
    for name, (value, message) in REFUSED.items():
        with pytest.raises(ValueError, match=message):
            tight.generate(random_ids(1, 20), max_new_tokens=2, **{name: value})


def test_what_comes_next_is_prepared_from_ids_and_every_method_of_continuous_batching_names_vllm(tight):
    """They would run transformers' own attention over a full cache."""
    assert torch.equal(tight.prepare_inputs_for_generation(input_ids=IDS)["input_ids"], IDS)
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'input_ids'"):
        tight.prepare_inputs_for_generation()
    for name, method in vars(transformers.ContinuousMixin).items():
        if callable(method) and not name.startswith("_"):
            with pytest.raises(AttributeError, match="serve the model with the vLLM plug-in"):
                getattr(tight, name)([[1, 2, 3]], max_new_tokens=2)


def test_a_mask_of_another_length_or_no_new_ids_beside_a_filled_cache_are_refused(tight):
    cache = tight.compress(IDS)
    for tokens, columns in ((3, 40), (3, 42), (3, 60), (43, 40), (43, 50)):
        with pytest.raises(ValueError, match="attention_mask of shape"):
            tight.generate(random_ids(1, tokens), attention_mask=torch.ones(1, columns), past_key_values=cache)
    with pytest.raises(ValueError, match="no input_ids beside a filled cache"):
        tight.generate(past_key_values=cache, max_new_tokens=2)


def test_ids_longer_than_the_cache_that_are_another_text_are_refused(tight):
    """They are taken for the whole text, of which only the end would be read."""
    (ids, mask), new = padded(20, 16), random_ids(2, 30, seed=1)
    cache = tight.compress(ids, mask)
    with pytest.raises(kvpass.CacheMismatchError, match=r"ids of 30 tokens.* \[2, 50\], over both"):
        tight.generate(new, past_key_values=cache, max_new_tokens=2)
    whole, seen = torch.cat([ids, new], 1), torch.cat([mask, torch.ones_like(new)], 1)
    expected = tight.generate(new, attention_mask=seen, past_key_values=cache, max_new_tokens=2)
    whole[1, :4] = 5  # padding may have any id
    found = tight.generate(whole, attention_mask=seen, past_key_values=cache, max_new_tokens=2)
    assert torch.equal(found[:, 20:], expected)


def test_a_pad_token_inside_a_prompt_or_a_text_that_continues_a_cache_is_named(tight):
    """Of what the cache holds its own mask says what is text."""
    ids, new = random_ids(2, 20), random_ids(2, 6, seed=1).repeat(1, 4)
    ids[1, 7] = pad = tight.generation_config.pad_token_id
    with pytest.raises(ValueError, match=r"row 1 has the pad token \(0\)"):
        tight.generate(ids, max_new_tokens=2)
    assert tight.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=2).shape == (2, 22)
    cache, text = tight.compress(ids, torch.ones_like(ids)), torch.cat([ids, new], 1)
    expected = greedy(tight, new, 3, past_key_values=cache, attention_mask=torch.ones_like(text))
    assert torch.equal(greedy(tight, text, 3, past_key_values=cache)[:, 20:], expected)
    text[1, 23] = pad
    with pytest.raises(ValueError, match=r"row 1 has the pad token \(0\) .*torch.cat\(\[cache.attention_mask"):
        tight.generate(text, past_key_values=cache, max_new_tokens=2)


def test_a_fraction_too_small_for_the_prompt_is_refused_and_the_report_after_guidance_is_of_the_prompt():
    _, fast = two_layers(budget=0.1, layers=1)
    with pytest.raises(ValueError, match=r"window \+ 1 = 9"):
        fast(IDS)
    assert fast(random_ids(1, 200)).past_key_values.lengths.sum() == 20 * 2
    greedy(fast, random_ids(1, 100), 2, guidance_scale=1.5, negative_prompt_ids=random_ids(1, 90))
    assert fast.report().prompt_lengths.tolist() == [100]


def test_cache_read_as_layers_says_what_to_read(tight):
    cache = tight(random_ids(1, 20)).past_key_values
    for read in (
        lambda c: c[0],
        list,
        lambda c: c.layers[0].keys,
        lambda c: c.max_cache_len,
        lambda c: c.max_batch_size,
    ):
        with pytest.raises(kvpass.CacheMismatchError, match=r"read cache\.positions"):
            read(cache)
