"""Adapters and quantised weights of other libraries; skipped where a library is not installed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import kvpass
from tiny_models import random_ids, tiny_model

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


@pytest.mark.parametrize("config", ["Int8WeightOnlyConfig", "Float8WeightOnlyConfig"])
def test_weights_quantised_by_torchao_work_in_compiled_code(config):
    torchao = pytest.importorskip("torchao.quantization")
    model, ids = tiny_model("llama", layers=1), random_ids(1, 30)
    torchao.quantize_(model, getattr(torchao, config)())
    fast = kvpass.compile(model, policy="full")
    assert torch.equal(fast.generate(ids, **GREEDY), model.generate(ids, **GREEDY))
