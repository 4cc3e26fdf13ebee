"""Run parts of a graph on examples: values for the symbols of a capture, inputs, and how many tokens are needed.

An example must be long enough for every number in the graph to make a difference: ``MaskPart.lengths`` chooses for a
mask, ``text_length`` for a whole graph.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import sympy  # type: ignore[import-untyped]
import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node

from kvpass.errors import UnsupportedAttentionError
from kvpass.graphs.fx_utils import (
    DataFlow,
    Dim,
    is_module_tensor,
    is_scalar,
    literals_of,
    lookup_of,
    made_of,
    module_tensor,
    numbers_in,
    recorded,
    shape_of,
    shape_only_inputs,
    symbols_of,
    target_name,
    value_inputs,
)
from kvpass.ranks import ALONE
from kvpass.torch_compat import TorchDispatchMode

SizeMap: TypeAlias = Mapping[sympy.Symbol, int]  # concrete values for the symbols of a capture
Functions: TypeAlias = Mapping[Any, Callable[..., Any]]  # to call in place of others

EXAMPLE_LENGTHS = (7, 13)  # token counts of examples
EXAMPLE_BATCH = 2  # rows of examples, where the batch is symbolic
_BY_AXIS = set(
    "index_select index_add index_copy index_fill index_reduce gather scatter scatter_add scatter_reduce".split()
)
"""Aten operators on a tensor, an axis and indices along it."""

LOOKUPS = {*_BY_AXIS, *"embedding take index index_put unsafe_index index_put_impl".split()}
"""Aten operators that look something up."""

_MAX_TEXT_TOKENS = 4096  # longest example of a text; what a graph does only beyond is not seen
MARGIN = 5  # by how many tokens an example goes beyond a number
_LARGEST_NUMBER = 1e9  # numbers from here on hide entries, they are no windows
_FILLS = {torch.finfo(dtype).min for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64)}
_SCALING = {"floordiv", "ifloordiv", "floor_divide", "mul", "imul", "multiply", "div", "divide", "truediv", "rshift"}


class EvaluationError(Exception):
    """A part of the graph cannot be evaluated on an example; the message says why."""


class NotCausalError(Exception):
    """The mask is not causal, or cannot be shown to be; the message is the reason."""


class NotEvaluatedError(NotCausalError):
    """It cannot be evaluated for that many tokens."""


def concrete(value: Any, sizes: SizeMap) -> Any:
    """A recorded size, symbol or tuple of them with its symbols replaced by ``sizes``."""
    if isinstance(value, (tuple, list)):
        return type(value)([concrete(part, sizes) for part in value])
    numbers = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}
    number, expr = numbers.get(type(value), int), value.node.expr if type(value) in numbers else value
    if not isinstance(expr, sympy.Basic):
        return value
    result = sympy.sympify(expr.xreplace(dict(sizes)))
    if result.free_symbols:
        raise EvaluationError(f"size {expr} depends on what is neither the number of tokens nor of rows")
    return number(result)


def example_sizes(batch: Dim, tokens: Dim, length: int) -> dict[sympy.Symbol, int]:
    """Values for the symbols of the batch size and of the token count."""
    return dict.fromkeys(symbols_of([batch]), EXAMPLE_BATCH) | dict.fromkeys(symbols_of([tokens]), length)


def hinted_sizes(gm: GraphModule) -> dict[sympy.Symbol, int]:
    """Values that the symbols of scalar inputs had when the graph was captured."""
    values = map(recorded, gm.graph.find_nodes(op="placeholder"))
    nodes = [value.node for value in values if isinstance(value, torch.SymInt)]
    return {node.expr: int(node.hint) for node in nodes if node.expr.is_Symbol and node.hint is not None}


def random_like(value: Tensor, sizes: SizeMap) -> Tensor:
    """Random numbers of the shape and dtype of a recorded tensor, always the same ones: 1e-3 to 1e4, both signs, 0."""
    shape = concrete(tuple(value.shape), sizes)
    generator = torch.Generator().manual_seed(0)
    size = 10.0 ** (torch.rand(shape, generator=generator, device="cpu") * 7 - 3)
    sign = torch.randint(-4, 5, shape, generator=generator, device="cpu").sign()
    return (size * sign).to(dtype=value.dtype, device=value.device)


def evaluate(
    result: Node, nodes: Sequence[Node], feeds: Mapping[Node, Tensor], sizes: SizeMap, instead: Functions | None = None
) -> Any:
    """Run ``nodes`` in order with the operators' real semantics; return the value of ``result`` after the last.

    Args:
        nodes: in execution order; tensor operands of calls are earlier nodes or ``feeds``. What is fed is not run.
        feeds, sizes, instead: as :class:`ExampleRun` takes them, which raises EvaluationError.
    """
    gm = result.graph.owning_module
    assert gm is not None
    run = ExampleRun(gm, sizes, feeds, instead)
    last_user = {operand: node for node in nodes for operand in node.all_input_nodes}
    with torch.no_grad(), LookupsInRange():
        for node in nodes:
            if node not in run.env and node.op != "placeholder":
                run.call(node)
            for operand in node.all_input_nodes:
                if last_user[operand] is node and operand is not result:
                    run.env.pop(operand, None)
    return run.env[result]


class LookupsInRange(TorchDispatchMode):
    """Looks at indices ahead of the call: one out of range is an error on the CPU, but the end of a process on CUDA."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__.strip("_")
        for index, rows in _looked_up(name, args) if name in LOOKUPS else ():
            if index.numel() and not (int(index.min()) >= -rows and int(index.max()) < rows):
                raise IndexError(f"one of {int(index.min())} to {int(index.max())} is looked up among {rows}")
        return func(*args, **(kwargs or {}))


def _looked_up(name: str, args: Any) -> Iterator[tuple[Tensor, int]]:
    """Indices in a call of an aten operator, with the number of rows that they pick from."""
    if name == "embedding":
        yield args[1], args[0].shape[0]
    elif name == "take":
        yield args[1], args[0].numel()
    elif name in _BY_AXIS and args[0].ndim:
        yield args[2], args[0].shape[args[1]]
    elif name not in _BY_AXIS:
        axis = 0
        for index in args[1]:
            if index is not None and index.dtype != torch.bool:
                yield index, args[0].shape[axis]
            axis += index.ndim if index is not None and index.dtype == torch.bool else 1


class ExampleRun(Interpreter):
    """Runs nodes on an example from tensors ``feeds``, calling some functions ``instead``, and no other process.

    Operands of which only the shape matters are made up.
    """

    def __init__(
        self, gm: GraphModule, sizes: SizeMap, feeds: Mapping[Node, Any], instead: Functions | None = None
    ) -> None:
        super().__init__(gm, garbage_collect_values=False)
        self.sizes, self.instead, self.extra_traceback = sizes, instead or {}, False
        self.env: dict[Node, Any] = dict(feeds)

    def call(self, node: Node) -> Any:
        """Run a node, and keep its value in ``env``; EvaluationError: an operand is missing, or the operator fails."""
        for operand in node.all_input_nodes:
            if operand not in self.env:
                self.env[operand] = self._stand_in(operand, node)
        try:
            self.env[node] = self.run_node(node)
        except UnsupportedAttentionError:
            raise
        except Exception as error:
            raise EvaluationError(f"{node.name} fails on an example of sizes {dict(self.sizes)}: {error}") from error
        return self.env[node]

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        return super().call_function(self.instead.get(target, ALONE.get(target, target)), args, kwargs)

    def _stand_in(self, operand: Node, user: Node) -> Any:
        """Return what an operand is to a call that reads no element of it; raise EvaluationError if it reads them."""
        value = recorded(operand)
        if is_scalar(operand):
            return concrete(value, self.sizes)
        if operand in shape_only_inputs(user) and isinstance(value, Tensor):
            return torch.empty(concrete(tuple(value.shape), self.sizes), dtype=value.dtype, device=value.device)
        raise EvaluationError(f"{user.name} needs {operand.name}, which has no example")


def input_dependent_nodes(live: Sequence[Node]) -> set[Node]:
    """Nodes whose elements come from the inputs of the decoder."""
    return made_of(live, lambda node: node.op == "placeholder" and not is_module_tensor(node))


def text_inputs(flow: DataFlow, live: Sequence[Node], tokens: Dim, sizes: SizeMap) -> dict[Node, Tensor]:
    """Return inputs of the nodes to be run, for an example of a text: weights, and numbers that differ by token.

    Whole numbers go from 0 up to the token count, as positions do, or as far as the tables reach in which they are
    looked up. EvaluationError: the content of a weight is out of reach.
    """
    inputs = [node for node in live if node.op == "placeholder" and not is_scalar(node)]
    inputs += [node for node in live if node.op == "get_attr" and flow.writes_to(node)]
    numbers = dict.fromkeys(inputs, int(concrete(tokens, sizes)))
    for rows, index in filter(None, map(lookup_of, live)):
        if index in numbers:
            numbers[index] = min(rows, numbers[index])
    return {node: _text_input(node, tokens, sizes, numbers[node]) for node in inputs}


def _text_input(node: Node, tokens: Dim, sizes: SizeMap, numbers: int) -> Tensor:
    if is_module_tensor(node):
        weight = module_tensor(node)
        if weight is None:
            raise EvaluationError(f"the content of {node.name} is out of reach")
        return weight
    like, shape = recorded(node), shape_of(node)
    if not isinstance(like, Tensor) or shape is None:
        raise EvaluationError(f"the input {node.name} is no tensor")
    axes = [axis for axis, dim in enumerate(shape) if dim == tokens]
    if len(axes) > 1:
        raise EvaluationError(f"the input {node.name} has several axes of tokens")
    size = concrete(shape, sizes)
    if like.is_floating_point():
        value = torch.randn(size, generator=torch.Generator().manual_seed(0), device="cpu")
    elif like.dtype == torch.bool:
        value = torch.ones(size, device="cpu")
    else:
        value = torch.zeros(size, dtype=torch.int64, device="cpu")
        for axis in axes:
            spread = torch.arange(size[axis], device="cpu") * (numbers - 1) // max(size[axis] - 1, 1)
            value = (value.movedim(axis, -1) + spread).movedim(-1, axis).contiguous()
    return value.to(dtype=like.dtype, device=like.device)


def token_wise_site(q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> Tensor:
    """What stands for attention: ``[B, H, T, Dv]``, each token made of its own query, key and value."""
    group = q.shape[1] // k.shape[1]
    gate = torch.sigmoid((q * k.repeat_interleave(group, 1)).mean(-1, keepdim=True))
    rows = v.repeat_interleave(group, 1) * (0.5 + gate)
    return rows.transpose(1, 2).contiguous().transpose(1, 2)


def numbers_of(calls: Collection[Node], products: Collection[Node] = ()) -> set[int]:
    """Return numbers in calls that may be windows, rounded up; where positions are scaled, times the scales too.

    ``products`` are made from the products of queries and keys: what they are multiplied with is no window.
    """
    numbers = windows_of(literals_of([node for node in calls if node not in products], floats=True))
    numbers |= windows_of(literals_of([node for node in calls if node in products]))
    scales = [node for node in calls if node not in products and target_name(node) in _SCALING]
    shifts = {2**value for node in scales if target_name(node) == "rshift" for value in literals_of([node])}
    factors = {value for value in windows_of(literals_of(scales, floats=True)) | shifts if value > 1}
    if factors and numbers:
        numbers.add(math.prod(factors) * max(abs(number) for number in numbers))
    return numbers


def windows_of(numbers: Iterable[float]) -> set[int]:
    """Those numbers that positions may be compared with, rounded up."""
    finite = (value for value in numbers if math.isfinite(value) and value not in _FILLS)
    return {math.ceil(abs(value)) for value in finite if abs(value) < _LARGEST_NUMBER}


def stored_numbers(tensors: Iterable[Tensor]) -> set[int]:
    """Return numbers in tensors of modules that may be windows: one, or ints that are no table by position."""
    numbers: set[float] = set()
    for value in tensors:
        if value.dtype == torch.bool or value.numel() == 0 or value.is_complex():
            continue
        if value.numel() == 1:
            numbers.add(float(value))
        elif not value.is_floating_point() and int(value.abs().max()) >= value.numel():
            numbers.add(int(value.abs().max()))
    return windows_of(numbers)


def text_length(live: Sequence[Node], tokens: Dim) -> int:
    """Tokens of an example beyond every number that positions or lengths are held against; 0 without such a number."""
    contents = (module_tensor(node) for node in live if is_module_tensor(node))
    calls = counting_calls(live, tokens)[0]
    numbers = numbers_of(calls) | stored_numbers(content for content in contents if content is not None)
    numbers |= windows_of(number for node in live for number in numbers_in(recorded(node), symbols_of([tokens])))
    fractions = [abs(value) for value in literals_of(calls, floats=True) if 1 / _MAX_TEXT_TOKENS < abs(value) < 1]
    numbers |= windows_of(number / fraction for fraction in fractions for number in numbers)
    return max((number + MARGIN for number in numbers if number < _MAX_TEXT_TOKENS), default=0)


def counting_calls(live: Sequence[Node], tokens: Dim) -> tuple[list[Node], list[Node]]:
    """Calls that make something by token of token ids, positions and numbers alone, and those that reduce such to less.

    What is made of the latter is in neither list, nor what meets a weight: a float of a module that is more than one.
    Nor is memory that is yet to be written.
    """
    symbols = symbols_of([tokens])
    counting: set[Node] = set()
    calls: list[Node] = []
    reductions: list[Node] = []
    for node in live:
        shape = shape_of(node)
        if not node.op.startswith("call_"):
            value = recorded(node)
            if shape is not None and (not value.is_floating_point() or shape in ((), (1,))):
                counting.add(node)
        elif shape is None or target_name(node).startswith(("empty", "new_empty")):
            continue
        elif all(operand in counting for operand in value_inputs(node)):
            if any(symbols_of(shape_of(operand) or ()) & symbols for operand in value_inputs(node)):
                if not symbols_of(shape) & symbols:
                    reductions.append(node)
                    continue
                calls.append(node)
            counting.add(node)
    return calls, reductions
