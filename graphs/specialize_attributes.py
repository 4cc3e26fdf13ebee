"""Replace symbols that Dynamo made of module attributes, and of arguments that are numbers, by numbers.

With ``torch.compile(..., dynamic=True)`` every float attribute of a module, and every argument that is a number, is an
input of the graph, and every size of a tensor attribute that is not a parameter or buffer is a symbol::

    eps = l_self_eps.item()
    y = layer_norm(x, shape, weight, bias, eps)
    mask = l_self_causal_mask[:tokens, :tokens]     # [rows, columns], and the guard tokens <= rows

The proofs need numbers for scales and for the ends of tables. Floats: this pass asks Dynamo to restart, which Inductor
cannot do, because it runs later. After the restart the graph has ``layer_norm(x, shape, weight, bias, 1e-05)``. Ints
and sizes: guards are added here. As without ``dynamic=True``, another value needs another capture. Constant results
that are still calls (``0.35 * 1.0``) are replaced by their numbers here.
"""

from __future__ import annotations

import sympy  # type: ignore[import-untyped]
import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from kvpass.graphs.fx_utils import dim_of, is_module_tensor, recorded, shape_of, source_of, symbols_in, symbols_of
from kvpass.torch_compat import (
    SymT,
    TensorifyScalarRestartAnalysis,
    TensorifyState,
    TensorPropertySource,
    symbol_is_type,
)


def specialize_attributes_pass(gm: GraphModule) -> int:
    """Replace calls whose number is always the same; return how many. It may make Dynamo capture again."""
    _restart_for_floats(gm)
    _guard_ints(gm)
    constants = [(node, number) for node in gm.graph.nodes if (number := _number(node)) is not None]
    calls = [node for node, _ in constants if node.op != "placeholder"]
    for node, number in constants:
        node.replace_all_uses_with(number)
    for node in reversed(calls):
        gm.graph.erase_node(node)
    return len(calls)


def _restart_for_floats(gm: GraphModule) -> None:
    floats = [value for node in gm.graph.nodes if isinstance(value := recorded(node), torch.SymFloat)]
    symbols = {symbol for value in floats for symbol in value.node.shape_env.backed_var_to_val}
    names = [str(symbol) for symbol in symbols if symbol_is_type(symbol, SymT.FLOAT)]
    new = [name for name in names if not TensorifyState.should_specialize(name)]
    for name in new:
        TensorifyState.specialize(name)
    if new:
        raise TensorifyScalarRestartAnalysis


def _guard_ints(gm: GraphModule) -> None:
    """Fix ints, and the sizes of a module's tensors, except those guarded as equal to an input's size."""
    inputs = gm.graph.find_nodes(op="placeholder")
    free: set[sympy.Symbol] = set()
    for node in inputs:
        if not is_module_tensor(node):
            is_size = isinstance(source_of(node), TensorPropertySource)
            free |= symbols_in(node) if is_size else symbols_of(shape_of(node) or ())
    for node in inputs:
        value = recorded(node)
        sizes = value.shape if is_module_tensor(node) and isinstance(value, Tensor) else [value]
        for size in sizes:
            if isinstance(size, torch.SymInt) and symbols_of([dim_of(size)]).isdisjoint(free):
                int(size)


def _number(node: Node) -> float | None:
    """Return the constant that a node is recorded as; None if it depends on a symbol or is no number."""
    value = recorded(node)
    if not isinstance(value, (torch.SymInt, torch.SymFloat)) or value.node.expr.free_symbols:
        return None
    return int(value) if isinstance(value, torch.SymInt) else float(value)
