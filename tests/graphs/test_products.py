"""Passes that choose how a CPU computes products, on single layers and on a model of int8 weights."""

import pytest
import torch

import kvpass
from compiled_models import greedy, reloaded
from kvpass.graphs import widen_linear
from kvpass.graphs.int8_linear import int8_linear_pass
from kvpass.graphs.widen_linear import widen_linear_pass
from kvpass.loading import load_model
from tiny_models import random_ids, tiny_model


def changed_by(graph_pass, module, x):
    """Return how many products a pass changes in the graph of ``module(x)``, and what the changed graph gives."""
    counts = []

    def backend(gm, example_inputs):
        counts.append(graph_pass(gm))
        gm.graph.lint()
        gm.recompile()
        return gm.forward

    torch._dynamo.reset()
    with torch.no_grad():
        result = torch.compile(module, backend=backend, fullgraph=True, dynamic=True)(x)
    return counts[0], result


def int8_layer(bias):
    torchao = pytest.importorskip("torchao.quantization")
    layer = torch.nn.Linear(64, 40, bias=bias).bfloat16()
    torchao.quantize_(layer, torchao.Int8WeightOnlyConfig())
    return layer


def exact(weight, layer, x):
    bias = None if layer.bias is None else layer.bias.double()
    return torch.nn.functional.linear(x.double(), weight.double(), bias)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("shape", "bias"), [((2, 1, 64), True), ((1, 3, 64), False), ((1, 1, 64), True)])
def test_products_of_several_rows_are_added_in_fp32_where_the_cpu_has_no_instructions(dtype, shape, bias, monkeypatch):
    layer, x = torch.nn.Linear(64, 40, bias=bias).to(dtype), torch.randn(shape).to(dtype)
    for has_instructions in (True, False):
        monkeypatch.setattr(widen_linear, "multiplies", lambda _, is_so=has_instructions: is_so)
        changed, result = changed_by(widen_linear_pass, layer, x)
        assert changed == (not has_instructions and shape != (1, 1, 64))
        assert result.dtype == dtype
        close = {"rtol": torch.finfo(dtype).eps, "atol": 1e-6} if changed else {"rtol": 0.02, "atol": 0.02}
        torch.testing.assert_close(result.double(), exact(layer.weight, layer, x), **close)


@pytest.mark.parametrize("shape", [(1, 1, 64), (3, 1, 64), (5, 64)])
@pytest.mark.parametrize("bias", [True, False])
def test_int8_weights_are_multiplied_as_they_are(shape, bias):
    layer, x = int8_layer(bias), torch.randn(shape).bfloat16()
    changed, result = changed_by(int8_linear_pass, layer, x)
    assert changed == 1 and result.dtype == torch.bfloat16
    torch.testing.assert_close(
        result.double(), exact(layer.weight.dequantize(torch.float32), layer, x), rtol=0.01, atol=0.01
    )
    assert changed_by(int8_linear_pass, layer, x.float())[0] == 0


def test_int8_weights_of_prompts_are_multiplied_in_fp32_where_the_cpu_has_no_instructions(monkeypatch):
    monkeypatch.setattr(widen_linear, "multiplies", lambda _: False)
    layer, x = int8_layer(True), torch.randn(2, 7, 64).bfloat16()
    changed, result = changed_by(widen_linear_pass, layer, x)
    assert changed == 1 and result.dtype == torch.bfloat16
    torch.testing.assert_close(
        result.double(), exact(layer.weight.dequantize(torch.float32), layer, x), rtol=0.005, atol=1e-3
    )


@pytest.mark.parametrize("rows", [1, pytest.param(3, marks=pytest.mark.exhaustive)])
def test_a_model_of_int8_weights_gives_the_logits_of_the_uncompiled_one(rows):
    torchao = pytest.importorskip("torchao.quantization")
    model = tiny_model("llama", layers=1, dtype=torch.bfloat16)
    torchao.quantize_(model, torchao.Int8WeightOnlyConfig())
    fast, ids, new = kvpass.compile(model, policy="full"), random_ids(rows, 40), random_ids(rows, 5, seed=1)
    out = fast(ids)
    logits = [out.logits, *(fast(token, past_key_values=out.past_key_values).logits for token in new.split(1, 1))]
    plain = model(torch.cat([ids, new], 1)).logits
    torch.testing.assert_close(torch.cat(logits, 1), plain, rtol=0.05, atol=0.05)
    passes = {record.name: record.sites for record in fast.report().compiled[-1].passes}
    assert passes["int8_linear"] == 8, "each product of the layer, and that of the logits"
    assert torch.equal(greedy(fast, ids), greedy(model, ids))


def test_a_cache_of_a_model_of_int8_weights_is_saved_and_of_no_other(tmp_path):
    pytest.importorskip("torchao")
    model, tokenizer = load_model("builtin", dtype="int8", device="cpu")
    assert type(model.lm_head.weight).__name__ == "Int8Tensor" and model.dtype == torch.bfloat16
    ids, question = (
        tokenizer(text, return_tensors="pt").input_ids for text in ("the farmer carried the lamp", "river")
    )
    fast = kvpass.compile(model, policy="full", backend="eager")
    cache = fast.compress(ids)
    loaded = reloaded(cache, fast, tmp_path)
    answers = [greedy(fast, question, past_key_values=given, min_new_tokens=6) for given in (loaded, cache)]
    assert torch.equal(*answers)
    plain = kvpass.compile(load_model("builtin", dtype="bfloat16", device="cpu")[0], policy="full", backend="eager")
    with pytest.raises(kvpass.CacheMismatchError, match="weights"):
        reloaded(cache, plain, tmp_path)
