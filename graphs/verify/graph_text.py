"""A graph, its weights and its inputs as text: equal texts mean that a check gives the same result.

Only on the CPU: elsewhere it would take longer to copy all weights to the host than to check.
"""

from __future__ import annotations

import hashlib
import operator
import sys
from contextlib import suppress
from types import FunctionType
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.fx.node import map_aggregate

from kvpass.graphs.canonical import batch_and_tokens
from kvpass.graphs.fx_utils import (
    TORCH_FOLDER,
    dim_of,
    is_module_tensor,
    module_tensor,
    recorded,
    source_of,
    storage_of,
    symbols_of,
)
from kvpass.graphs.verify.examples import hinted_sizes

_LIBRARIES = {"torch", "_operator", "math", "builtins"}
_HOMES = ("torch", "torch._C._nn")
_NAMESPACES = {"aten", "prims", "kvpass", "transformers"}
_PLAIN = (bool, int, float, complex, str, type(None), type(...), torch.dtype, torch.device, torch.layout)


class NoTextError(Exception):
    """Something in a graph has no text that says what it does."""


def graph_text(gm: GraphModule) -> list[str]:
    """Return what a check of the graph depends on; not the numbers of rows and of tokens with which it was captured.

    Raises:
        NoTextError: it calls what belongs to none of torch, transformers and kvpass, or the content of a weight is out
            of reach.
    """
    for node in gm.graph.nodes:
        if node.op.startswith("call_"):
            _check_target(node)
        map_aggregate((node.args, node.kwargs), _check_plain)
    inputs = [node for node in gm.graph.nodes if node.op in ("placeholder", "get_attr")]
    shared = {storage_of(node): place for place, node in reversed([*enumerate(inputs)])}  # by the first that holds it
    casts = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
    settings = torch.get_default_dtype(), torch.get_float32_matmul_precision(), *casts
    given = symbols_of(batch_and_tokens(gm))
    sizes = sorted((str(symbol), size) for symbol, size in hinted_sizes(gm).items() if symbol not in given)
    return [
        str(settings),
        str(sizes),
        transformers.__version__,
        gm.graph.python_code("self").src,
        *(f"{shared[storage_of(node)]} {_input_text(node)}" for node in inputs),
    ]


def _check_plain(value: Any) -> Any:
    """Raise unless an argument is in the code of a graph as what it is."""
    if not isinstance(value, (Node, torch.SymInt, torch.SymFloat, torch.SymBool, torch.memory_format, *_PLAIN)):
        raise NoTextError(f"{type(value).__name__} has no text")
    return value


def _input_text(node: Node) -> str:
    value, source = recorded(node), getattr(source_of(node), "name", "")
    if not isinstance(value, Tensor):
        return f"{value} {source}"
    if value.device.type != "cpu":
        raise NoTextError(f"{node.name} is on {value.device}")
    form = value.dtype, value.requires_grad, *map(dim_of, (*value.shape, *value.stride()))
    return f"{form} {source} {content_text(module_tensor(node)) if is_module_tensor(node) else ''}"


def _check_target(node: Node) -> None:
    """Raise unless a node calls a method, an operator, or a function of a library that is found by its name."""
    target = node.target
    operators = torch._ops.OpOverload, torch._ops.OpOverloadPacket
    is_operator = isinstance(target, operators) and str(target).split(".")[0] in _NAMESPACES
    if is_operator or node.op == "call_method":
        return
    module = getattr(target, "__module__", None) or "torch"  # functions in C++ name none
    for home in (module, *_HOMES) if module.split(".")[0] in _LIBRARIES else ():
        for name in (getattr(target, "__qualname__", ""), getattr(target, "__name__", "")):
            with suppress(AttributeError, KeyError):
                if operator.attrgetter(name)(sys.modules[home]) is target and _is_of_torch(target):
                    return
    raise NoTextError(f"{target} is no function of torch by that name")


def _is_of_torch(target: Any) -> bool:
    """Whether a function of Python is none that was put in the place of another, under its name."""
    return not isinstance(target, FunctionType) or target.__code__.co_filename.startswith(TORCH_FOLDER)


def content_text(weight: Tensor | None) -> str:
    """A digest of a weight's bytes."""
    if weight is None or type(weight) not in (Tensor, nn.Parameter, nn.Buffer):
        raise NoTextError("the content of a weight is out of reach")
    if weight.layout != torch.strided or weight.is_quantized or weight.is_conj() or weight.is_neg():
        raise NoTextError("a weight has no plain bytes")
    return hashlib.sha256(weight.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data).hexdigest()
