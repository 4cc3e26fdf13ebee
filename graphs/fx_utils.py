"""Read a Dynamo graph: symbolic shapes, data flow including in-place writes, numbers in calls.

Nothing here adds a guard: symbolic sizes are compared as expressions, never turned into ints.
"""

from __future__ import annotations

import inspect
import operator
import os
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any, TypeAlias

import sympy  # type: ignore[import-untyped]
import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import free_symbols
from torch.fx.node import map_aggregate, map_arg
from torch.fx.operator_schemas import normalize_function
from torch.nn.functional import embedding

from kvpass.errors import UnsupportedAttentionError
from kvpass.torch_compat import (
    FakeTensor,
    LocalSource,
    TensorProperty,
    TensorPropertySource,
    get_unwrapped,
    is_functorch_wrapped_tensor,
)

Dim: TypeAlias = int | sympy.Expr  # a size: an int, or an expression over the symbols of the capture

_SCALAR = (bool, int, float, torch.SymInt, torch.SymFloat, torch.SymBool)

_SIZES = set(
    "view reshape expand unflatten flatten permute transpose unsqueeze squeeze ones zeros empty new_ones "
    "new_zeros new_empty repeat broadcast_to size softmax pad".split()
)
"""Calls whose ints are sizes and axes."""

_PLACES = set("getitem narrow select split chunk arange range linspace tile repeat_interleave eye as_strided".split())
"""Other calls whose ints, given at run time, are sizes and indices."""

_FILLED = {"full": 1, "new_full": 2, "full_like": 1}
"""Calls that fill a tensor, and the argument index of the fill value; their other ints are sizes."""

MATMULS = {"matmul", "__matmul__", "bmm", "mm", "einsum"}  # names of products of two tensors
SOFTMAX = {"softmax", "_softmax", "_safe_softmax"}  # names of softmax as function, method and operator
_TORCH = f"{Path(torch.__file__).parent}{os.sep}"
_FRAME = re.compile(r'File "([^"]+)", line (\d+)')

_SHAPE_OF_FIRST = re.compile(r"(new_(ones|zeros|full|empty)|(ones|zeros|full|empty|rand|randn)_like)")
_SHAPE_OF_SECOND = {"type_as", "to", "expand_as", "view_as", "reshape_as"}
_INPLACE_OPERATORS = {
    getattr(operator, name)
    for name in "iadd iand ifloordiv ilshift imatmul imod imul ior ipow irshift isub itruediv ixor".split()
}

_INDICES = {torch.int32, torch.int64}
_SAME_VALUES = set("view reshape flatten unsqueeze squeeze expand contiguous to long int clone detach".split())

_OF_MODULES = {"self", "_modules", "_parameters", "_buffers", "__dict__"}


def module_path_of(node: Node) -> str:
    """Return the path of the module that made the node, ``model.layers.0.self_attn``; "" if not recorded."""
    stack = node.meta.get("nn_module_stack")
    return dotted(str(list(stack.values())[-1][0])) if stack else ""


def dotted(source: str) -> str:
    """Convert a Dynamo source, ``L['self']._modules['norm'].eps``, to a dotted path: ``norm.eps``."""
    path = re.sub(r"\[['\"]?([^\]'\"]*)['\"]?\]", r".\1", source.removeprefix("L").removeprefix("G"))
    parts = [part for part in path.split(".") if part and part not in _OF_MODULES]
    if "__self__" in parts:  # a bound method was traced: its name precedes its module
        parts = parts[parts.index("__self__") + 1 :]
    return ".".join(parts)


def refuse(node: Node, reason: str) -> UnsupportedAttentionError:
    """Return the error for an unsupported node, with the innermost ``file:line`` outside torch that made it."""
    frames = _FRAME.findall(node.stack_trace or "")
    outside = [(file, line) for file, line in frames if not file.startswith(_TORCH)]
    line = ":".join((outside or frames)[-1]) if frames else ""
    return UnsupportedAttentionError(module_path_of(node), node.name, reason, line)


def target_name(node: Node) -> str:
    """Return the bare name of what the node calls: ``softmax`` for function, method and aten operator."""
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return target.overloadpacket.__name__
    return target if isinstance(target, str) else str(getattr(target, "__name__", target))


def arguments_of(node: Node) -> dict[str, Any]:
    """Return all arguments of a call of a function by name, with defaults."""
    assert callable(node.target)
    arguments = normalize_function(node.target, node.args, node.kwargs, normalize_to_only_use_kwargs=True)
    if arguments is None:
        raise refuse(node, f"its arguments are not those of {target_name(node)}")
    return dict(arguments.kwargs)


def recorded(node: Node) -> Any:
    """Return the recorded result: a fake tensor, a symbol, a tuple of them; None if there is none."""
    meta = node.meta
    return meta["example_value"] if "example_value" in meta else meta.get("val")


def is_scalar(node: Node) -> bool:
    """Return whether the node holds only sizes: a number, a symbol or a tuple of them."""
    value = recorded(node)
    if isinstance(value, (tuple, list)):
        return len(value) > 0 and all(isinstance(part, _SCALAR) for part in value)
    return isinstance(value, _SCALAR)


def dim_of(size: int | torch.SymInt) -> Dim:
    """Return the size as an int or expression, without guarding on it."""
    if isinstance(size, int):
        return size
    expr = size.node.expr
    return int(expr) if expr.is_Integer else expr


def shape_of(node: Node) -> tuple[Dim, ...] | None:
    """Return the shape of the node's tensor, or None when it holds none."""
    value = recorded(node)
    return tuple(dim_of(size) for size in value.shape) if isinstance(value, Tensor) else None


def symbols_of(dims: Iterable[Dim]) -> set[sympy.Symbol]:
    return {symbol for dim in dims if isinstance(dim, sympy.Expr) for symbol in dim.free_symbols}


def symbols_in(node: Node) -> set[sympy.Symbol]:
    """Return the symbols that a node's numbers depend on; sizes of tensors do not count."""
    return set(free_symbols(recorded(node))) if is_scalar(node) else set()


def numbers_in(value: Any, symbols: Collection[sympy.Symbol]) -> set[float]:
    """Return numbers in sizes of a recorded value that depend on the symbols, except factors of the symbols."""
    if isinstance(value, (tuple, list)):
        return {number for part in value for number in numbers_in(part, symbols)}
    if isinstance(value, Tensor):
        return numbers_in(tuple(value.shape), symbols)
    if not isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return set()
    expr = value.node.expr
    parts = sympy.preorder_traversal(expr) if expr.free_symbols & set(symbols) else ()
    terms = [part for part in parts if not isinstance(part, sympy.Mul)]
    return {float(number) for part in terms for number in part.args if number.is_Number and number.is_finite}


def is_integral(node: Node) -> bool:
    """Return whether the node's tensor has an integer or bool dtype."""
    value = recorded(node)
    return isinstance(value, Tensor) and not value.dtype.is_floating_point and not value.dtype.is_complex


def source_of(node: Node) -> Any:
    """Return the ``Source`` where Dynamo finds an input: the same place in every capture of a module; else None."""
    return getattr(node, "_dynamo_source", None)


def argument_of(node: Node) -> str:
    """Return the name of the argument of the captured call that an input is; "" for any other input."""
    source = source_of(node)
    return source.local_name if isinstance(source, LocalSource) else ""


def is_module_tensor(node: Node) -> bool:
    """Return whether the node is a parameter, buffer or tensor attribute of a module."""
    if node.op == "get_attr":
        return True
    source = source_of(node)
    if node.op != "placeholder" or source is None:
        return False
    guard = source.guard_source
    return guard.is_specialized_nn_module() or guard.is_unspecialized_nn_module()


def module_tensor(node: Node) -> Tensor | None:
    """Return the real tensor of :func:`is_module_tensor` while Dynamo holds it; None if not available."""
    if node.op == "get_attr":
        value = operator.attrgetter(str(node.target))(node.graph.owning_module)
    else:
        graph_arg = node.meta.get("grapharg")
        value = None if graph_arg is None else graph_arg.example
    reachable = isinstance(value, Tensor) and not isinstance(value, FakeTensor) and not value.is_meta
    return value if reachable else None


def shape_only_inputs(node: Node) -> set[Node]:
    """Return operands of which only shape, dtype and device are read: of ``ones_like``, ``type_as``..."""
    name = target_name(node)
    if _SHAPE_OF_FIRST.fullmatch(name):
        operands = node.args[:1]
    elif name in _SHAPE_OF_SECOND:
        operands = node.args[1:2]
    else:
        return set()
    return {operand for operand in operands if isinstance(operand, Node)}


def value_inputs(node: Node) -> list[Node]:
    """Return operands whose elements the node reads."""
    ignored = shape_only_inputs(node)
    return [operand for operand in node.all_input_nodes if operand not in ignored and not is_scalar(operand)]


def mutated_inputs(node: Node) -> list[Node]:
    target, name = node.target, target_name(node)
    if isinstance(target, torch._ops.OpOverload):
        arguments = target._schema.arguments
        by_name = {**dict(zip([a.name for a in arguments], node.args, strict=False)), **node.kwargs}
        written = [by_name.get(a.name) for a in arguments if a.alias_info is not None and a.alias_info.is_write]
    elif node.op == "call_function" and name == "setitem":
        written = [node.args[0]]
    elif node.op in ("call_function", "call_method"):
        named = name.endswith("_") and not name.endswith("__")
        in_place = named and getattr(target, "__module__", None) != "_operator"  # and_, not_
        in_place |= target in _INPLACE_OPERATORS
        written = [node.args[0] if node.args else None] if in_place or _inplace_flag(node) else []
        written.append(node.kwargs.get("out"))
    else:
        return []
    operands: list[Node] = []
    map_arg(written, operands.append)
    return [operand for operand in operands if not is_scalar(operand)]


def _inplace_flag(node: Node) -> bool:
    """Return whether ``inplace=True`` was passed to a function of ``torch.nn.functional``."""
    if "inplace" in node.kwargs:
        return node.kwargs["inplace"] is not False
    if not inspect.isfunction(node.target) or node.target.__module__ != "torch.nn.functional":
        return False
    parameters = list(inspect.signature(node.target).parameters)
    position = parameters.index("inplace") if "inplace" in parameters else len(node.args)
    return position < len(node.args) and node.args[position] is not False


class DataFlow:
    """Dependencies between nodes, with writes into shared storage; a snapshot, to be made anew after edits."""

    def __init__(self, gm: GraphModule) -> None:
        self.gm = gm
        self.nodes: list[Node] = list(gm.graph.nodes)
        self.order = {node: index for index, node in enumerate(self.nodes)}
        self.writers: dict[object, list[Node]] = defaultdict(list)
        for node in self.nodes:
            for operand in mutated_inputs(node):
                self.writers[storage_of(operand)].append(node)

    def writes_to(self, node: Node, before: Node | None = None) -> list[Node]:
        """Return nodes that write into the storage of ``node``, only those before ``before``."""
        writers = self.writers.get(storage_of(node), [])
        return [writer for writer in writers if before is None or self.order[writer] < self.order[before]]

    def sources(
        self, targets: Collection[Node], *, before: Node | None = None, stop: Collection[Node] = ()
    ) -> list[Node]:
        """Return ``targets`` and all nodes whose elements reach them, in execution order.

        Writes at or after ``before`` do not count. Nodes of ``stop`` are included, but not their inputs.
        """
        return self._in_order(targets, value_inputs, before, stop)

    def needed(self, targets: Collection[Node], *, stop: Collection[Node] = ()) -> list[Node]:
        """Return ``targets`` and every node they need to run, sizes included; ``stop`` as for :meth:`sources`."""
        return self._in_order(targets, lambda node: node.all_input_nodes, None, stop)

    def _in_order(
        self, targets: Collection[Node], inputs: Callable[[Node], list[Node]], before: Node | None, stop: Any
    ) -> list[Node]:
        def reads(node: Node) -> list[Node]:
            return [] if node in stop else [*inputs(node), *self.writes_to(node, before)]

        return sorted(reached(targets, reads), key=self.order.__getitem__)


def reached(targets: Iterable[Node], inputs: Callable[[Node], Iterable[Node]]) -> set[Node]:
    """Return ``targets`` and all nodes to which ``inputs`` of a node leads from them."""
    nodes: set[Node] = set()
    stack = list(targets)
    while stack:
        node = stack.pop()
        if node not in nodes:
            nodes.add(node)
            stack.extend(inputs(node))
    return nodes


def made_of(nodes: Iterable[Node], is_source: Callable[[Node], bool]) -> set[Node]:
    """Return those of the nodes, in execution order, that are a source or whose elements come from one."""
    made: set[Node] = set()
    for node in nodes:
        if is_source(node) or not made.isdisjoint(value_inputs(node)):
            made.add(node)
    return made


def through(node: Node, names: Collection[str]) -> Node:
    """Return the node before all calls of these names, which read one tensor."""
    while node.op in ("call_method", "call_function") and target_name(node) in names:
        node = node.all_input_nodes[0]
    return node


def lookup_of(node: Node) -> tuple[int, Node] | None:
    """Return the rows of a table of constant size and what picks from them: by embedding, getitem or index_select."""
    name, args = target_name(node), node.args
    if node.target is embedding and len(args) >= 2:
        index, table = args[:2]
    elif name == "index_select" and len(args) == 3 and args[1] == 0:
        table, _, index = args
    elif name == "getitem" and len(args) == 2:
        table, index = args
    else:
        return None
    if not isinstance(table, Node) or not isinstance(index, Node) or shape_of(index) is None:
        return None
    rows = (shape_of(table) or (None,))[0]
    return (rows, through(index, _SAME_VALUES)) if isinstance(rows, int) and recorded(index).dtype in _INDICES else None


def storage_of(node: Node) -> object:
    """Return a key of the storage of a node's tensor; views share it. Unknown tensors have their own."""
    value = recorded(node)
    while isinstance(value, Tensor) and is_functorch_wrapped_tensor(value):
        value = get_unwrapped(value)
    return value.untyped_storage()._cdata if isinstance(value, Tensor) else node


def literals_of(nodes: Iterable[Node], *, floats: bool = False) -> set[Any]:
    """Return ints, or also floats, in calls, slices and fill values, except mere sizes and axes."""
    values: list[Any] = []
    for node in nodes:
        if node.op.startswith("call_") and target_name(node) not in _SIZES:
            fills = fills_of(node)
            map_aggregate((node.args, node.kwargs) if fills is None else fills, values.append)
    numbers = (int, float) if floats else int
    return {value for value in values if isinstance(value, numbers) and not isinstance(value, bool)}


def fills_of(node: Node) -> list[Any] | None:
    """Return the fill values of a call such as ``full``; None for a call that fills no tensor."""
    place = _FILLED.get(target_name(node))
    return None if place is None else [*node.args[place : place + 1], node.kwargs.get("fill_value")]


def numbers_given(node: Node) -> list[Node]:
    """Return operands that a call uses as numbers, not as sizes, axes or indices."""
    if target_name(node) in _SIZES | _PLACES:
        return []
    fills = fills_of(node) if target_name(node) != "setitem" else [node.args[2]]
    operands = node.all_input_nodes if fills is None else fills
    return [number for number in operands if isinstance(number, Node) and is_scalar(number)]


def replace_node(node: Node, other: Node) -> None:
    node.replace_all_uses_with(other)
    node.graph.erase_node(node)


def erase_dead_nodes(gm: GraphModule, among: Iterable[Node]) -> int:
    """Erase calls in ``among`` that do not affect the output or the inputs; return how many.

    ``Graph.eliminate_dead_code`` is not used: it drops in-place methods with unused results although their operand is
    used, and keeps item assignments to unused tensors.
    """
    flow = DataFlow(gm)
    inputs = {storage_of(node) for node in flow.nodes if node.op in ("placeholder", "get_attr")}
    candidates = set(among)
    roots = []
    for node in flow.nodes:
        written = mutated_inputs(node)
        if node not in candidates:
            roots.append(node)
        elif written:
            roots.extend([node] if any(storage_of(operand) in inputs for operand in written) else [])
        elif node.is_impure():
            roots.append(node)
    live = set(flow.needed(roots))
    dead = [node for node in flow.nodes if node not in live]
    for node in reversed(dead):
        gm.graph.erase_node(node)
    return len(dead)


def token_sizes(nodes: Iterable[Node]) -> set[Dim]:
    """Return the token sizes of the decoder's inputs: the second axis, or the only one."""
    inputs = [node for node in nodes if node.op == "placeholder" and not is_module_tensor(node)]
    sizes = {dim for node in inputs if (shape := shape_of(node)) for dim in (shape[1:2] or shape)}
    for node in inputs:  # the token size of a tensor, which may be no input, may itself be one
        source = source_of(node)
        if isinstance(source, TensorPropertySource) and (source.prop, source.idx) == (TensorProperty.SIZE, 1):
            sizes.add(dim_of(recorded(node)))
    return sizes
