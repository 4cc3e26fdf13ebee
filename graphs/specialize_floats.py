"""Let Dynamo capture again with floats as numbers where it made them symbolic.

``torch.compile(..., dynamic=True)`` makes every float attribute of a module an input of the graph::

    eps = l_self_eps.item()
    y = layer_norm(x, shape, weight, bias, eps)

A scale must be a number to be proved, and Inductor, which runs when Dynamo has gone, could not ask it to start again.
After the restart, which is Dynamo's own, the graph reads ``layer_norm(x, shape, weight, bias, 1e-05)``; another value
then is another capture, as it is without ``dynamic=True``.
"""

from __future__ import annotations

import torch
from torch._dynamo.exc import TensorifyScalarRestartAnalysis
from torch._dynamo.symbolic_convert import TensorifyState
from torch.fx import GraphModule
from torch.utils._sympy.symbol import SymT, symbol_is_type

from kvpass.graphs.fx_utils import recorded


def specialize_floats_pass(gm: GraphModule) -> int:
    """Change nothing, and return 0, when no float of the graph is symbolic.

    Raises:
        TensorifyScalarRestartAnalysis: to Dynamo, which captures again with numbers in their place.
    """
    floats = [value for node in gm.graph.nodes if isinstance(value := recorded(node), torch.SymFloat)]
    symbols = {symbol for value in floats for symbol in value.node.shape_env.backed_var_to_val}
    names = [str(symbol) for symbol in symbols if symbol_is_type(symbol, SymT.FLOAT)]
    new = [name for name in names if not TensorifyState.should_specialize(name)]
    for name in new:
        TensorifyState.specialize(name)
    if new:
        raise TensorifyScalarRestartAnalysis
    return 0
