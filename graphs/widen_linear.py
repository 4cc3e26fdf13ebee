"""Choose the dtype of products of several rows on a CPU: fp32 where it has no instructions for 16 bits.

Before::

    y = linear(x, weight, bias)                                             # bf16, several rows

After::

    y = linear(x.float(), weight.float(), bias.float()).to(bfloat16)

The library otherwise multiplies number by number, several times slower (docs/results.md has seconds). The sums are
those of fp32 numbers, rounded once. Where the weight is a tensor of torchao that wraps int8 numbers, these are
converted, also to 16 bits, and the products multiplied by the scales in fp32::

    y = (linear(x, weight.qdata.to(bfloat16)).float() * weight.scale.flatten() + bias).to(bfloat16)

Inductor otherwise calls ``aten._weight_int8pack_mm``, which takes twice as long for the rows of a prompt. Such products
of one token a row are left to it.
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


def is_int8(weight: Any) -> bool:
    """Return whether a weight is one of torchao with int8 numbers and a scale for each row, for plain activations."""
    integers, scales = getattr(weight, "qdata", None), getattr(weight, "scale", None)
    if not isinstance(integers, Tensor) or not isinstance(scales, Tensor) or integers.dtype != torch.int8:
        return False
    of_activations = (getattr(weight, name, None) for name in ("act_quant_kwargs", "act_pre_scale"))
    return scales.shape == (len(integers), 1) and all(other is None for other in of_activations)


def widen_linear_pass(gm: GraphModule) -> int:
    """Replace each ``linear`` of several rows, on a CPU, of int8 or a dtype that it does not multiply; count them."""
    changed = 0
    for node in gm.graph.find_nodes(op="call_function", target=_LINEAR):
        x, weight, bias = arguments_of(node).values()
        value, weights = recorded(x), recorded(weight)
        if not isinstance(value, Tensor) or value.device.type != "cpu":
            continue
        dtype, in_int8 = value.dtype if multiplies(value.dtype) else torch.float32, is_int8(weights)
        if not in_int8 and (dtype == value.dtype or is_traceable_wrapper_subclass(weights)):
            continue
        rows = value.shape[1:-1] if in_int8 else value.shape[:-1]
        if all(dim_of(size) == 1 for size in rows):
            continue
        with gm.graph.inserting_before(node), value.fake_mode:  # type: ignore[attr-defined]
            insert = partial(insert_function, node)
            numbers = insert(getattr, weight, "qdata") if in_int8 else weight
            product = insert(_LINEAR, insert(_TO, x, dtype), insert(_TO, numbers, dtype))
            if in_int8 or bias is not None:
                product = insert(_TO, product, torch.float32)
            if in_int8:
                product = insert(torch.mul, product, insert(torch.flatten, insert(getattr, weight, "scale")))
            if bias is not None:
                product = insert(torch.add, product, bias)
            replace_node(node, insert(_TO, product, value.dtype))
        changed += 1
    return changed
