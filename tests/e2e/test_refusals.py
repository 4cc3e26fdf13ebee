"""What is refused, and in what words: models, options, calls; nothing is lost by it."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import (
    AutoModelForCausalLM,
    BatchEncoding,
    BertConfig,
    BertForMaskedLM,
    BertLMHeadModel,
    DynamicCache,
    EncoderDecoderCache,
    OpenAIGPTConfig,
    T5Config,
    T5ForConditionalGeneration,
    TrOCRConfig,
    TrOCRForCausalLM,
    XLMConfig,
    XLNetConfig,
)
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

import kvpass
from numeric_checks import assert_close
from tiny_models import left_pad, random_ids, tiny_model


@pytest.mark.skipif(Version(transformers.__version__) >= Version("5.22"), reason="make test-versions has older ones")
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


def test_contract_7_a_decoder_that_is_no_single_graph_is_refused():
    branching = tiny_model("llama", num_hidden_layers=1)
    branching.model.norm.forward = lambda x: x if x.sum() > 0 else -x
    place = r"one graph: test_refusals.py, line \d+, `branching.model.norm.forward = .*`: Data-dependent branching"
    with pytest.raises(ValueError, match=place) as refused:
        kvpass.compile(branching, budget=100, backend="eager")(random_ids(1, 40))
    assert "\n" not in str(refused.value) and "Explanation" in str(refused.value.__cause__)


def test_contract_7_a_layer_without_attention_is_refused():
    model = tiny_model("llama", num_hidden_layers=2)
    model.model.layers[1].self_attn.forward = lambda hidden_states, **kwargs: (hidden_states, None)
    with pytest.raises(kvpass.UnsupportedAttentionError, match=r"found 1 attention ops in 1 modules .* of 2 layers"):
        kvpass.compile(model, budget=100, backend="eager")(random_ids(1, 40))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"budget": 32}, r"budget=32: must be at least window \+ 1 = 33"),
        ({"budget": 0}, "budget=0"),
        ({"budget": -5}, "budget=-5"),
        ({"budget": float("nan")}, "budget=nan"),
        ({"budget": 1.5}, "budget=1.5"),
        ({"budget": "lots"}, "budget='lots'"),
        ({"budget": "12 parsecs"}, "budget='12 parsecs'"),
        ({"budget": True}, "budget=True"),
        ({"budget": None}, "budget=None"),
        ({"policy": "full", "budget": 100}, "keeps everything"),
        ({"policy": "lavaa"}, "did you mean 'lava'"),
        ({"windw": 3}, "windw=3: not an option of policy 'lava'; did you mean 'window'"),
        ({"kernelsize": 5}, "kernelsize=5: .* did you mean 'kernel_size'"),
        ({"budjet": 5}, "budjet=5: .* did you mean 'budget'"),
        ({"xyz": 5}, "xyz=5: not an option of policy 'lava'; its options are window, parity"),
        ({"policy": "cake"}, "no published CAKE temperatures .* give both as options, for instance tau1=1.6, tau2=0.4"),
        ({"policy": "cake", "tau1": 1.0}, "tau2=None: .* give both temperatures as options, for instance tau1=1.6"),
        ({"window": -1}, "window=-1"),
        ({"kernel_size": 4}, "kernel_size=4"),
        ({"backend": "cuda"}, "backend='cuda'"),
    ],
    ids=str,
)
def test_contract_10_bad_options_name_value_and_range(model, options, message):
    with pytest.raises(ValueError, match=message):
        kvpass.compile(model, **{"budget": 100, **options})


def test_contract_10_models_that_cannot_be_compiled_are_refused(model, fast):
    with pytest.raises(ValueError, match="already compiled"):
        kvpass.compile(fast, budget=100)
    with pytest.raises(ValueError, match="training mode"):
        kvpass.compile(tiny_model("llama").train(), budget=100)
    with pytest.raises(ValueError, match="training mode"):
        kvpass.compile(tiny_model("llama", num_hidden_layers=1), budget=100).train()(random_ids(1, 40))
    for wish in ("output_hidden_states", "output_attentions"):
        wishful = tiny_model("gpt2", **{wish: True})
        with pytest.raises(ValueError, match=f"config.{wish}=True"):
            kvpass.compile(wishful, budget=100)
    with pytest.raises(ValueError, match=r"config.output_router_logits=True"):
        kvpass.compile(tiny_model("mixtral", output_router_logits=True), budget=100)
    t5 = T5Config(vocab_size=50, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=0)
    with pytest.raises(ValueError, match="encoder-decoder"):
        kvpass.compile(T5ForConditionalGeneration(t5).eval(), budget=100)
    with pytest.raises(ValueError, match=r"torch\.compile"):
        kvpass.compile(torch.nn.Linear(2, 2), budget=100)
    for name in ("gpt2", Path("folder/gpt2")):
        with pytest.raises(ValueError, match=rf"is a name: load it .*AutoModelForCausalLM.from_pretrained\('{name}'\)"):
            kvpass.compile(name, budget=100)
    with pytest.raises(ValueError, match=r"LlamaModel is no causal language model: .*AutoModelForCausalLM.from_pre"):
        kvpass.compile(tiny_model("llama").model, budget=100)
    bert = BertConfig(vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    with pytest.raises(ValueError, match=r"BertForMaskedLM is no causal language model: .* predicts the next token"):
        kvpass.compile(BertForMaskedLM(bert).eval(), budget=100)
    with pytest.raises(kvpass.UnsupportedAttentionError, match=r"is_decoder=False, .* needs is_decoder=True"):
        kvpass.compile(BertLMHeadModel(bert).eval(), budget=100, backend="eager")(random_ids(1, 40) % 50)
    trocr = TrOCRConfig(vocab_size=50, d_model=16, decoder_layers=1, decoder_attention_heads=2, decoder_ffn_dim=16)
    with pytest.raises(ValueError, match="TrOCRForCausalLM is not supported: its forward has no argument logits_to_k"):
        kvpass.compile(TrOCRForCausalLM(trocr).eval(), budget=100)


def test_contract_10_bad_calls_leave_the_cache_as_it_was(model, tight):
    ids, embeds = random_ids(2, 40), torch.zeros(2, 40, 64)
    cache = tight(ids).past_key_values
    token = random_ids(2, 1, seed=3)
    expected = tight(token, past_key_values=tight(ids).past_key_values).logits
    foreign = DynamicCache(config=model.config)
    model(ids, past_key_values=foreign)
    stranger = kvpass.compile(tiny_model("llama", layers=1), budget=16, window=8, backend="eager")
    stranger(ids)
    same_shape = kvpass.compile(tiny_model("llama", layers=2, seed=1), budget=16, window=8, backend="eager")
    same_shape(ids)
    other_budget = kvpass.compile(model, budget=24, window=8, backend="eager")
    bad = [
        (tight, {"input_ids": token[:1], "past_key_values": cache}, "1 rows"),
        (tight, {"input_ids": token, "past_key_values": cache, "attention_mask": torch.ones(2, 3)}, r"\[2, 41\]"),
        (tight, {"input_ids": ids, "attention_mask": torch.ones(2, 41)}, r"\[2, 40\]"),
        (tight, {"input_ids": ids, "attention_mask": torch.ones(2, 40).tril(38)}, 'padding_side = "left"'),
        (tight, {"input_ids": ids, "attention_mask": torch.zeros(2, 40)}, "no real token"),
        (tight, {"input_ids": ids, "past_key_values": foreign}, "DynamicCache"),
        (tight, {"input_ids": ids, "past_key_values": EncoderDecoderCache(foreign, DynamicCache())}, "Cache"),
        (stranger, {"input_ids": token, "past_key_values": cache}, "another model"),
        (same_shape, {"input_ids": token, "past_key_values": cache}, "another model"),
        (other_budget, {"input_ids": token, "past_key_values": cache}, "has budget 16, the model 24"),
        (tight, {"input_ids": None}, "input_ids=None"),
        (tight, {"input_ids": torch.empty(1, 0, dtype=torch.int64)}, r"\[1, 0\]: must be \[B, T\] with B, T >= 1$"),
        (tight, {"input_ids": ids[0]}, r"\[40\]: must be \[B, T\] with B, T >= 1, use input_ids\[None\]"),
        (tight, {"input_ids": ids.float()}, r"torch.float32: .* use input_ids.long\(\)"),
        (tight, {"input_ids": ids.bool()}, r"torch.bool: .* use input_ids.long\(\)"),
        (tight, {"input_ids": token.float(), "past_key_values": cache}, "torch.float32"),
        (tight, {"input_ids": ids.to("meta")}, r"on meta, but the model is on cpu: use input_ids.to\(model.device\)"),
        (tight, {"input_ids": token.to("meta"), "past_key_values": cache}, "on meta, but the model is on cpu"),
        (tight, {"input_ids": "how are you?"}, "of type str: must be a tensor of token ids, such as tokenizer"),
        (tight, {"input_ids": ids.tolist()}, "of type list: must be a tensor of token ids"),
        (tight, {"input_ids": BatchEncoding({"input_ids": ids})}, r"of type BatchEncoding: .* model\(\*\*inputs\)"),
        (
            tight,
            {"inputs_embeds": ids},
            r"inputs_embeds of torch.int64 \[2, 40\]: must be floating numbers \[B, T, D\]",
        ),
        (tight, {"inputs_embeds": [1.0]}, "inputs_embeds of list: must be floating numbers"),
        (tight, {"inputs_embeds": embeds.to("meta")}, "inputs_embeds on meta, but the model is on cpu"),
        (tight, {"input_ids": ids, "inputs_embeds": embeds}, "input_ids and inputs_embeds are two forms of one prompt"),
        (
            tight,
            {"inputs_embeds": embeds[:, :1], "past_key_values": cache},
            "only as a prompt: .* new tokens as input_ids",
        ),
        (tight, {"inputs_embeds": embeds[..., :5]}, "the decoder fails on an input of 40 tokens"),
        (tight, {"input_ids": ids, "labels": ids}, "'labels' is not supported: .* compute it from the logits"),
        (tight, {"input_ids": ids, "token_type_ids": ids}, "return_token_type_ids=False"),
        (tight, {"input_ids": ids, "speed": 3}, "'speed' is not supported: a kvpass model takes input_ids"),
        (tight, {"input_ids": ids, "output_attentions": True}, "output_attentions.* use the uncompiled model"),
        (tight, {"input_ids": ids, "logits_to_keep": -1}, "logits_to_keep=-1"),
        (tight, {"input_ids": ids, "position_ids": torch.zeros(2, 3, dtype=torch.int64)}, "position_ids"),
        (
            tight,
            {"input_ids": ids[:, :3], "past_key_values": cache, "attention_mask": torch.ones(2, 43).tril(39)},
            "row 0 has no real new token",
        ),
        (
            tight,
            {"input_ids": ids[:, :3], "past_key_values": cache, "attention_mask": torch.ones(2, 43).triu()},
            "row 1 hides other columns",
        ),
    ]
    for subject, call, message in bad:
        with pytest.raises(ValueError, match=message):
            subject(**call)
        assert cache.get_seq_length() == 40
    assert_close("logits", tight(token, past_key_values=cache).logits, expected, atol=0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"inputs": "how are you?"}, "of type str: must be a tensor of token ids, such as tokenizer"),
        ({"inputs": BatchEncoding({"input_ids": random_ids(1, 40)})}, r"of type BatchEncoding: .* model\(\*\*inputs\)"),
        ({"input_ids": random_ids(1, 40).float()}, "torch.float32: token ids must be int64"),
        ({"inputs": random_ids(1, 40)[0]}, r"of shape \[40\]"),
        (
            {"inputs_embeds": torch.zeros(40, 64)},
            r"inputs_embeds of torch.float32 \[40, 64\]: must be floating numbers \[B, T, D\]",
        ),
        ({"inputs": random_ids(1, 40), "token_type_ids": random_ids(1, 40)}, "return_token_type_ids=False"),
        ({"inputs": random_ids(1, 40), "output_attentions": True}, "'output_attentions' .* use the uncompiled model"),
    ],
    ids=lambda given: next(reversed(given)) if isinstance(given, dict) else "",
)
def test_contract_10_generate_takes_token_ids(tight, call, message):
    with pytest.raises(ValueError, match=message):
        tight.generate(**call, max_new_tokens=2)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (OpenAIGPTConfig(vocab_size=128, n_embd=32, n_layer=1, n_head=4), "adds a bias"),
        (XLMConfig(vocab_size=128, emb_dim=32, n_layers=1, n_heads=4), "not causal"),
        (XLNetConfig(vocab_size=128, d_model=32, n_layer=1, n_head=4, d_inner=32), "relates tokens to tokens"),
    ],
    ids=lambda given: getattr(given, "model_type", None),
)
def test_generate_refuses_a_family_for_the_same_reason_as_forward(config, reason):
    fast = kvpass.compile(AutoModelForCausalLM.from_config(config).eval(), policy="full", backend="eager")
    for call in (fast, lambda ids: fast.generate(ids, max_new_tokens=2, do_sample=False)):
        with pytest.raises(kvpass.UnsupportedAttentionError, match=reason):
            call(random_ids(1, 5))


def test_contract_10_a_mask_cannot_take_padding_back(tight):
    ids, mask = left_pad([random_ids(1, n, seed=n)[0] for n in (50, 31)])
    new = random_ids(2, 3, seed=1)
    cache = tight(ids, attention_mask=mask).past_key_values
    with pytest.raises(kvpass.CacheMismatchError, match="row 1 hides other columns"):
        tight(new, past_key_values=cache, attention_mask=torch.ones(2, 53))
    whole = torch.cat([mask, torch.ones_like(new)], 1)
    expected = tight(new, past_key_values=cache.clone()).logits
    assert torch.equal(tight(new, past_key_values=cache, attention_mask=whole).logits, expected)


def test_contract_10_a_fraction_too_small_for_the_prompt_is_refused(model):
    fast = kvpass.compile(model, budget=0.1, window=8, backend="eager")
    with pytest.raises(ValueError, match=r"window \+ 1 = 9"):
        fast(random_ids(1, 40))
    assert fast(random_ids(1, 200)).past_key_values.lengths.sum() == 20 * 4


def test_an_uncompiled_model_refuses_the_cache_of_a_compiled_one(model, tight):
    ids = random_ids(1, 40)
    cache = tight(ids).past_key_values
    calls = [
        lambda: model(ids[:, :3], past_key_values=cache),
        lambda: model(ids[:, :1], past_key_values=cache),
        lambda: model(ids[:, :1], past_key_values=cache, attention_mask=torch.zeros(1, 1, 1, 41)),
        lambda: model.generate(ids[:, :3], past_key_values=cache, max_new_tokens=2),
        lambda: model.generate(torch.cat([ids, ids], 1), past_key_values=cache, max_new_tokens=2),
    ]
    for call in calls:
        with pytest.raises(kvpass.CacheMismatchError, match="CompressedCache was given to an uncompiled model"):
            call()
    assert cache.get_seq_length() == 40
    assert tight(ids[:, :1], past_key_values=cache).logits.isfinite().all()


def test_a_compiled_model_and_its_cache_are_copied_but_not_pickled(model, tmp_path):
    tight = kvpass.compile(model, budget=16, window=8, backend="eager")
    ids, token = random_ids(2, 40), random_ids(2, 1, seed=3)
    cache = tight(ids).past_key_values
    refusals = {
        r"a compiled LlamaForCausalLM cannot be pickled, .* call kvpass.compile again": tight,
        "a CompressedCache cannot be pickled: use cache.save": cache,
    }
    for message, value in refusals.items():
        for pickled in (value, {"held": value}):
            with pytest.raises(pickle.PicklingError, match=message):
                torch.save(pickled, tmp_path / "pickled.pt")
            with pytest.raises(pickle.PicklingError, match=message):
                pickle.dumps(pickled)

    torch.save(tight.state_dict(), tmp_path / "weights.pt")
    expected = tight(token, past_key_values=copy.deepcopy(cache)).logits
    assert cache.get_seq_length() == 40
    assert torch.equal(tight(token, past_key_values=copy.copy(cache).clone()).logits, expected)
    for twin in (copy.copy(tight), copy.deepcopy(tight)):
        assert type(twin) is type(tight)
        assert torch.equal(twin(token, past_key_values=twin(ids).past_key_values).logits, expected)
    assert all(map(torch.equal, copy.deepcopy(tight).parameters(), tight.parameters()))


@torch.no_grad()
def test_positions_of_several_axes_are_named():
    fast = kvpass.compile(tiny_model("llama", layers=1), policy="full", backend="eager")
    with pytest.raises(ValueError, match=r"shape \[4, 1, 20\]: must be \[1, 20\]; .*M-RoPE"):
        fast(random_ids(1, 20), position_ids=torch.arange(20).expand(4, 1, -1))
