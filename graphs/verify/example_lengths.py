"""How many tokens an example needs, so that a number by which the graph makes a difference shows in it."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass

import sympy  # type: ignore[import-untyped]
import torch
from torch import Tensor
from torch.fx import Node

from kvpass.graphs.fx_utils import Dim, literals_of, numbers_in, recorded, target_name
from kvpass.graphs.verify.examples import EXAMPLE_LENGTHS

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
    Raises:
        NotCausalError: the window cannot be decided.
    """
    if isinstance(tokens, int):
        beyond = beyond_of(tokens, tensors, numbers)
        if beyond and tokens > 1:
            raise NotCausalError(undecided(tokens, beyond))
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


def beyond_of(tokens: int, tensors: Collection[Tensor], numbers: Collection[int]) -> int:
    """The largest number in a mask that may be a window longer than the capture; 0 when there is none."""
    tables = [value for value in tensors if value.ndim >= 2]
    stored = 0 if all(_is_causal_table(value) for value in tables) else max(max(value.shape) for value in tables)
    largest = max([stored, *numbers])
    return largest if largest > tokens else 0


def undecided(tokens: int, mentioned: int) -> str:
    """Why a mask of a capture of fixed length is not decided."""
    return (
        f"its mask mentions {mentioned} but was captured for exactly {tokens} tokens, so a sliding window cannot be "
        "ruled out; capture with a dynamic length"
    )


def _is_square(table: Tensor) -> bool:
    return table.ndim >= 2 and table.shape[-1] == table.shape[-2] > 1


def _is_causal_table(table: Tensor) -> bool:
    """Whether a stored mask is causal as a whole: one value on and below the diagonal, another one above."""
    n = table.shape[-1]
    if not _is_square(table):
        return False
    below, above = table[(0,) * table.ndim], table[(0,) * (table.ndim - 1) + (n - 1,)]
    causal = torch.ones(n, n, dtype=torch.bool, device=table.device).tril()
    return bool(below != above) and bool((table == torch.where(causal, below, above)).all())
