"""Parts of a graph run on small examples: values for the symbols of a capture, and the calls with real semantics."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import sympy  # type: ignore[import-untyped]
import torch
from torch import Tensor
from torch._functorch import predispatch
from torch.fx import GraphModule, Interpreter, Node
from torch.utils._python_dispatch import TorchDispatchMode

from kvpass.graphs.fx_utils import VMAP_LEVELS, Dim, is_scalar, recorded, shape_only_inputs, symbols_of, target_name

SizeMap: TypeAlias = Mapping[sympy.Symbol, int]
"""Concrete values for the symbols of a capture."""

EXAMPLE_LENGTHS = (7, 13)
"""Token counts of examples."""

EXAMPLE_BATCH = 2
"""Rows of examples, where the batch is symbolic."""

_BY_AXIS = set(
    "index_select index_add index_copy index_fill index_reduce gather scatter scatter_add scatter_reduce".split()
)
"""Aten operators on a tensor, an axis and indices along it."""


class EvaluationError(Exception):
    """A part of the graph cannot be evaluated on an example; the message says why."""


def concrete(value: Any, sizes: SizeMap) -> Any:
    """A recorded size, symbol or tuple of them with its symbols replaced by ``sizes``."""
    if isinstance(value, (tuple, list)):
        return type(value)([concrete(part, sizes) for part in value])
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        kind = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}[type(value)]
        return kind(_substitute(value.node.expr, sizes))
    return int(_substitute(value, sizes)) if isinstance(value, sympy.Expr) else value


def _substitute(expr: sympy.Basic, sizes: SizeMap) -> sympy.Basic:
    result = sympy.sympify(expr.xreplace(dict(sizes)))
    if result.free_symbols:
        raise EvaluationError(f"size {expr} depends on what is neither the number of tokens nor of rows")
    return result


def example_sizes(batch: Iterable[Dim], tokens: Iterable[Dim], length: int) -> dict[sympy.Symbol, int]:
    """Values for the symbols of batch sizes and of token counts."""
    return dict.fromkeys(symbols_of(batch), EXAMPLE_BATCH) | dict.fromkeys(symbols_of(tokens), length)


def hinted_sizes(gm: GraphModule) -> dict[sympy.Symbol, int]:
    """Values that the symbols of scalar inputs had when the graph was captured."""
    symbols = [recorded(node) for node in gm.graph.find_nodes(op="placeholder")]
    nodes = [value.node for value in symbols if isinstance(value, torch.SymInt)]
    return {node.expr: int(node.hint) for node in nodes if node.expr.is_Symbol and node.hint is not None}


def random_like(value: Tensor, sizes: SizeMap) -> Tensor:
    """Random numbers of the shape and dtype of a recorded tensor, always the same ones: 1e-3 to 1e4, both signs, 0."""
    shape = concrete(tuple(value.shape), sizes)
    generator = torch.Generator().manual_seed(0)
    size = 10.0 ** (torch.rand(shape, generator=generator) * 7 - 3)
    sign = torch.randint(-4, 5, shape, generator=generator).sign()
    return (size * sign).to(dtype=value.dtype, device=value.device)


def evaluate(
    gm: GraphModule,
    result: Node,
    nodes: Sequence[Node],
    feeds: Mapping[Node, Tensor],
    sizes: SizeMap,
    *,
    instead: Mapping[Any, Callable[..., Any]] | None = None,
    after: Callable[[Node, Any], Any] | None = None,
) -> Any:
    """Run ``nodes`` in the given order with the operators' real semantics; value of ``result`` after the last.

    Args:
        result: one of ``nodes`` or of ``feeds``.
        nodes: calls in execution order; their tensor operands are earlier nodes or ``feeds``. What is fed is not run.
        feeds: tensors to start from.
        sizes: values for the symbols. Operands of which only the shape matters are made up.
        instead: functions to call in place of others. after: is told of each call and its value, and gives the value
            to go on with.
    Raises:
        EvaluationError: a value is missing, or an operator fails on the example.
    """
    interpreter = _Substituting(gm, instead or {})
    interpreter.extra_traceback = False
    last_user = {operand: node for node in nodes for operand in node.all_input_nodes}
    env: dict[Node, Any] = dict(feeds)
    interpreter.env = env
    levels = 0
    try:
        with torch.no_grad(), _LookupsInRange():
            for node in nodes:
                if node not in env:
                    for operand in node.all_input_nodes:
                        if operand not in env:
                            env[operand] = _stand_in(operand, node, sizes)
                    value = interpreter.run_node(node)
                    env[node] = value if after is None else after(node, value)
                    levels += VMAP_LEVELS.get(target_name(node), 0)
                for operand in node.all_input_nodes:
                    if last_user[operand] is node and operand is not result:
                        env.pop(operand, None)
    except EvaluationError:
        raise
    except Exception as error:
        raise EvaluationError(f"{node.name} fails on an example of sizes {dict(sizes)}: {error}") from error
    finally:
        for _ in range(levels):
            predispatch._vmap_decrement_nesting()
    return env[result]


class _LookupsInRange(TorchDispatchMode):
    """Looks at indices ahead of the call: one out of range is an error on the CPU, but the end of a process on CUDA."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for index, rows in _looked_up(func.overloadpacket.__name__.strip("_"), args):
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
    elif name in ("index", "index_put", "unsafe_index", "index_put_impl"):
        axis = 0
        for index in args[1]:
            if index is not None and index.dtype != torch.bool:
                yield index, args[0].shape[axis]
            axis += index.ndim if index is not None and index.dtype == torch.bool else 1


class _Substituting(Interpreter):
    """Runs nodes, calling some functions in place of others."""

    def __init__(self, gm: GraphModule, instead: Mapping[Any, Callable[..., Any]]) -> None:
        super().__init__(gm, garbage_collect_values=False)
        self.instead = instead

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        return super().call_function(self.instead.get(target, target), args, kwargs)


def _stand_in(operand: Node, user: Node, sizes: SizeMap) -> Any:
    value = recorded(operand)
    if is_scalar(operand):
        return concrete(value, sizes)
    if operand in shape_only_inputs(user) and isinstance(value, Tensor):
        return torch.empty(concrete(tuple(value.shape), sizes), dtype=value.dtype, device=value.device)
    raise EvaluationError(f"{user.name} needs {operand.name}, which has no example")
