"""Compute products of 16-bit numbers in fp32, on CPUs that have no instructions for them.

Before::

    y = linear(x, weight, bias)                                             # bf16, several rows

After::

    y = linear(x.float(), weight.float(), bias.float()).to(bfloat16)

The library otherwise multiplies number by number, several times slower (docs/figures.md has seconds). The sums are
those of fp32 numbers, rounded once.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.fx import GraphModule

from kvpass.graphs.fx_utils import arguments_of, dim_of, recorded, replace_node
from kvpass.graphs.insert_nodes import insert_function
from kvpass.graphs.int8_linear import int8_parts

_TO = torch.ops.aten.to.dtype
_LINEAR = torch.nn.functional.linear


@functools.cache
def multiplies(dtype: torch.dtype) -> bool:
    """Return whether this machine's CPU has instructions for products of numbers of this dtype."""
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if dtype == torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return True


def widen_linear_pass(gm: GraphModule) -> int:
    """Replace every ``linear`` of several rows, on a CPU, whose dtype the CPU does not multiply; return how many."""
    changed = 0
    for node in gm.graph.find_nodes(op="call_function", target=_LINEAR):
        x, weight, bias = arguments_of(node).values()
        value, weights = recorded(x), recorded(weight)
        if not isinstance(value, Tensor) or value.device.type != "cpu" or multiplies(value.dtype):
            continue
        wraps_others = hasattr(weights, "__tensor_flatten__")
        if all(dim_of(size) == 1 for size in value.shape[:-1]) or (wraps_others and int8_parts(weights) is None):
            continue
        with gm.graph.inserting_before(node), value.fake_mode:  # type: ignore[attr-defined]
            # int8 weights of torchao take the dtype of what they are multiplied with
            wide = [
                insert_function(node, _TO, operand, torch.float32)
                for operand in (x, weight, bias)
                if operand is not None
            ]
            product = insert_function(node, _LINEAR, *wide)
            replace_node(node, insert_function(node, _TO, product, value.dtype))
        changed += 1
    return changed
