"""Insert calls into a Dynamo graph, with the metadata that Dynamo records, and replace others."""

from __future__ import annotations

import operator
from typing import Any

from torch.fx import Node
from torch.fx.node import map_arg

from kvpass.graphs.canonical import SITE, SLOPES
from kvpass.graphs.fx_utils import recorded, refuse
from kvpass.graphs.verify.causal_mask import Band


def insert_method(operand: Node, name: str, *args: Any) -> Node:
    """Insert a tensor method call at the graph's insertion point, with its recorded result."""
    node = operand.graph.call_method(name, (operand, *args))
    node.meta = {**operand.meta, "example_value": getattr(recorded(operand), name)(*args)}
    return node


def insert_function(like: Node, target: Any, *args: Any, **kwargs: Any) -> Node:
    """Insert a function call at the graph's insertion point, with its recorded result.

    Module path and stack trace are those of ``like``. If arguments include sizes, the graph's fake mode must be active.
    """
    node = like.graph.call_function(target, args, kwargs)
    node.meta = {name: like.meta.get(name) for name in ("nn_module_stack", "stack_trace")}
    node.meta["example_value"] = target(*map_arg(args, recorded), **map_arg(kwargs, recorded))
    return node


def replace_output(node: Node, out: Node) -> None:
    """Replace a call by ``out``. The call returns its output, or a tuple with it first and the rest unused."""
    picks = [user for user in node.users if user.target is operator.getitem]
    if len(picks) != len(node.users):
        node.replace_all_uses_with(out)
    for user in picks:
        if user.args[1] == 0:
            user.replace_all_uses_with(out)
        elif user.users:
            raise refuse(node, f"{user.name} reads more of its result than the output")
        node.graph.erase_node(user)
    node.graph.erase_node(node)


def emit_site(call: Node, q: Node, k: Node, v: Node, scale: float, band: Band, softcap: float | None = None) -> Node:
    """Insert an attention op for ``call``, of ``[B, H, T, D]`` and ``[B, K, T, D]``; ``band`` is what the mask does."""
    site = insert_function(call, SITE, q, k, v, scale, band.window, softcap)
    site.meta[SLOPES] = band.slopes
    return site
