"""Modules that other libraries changed: adapters and quantised weights; skipped where one is not installed."""

import copy

import pytest
import torch
from torch import nn

import kvpass
from compiled_models import greedy, reloaded
from kvpass.loading import load_model, quantiser
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


def test_layers_of_compressed_tensors_are_refused_with_the_way_out(model):
    model.model.layers[0].mlp.up_proj.quantization_status = "compressed"
    with pytest.raises(ValueError, match=r"up_proj is a layer of compressed-tensors.*run_compressed=False"):
        kvpass.compile(model, policy="full", backend="eager")


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


@pytest.mark.parametrize("weights", quick(["int8", "int4", "Float8WeightOnlyConfig"], ["int8", "int4"]))
@pytest.mark.parametrize("rows", quick([1, 3], [1]))
def test_weights_quantised_by_torchao_work_in_compiled_code(weights, rows):
    torchao = pytest.importorskip("torchao.quantization")
    model = tiny_model("llama", layers=1, dtype=torch.bfloat16)
    if weights in ("int8", "int4"):
        quantiser(weights)(model)
    else:
        torchao.quantize_(model, getattr(torchao, weights)())
    fast, ids = kvpass.compile(model, policy="full"), random_ids(rows, 40)
    out = fast(ids[:, :35], logits_to_keep=1)
    tokens = ids[:, 35:].split(1, 1)
    logits = [fast(token, past_key_values=out.past_key_values, logits_to_keep=1).logits for token in tokens]
    expected = model(ids, logits_to_keep=6).logits
    torch.testing.assert_close(torch.cat([out.logits, *logits], 1), expected, rtol=0.05, atol=0.05)


@pytest.mark.parametrize(("dtype", "kind"), [("int8", "Int8Tensor"), ("int4", "Int4OpaqueTensor")])
def test_the_command_line_loads_models_of_quantised_weights(dtype, kind):
    pytest.importorskip("torchao")
    model, _ = load_model("builtin", dtype=dtype, device="cpu")
    layer = model.model.layers[0].mlp.up_proj.weight
    assert (type(layer).__name__, type(model.lm_head.weight).__name__) == (kind, "Int8Tensor")
    assert model.dtype == torch.bfloat16 and type(model.get_input_embeddings().weight) is nn.Parameter


def test_a_layer_that_does_not_divide_into_groups_of_int4_has_int8():
    pytest.importorskip("torchao")
    model = tiny_model("llama", layers=1, dtype=torch.bfloat16, hidden_size=48, intermediate_size=32)
    quantiser("int4")(model)
    layer = model.model.layers[0].mlp
    kinds = [type(linear.weight).__name__ for linear in (layer.up_proj, layer.down_proj, model.lm_head)]
    assert kinds == ["Int8Tensor", "Int4OpaqueTensor", "Int8Tensor"]


def test_a_cache_of_quantised_weights_is_continued_with_these_alone(model, tmp_path):
    plain, model = kvpass.compile(model, policy="full", backend="eager"), copy.deepcopy(model)
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            layer.weight = nn.Parameter(HalfPrecision(layer.weight.detach().bfloat16()), requires_grad=False)
    fast = kvpass.compile(model, policy="full", backend="eager")
    cache, question = fast.compress(IDS), random_ids(1, 3, seed=1)
    loaded = reloaded(cache, fast, tmp_path)
    answers = [greedy(fast, question, past_key_values=given, min_new_tokens=6) for given in (loaded, cache)]
    assert torch.equal(*answers)
    with pytest.raises(kvpass.CacheMismatchError, match="weights"):
        reloaded(cache, plain, tmp_path)


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
