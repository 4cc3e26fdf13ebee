"""Let a decoder that counts its own positions go on counting from the tokens a cache has seen.

Before::

    order = arange(T)
    x = embed(ids) + table[:T] + learned(order)

After, in extend and decode, ``seen`` being the tokens before this call::

    order = arange(T) + seen
    x = embed(ids) + table.index_select(0, arange(T) + seen) + learned(order)

Calls that make positions are found by their form: ``arange`` over the tokens, ``cumsum``, and a slice of as many rows
of a table as there are tokens. That the result is right is shown by ``self_check``, which marks them. Those that
``fold_alibi`` marks are its own.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from kvpass.graphs.canonical import batch_and_tokens
from kvpass.graphs.fx_utils import DataFlow, Dim, dim_of, mutated_inputs, recorded, shape_of, storage_of, target_name

MARK = "kvpass_positions"  # note of a node whose operands are positions; copies carry none
COUNTED = "kvpass_positions_counted"  # note of a node of how many of these count tokens, and not only their distances


def counts_positions(gm: GraphModule) -> bool:
    """Whether ``self_check`` found that the decoder counts its positions, in this graph or the one it is a copy of."""
    return any(node.meta.get(COUNTED, 0) for node in gm.graph.nodes)


def offset_positions_pass(gm: GraphModule, *, seen: Node) -> int:
    """Offset the marked positions by ``seen``, an int64 tensor without axes; return how many."""
    flow = DataFlow(gm)
    tokens = batch_and_tokens(gm)[1]
    done: dict[tuple[Node, ...], Node] = {}
    changed = 0
    for node in flow.nodes:
        operands = node.all_input_nodes
        for index in node.meta.pop(MARK, ()):
            sources = flow.sources([operands[index]], before=node)
            key = (operands[index], *sources)
            if key not in done:  # self_check showed that there is an offset
                done[key] = shift(sources, node, seen, tokens)[operands[index]]
            node.replace_input_with(operands[index], done[key])
            changed += 1
    return changed


def shift(sources: Sequence[Node], user: Node, seen: Node, tokens: Dim) -> dict[Node, Node]:
    """Copies of ``sources``, ahead of ``user``, that count from ``seen``; none if they write into a kept tensor."""
    inputs = {storage_of(node) for node in sources if node.op in ("placeholder", "get_attr")}
    if any(storage_of(target) in inputs for node in sources for target in mutated_inputs(node)):
        return {}
    copies: dict[Node, Node] = {}
    with user.graph.inserting_before(user):
        for node in sources:
            if node.op in ("placeholder", "get_attr"):
                continue
            copied = _shifted_slice(node, seen, tokens, copies)
            if copied is None:
                copied = node.graph.node_copy(node, lambda operand: copies.get(operand, operand))
                copied.meta.pop(MARK, None)
            copies[node] = copied
            if _is_counter(node, tokens):
                copies[node] = _shifted_counter(node, seen, copies)
            elif target_name(node) == "cumsum":
                copies[node] = _shifted_sum(node, seen, copies)
    return copies


def _with(like: Node, target: Any, args: tuple[Any, ...]) -> Node:
    node = like.graph.call_function(target, args)
    node.meta = dict(like.meta)
    return node


def _is_counter(node: Node, tokens: Dim) -> bool:
    """Whether the node is ``arange`` over the tokens, from some number in steps of 1."""
    if target_name(node) != "arange" or shape_of(node) != (tokens,):
        return False
    names = ("start", "end", "step") if len(node.args) > 1 else ("end",)
    arguments = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    return isinstance(arguments.get("start", 0), int) and bool(arguments.get("step", 1) == 1)


def _shifted_counter(node: Node, seen: Node, copies: dict[Node, Node]) -> Node:
    """A counter that goes on from ``seen``, rounded to its dtype once, as a longer one would be."""
    dtype = recorded(node).dtype
    if not dtype.is_floating_point or dtype.itemsize >= torch.float32.itemsize:
        return _with(node, torch.add, (copies[node], seen))
    copies[node].update_kwarg("dtype", torch.float32)
    later = _with(node, torch.add, (copies[node], seen))
    return _with(node, Tensor.to, (later, dtype))


def _shifted_sum(node: Node, seen: Node, copies: dict[Node, Node]) -> Node:
    """A running sum of equal numbers, which goes on from ``seen`` of them."""
    summed = node.args[0]
    dim = node.kwargs.get("dim", node.args[1] if len(node.args) > 1 else -1)
    assert isinstance(summed, Node)
    one = node.graph.call_method("narrow", (copies.get(summed, summed), dim, 0, 1))
    one.meta = dict(node.meta)
    return _with(node, torch.add, (copies[node], _with(node, torch.mul, (one, seen))))


def _shifted_slice(node: Node, seen: Node, tokens: Dim, copies: dict[Node, Node]) -> Node | None:
    """``table[a : a + T]``, ``seen`` rows further on; None for any other node."""
    picked_rows = _rows_of_tokens(node, tokens)
    if picked_rows is None:
        return None
    axis, bounds, rest = picked_rows
    table = node.args[0]
    assert isinstance(table, Node)
    rows = node.graph.call_function(torch.arange, bounds, {"device": recorded(table).device})
    rows.meta = {"nn_module_stack": node.meta.get("nn_module_stack")}
    rows = _with(rows, torch.add, (rows, seen))
    picked = _with(node, torch.index_select, (copies.get(table, table), axis, rows))
    return _with(node, operator.getitem, (picked, rest))


def _rows_of_tokens(node: Node, tokens: Dim) -> tuple[int, tuple[Any, Any], Any] | None:
    """Axis, first and end, and remaining index of a call that takes as many rows of a table as there are tokens."""
    table = node.args[0] if node.args else None
    shape = shape_of(table) if isinstance(table, Node) else None
    if shape is None or target_name(node) != "getitem":
        return None
    index = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
    if any(isinstance(part, (Node, Tensor)) for part in index):
        return None
    cuts = {place: _bounds(part, tokens) for place, part in enumerate(index) if isinstance(part, slice)}
    picks = {place: bounds for place, bounds in cuts.items() if bounds is not None}
    if len(picks) != 1:
        return None
    ((place, bounds),) = picks.items()
    axis = _axis(index, place, len(shape))
    if shape[axis] == tokens:
        return None
    return axis, bounds, (*index[:place], slice(None), *index[place + 1 :])


def _bounds(cut: slice, tokens: Dim) -> tuple[int, Any] | None:
    """First and end of a slice of as many rows as there are tokens, None of any other."""
    first, end = cut.start or 0, recorded(cut.stop) if isinstance(cut.stop, Node) else cut.stop
    if not isinstance(first, int) or first < 0 or cut.step not in (None, 1) or isinstance(end, bool):
        return None
    return (first, cut.stop) if isinstance(end, int | torch.SymInt) and dim_of(end) == tokens + first else None


def _axis(index: tuple[Any, ...], place: int, ndim: int) -> int:
    """Axis of the tensor that entry ``place`` of an index speaks of."""
    taken = [part for part in index if part is not None and part is not Ellipsis]
    axis = sum(part is not None and part is not Ellipsis for part in index[:place])
    return axis + ndim - len(taken) if Ellipsis in index[:place] else axis
