"""Calls that relate tokens to tokens by what their shapes and arguments say, without running them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

from torch.fx import Node

from kvpass.graphs.find.alibi import RELATIVE
from kvpass.graphs.fx_utils import Dim, recorded, shape_of, symbols_of, target_name, value_inputs

_CONVOLUTION = {"conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d"}


def mixing_call(node: Node, fed: Collection[Node], batch: Dim, tokens: Dim) -> str | None:
    """Why a call shifts or convolves tokens, None when it does not.

    Args:
        fed: nodes made from the inputs. batch, tokens: sizes of these axes.
    """
    name = target_name(node)
    operands = [operand for operand in node.all_input_nodes if operand in fed and shape_of(operand)]
    shape = shape_of(operands[0]) if operands else None
    if shape is None or not node.op.startswith("call_"):
        return None
    moved: Iterable[int] = ()
    if name in ("roll", "flip"):
        dims = _argument(node, 2 if name == "roll" else 1, "dims")
        moved = _axes(dims, len(shape)) if dims is not None else range(len(shape))
    elif name == "pad":
        moved = _padded_axes(_argument(node, 1, "pad"), len(shape))
    elif name in _CONVOLUTION:
        kernel = _argument(node, 1, "weight")
        extents = (shape_of(kernel) if isinstance(kernel, Node) else None) or ()
        moved = [place for place in range(-len(extents) + 2, 0) if extents[place] != 1]
    if any(_is_tokens(shape, axis, tokens) for axis in moved):
        return f"{name} moves tokens to other tokens outside of an attention site"
    if any(_is_shifted(shape_of(operand) or (), batch, tokens) for operand in operands) and _has(
        shape_of(node), tokens
    ):
        return f"{name} puts a part of the tokens beside others: they are shifted outside of an attention site"
    return None


def counting_calls(live: Sequence[Node], tokens: Dim) -> tuple[list[Node], list[Node]]:
    """Calls that make something by token of token ids, positions and numbers alone, and those that reduce such to less.

    What is made of the latter is in neither list, nor what meets a weight: a float of a module that is more than one.
    Nor are positions that ``fold_alibi`` counts, which is right at any number, and memory that is yet to be written.

    Args:
        live: nodes in execution order.
    """
    counting: set[Node] = set()
    calls: list[Node] = []
    reductions: list[Node] = []
    for node in live:
        shape = shape_of(node)
        if not node.op.startswith("call_"):
            value = recorded(node)
            if shape is not None and (not value.is_floating_point() or shape in ((), (1,))):
                counting.add(node)
        elif shape is None or RELATIVE in node.meta or target_name(node).startswith(("empty", "new_empty")):
            continue
        elif all(operand in counting for operand in value_inputs(node)):
            if any(_by_token(shape_of(operand), tokens) for operand in value_inputs(node)):
                if not _by_token(shape, tokens):
                    reductions.append(node)
                    continue
                calls.append(node)
            counting.add(node)
    return calls, reductions


def _by_token(shape: tuple[Dim, ...] | None, tokens: Dim) -> bool:
    """Whether some axis holds the tokens, perhaps of all rows."""
    symbols = symbols_of([tokens])
    return any(symbols_of([dim]) & symbols if symbols else dim == tokens for dim in shape or ())


def _argument(node: Node, place: int, name: str) -> Any:
    return node.kwargs.get(name, node.args[place] if len(node.args) > place else None)


def _axes(dims: Any, ndim: int) -> list[int]:
    given = dims if isinstance(dims, (tuple, list)) else [dims]
    return [dim % ndim for dim in given if isinstance(dim, int)]


def _padded_axes(pad: Any, ndim: int) -> list[int]:
    """Axes that grow or shrink, for sizes from the last axis on."""
    if not isinstance(pad, (tuple, list)):
        return []
    pairs = list(zip(pad[::2], pad[1::2], strict=False))
    return [ndim - 1 - place for place, pair in enumerate(pairs) if pair != (0, 0)]


def _is_tokens(shape: tuple[Dim, ...], axis: int, tokens: Dim) -> bool:
    """Whether an axis is that of the tokens; in a capture of fixed length, where no other has its size."""
    if symbols_of([tokens]):
        return bool(symbols_of([shape[axis]]) & symbols_of([tokens]))
    return shape[axis] == tokens and shape.count(tokens) == 1


def _is_shifted(shape: tuple[Dim, ...], batch: Dim, tokens: Dim) -> bool:
    """Whether a tensor has a part of the tokens, such as all but the last."""
    symbols = symbols_of([tokens])
    if not symbols:
        return tokens == 1 and shape[:2] == (batch, 0)
    return any(symbols_of([dim]) & symbols and symbols_of([dim / tokens]) & symbols for dim in shape)


def _has(shape: tuple[Dim, ...] | None, tokens: Dim) -> bool:
    return tokens in (shape or ())
