"""Matrix-vector products become reductions, everything else stays a library call."""

from __future__ import annotations

import pytest
import torch

from kvpass.graphs.decompose_linear import decompose_linear_pass
from kvpass.graphs.fx_utils import target_name
from numeric_checks import assert_close


def capture(module, x):
    """What the pass does to the graph of ``module(x)``: changed calls, calls of linear left, and the result."""
    seen = []

    def backend(gm, example_inputs):
        changed = decompose_linear_pass(gm)
        gm.graph.lint()
        gm.recompile()
        seen.append((changed, sum(target_name(node) == "linear" for node in gm.graph.nodes)))
        return gm.forward

    torch._dynamo.reset()
    with torch.no_grad():
        result = torch.compile(module, backend=backend, fullgraph=True)(x)
    return *seen[0], result


@pytest.mark.parametrize("bias", [True, False])
def test_one_row_becomes_a_reduction_with_the_same_result(bias):
    module = torch.nn.Sequential(torch.nn.Linear(24, 40, bias=bias), torch.nn.GELU(), torch.nn.Linear(40, 8, bias=bias))
    x = torch.randn(1, 1, 24)
    changed, left, result = capture(module, x)
    assert (changed, left) == (2, 0)
    assert_close("result", result, module(x), atol=1e-6)


@pytest.mark.parametrize("shape", [(2, 1, 24), (1, 3, 24), (24,)])
def test_only_a_single_row_is_changed(shape):
    changed, left, _ = capture(torch.nn.Linear(24, 40), torch.randn(shape))
    assert changed + left == 1 and changed == (shape == (24,))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_multiplied_and_added_in_fp32(dtype):
    module, x = torch.nn.Linear(512, 40).to(dtype), torch.randn(1, 1, 512).to(dtype)
    changed, left, result = capture(module, x)
    assert (changed, left) == (1, 0)
    assert result.dtype == dtype
    exact = torch.nn.functional.linear(x.double(), module.weight.double(), module.bias.double())
    torch.testing.assert_close(result, exact.to(dtype), rtol=torch.finfo(dtype).eps, atol=0)


def test_large_weights_keep_their_library_call():
    module = torch.nn.Sequential(torch.nn.Linear(64, 48, bias=False), torch.nn.Linear(48, 2**17, bias=False))
    changed, left, _ = capture(module, torch.randn(1, 1, 64))
    assert (changed, left) == (1, 1)
