"""Split a rewritten graph at its operators on the cache into parts, of which equal ones are compiled once.

Before, in a decoder of L layers::

    x = embedding(ids); q, k, v = ...; out = kvpass.attend_cache(q, k, v, ...); x = x + linear(out); ...; logits = ...

After: L + 1 parts with the operators between them. All but the first and the last do the same to other parameters, so
three are compiled for any number of layers.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from kvpass.graphs.bind_state import placeholders
from kvpass.graphs.canonical import ABSORBED_QUERY, EXPANDED_OUTPUT
from kvpass.graphs.fx_utils import dim_of, is_scalar, mutated_inputs, recorded, storage_of, symbols_in, symbols_of


class CannotSplitError(ValueError):
    """A graph has no parts that could be called one after the other; the message says why."""


@dataclass(frozen=True)
class Part:
    """Nodes between two operators on the cache, as a graph of their own.

    Attributes:
        gm: the part, or an equal one; its output is a tuple. inputs, outputs: their nodes in the whole graph. key:
            equal for parts that differ only in the elements of their inputs.
    """

    gm: GraphModule
    inputs: tuple[Node, ...]
    outputs: tuple[Node, ...]
    key: Hashable

    @property
    def runs(self) -> bool:
        """Whether it has results or writes into its inputs; one that computes sizes that nothing reads does neither."""
        return bool(self.outputs) or any(map(mutated_inputs, self.gm.graph.nodes))


def is_cache_operator(node: Node) -> bool:
    """Whether a node is a ``kvpass::`` operator, and none that Inductor traces through."""
    traced = node.target in (ABSORBED_QUERY, EXPANDED_OUTPUT)
    return isinstance(node.target, torch._ops.OpOverload) and node.target.namespace == "kvpass" and not traced


def split_graph(gm: GraphModule) -> list[Part | Node]:
    """Return parts and single nodes in the order in which they run.

    Single nodes are operators on the cache, and what picks one of their outputs.

    Raises:
        CannotSplitError: a value that is neither a tensor nor a size is needed in two parts, or a part writes into
            memory that two of its inputs share.
    """
    pieces: list[Node | list[Node]] = []
    for node in gm.graph.nodes:
        if not node.op.startswith("call_"):
            continue
        picks = node.target is operator.getitem and is_cache_operator(node.args[0])
        if picks or is_cache_operator(node):
            pieces.append(node)
        elif pieces and isinstance(pieces[-1], list):
            pieces[-1].append(node)
        else:
            pieces.append([node])
    return make_parts(gm, pieces)


def make_parts(gm: GraphModule, pieces: Sequence[Node | list[Node]], given: Iterable[Node] = ()) -> list[Part | Node]:
    """Return a part for each list of nodes, and single nodes as they are.

    Args:
        pieces: all calls of the graph, in an order in which they can run. given: results that parts have besides those
            that others read.
    Raises:
        CannotSplitError: as :func:`split_graph`.
    """
    whole = [piece if isinstance(piece, Node) else _with_sizes(piece) for piece in pieces]
    sizes = {symbol: node for node in placeholders(gm) if is_scalar(node) for symbol in symbols_in(node)}
    inputs = [_inputs(piece, sizes) for piece in whole]
    read = set().union(*inputs, gm.graph.output_node().all_input_nodes, given)
    known: dict[Hashable, GraphModule] = {}
    return [
        piece if isinstance(piece, Node) else _part(piece, reads, [node for node in own if node in read], known)
        for piece, reads, own in zip(whole, inputs, map(_listed, pieces), strict=True)
    ]


def join(
    gm: GraphModule, pieces: Sequence[Part | Node], functions: Mapping[Hashable, Callable[..., Any]]
) -> GraphModule:
    """Return a graph of the whole in which each part is one call of its function.

    Args:
        gm: the graph that was split. functions: of the parts, by key; each returns a tuple.
    """
    graph, copies = Graph(), dict[Node, Node]()
    for node in gm.graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            copies[node] = graph.node_copy(node)
    for piece in pieces:
        if isinstance(piece, Node):
            copies[piece] = graph.node_copy(piece, copies.__getitem__)
            continue
        if not piece.runs:
            continue
        result = graph.call_function(functions[piece.key], tuple(copies[node] for node in piece.inputs))
        for place, node in enumerate(piece.outputs):
            copies[node] = graph.call_function(operator.getitem, (result, place))
    graph.output(map_arg(gm.graph.output_node().args[0], copies.__getitem__))
    return GraphModule(gm, graph)


def _listed(piece: Node | list[Node]) -> list[Node]:
    return [piece] if isinstance(piece, Node) else piece


def _with_sizes(nodes: list[Node]) -> list[Node]:
    """The nodes of a part, and before them those that compute sizes for it: only tensors pass between parts."""
    found = dict[Node, None]()

    def add(node: Node) -> None:
        for operand in node.all_input_nodes:
            if operand not in found and is_scalar(operand) and operand.op.startswith("call_"):
                add(operand)
        found[node] = None

    for node in nodes:
        add(node)
    return list(found)


def _inputs(piece: Node | list[Node], sizes: Mapping[Any, Node]) -> list[Node]:
    """What a part reads: the sizes that its tensors have, then tensors in the order in which they are read."""
    nodes = _listed(piece)
    own = set(nodes)
    read = dict.fromkeys(operand for node in nodes for operand in node.all_input_nodes if operand not in own)
    if isinstance(piece, Node):
        return list(read)
    tensors = [node for node in read if not is_scalar(node)]
    symbols = {symbol for node in tensors for symbol in symbols_of(_dims(recorded(node)))}
    named = [node for node in read if is_scalar(node)] + [node for symbol, node in sizes.items() if symbol in symbols]
    return [*dict.fromkeys(named), *tensors]


def _part(nodes: list[Node], inputs: list[Node], outputs: list[Node], known: dict[Hashable, GraphModule]) -> Part:
    """Return a part.

    Args:
        known: graphs of earlier parts by key, to which this one's is added.
    """
    for node in (*inputs, *outputs):
        if not isinstance(recorded(node), (Tensor, torch.SymInt)):
            raise CannotSplitError(f"{node.name}, a {type(recorded(node)).__name__}, is needed in two parts")
    held = Counter(storage_of(node) for node in inputs)
    for node in nodes:
        if any(held[storage_of(operand)] > 1 for operand in mutated_inputs(node)):
            raise CannotSplitError(f"{node.name} writes into memory that two tensors share, which other parts made")
    key = _key(nodes, inputs, outputs)
    if key not in known:
        graph, copies = Graph(), dict[Node, Node]()
        for place, node in enumerate(inputs):
            copies[node] = graph.placeholder(f"input_{place}")
            copies[node].meta["example_value"] = recorded(node)
        for node in nodes:
            copies[node] = graph.node_copy(node, copies.__getitem__)
        graph.output(tuple(copies[node] for node in outputs))
        known[key] = GraphModule(nn.Module(), graph)
    return Part(known[key], tuple(inputs), tuple(outputs), key)


def _key(nodes: Sequence[Node], inputs: Sequence[Node], outputs: Sequence[Node]) -> Hashable:
    """What a part does to its inputs, and what those are."""
    order = {node: place for place, node in enumerate((*inputs, *nodes))}

    def arguments(node: Node) -> str:
        return repr(map_arg((node.args, node.kwargs), lambda operand: f"%{order[operand]}"))

    calls = ((node.op, node.target, arguments(node)) for node in nodes)
    return *(_kind(recorded(node)) for node in inputs), *calls, *map(order.__getitem__, outputs)


def _kind(value: Any) -> Hashable:
    if not isinstance(value, Tensor):
        return str(value)
    return value.dtype, value.device, value.requires_grad, *map(str, _dims(value))


def _dims(value: Any) -> Iterable[Any]:
    return map(dim_of, (*value.shape, *value.stride())) if isinstance(value, Tensor) else ()
