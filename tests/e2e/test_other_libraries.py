"""Modules that other libraries changed: adapters and quantised weights; skipped where one is not installed."""

import pytest
import torch
from torch import nn

import kvpass
from compiled_models import greedy
from pairwise import quick
from tiny_models import random_ids, tiny_model
from wrapping_tensor import HalfPrecision

IDS = random_ids(1, 40)


@pytest.fixture
def model():
    return tiny_model("llama", layers=1)


def assert_same_tokens(model, **options):
    """The compiled model and the other give the same tokens."""
    fast = kvpass.compile(model, policy="full", **options)
    assert torch.equal(greedy(fast, IDS), greedy(model, IDS))


def test_dora_is_named_until_it_is_merged(model):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(use_dora=True, target_modules=["q_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(model, config).eval()
    with pytest.raises(ValueError, match=r"q_proj has an adapter of DoRA.*merge_and_unload"):
        kvpass.compile(adapted.base_model.model, policy="full", backend="eager")
    kvpass.compile(adapted.merge_and_unload(), policy="full", backend="eager")


def test_activations_quantised_by_torchao_are_refused_in_compiled_code_and_layers_of_bitsandbytes_named(model):
    torchao = pytest.importorskip("torchao.quantization")
    torchao.quantize_(model, torchao.Int8DynamicActivationInt8WeightConfig())
    with pytest.raises(ValueError, match=r"weight of torchao quantises what it is multiplied with"):
        kvpass.compile(model, policy="full")
    assert_same_tokens(model, backend="eager")
    layer = model.model.layers[0].mlp
    layer.up_proj = type("Linear8bitLt", (nn.Linear,), {})(*reversed(layer.up_proj.weight.shape), bias=False)
    with pytest.raises(ValueError, match=r"mlp.up_proj is an 8-bit layer of bitsandbytes"):
        kvpass.compile(model, policy="full", backend="eager")


@pytest.mark.parametrize("config", quick(["Int8WeightOnlyConfig", "Float8WeightOnlyConfig"], ["Int8WeightOnlyConfig"]))
def test_weights_quantised_by_torchao_work_in_compiled_code(model, config):
    torchao = pytest.importorskip("torchao.quantization")
    torchao.quantize_(model, getattr(torchao, config)())
    assert_same_tokens(model)


@pytest.mark.parametrize("backend", quick(["eager", "inductor"], ["eager"]))
def test_weights_that_wrap_others_are_read_in_blocks(backend):
    model = tiny_model("llama", layers=2)
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            layer.weight = nn.Parameter(HalfPrecision(layer.weight.detach().bfloat16()), requires_grad=False)
    assert_same_tokens(model, backend=backend, prefill_block=16)


def test_adapter_merged_in_the_original_counts_once(model):
    peft = pytest.importorskip("peft")
    settings = peft.LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    tuned = peft.get_peft_model(model, settings).eval()
    fast = kvpass.compile(tuned.get_base_model(), policy="full", backend="eager")
    before, document = fast(IDS, logits_to_keep=1).logits, fast.compress(IDS)
    tuned.merge_adapter()
    torch.testing.assert_close(fast(IDS, logits_to_keep=1).logits, before, atol=1e-4, rtol=0)
    with pytest.raises(kvpass.CacheMismatchError, match="adapters"):
        greedy(fast, IDS[:, :3], past_key_values=document)
