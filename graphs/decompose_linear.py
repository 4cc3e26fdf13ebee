"""Rewrite matrix-vector products of a decode step as reductions that Inductor fuses and vectorises.

Before::

    y = linear(x, weight, bias)             # one token: x is [1, 1, in], weight [out, in]

After::

    y = (x[..., None, :] * weight).sum(-1) + bias

A library call costs more than reading a small weight, and products of one layer fuse with each other and with nearby
operations. The library reads large weights faster, except on CPUs of AMD. Only for one row on the CPU: with more rows,
a product reads its weights once for all of them; a reduction does not. Of a weight of torchao with int8 numbers the
numbers are multiplied, and the sums by the scales: it is faster than ``aten._weight_int8pack_mm``.
"""

from __future__ import annotations

import functools
from pathlib import Path

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from kvpass.graphs.fx_utils import arguments_of, dim_of, recorded, replace_node
from kvpass.graphs.widen_linear import is_int8
from kvpass.torch_compat import force_stride_order, is_traceable_wrapper_subclass

_TO = torch.ops.aten.to.dtype
_LINEAR = torch.nn.functional.linear
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

LARGE_BYTES = 2**24
"""Weights from this size on stay products: on two cores of an Intel Xeon a reduction read 17 MB a quarter slower than a
product; on two of an AMD EPYC a product took twice as long."""

LONGEST_SUM = 4096
"""Inductor adds more numbers than these in a way that rounds less and takes twice as long."""


@functools.cache
def reads_large_weights_faster() -> bool:
    """Return whether the library does so on this machine's CPU: not on one of AMD, as Linux names it."""
    listing = Path("/proc/cpuinfo")
    return not (listing.is_file() and "AuthenticAMD" in listing.read_text())


def decompose_linear_pass(gm: GraphModule) -> int:
    """Replace every eligible ``linear`` call; return how many."""
    most = LARGE_BYTES if reads_large_weights_faster() else float("inf")
    changed = 0
    for node in gm.graph.find_nodes(op="call_function", target=_LINEAR):
        x, weight, bias = arguments_of(node).values()
        value, weights = recorded(x), recorded(weight)
        if not isinstance(value, Tensor) or value.dtype not in _DTYPES or value.device.type != "cpu":
            continue
        if any(size != 1 for size in map(dim_of, value.shape[:-1])):
            continue
        wraps_others = is_traceable_wrapper_subclass(weights)  # as torchao's: those have linear, but seldom mul
        if not is_int8(weights) and (wraps_others or weights.nbytes >= most):
            continue
        with gm.graph.inserting_before(node):
            total = _reduction(gm, x, weight, bias)
        total.meta = node.meta
        replace_node(node, total)
        changed += 1
    return changed


def _reduction(gm: GraphModule, x: Node, weight: Node, bias: Node | None) -> Node:
    """Insert the product as a reduction: computed in fp32, its result in the dtype of ``x``.

    A vector of 16 bits becomes a tensor in fp32 first: else Inductor converts it again for each row of the weight. It
    calls no methods: torch caches no compiled graph with methods of nodes that Dynamo did not make.
    """
    value, scales = recorded(x), None
    dtype, (outputs, inputs) = value.dtype, recorded(weight).shape
    if is_int8(recorded(weight)):
        scales, weight = (gm.graph.call_function(getattr, (weight, name)) for name in ("scale", "qdata"))
    if dtype != torch.float32 or scales is not None:
        x, weight = (gm.graph.call_function(_TO, (operand, torch.float32)) for operand in (x, weight))
        x = gm.graph.call_function(force_stride_order, (x, [*[inputs] * (value.ndim - 1), 1]))
    pieces = 1
    while inputs > LONGEST_SUM * pieces and inputs % (2 * pieces) == 0:
        pieces *= 2
    shape = (pieces, inputs // pieces)
    row = gm.graph.call_function(torch.reshape, (x, (*value.shape[:-1], 1, *shape)))
    weight = gm.graph.call_function(torch.reshape, (weight, (outputs, *shape)))
    total = gm.graph.call_function(torch.mul, (row, weight))
    for _ in shape:
        total = gm.graph.call_function(torch.sum, (total, -1))
    if scales is not None:
        total = gm.graph.call_function(torch.mul, (total, gm.graph.call_function(torch.flatten, (scales,))))
    if bias is not None:
        total = gm.graph.call_function(torch.add, (total, bias))
    return total if dtype == torch.float32 else gm.graph.call_function(_TO, (total, dtype))
