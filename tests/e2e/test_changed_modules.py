"""Modules that were changed beside a compiled copy: merged adapters, quantised weights, dropout in training mode."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import kvpass
from tiny_models import VOCABULARY, tiny_model

IDS = torch.randint(2, VOCABULARY, (1, 40), generator=torch.Generator().manual_seed(0))
CALL = {"max_new_tokens": 4, "do_sample": False}


def test_adapter_merged_in_the_original_counts_once():
    peft = pytest.importorskip("peft")
    settings = peft.LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    tuned = peft.get_peft_model(tiny_model("llama", layers=1), settings).eval()
    fast = kvpass.compile(tuned.get_base_model(), policy="full", backend="eager")
    before, document = fast(IDS).logits, fast.compress(IDS)
    tuned.merge_adapter()
    torch.testing.assert_close(fast(IDS).logits, before, atol=1e-4, rtol=0)
    with pytest.raises(kvpass.CacheMismatchError, match="adapters"):
        fast.generate(IDS[:, :3], past_key_values=document, **CALL)


def test_dropout_in_training_mode_is_named():
    model = tiny_model("llama", layers=1)
    mlp = model.model.layers[0].mlp
    mlp.down_proj = nn.Sequential(mlp.down_proj, nn.Dropout(0.5))
    with pytest.raises(kvpass.UnsupportedAttentionError, match="dropout in training mode"):
        kvpass.compile(model, policy="full", backend="eager")(IDS)


def test_weights_of_torchao_run_in_the_default_backend():
    quantization = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
    model = tiny_model("llama", layers=1)
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    expected = model.generate(IDS, **CALL)
    assert torch.equal(kvpass.compile(model, policy="full").generate(IDS, **CALL), expected)
