"""Choose how many tokens an example needs so that every number in the graph makes a difference.

``example_lengths`` chooses for a mask, ``text_lengths`` for a whole graph.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import sympy  # type: ignore[import-untyped]
import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from kvpass.graphs.fx_utils import (
    Dim,
    is_module_tensor,
    literals_of,
    module_tensor,
    numbers_in,
    recorded,
    shape_of,
    symbols_of,
    target_name,
    value_inputs,
)
from kvpass.graphs.verify.examples import EXAMPLE_LENGTHS
from kvpass.graphs.verify.shift_positions import RELATIVE

_MAX_TEXT_TOKENS = 4096
"""Longest example of a text; what a graph does only beyond is not seen."""

MAX_EXAMPLE_TOKENS = 8192
"""Longest example that is evaluated; a window that cannot be seen within it is not decided."""

_MARGIN = 5
_FLOOR = 2048
_MAX_FLOOR_ELEMENTS = 2**22
"""The longest example has 2048 tokens even where no number asks for that, or fewer to have no more elements."""

_LARGEST_NUMBER = 1e9
"""Numbers from here on hide entries, they are no windows."""

_FILLS = {torch.finfo(dtype).min for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64)}
_SCALING = {"floordiv", "ifloordiv", "floor_divide", "mul", "imul", "multiply", "div", "divide", "truediv", "rshift"}


class NotCausalError(Exception):
    """The mask is not causal, or cannot be shown to be; the message is the reason."""


class NotEvaluatedError(NotCausalError):
    """It cannot be evaluated for that many tokens."""


@dataclass(frozen=True)
class Lengths:
    """Values for the token symbol.

    Attributes:
        longest: by preference; the first that can be evaluated decides the window. short: to try beside it.
        undecided: why a mask that fits at all of these may still have a window.
    """

    longest: tuple[int, ...]
    short: tuple[int, ...] = ()
    undecided: str | None = None


def numbers_of(calls: Collection[Node], products: Collection[Node] = (), *, scaled: bool = True) -> set[int]:
    """Numbers in calls that may be windows, rounded up; where positions are scaled, the product with the scales too.

    Args:
        products: nodes made from the products of queries and keys: what they are multiplied with is no window.
        scaled: False for calls that are known to scale by block sizes only.
    """
    numbers = windows_of(literals_of([node for node in calls if node not in products], floats=True))
    numbers |= windows_of(literals_of([node for node in calls if node in products]))
    scales = [node for node in calls if node not in products and target_name(node) in _SCALING]
    shifts = {2**value for node in scales if target_name(node) == "rshift" for value in literals_of([node])}
    factors = {value for value in windows_of(literals_of(scales, floats=True)) | shifts if value > 1}
    if scaled and factors and numbers:
        numbers.add(math.prod(factors) * max(abs(number) for number in numbers))
    return numbers


def windows_of(numbers: Iterable[float]) -> set[int]:
    """Those numbers that positions may be compared with, rounded up."""
    finite = (value for value in numbers if math.isfinite(value) and value not in _FILLS)
    return {math.ceil(abs(value)) for value in finite if abs(value) < _LARGEST_NUMBER}


def stored_numbers(tensors: Iterable[Tensor]) -> set[int]:
    """Numbers in tensors of modules that may be windows: one, or ints that are no table by position."""
    found: set[float] = set()
    for value in tensors:
        if value.dtype == torch.bool or value.numel() == 0 or value.is_complex():
            continue
        if value.numel() == 1:
            found.add(float(value))
        elif not value.is_floating_point() and int(value.abs().max()) >= value.numel():
            found.add(int(value.abs().max()))
    return windows_of(found)


def example_lengths(
    tokens: Dim, tensors: Collection[Tensor], numbers: Collection[int], planes: int, most: float = math.inf
) -> Lengths:
    """Values for the token symbol to evaluate.

    A window is a number in the graph or the shape of a stored mask, so the longest example goes beyond the former or to
    the end of the latter. It also tells positions from token ids: its row 0, 1, 2... holds every number that the graph
    could compare an id with.

    Args:
        tensors: what the graph reads from modules. numbers: what it may compare positions with.
        planes: elements of the result per pair of tokens. most: tokens that the capture holds for, tried last: what can
            be evaluated beyond them shows more.
    """
    if isinstance(tokens, int):  # such a capture is compared with another one, or refused in the end
        return Lengths((tokens,))
    reach = max(numbers, default=0)
    needed = max(reach + _MARGIN, EXAMPLE_LENGTHS[-1])
    stored = max((value.shape[-1] for value in tensors if _is_square(value)), default=0)
    stored = stored if stored > EXAMPLE_LENGTHS[-1] else 0
    floor = min(_FLOOR, math.isqrt(_MAX_FLOOR_ELEMENTS // planes))
    tables = {size for value in tensors for size in value.shape if size > EXAMPLE_LENGTHS[-1]}
    longest = [stored] if stored and stored >= reach else [max(needed, floor), *sorted(tables, reverse=True), needed]
    longest += [int(most)] if most < min(longest) else []
    if longest[0] > MAX_EXAMPLE_TOKENS:
        needs = f"deciding whether its mask has a sliding window needs an example of {longest[0]} tokens"
        return Lengths(EXAMPLE_LENGTHS[1:], EXAMPLE_LENGTHS[:1], f"{needs}, more than {MAX_EXAMPLE_TOKENS}")
    short = tuple(length for length in EXAMPLE_LENGTHS if length < min(longest))
    return Lengths(tuple(dict.fromkeys(length for length in longest if length <= longest[0])), short)


def lengths_about(numbers: Iterable[int]) -> tuple[int, ...]:
    """Token counts, ascending, that show a difference made by one of the numbers: on both sides of each, and beyond."""
    beside = {number + step for number in numbers for step in (-1, 0, 1, _MARGIN)}
    return tuple(sorted({*EXAMPLE_LENGTHS, *(length for length in beside if length >= 2)}))


def size_numbers(nodes: Iterable[Node], symbols: Collection[sympy.Symbol]) -> set[int]:
    """Numbers that sizes made of the ``symbols`` are compared with or moved by, rounded up: 26 of ``max(tokens, 26)``.

    Args:
        nodes: whose sizes, numbers and shapes are looked at.
    """
    found: set[float] = set()
    for node in nodes:
        found |= numbers_in(recorded(node), symbols)
    return windows_of(found)


def _is_square(table: Tensor) -> bool:
    return table.ndim >= 2 and table.shape[-1] == table.shape[-2] > 1


def text_lengths(gm: GraphModule, live: Sequence[Node], tokens: Dim) -> list[int]:
    """Token counts of examples: a few, and beyond every number that positions or lengths are held against."""
    symbols = symbols_of([tokens])
    contents = (module_tensor(gm, node) for node in live if is_module_tensor(node))
    calls = counting_calls(live, tokens)[0]
    numbers = numbers_of(calls) | size_numbers(live, symbols)
    numbers |= stored_numbers(content for content in contents if content is not None)
    fractions = [abs(value) for value in literals_of(calls, floats=True) if 1 / _MAX_TEXT_TOKENS < abs(value) < 1]
    numbers |= windows_of(number / fraction for fraction in fractions for number in numbers)
    beyond = lengths_about(number for number in numbers if number < _MAX_TEXT_TOKENS)[-1]
    return [EXAMPLE_LENGTHS[0], *([beyond] if beyond > EXAMPLE_LENGTHS[-1] else [])]


def counting_calls(live: Sequence[Node], tokens: Dim) -> tuple[list[Node], list[Node]]:
    """Calls that make something by token of token ids, positions and numbers alone, and those that reduce such to less.

    What is made of the latter is in neither list, nor what meets a weight: a float of a module that is more than one.
    Nor are positions that ``fold_alibi`` counts, which is right at any number, and memory that is yet to be written.

    Args:
        live: nodes in execution order.
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
        elif shape is None or RELATIVE in node.meta or target_name(node).startswith(("empty", "new_empty")):
            continue
        elif all(operand in counting for operand in value_inputs(node)):
            if any(symbols_of(shape_of(operand) or ()) & symbols for operand in value_inputs(node)):
                if not symbols_of(shape) & symbols:
                    reductions.append(node)
                    continue
                calls.append(node)
            counting.add(node)
    return calls, reductions
