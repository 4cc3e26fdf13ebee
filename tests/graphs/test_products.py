"""Passes that choose how a CPU computes products, on single layers."""

import pytest
import torch

from kvpass.graphs import decompose_linear, widen_linear
from kvpass.graphs.decompose_linear import decompose_linear_pass
from kvpass.graphs.fx_utils import recorded
from kvpass.graphs.widen_linear import widen_linear_pass
from numeric_checks import assert_close


def changed_by(graph_pass, module, x, *, dynamic=True):
    """Return how many products a pass changes in the graph of ``module(x)``, their dtypes, and what that then gives."""
    counts, dtypes = [], []

    def backend(gm, example_inputs):
        counts.append(graph_pass(gm))
        products = gm.graph.find_nodes(op="call_function", target=torch.nn.functional.linear)
        dtypes.extend(recorded(product).dtype for product in products)
        gm.graph.lint()
        gm.recompile()
        return gm.forward

    torch._dynamo.reset()
    with torch.no_grad():
        result = torch.compile(module, backend=backend, fullgraph=True, dynamic=dynamic)(x)
    return counts[0], dtypes, result


def exact(weight, layer, x):
    bias = None if layer.bias is None else layer.bias.double()
    return torch.nn.functional.linear(x.double(), weight.double(), bias)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("shape", "bias"), [((2, 1, 64), True), ((1, 3, 64), False), ((1, 1, 64), True)])
def test_products_of_several_rows_are_added_in_fp32_where_the_cpu_has_no_instructions(dtype, shape, bias, monkeypatch):
    layer, x = torch.nn.Linear(64, 40, bias=bias).to(dtype), torch.randn(shape).to(dtype)
    for has_instructions in (True, False):
        monkeypatch.setattr(widen_linear, "multiplies", lambda _, is_so=has_instructions: is_so)
        changed, dtypes, result = changed_by(widen_linear_pass, layer, x)
        assert dtypes == [torch.float32 if changed else dtype]
        assert changed == (not has_instructions and shape != (1, 1, 64))
        assert result.dtype == dtype
        close = {"rtol": torch.finfo(dtype).eps, "atol": 1e-6} if changed else {"rtol": 0.02, "atol": 0.02}
        torch.testing.assert_close(result.double(), exact(layer.weight, layer, x), **close)


def quantised(layer):
    """Quantise a layer in place with torchao; return its weight as it is multiplied."""
    torchao = pytest.importorskip("torchao.quantization")
    torchao.quantize_(layer, torchao.Int8WeightOnlyConfig())
    return layer.weight.dequantize(torch.float32)


@pytest.mark.parametrize(("has_instructions", "dtype"), [(True, torch.bfloat16), (False, torch.float32)])
@pytest.mark.parametrize("bias", [True, False])
def test_int8_weights_of_prompts_are_converted_to_what_the_cpu_multiplies(has_instructions, dtype, bias, monkeypatch):
    monkeypatch.setattr(widen_linear, "multiplies", lambda _: has_instructions)
    layer, x = torch.nn.Linear(64, 40, bias=bias).bfloat16(), torch.randn(2, 7, 64).bfloat16()
    weight = quantised(layer)
    changed, dtypes, result = changed_by(widen_linear_pass, layer, x)
    assert changed == 1 and dtypes == [dtype] and result.dtype == torch.bfloat16
    torch.testing.assert_close(result.double(), exact(weight, layer, x), rtol=0.008, atol=0.004)


@pytest.mark.parametrize("rows", [1, 3])
def test_int8_weights_of_single_tokens_are_not_converted(rows):
    layer = torch.nn.Linear(64, 40).bfloat16()
    quantised(layer)
    changed, _, _ = changed_by(widen_linear_pass, layer, torch.randn(rows, 1, 64).bfloat16())
    assert changed == 0


@pytest.mark.parametrize(("inputs", "pieces"), [(4096, 1), (4864, 2), (3 * 4096, 4), (4099, 1)])
def test_a_long_sum_is_decomposed_into_equal_short_ones(inputs, pieces):
    layer, x = torch.nn.Linear(inputs, 3), torch.randn(1, inputs)
    sizes = []

    def decompose(gm):
        changed = decompose_linear_pass(gm)
        products = gm.graph.find_nodes(op="call_function", target=torch.reshape)
        sizes.extend(node.args[1][-2:] for node in products)
        return changed

    changed, _, result = changed_by(decompose, layer, x, dynamic=False)
    assert changed == 1 and sizes == 2 * [(pieces, inputs // pieces)]
    assert_close("result", result.double(), exact(layer.weight, layer, x), atol=1e-5)


@pytest.mark.parametrize("shape", [(2, 1, 24), (1, 3, 24), (24,)])
def test_only_a_single_row_is_decomposed(shape):
    changed, left, _ = changed_by(decompose_linear_pass, torch.nn.Linear(24, 40), torch.randn(shape), dynamic=False)
    assert changed + len(left) == 1 and changed == (shape == (24,))


@pytest.mark.parametrize("is_int8", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_decomposed_layer_is_multiplied_and_added_in_fp32(dtype, is_int8):
    layer, x = torch.nn.Linear(512, 40).to(dtype), torch.randn(1, 1, 512).to(dtype)
    weight = quantised(layer) if is_int8 else layer.weight
    changed, left, result = changed_by(decompose_linear_pass, layer, x, dynamic=False)
    assert (changed, left, result.dtype) == (1, [], dtype)
    wanted = exact(weight, layer, x).to(dtype)
    rounded_weights = {"rtol": max(1e-5, torch.finfo(dtype).eps), "atol": 1e-6}
    tolerance = rounded_weights if is_int8 or dtype == torch.float32 else {"rtol": torch.finfo(dtype).eps, "atol": 0}
    torch.testing.assert_close(result, wanted, **tolerance)


@pytest.mark.parametrize(("is_faster", "counts"), [(True, (1, 1)), (False, (2, 0))])
def test_large_weights_keep_their_library_call_where_it_is_faster(is_faster, counts, monkeypatch):
    monkeypatch.setattr(decompose_linear, "reads_large_weights_faster", lambda: is_faster)
    layers = torch.nn.Linear(64, 48), torch.nn.GELU(), torch.nn.Linear(48, 2**17, bias=False)
    module, x = torch.nn.Sequential(*layers), torch.randn(1, 1, 64)
    changed, left, result = changed_by(decompose_linear_pass, module, x, dynamic=False)
    assert (changed, len(left)) == counts
    assert_close("result", result, module(x), atol=1e-6)
