"""Modules that other libraries changed: adapters, quantised weights, dropout; skipped where one is not installed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import kvpass
from pairwise import quick
from tiny_models import VOCABULARY, random_ids, tiny_model

GREEDY = {"max_new_tokens": 4, "do_sample": False}


def test_dora_is_named_until_it_is_merged():
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(use_dora=True, target_modules=["q_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(tiny_model("llama", layers=1), config).eval()
    with pytest.raises(ValueError, match=r"q_proj has an adapter of DoRA.*merge_and_unload"):
        kvpass.compile(adapted.base_model.model, policy="full", backend="eager")
    merged, ids = adapted.merge_and_unload(), random_ids(1, 30)
    fast = kvpass.compile(merged, policy="full", backend="eager")
    assert torch.equal(fast.generate(ids, **GREEDY), merged.generate(ids, **GREEDY))


def test_8_bit_layers_of_bitsandbytes_are_named():
    model = tiny_model("llama", layers=1)
    layer = model.model.layers[0].mlp
    layer.up_proj = type("Linear8bitLt", (nn.Linear,), {})(*reversed(layer.up_proj.weight.shape), bias=False)
    with pytest.raises(ValueError, match=r"mlp.up_proj is an 8-bit layer of bitsandbytes"):
        kvpass.compile(model, policy="full", backend="eager")


def test_activations_quantised_by_torchao_are_refused_in_compiled_code_on_a_cpu():
    torchao = pytest.importorskip("torchao.quantization")
    model, ids = tiny_model("llama", layers=1), random_ids(1, 30)
    torchao.quantize_(model, torchao.Int8DynamicActivationInt8WeightConfig())
    with pytest.raises(ValueError, match=r"weight of torchao quantises what it is multiplied with"):
        kvpass.compile(model, policy="full")
    fast = kvpass.compile(model, policy="full", backend="eager")
    assert torch.equal(fast.generate(ids, **GREEDY), model.generate(ids, **GREEDY))


@pytest.mark.parametrize("config", quick(["Int8WeightOnlyConfig", "Float8WeightOnlyConfig"], ["Int8WeightOnlyConfig"]))
def test_weights_quantised_by_torchao_work_in_compiled_code(config):
    torchao = pytest.importorskip("torchao.quantization")
    model, ids = tiny_model("llama", layers=1), random_ids(1, 30)
    torchao.quantize_(model, getattr(torchao, config)())
    fast = kvpass.compile(model, policy="full")
    assert torch.equal(fast.generate(ids, **GREEDY), model.generate(ids, **GREEDY))


IDS = torch.randint(2, VOCABULARY, (1, 40), generator=torch.Generator().manual_seed(0))


def test_adapter_merged_in_the_original_counts_once():
    peft = pytest.importorskip("peft")
    settings = peft.LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    tuned = peft.get_peft_model(tiny_model("llama", layers=1), settings).eval()
    fast = kvpass.compile(tuned.get_base_model(), policy="full", backend="eager")
    before, document = fast(IDS).logits, fast.compress(IDS)
    tuned.merge_adapter()
    torch.testing.assert_close(fast(IDS).logits, before, atol=1e-4, rtol=0)
    with pytest.raises(kvpass.CacheMismatchError, match="adapters"):
        fast.generate(IDS[:, :3], past_key_values=document, **GREEDY)


def test_dropout_in_training_mode_is_named():
    model = tiny_model("llama", layers=1)
    mlp = model.model.layers[0].mlp
    mlp.down_proj = nn.Sequential(mlp.down_proj, nn.Dropout(0.5))
    with pytest.raises(kvpass.UnsupportedAttentionError, match="dropout in training mode"):
        kvpass.compile(model, policy="full", backend="eager")(IDS)
