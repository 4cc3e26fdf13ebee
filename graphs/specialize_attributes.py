"""Let what a module holds be numbers where Dynamo made symbols of it.

``torch.compile(..., dynamic=True)`` makes every float attribute of a module an input of the graph, and every size of a
tensor that is an attribute, but no parameter or buffer, a symbol::

    eps = l_self_eps.item()
    y = layer_norm(x, shape, weight, bias, eps)
    mask = l_self_causal_mask[:tokens, :tokens]     # [rows, columns], and the guard tokens <= rows

A scale must be a number to be proved, a table's end one to be known. Floats: Inductor, which runs when Dynamo has gone,
could not ask it to start again, so this does; after the restart, which is Dynamo's own, the graph reads
``layer_norm(x, shape, weight, bias, 1e-05)``. Sizes: they are guarded here. Either way another value is another
capture, as it is without ``dynamic=True``. What was computed from them is still a call (``0.35 * 1.0``), and becomes
its number here.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch._dynamo.exc import TensorifyScalarRestartAnalysis
from torch._dynamo.symbolic_convert import TensorifyState
from torch.fx import GraphModule, Node
from torch.utils._sympy.symbol import SymT, symbol_is_type

from kvpass.graphs.fx_utils import dim_of, is_module_tensor, recorded, shape_of, symbols_in, symbols_of


def specialize_attributes_pass(gm: GraphModule) -> int:
    """Replace numbers that are the same for every length and batch by themselves; returns how many calls went.

    Raises:
        TensorifyScalarRestartAnalysis: to Dynamo, which captures again with numbers in place of floats.
    """
    _restart_for_floats(gm)
    _guard_sizes(gm)
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


def _guard_sizes(gm: GraphModule) -> None:
    """Fix the sizes of a module's tensors, but for those that Dynamo takes for one with a size of an input."""
    inputs = gm.graph.find_nodes(op="placeholder")
    given = {
        symbol
        for node in inputs
        if not is_module_tensor(node)
        for symbol in symbols_in(node) | symbols_of(shape_of(node) or ())
    }
    for node in inputs:
        value = recorded(node)
        if is_module_tensor(node) and isinstance(value, Tensor):
            for size in value.shape:
                if isinstance(size, torch.SymInt) and symbols_of([dim_of(size)]).isdisjoint(given):
                    int(size)


def _number(node: Node) -> float | None:
    """The number that a node was recorded as a symbol of, None where it depends on one or is no number."""
    value = recorded(node)
    if not isinstance(value, (torch.SymInt, torch.SymFloat)) or value.node.expr.free_symbols:
        return None
    return int(value) if isinstance(value, torch.SymInt) else float(value)
