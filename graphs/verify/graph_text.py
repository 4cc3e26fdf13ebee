"""A graph, its weights and its recorded values as text: equal texts mean that a check gives the same result."""

from __future__ import annotations

import hashlib
import operator
import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from kvpass.graphs.canonical import batch_and_tokens
from kvpass.graphs.fx_utils import (
    is_module_tensor,
    is_scalar,
    module_tensor,
    recorded,
    source_of,
    storage_of,
    symbols_of,
)
from kvpass.graphs.verify.examples import hinted_sizes

_SAMPLES = 256
_LIBRARIES = {"torch", "_operator", "math", "builtins"}
_HOMES = ("torch", "torch._C._nn")
NAMESPACES = {"aten", "prims", "kvpass", "transformers"}
_PLAIN = (bool, int, float, complex, str, type(None), type(...), torch.dtype, torch.device, torch.layout)


class NoTextError(Exception):
    """Something in a graph has no text that says what it does."""


def graph_text(gm: GraphModule) -> list[str]:
    """Return what a check of the graph depends on; not the numbers of rows and of tokens with which it was captured.

    Raises:
        NoTextError: it calls what belongs to none of torch, transformers and kvpass, or the content of a weight is out
            of reach.
    """
    place = {node: index for index, node in enumerate(gm.graph.nodes)}
    shared = {storage_of(node): index for node, index in reversed(place.items())}  # by the first that holds it
    settings = torch.get_float32_matmul_precision(), torch.backends.cuda.matmul.allow_tf32, torch.version.cuda
    given = symbols_of(batch_and_tokens(gm))
    sizes = sorted((str(symbol), size) for symbol, size in hinted_sizes(gm).items() if symbol not in given)
    return [
        str(settings),
        str(sizes),
        transformers.__version__,
        *(f"{shared[storage_of(node)]} {' '.join(_of_node(gm, node, place))}" for node in place),
    ]


def _of_node(gm: GraphModule, node: Node, place: dict[Node, int]) -> Iterator[str]:
    def text(value: Any) -> str:
        if isinstance(value, Node):
            return f"%{place[value]}"
        if isinstance(value, (tuple, list)):
            return f"{type(value).__name__}({','.join(map(text, value))})"
        if isinstance(value, dict):
            return f"dict({','.join(f'{text(name)}:{text(part)}' for name, part in value.items())})"
        if isinstance(value, slice):
            return f"slice({text((value.start, value.stop, value.step))})"
        return _of_value(value)

    yield node.op
    yield "" if node.op in ("placeholder", "output") else target_text(node.target)
    yield text(node.args)
    yield text(node.kwargs)
    yield _of_value(recorded(node))
    if node.op == "placeholder":
        yield getattr(source_of(node), "name", "")
    if is_module_tensor(node) and not is_scalar(node):
        yield content_text(module_tensor(gm, node))


def target_text(target: Any) -> str:
    """A function by its name, under which it must be found; a method or an attribute by its own."""
    if isinstance(target, str):
        return target
    operators = torch._ops.OpOverload, torch._ops.OpOverloadPacket
    if isinstance(target, operators) and str(target).split(".")[0] in NAMESPACES:
        return str(target)
    module = getattr(target, "__module__", None) or "torch"  # functions in C++ name none
    for home in (module, *_HOMES) if module.split(".")[0] in _LIBRARIES else ():
        for name in (getattr(target, "__qualname__", ""), getattr(target, "__name__", "")):
            with suppress(AttributeError, KeyError):
                if operator.attrgetter(name)(sys.modules[home]) is target:
                    return f"{home}.{name}"
    raise NoTextError(f"{target} is no function of torch by that name")


def _of_value(value: Any) -> str:
    if isinstance(value, Tensor):
        sizes = ",".join(_of_value(size) for size in (*value.shape, *value.stride()))
        return f"tensor({value.dtype},{value.device},{value.requires_grad},{sizes})"
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return str(value.node.expr)
    if isinstance(value, (tuple, list)):
        return f"{type(value).__name__}({','.join(map(_of_value, value))})"
    if type(value) in _PLAIN or isinstance(value, torch.memory_format):
        return repr(value)
    raise NoTextError(f"{type(value).__name__} has no text")


def content_text(weight: Tensor | None) -> str:
    """A digest of samples, and the sum of all 8-byte words: what a weight is to a check that it is an example for."""
    if weight is None or type(weight) not in (Tensor, nn.Parameter, nn.Buffer):
        raise NoTextError("the content of a weight is out of reach")
    if weight.layout != torch.strided or weight.is_quantized or weight.is_conj() or weight.is_neg():
        raise NoTextError("a weight has no plain bytes")
    flat = weight.detach().contiguous().reshape(-1).view(torch.uint8)
    words = flat[: flat.numel() // 8 * 8]
    words = words.clone() if words.storage_offset() % 8 else words
    sample = torch.cat([flat[:: max(flat.numel() // _SAMPLES, 1)], flat[words.numel() :]]).cpu()
    return f"{int(words.view(torch.int64).sum())} {hashlib.sha256(sample.numpy().tobytes()).hexdigest()}"
