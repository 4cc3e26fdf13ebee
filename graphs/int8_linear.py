"""Multiply with int8 weights of torchao as they are stored, one scale for each row, in decode steps on a CPU.

Before::

    y = linear(x, weight, bias)         # x bf16 [B, 1, in]; weight a tensor of torchao, which wraps qdata and scale

After::

    y = aten._weight_int8pack_mm(x.flatten(0, 1), weight.qdata, weight.scale.flatten()).unflatten(0, (-1, 1)) + bias

The operator reads a byte of a weight and adds in fp32. What torchao calls otherwise brings the weights to bf16 first.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from kvpass.graphs.fx_utils import arguments_of, recorded, replace_node
from kvpass.graphs.insert_nodes import insert_function

_LINEAR = torch.nn.functional.linear
_PRODUCT = torch.ops.aten._weight_int8pack_mm.default


def int8_parts(weight: Any) -> tuple[Tensor, Tensor] | None:
    """Return the integers ``[out, in]`` and the scales ``[out, 1]`` of a weight of torchao; None: it is another one."""
    integers, scales = getattr(weight, "qdata", None), getattr(weight, "scale", None)
    if not isinstance(integers, Tensor) or not isinstance(scales, Tensor) or integers.dtype != torch.int8:
        return None
    others = (getattr(weight, name, None) for name in ("act_quant_kwargs", "act_pre_scale"))
    by_row = integers.ndim == 2 and scales.shape == (len(integers), 1)
    return (integers, scales) if by_row and all(other is None for other in others) else None


def int8_linear_pass(gm: GraphModule) -> int:
    """Replace every eligible ``linear`` call of a decode step; return how many."""
    changed = 0
    for node in gm.graph.find_nodes(op="call_function", target=_LINEAR):
        x, weight, bias = arguments_of(node).values()
        value = recorded(x)
        if not isinstance(value, Tensor) or value.device.type != "cpu" or value.dtype != torch.bfloat16:
            continue
        inner = value.shape[1:-1]
        if int8_parts(recorded(weight)) is None or not all(isinstance(size, int) for size in inner):
            continue
        with gm.graph.inserting_before(node), value.fake_mode:  # type: ignore[attr-defined]
            integers, scales = (insert_function(node, getattr, weight, name) for name in ("qdata", "scale"))
            scales = insert_function(node, torch.ops.aten.to.dtype, scales, value.dtype)
            rows = insert_function(node, torch.flatten, x, 0, -2) if value.ndim > 2 else x
            product = insert_function(node, _PRODUCT, rows, integers, insert_function(node, torch.flatten, scales))
            if value.ndim > 2:
                product = insert_function(node, torch.unflatten, product, 0, (-1, *inner))
            if bias is not None:
                product = insert_function(node, torch.add, product, bias)
            replace_node(node, product)
        changed += 1
    return changed
