"""Compute products of 16-bit numbers in fp32, on CPUs that have no instructions for them.

Before::

    y = linear(x, weight, bias)                                             # bf16, several rows

After::

    y = linear(x.float(), weight.float(), bias.float()).to(bfloat16)

The library otherwise multiplies number by number, several times slower (docs/figures.md has seconds). The sums are
those of fp32 numbers, rounded once. Where the weight is a tensor of torchao that wraps int8 numbers, only ``x`` and
``bias`` are converted: it computes in the dtype that it is multiplied with. Such products of one token a row are left
to Inductor, which calls ``aten._weight_int8pack_mm`` for them.
"""

from __future__ import annotations

import functools
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from kvpass.graphs.fx_utils import arguments_of, dim_of, recorded, replace_node
from kvpass.graphs.insert_nodes import insert_function
from kvpass.torch_compat import is_traceable_wrapper_subclass

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


def _is_int8(weight: Any) -> bool:
    """Return whether a weight is one of torchao with int8 numbers and a scale for each row, for plain activations."""
    integers, scales = getattr(weight, "qdata", None), getattr(weight, "scale", None)
    if not isinstance(integers, Tensor) or not isinstance(scales, Tensor) or integers.dtype != torch.int8:
        return False
    of_activations = (getattr(weight, name, None) for name in ("act_quant_kwargs", "act_pre_scale"))
    return scales.shape == (len(integers), 1) and all(other is None for other in of_activations)


def widen_linear_pass(gm: GraphModule) -> int:
    """Replace every ``linear`` of several rows, on a CPU, whose dtype the CPU does not multiply; return how many."""
    changed = 0
    for node in gm.graph.find_nodes(op="call_function", target=_LINEAR):
        x, weight, bias = arguments_of(node).values()
        value, weights = recorded(x), recorded(weight)
        if not isinstance(value, Tensor) or value.device.type != "cpu" or multiplies(value.dtype):
            continue
        wraps_others = is_traceable_wrapper_subclass(weights)
        rows = value.shape[1:-1] if wraps_others else value.shape[:-1]
        if all(dim_of(size) == 1 for size in rows) or (wraps_others and not _is_int8(weights)):
            continue
        with gm.graph.inserting_before(node), value.fake_mode:  # type: ignore[attr-defined]
            widen = partial(insert_function, node, _TO)
            wide = [widen(x, torch.float32), weight if wraps_others else widen(weight, torch.float32)]
            wide += [] if bias is None else [widen(bias, torch.float32)]
            product = insert_function(node, _LINEAR, *wide)
            replace_node(node, insert_function(node, _TO, product, value.dtype))
        changed += 1
    return changed
