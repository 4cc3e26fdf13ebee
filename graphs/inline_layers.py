"""Write out layers that Dynamo traced once: one graph that is called for each of them.

Before, ``subgraph_0`` being the graph of the first layer, traced with its weights as inputs::

    out_0 = invoke_subgraph(subgraph_0, "subgraph_0", s0, x, layers_0_weight)[0]
    out_1 = invoke_subgraph(subgraph_0, "subgraph_0", s0, out_0, layers_1_weight)[0]

After ``inline_layers_pass`` the calls of ``subgraph_0`` stand there twice, each with its module's path and its values.
What a check shows of one of them it shows of all that have the same graph and differ in weights only:
:class:`DistinctLayers` has the graph with one of each.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Collection, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from kvpass.graphs.bind_state import copy_graph
from kvpass.graphs.fx_utils import is_module_tensor, recorded
from kvpass.graphs.record_values import record_values
from kvpass.torch_compat import FakeTensorMode

_INVOKE = torch.ops.higher_order.invoke_subgraph


def inline_layers_pass(
    gm: GraphModule, *, inputs: Sequence[Any], mode: FakeTensorMode, known: dict[Hashable, Any]
) -> int:
    """Put the graph of each called layer in place of the call, with values of fake ``inputs``; return how many.

    Args:
        known: values of calls that were recorded of another graph; those of this one are added.
    """
    calls = _calls(gm)
    traced: dict[Any, str] = {}  # path of the layer that a graph was traced for
    for call in calls:
        _inline(gm, call, traced.setdefault(call.args[1], _path(call)))
    if calls:
        record_values(gm, inputs, mode, known)
    return len(calls)


class DistinctLayers:
    """A copy ``gm`` of a graph, as Dynamo captured it, without layers that another one stands for."""

    def __init__(self, gm: GraphModule) -> None:
        self.gm = copy_graph(gm)
        self.like = dict[str, str]()  # paths of layers that are left out, each with that of the one that stands for it
        kept: list[Node] = []
        for call in _calls(self.gm):
            alike = next((other for other in kept if _are_alike(call, other)), None)
            if alike is None:
                kept.append(call)
                continue
            self.like[_path(call)] = _path(alike)
            with self.gm.graph.inserting_after(alike):
                _replace_results(call, lambda index, alike=alike: _result(alike, index))

    def copy_meta(self, gm: GraphModule, names: Collection[str]) -> None:
        """Give the calls of the whole graph what those of the copy have, after the same passes over both."""
        of_copy, places = dict(self._places(self.gm)), dict(self._places(gm))
        for (path, place), node in places.items():
            layer = next((layer for layer in self.like if path == layer or path.startswith(f"{layer}.")), None)
            alike = of_copy[path if layer is None else path.replace(layer, self.like[layer], 1), place]
            if alike.target != node.target:
                raise AssertionError(f"{node.name} of a layer is {alike.name} in another one like it")
            node.meta |= {name: alike.meta[name] for name in names if name in alike.meta}

    @staticmethod
    def _places(gm: GraphModule) -> Any:
        """Yield each node that computes, by the path of its module and its number among those of that module."""
        count: Counter[str] = Counter()
        for node in gm.graph.nodes:
            if node.op.startswith("call_"):
                path = _path(node) if node.meta.get("nn_module_stack") else ""
                yield (path, count[path]), node
                count[path] += 1


def distinct_layers(gm: GraphModule) -> DistinctLayers | None:
    """Return a graph's distinct layers, as Dynamo captured it; None if it repeats none."""
    return DistinctLayers(gm) if _calls(gm) else None


def _calls(gm: GraphModule) -> list[Node]:
    return gm.graph.find_nodes(op="call_function", target=_INVOKE)


def _are_alike(call: Node, other: Node) -> bool:
    """Whether two layers have one graph and the same inputs, but for weights of several floats and others' outputs."""

    def may_differ(x: Any, y: Any) -> bool:
        if not all(isinstance(recorded(node), Tensor) and recorded(node).is_floating_point() for node in (x, y)):
            return False
        is_output = x.target is operator.getitem and x.args[0].target is _INVOKE
        return is_output or all(is_module_tensor(node) and recorded(node).numel() > 1 for node in (x, y))

    pairs = zip(call.args[2:], other.args[2:], strict=True)
    return call.args[1] == other.args[1] and all(x is y or may_differ(x, y) for x, y in pairs)


def _inline(gm: GraphModule, call: Node, traced: str) -> None:
    """Copy the nodes of a layer's graph before its call, and let them replace the call."""
    body, _, *operands = call.args
    assert isinstance(body, Node)
    layer = gm.get_submodule(str(body.target))
    assert isinstance(layer, GraphModule)
    copies: dict[Node, Any] = dict(zip(layer.graph.find_nodes(op="placeholder"), operands, strict=True))
    path = _path(call)
    for node in layer.graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        with gm.graph.inserting_before(call):
            copies[node] = copied = gm.graph.node_copy(node, copies.__getitem__)
        if node.op == "get_attr":
            copied.target = f"{body.target}.{node.target}"
        stack = node.meta.get("nn_module_stack") or {}
        copied.meta["nn_module_stack"] = {
            key: (str(of_node).replace(traced, path, 1), module) for key, (of_node, module) in stack.items()
        }
    results: Any = layer.graph.output_node().args[0]
    _replace_results(call, lambda index: copies[results[index]])


def _replace_results(call: Node, result: Any) -> None:
    """Replace what is read of a call by ``result(index)``, and remove it."""
    for pick in list(call.users):
        assert pick.target is operator.getitem
        pick.replace_all_uses_with(result(pick.args[1]))
        call.graph.erase_node(pick)
    call.graph.erase_node(call)


def _result(call: Node, index: Any) -> Node:
    """A node that reads a result of a call."""
    picks = (pick for pick in call.users if pick.args[1] == index)
    return next(picks, None) or call.graph.call_function(operator.getitem, (call, index))


def _path(node: Node) -> str:
    return str(list(node.meta["nn_module_stack"].values())[-1][0])
