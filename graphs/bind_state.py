"""Add the cache's state to a captured graph as placeholders, after those of Dynamo."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.symbolic_shapes import DimDynamic, StatelessSymbolicContext

from kvpass.graphs.fx_utils import Dim, argument_of, dim_of, is_module_tensor, recorded, source_of
from kvpass.torch_compat import FakeTensorMode, LazyGraphModule, LocalSource, TracingContext

STATE_PREFIX = "kvpass_"  # with which the names of the cache's state begin among the inputs of a graph


def copy_graph(gm: GraphModule) -> GraphModule:
    """Return a copy to rewrite; Dynamo reads the original again after the backend returns."""
    graph = Graph()
    copies: dict[Node, Node] = {}
    graph.output(graph.graph_copy(gm.graph, copies))
    for node, copied in copies.items():
        if node.op == "placeholder":
            copied._dynamo_source = source_of(node)
    result = LazyGraphModule(gm, graph)
    result.meta = dict(gm.meta)
    return result


def placeholders(gm: GraphModule) -> list[Node]:
    return [node for node in gm.graph.nodes if node.op == "placeholder"]


def held_by_module(gm: GraphModule) -> list[int]:
    """Return the indices of inputs that are parameters and buffers of the module."""
    return [place for place, node in enumerate(placeholders(gm)) if is_module_tensor(node)]


def ids_and_positions(gm: GraphModule) -> tuple[int | None, ...]:
    """Return the indices of the inputs that are ids and positions; None where the graph does not use them."""
    names = list(map(argument_of, placeholders(gm)))
    return tuple(names.index(name) if name in names else None for name in ("input_ids", "position_ids"))


def backend_mode() -> FakeTensorMode:
    context = TracingContext.try_get()
    if context is None or context.fake_mode is None:
        raise RuntimeError("the kvpass backend must be called by torch.compile, inside a Dynamo trace")
    return context.fake_mode


def fake_inputs(gm: GraphModule, example_inputs: Sequence[Any]) -> list[Any]:
    """Return the captured graph's inputs as fake tensors of :func:`backend_mode`, with its symbols.

    Call it inside the trace: Dynamo forgets afterwards which tensor sizes were symbols.
    """
    mode, symbolic = backend_mode(), TracingContext.get().tensor_to_context

    def fake(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        context = symbolic[value]
        return mode.from_tensor(value, symbolic_context=context, source=context.tensor_source)

    return [fake(value) for value in example_inputs]


def add_state_placeholders(
    gm: GraphModule, state: Mapping[str, Tensor], dynamic: Mapping[str, Set[int]], fake_mode: FakeTensorMode
) -> tuple[dict[str, Node], list[Tensor]]:
    """Append one placeholder per state tensor; return them by name, and the fake inputs to append to the graph's.

    Args:
        state: example tensors by name; the caller must pass them in this order.
        dynamic: dimensions of a tensor that may change between calls without recompiling (pool entries, tail
            capacity); all others are static.
    """
    nodes: dict[str, Node] = {}
    examples: list[Tensor] = []
    for name, tensor in state.items():
        source = LocalSource(f"{STATE_PREFIX}{name}")
        free = dynamic.get(name, ())
        sizes = [DimDynamic.DYNAMIC if dim in free else DimDynamic.STATIC for dim in range(tensor.ndim)]
        if any(tensor.shape[dim] == 1 for dim in free):  # would be a constant: a pool of one row for several
            tensor = tensor.new_empty([2 if dim in free else size for dim, size in enumerate(tensor.shape)])
        fake = fake_mode.from_tensor(
            tensor, source=source, symbolic_context=StatelessSymbolicContext(dynamic_sizes=sizes)
        )
        nodes[name] = append_input(gm, name, fake)
        examples.append(fake)
    return nodes, examples


def append_input(gm: GraphModule, name: str, example: Any) -> Node:
    """Append a placeholder for a state tensor of that name; returns it."""
    with gm.graph.inserting_after(placeholders(gm)[-1]):
        node = gm.graph.placeholder(f"{STATE_PREFIX}{name}")
    node.meta["example_value"] = example
    node._dynamo_source = LocalSource(f"{STATE_PREFIX}{name}")
    return node


def size_reader(gm: GraphModule, size: Dim) -> Callable[[Sequence[Any]], int]:
    """Return a function from the graph's inputs to the value of ``size`` in that call."""
    if isinstance(size, int):
        return lambda inputs: size
    for index, node in enumerate(placeholders(gm)):
        value = recorded(node)
        if isinstance(value, torch.SymInt) and dim_of(value) == size:
            return lambda inputs: int(inputs[index])
    raise ValueError(f"no input of the graph has the size {size}")
