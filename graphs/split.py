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
    """Nodes between two operators on the cache, as a graph of their own."""

    gm: GraphModule  # the part, or an equal one; its output is a tuple
    inputs: tuple[Node, ...]  # in the whole graph
    outputs: tuple[Node, ...]
    key: Hashable  # equal for parts that differ only in the elements of their inputs

    @property
    def runs(self) -> bool:
        """Whether it has results or writes into its inputs; one that computes sizes that nothing reads does neither."""
        return bool(self.outputs) or any(map(mutated_inputs, self.gm.graph.nodes))


def cuts_graph(node: Node) -> bool:
    """Whether a node is called between compiled parts: a ``kvpass::`` operator that Inductor does not trace through."""
    traced = node.target in (ABSORBED_QUERY, EXPANDED_OUTPUT)
    return isinstance(node.target, torch._ops.OpOverload) and node.target.namespace == "kvpass" and not traced


def split_graph(gm: GraphModule) -> list[Part | Node]:
    """Return parts, and between them single nodes: operators on the cache, and what picks one of their outputs.

    Raises:
        CannotSplitError: a value that is neither a tensor nor a size is needed in two parts, or a part writes into
            memory that two of its inputs share.
    """
    pieces: list[Node | list[Node]] = []
    for node in gm.graph.nodes:
        if not node.op.startswith("call_"):
            continue
        picks = node.target is operator.getitem and cuts_graph(node.args[0])
        if picks or cuts_graph(node):
            pieces.append(node)
        elif pieces and isinstance(pieces[-1], list):
            pieces[-1].append(node)
        else:
            pieces.append([node])
    return make_parts(gm, pieces)


def make_parts(gm: GraphModule, pieces: Sequence[Node | list[Node]], results: Iterable[Node] = ()) -> list[Part | Node]:
    """Return a part for each list of nodes, and single nodes as they are; raise as :func:`split_graph`.

    Args:
        pieces: all calls of the graph, in an order in which they can run.
        results: of parts, besides those that other parts read.
    """
    with_sizes = [[piece] if isinstance(piece, Node) else _with_sizes(piece) for piece in pieces]
    sizes = {symbol: node for node in placeholders(gm) if is_scalar(node) for symbol in symbols_in(node)}
    inputs = [_inputs(nodes, sizes) for nodes in with_sizes]
    read = set().union(*inputs, gm.graph.output_node().all_input_nodes, results)
    graphs: dict[Hashable, GraphModule] = {}
    return [
        piece if isinstance(piece, Node) else _part(nodes, reads, [node for node in piece if node in read], graphs)
        for piece, nodes, reads in zip(pieces, with_sizes, inputs, strict=True)
    ]


def join(
    gm: GraphModule, pieces: Sequence[Part | Node], functions: Mapping[Hashable, Callable[..., Any]]
) -> GraphModule:
    """Return the graph that was split, with one call for each part: of its function by key, which returns a tuple."""
    graph, copies = Graph(), dict[Node, Node]()
    for node in gm.graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            copies[node] = graph.node_copy(node)
    for piece in pieces:
        if isinstance(piece, Node):
            copies[piece] = graph.node_copy(piece, copies.__getitem__)
        elif piece.runs:
            result = graph.call_function(functions[piece.key], tuple(copies[node] for node in piece.inputs))
            for place, node in enumerate(piece.outputs):
                copies[node] = graph.call_function(operator.getitem, (result, place))
    graph.output(map_arg(gm.graph.output_node().args[0], copies.__getitem__))
    return GraphModule(gm, graph)


def _with_sizes(nodes: list[Node]) -> list[Node]:
    """The nodes of a part, and before them those that compute sizes for it: only tensors pass between parts."""
    added = dict[Node, None]()

    def add(node: Node) -> None:
        for operand in node.all_input_nodes:
            if operand not in added and is_scalar(operand) and operand.op.startswith("call_"):
                add(operand)
        added[node] = None

    for node in nodes:
        add(node)
    return list(added)


def _inputs(nodes: list[Node], sizes: Mapping[Any, Node]) -> list[Node]:
    """What a part reads: the sizes that its tensors have, then tensors in the order in which they are read."""
    inside = set(nodes)
    read = dict.fromkeys(operand for node in nodes for operand in node.all_input_nodes if operand not in inside)
    tensors = [node for node in read if not is_scalar(node)]
    symbols = {symbol for node in tensors for symbol in symbols_of(_dims(recorded(node)))}
    named = [node for node in read if is_scalar(node)] + [node for symbol, node in sizes.items() if symbol in symbols]
    return [*dict.fromkeys(named), *tensors]


def _part(nodes: list[Node], inputs: list[Node], outputs: list[Node], graphs: dict[Hashable, GraphModule]) -> Part:
    """Return a part, and add its graph to those of earlier parts by key."""
    for node in (*inputs, *outputs):
        if not isinstance(recorded(node), (Tensor, torch.SymInt)):
            raise CannotSplitError(f"{node.name}, a {type(recorded(node)).__name__}, is needed in two parts")
    tensors_in = Counter(storage_of(node) for node in inputs)
    for node in nodes:
        if any(tensors_in[storage_of(operand)] > 1 for operand in mutated_inputs(node)):
            raise CannotSplitError(f"{node.name} writes into memory that two tensors share, which other parts made")
    key = _key(nodes, inputs, outputs)
    if key not in graphs:
        graph, copies = Graph(), dict[Node, Node]()
        for place, node in enumerate(inputs):
            copies[node] = graph.placeholder(f"input_{place}")
            copies[node].meta["example_value"] = recorded(node)
        for node in nodes:
            copies[node] = graph.node_copy(node, copies.__getitem__)
        graph.output(tuple(copies[node] for node in outputs))
        graphs[key] = GraphModule(nn.Module(), graph)
    return Part(graphs[key], tuple(inputs), tuple(outputs), key)


def _key(nodes: Sequence[Node], inputs: Sequence[Node], outputs: Sequence[Node]) -> Hashable:
    """What a part does to its inputs, and what those are."""
    order = {node: place for place, node in enumerate((*inputs, *nodes))}

    def arguments(node: Node) -> str:
        return repr(map_arg((node.args, node.kwargs), lambda operand: f"%{order[operand]}"))

    def form(value: Any) -> Hashable:
        if not isinstance(value, Tensor):
            return str(value)
        return value.dtype, value.device, value.requires_grad, *map(str, _dims(value))

    calls = ((node.op, node.target, arguments(node)) for node in nodes)
    return *(form(recorded(node)) for node in inputs), *calls, *map(order.__getitem__, outputs)


def _dims(value: Any) -> Iterable[Any]:
    return map(dim_of, (*value.shape, *value.stride())) if isinstance(value, Tensor) else ()
