"""Passes that choose how a CPU computes products, on single layers."""

import pytest
import torch

from kvpass.graphs import widen_linear
from kvpass.graphs.fx_utils import recorded
from kvpass.graphs.widen_linear import widen_linear_pass


def changed_by(graph_pass, module, x):
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
        result = torch.compile(module, backend=backend, fullgraph=True, dynamic=True)(x)
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


def test_int8_weights_of_prompts_are_multiplied_in_fp32_where_the_cpu_has_no_instructions(monkeypatch):
    torchao = pytest.importorskip("torchao.quantization")
    monkeypatch.setattr(widen_linear, "multiplies", lambda _: False)
    layer, x = torch.nn.Linear(64, 40).bfloat16(), torch.randn(2, 7, 64).bfloat16()
    torchao.quantize_(layer, torchao.Int8WeightOnlyConfig())
    changed, dtypes, result = changed_by(widen_linear_pass, layer, x)
    assert changed == 1 and dtypes == [torch.float32] and result.dtype == torch.bfloat16
    torch.testing.assert_close(
        result.double(), exact(layer.weight.dequantize(torch.float32), layer, x), rtol=0.005, atol=1e-3
    )
