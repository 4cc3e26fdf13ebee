"""Spans of a text, as callers give them: tokens that every head keeps, and tokens that are forgotten."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from kvpass.config import Spans


def read_spans(protect: Spans | None, start: Tensor, columns: int) -> Tensor | None:
    """Return which tokens are kept in any case, bool ``[B, columns]`` by true position; None: none.

    Args:
        start: first real column of each row, int64 ``[B]``. columns: of the prompt. A mask may have fewer rows: each
            then is of as many rows of the prompt that follow each other, as beams do.
    Raises:
        ValueError: a mask of another shape or dtype; a span that is empty, not within a row, or overlaps another one.
    """
    if protect is None:
        return None
    rows, first = len(start), start.to("cpu")[:, None]
    if isinstance(protect, Tensor):
        mask = protect.to("cpu")
        if mask.dtype != torch.bool or mask.ndim != 2 or mask.shape[1] != columns or len(mask) == 0 or rows % len(mask):
            shape = f"{str(mask.dtype).removeprefix('torch.')} {list(mask.shape)}"
            raise ValueError(f"protect={shape}: a mask must be bool [{rows}, {columns}], of the columns of the prompt")
        column = torch.arange(columns, device="cpu") + first
        mask = mask.repeat_interleave(rows // len(mask), 0)
        found = mask.gather(1, column.clamp(max=columns - 1)) & (column < columns)
    else:
        found = torch.zeros(rows, columns, dtype=torch.bool, device="cpu")
        for begin, end in checked_spans("protect", protect, columns - int(start.max())):  # type: ignore[arg-type]
            found[:, begin:end] = True
    return found if bool(found.any()) else None


def by_column(protected: Tensor, start: Tensor) -> Tensor:
    """Return the tokens of :func:`read_spans`, bool ``[B, N]``, by column; ``start``: on their device."""
    position = torch.arange(protected.shape[1], device=start.device) - start[:, None]
    return protected.gather(1, position.clamp(min=0)) & (position >= 0)


def check_room(asked: str, tokens: int, window: int, budget: int) -> None:
    """Raise ValueError if the budget has no room for ``tokens`` beside the window; ``asked`` begins the message."""
    if tokens > max(budget - window, 0):
        raise ValueError(
            f"{asked} are to be kept beside the last {window}, the window, and the budget is {budget} entries for "
            f"both: {tokens + window} are needed"
        )


def checked_spans(name: str, spans: Sequence[tuple[int, int]], tokens: int) -> list[tuple[int, int]]:
    """Return spans in order; raise ValueError unless they are apart from each other and within ``tokens`` tokens."""
    try:
        ordered = sorted((operator.index(begin), operator.index(end)) for begin, end in spans)
    except (TypeError, ValueError):
        others = ", a mask, or ('images',) beside images"
        raise ValueError(
            f"{name}={spans!r}: must be pairs (start, stop) of tokens{others * (name == 'protect')}"
        ) from None
    for begin, end in ordered:
        if not 0 <= begin < end:
            raise ValueError(f"{name}: the span ({begin}, {end}) has no token, or begins before the text")
        if end > tokens:
            raise ValueError(f"{name}: the span ({begin}, {end}) ends behind the text, whose shortest row has {tokens}")
    for one, other in pairwise(ordered):
        if other[0] < one[1]:
            raise ValueError(f"{name}: the spans {one} and {other} overlap")
    return ordered
