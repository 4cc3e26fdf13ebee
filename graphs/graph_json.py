"""A canonical graph as plain JSON, and the graph again, for another process with the same model.

Values are not written: whoever reads the graph records them anew from its inputs. Of the inputs, ids, positions and
their sizes are known by name; all others must be tensors of the model, known by their path.
"""

from __future__ import annotations

import operator
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.symbolic_shapes import DimDynamic, StatelessSymbolicContext

from kvpass.graphs.bind_state import placeholders
from kvpass.graphs.canonical import POSITIONS_IN_KEYS
from kvpass.graphs.fx_utils import is_module_tensor, line_of, module_path_of, source_of
from kvpass.graphs.verify.graph_text import NAMESPACES, NoTextError, target_text
from kvpass.graphs.verify.offset_positions import COUNTED, MARK
from kvpass.torch_compat import (
    FakeTensorMode,
    LazyGraphModule,
    LocalSource,
    TensorProperty,
    TensorPropertySource,
    UnspecializedNNModuleSource,
)

_PLAIN = (bool, int, float, str, type(None))
_NAMED = (torch.dtype, torch.layout, torch.memory_format)


def graph_to_json(gm: GraphModule, paths: Mapping[int, str]) -> dict[str, Any]:
    """Return a canonical graph as plain JSON.

    Args:
        paths: of the parameters and buffers of the model, by the id of the tensor.
    Raises:
        NoTextError: something in it cannot be written.
    """
    place = {node: index for index, node in enumerate(gm.graph.nodes)}
    lines: dict[str, int] = {}
    nodes = []
    for node in place:
        marks = {name: node.meta[name] for name in (MARK, COUNTED, POSITIONS_IN_KEYS) if name in node.meta}
        target = [node.target, *_input(node, paths)] if node.op == "placeholder" else target_text(node)
        where = module_path_of(node), lines.setdefault(line_of(node), len(lines))
        nodes.append([node.op, node.name, target, _plain(node.args, place), _plain(node.kwargs, place), *where, marks])
    return {"nodes": nodes, "lines": list(lines)}


def graph_from_json(found: Mapping[str, Any], module: nn.Module) -> GraphModule:
    """Return the graph of :func:`graph_to_json`, without values; its inputs hold the tensors of ``module``.

    Its code is the same, also in names and types of parameters: by that Inductor's cache knows it.
    """
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    graph, nodes = Graph(), list[Node]()
    for op, name, target, args, kwargs, path, line, marks in found["nodes"]:
        given = _value(args, nodes), _value(kwargs, nodes)
        if op == "placeholder":
            parameter, kind, *named = target
            held = tensors[named[0]] if kind == "tensor" else None
            types = {"tensor": type(held), "given": Tensor, "size": torch.SymInt}
            node = graph.create_node(op, parameter, name=name, type_expr=types[kind])
            node._dynamo_source = _SOURCES[kind](*named)
            if held is not None:
                node.meta["grapharg"] = SimpleNamespace(example=held)
        elif op == "output":
            node = graph.output(*given[0])
        else:
            node = graph.create_node(op, _function(target) if op == "call_function" else target, *given, name=name)
        node.meta |= {mark: tuple(value) if isinstance(value, list) else value for mark, value in marks.items()}
        if path:
            node.meta["nn_module_stack"] = {"": (path, nn.Module)}
        if file_and_number := found["lines"][line]:
            file, _, number = file_and_number.rpartition(":")
            node.stack_trace = f'File "{file}", line {number}'
        nodes.append(node)
    return LazyGraphModule(nn.Module(), graph)


def inputs_of(gm: GraphModule, ids: Tensor, positions: Tensor) -> list[Any]:
    """Return what a call gives the graph of :func:`graph_from_json`.

    Args:
        ids: ``[B, T]``, or embeddings ``[B, T, D]``. positions: ``[B, T]``.
    """
    given = {"input_ids": ids, "inputs_embeds": ids, "position_ids": positions}

    def value(node: Node) -> Any:
        source: Any = source_of(node)
        if isinstance(source, LocalSource):
            return given[source.local_name]
        if isinstance(source, TensorPropertySource):
            return given[source.base.local_name].shape[source.idx]  # type: ignore[attr-defined, index]
        return node.meta["grapharg"].example

    return [value(node) for node in placeholders(gm)]


def fake_inputs_like(gm: GraphModule, ids: Tensor, mode: FakeTensorMode) -> list[Any]:
    """Return fake inputs of the graph of :func:`graph_from_json`, for any number of tokens, and of rows if several.

    Args:
        ids: an example, as in :func:`inputs_of`.
    """
    free = [DimDynamic.DYNAMIC if axis < 2 and size > 1 else DimDynamic.STATIC for axis, size in enumerate(ids.shape)]
    like: Any = StatelessSymbolicContext(dynamic_sizes=free)
    fake_ids = mode.from_tensor(ids, source=LocalSource("input_ids"), symbolic_context=like)
    with mode:
        positions = torch.empty(fake_ids.shape[:2], dtype=torch.int64, device=ids.device)

    def fake(node: Node, value: Any) -> Any:
        return mode.from_tensor(value, static_shapes=True, source=source_of(node)) if is_module_tensor(node) else value

    return [fake(node, value) for node, value in zip(placeholders(gm), inputs_of(gm, fake_ids, positions), strict=True)]


_SOURCES: dict[str, Callable[..., Any]] = {
    "tensor": lambda path: UnspecializedNNModuleSource(LocalSource(path)),
    "given": LocalSource,
    "size": lambda name, axis: TensorPropertySource(LocalSource(name), TensorProperty.SIZE, axis),
}
"""Where an input is found, by its kind."""


def _input(node: Node, paths: Mapping[int, str]) -> list[Any]:
    """Kind and name of an input."""
    source: Any = source_of(node)
    if is_module_tensor(node):
        path = paths.get(id(node.meta["grapharg"].example))
        if path is not None:
            return ["tensor", path]
    elif isinstance(source, LocalSource):
        return ["given", source.local_name]
    elif isinstance(source, TensorPropertySource) and source.prop is TensorProperty.SIZE:
        return ["size", source.base.local_name, source.idx]  # type: ignore[attr-defined]
    raise NoTextError(f"the input {node} is no tensor of the model by its path, no argument and no size of one")


def _function(name: str) -> Callable[..., Any]:
    """The function that :func:`target_text` names."""
    is_operator = name.split(".")[0] in NAMESPACES
    found: Callable[..., Any] = operator.attrgetter(name)(torch.ops) if is_operator else pkgutil.resolve_name(name)
    return found


def _plain(value: Any, place: Mapping[Node, int]) -> Any:
    """An argument as JSON; what JSON has not is a list of its kind and content."""
    if type(value) in _PLAIN:
        return value
    if isinstance(value, Node):
        return ["node", place[value]]
    if isinstance(value, Mapping):
        return ["dict", *([name, _plain(part, place)] for name, part in value.items())]
    if isinstance(value, slice):
        return ["slice", *(_plain(part, place) for part in (value.start, value.stop, value.step))]
    if isinstance(value, Sequence):
        return ["list" if isinstance(value, list) else "tuple", *(_plain(part, place) for part in value)]
    if value is ...:
        return ["..."]
    if isinstance(value, torch.device):
        return ["device", str(value)]
    if isinstance(value, _NAMED):
        return ["torch", str(value).removeprefix("torch.")]
    raise NoTextError(f"{type(value).__name__} cannot be written")


def _value(plain: Any, nodes: Sequence[Node]) -> Any:
    """The argument of :func:`_plain`."""
    if not isinstance(plain, list):
        return plain
    match plain:
        case ["node", place]:
            return nodes[place]
        case ["device", name]:
            return torch.device(name)
        case ["torch", name]:
            return getattr(torch, name)
        case ["..."]:
            return ...
        case ["dict", *pairs]:
            return {name: _value(part, nodes) for name, part in pairs}
        case [kind, *parts]:
            values = [_value(part, nodes) for part in parts]
            return slice(*values) if kind == "slice" else tuple(values) if kind == "tuple" else values
    raise ValueError(f"{plain} is no argument")
