"""Prove that the mask of an attention call is causal, by evaluating the graph that makes it on small examples.

The mask is taken for what it does, not for how it is written: its ancestors run for a few token counts with ordinary
contiguous positions, and the result must equal the causal mask, or the causal mask of one sliding window.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from kvpass.graphs.fx_utils import (
    DataFlow,
    Dim,
    EvaluationError,
    SizeMap,
    concrete,
    evaluate,
    is_module_tensor,
    is_scalar,
    literals_of,
    module_tensor,
    recorded,
    shape_of,
    symbols_of,
)

_SHORT_LENGTHS = (7, 13)
_BATCH = 2
_OFFSET = 5
_MARGIN = 5

MAX_EXAMPLE_TOKENS = 8192
"""Longest example that is evaluated; a window that cannot be seen within it is not decided."""

NEGLIGIBLE_LOGIT = -1e9
"""An additive mask at or below this leaves nothing of an entry."""


class NotCausalError(Exception):
    """The mask is not causal, or cannot be shown to be; the message is the reason."""


def prove_causal(gm: GraphModule, flow: DataFlow, site: Node, mask: Node, q: Node) -> int | None:
    """Sliding window of a causal mask: how many keys a query sees at most, itself included; None for no window.

    Args:
        flow: data flow of ``gm``. site: the attention call. mask: its mask, bool (True = attend) or additive,
            broadcastable to ``[B, H, T, T]``. q: its queries, ``[B, H, T, D]``.
    Raises:
        NotCausalError: with the reason.
    """
    shape = shape_of(q)
    assert shape is not None and len(shape) == 4
    sources = flow.sources([mask], before=site)
    inputs = [node for node in sources if node.op in ("placeholder", "get_attr")]
    calls = [node for node in sources if node not in inputs]
    if not calls:
        raise NotCausalError(f"the mask is the input {mask.name}, whose content is unknown")
    tokens = _module_tensors(gm, inputs)
    literals = _literals(calls, tokens, shape)
    lengths = _example_lengths(shape[2], literals, tokens)
    window: int | None = None
    for length in lengths:
        for start in _starts(length):
            sizes = _sizes(shape, length)
            try:
                count = concrete(shape[2], sizes)
                feeds = {node: _feed(node, shape[2], start, tokens, sizes) for node in inputs if not is_scalar(node)}
                value = evaluate(gm, mask, calls, feeds, sizes)
            except EvaluationError as error:
                raise NotCausalError(f"its mask cannot be evaluated: {error}") from error
            attended = _attended(value)
            if length == lengths[0] and start == 0:
                window = _window(attended, count)
            if not _equals(attended, band(count, window, attended.device)):
                raise NotCausalError(
                    f"its mask {mask.name} is not causal (evaluated for {count} tokens at positions from {start})"
                )
    return window


def band(length: int, window: int | None, device: torch.device | None = None) -> Tensor:
    """Causal mask ``[length, length]`` bool of a sliding window, True = attend."""
    causal = torch.ones(length, length, dtype=torch.bool, device=device).tril()
    return causal if window is None else causal.triu(1 - window)


def _module_tensors(gm: GraphModule, inputs: list[Node]) -> dict[Node, Tensor]:
    tensors = {}
    for node in inputs:
        if is_module_tensor(node):
            value = module_tensor(gm, node)
            if value is None:
                raise NotCausalError(f"its mask depends on {node.name}, whose content is out of reach")
            tensors[node] = value
    return tensors


def _literals(calls: list[Node], tensors: dict[Node, Tensor], shape: tuple[Dim, ...]) -> set[int]:
    """Ints that the mask may compare positions with; sizes of the mask itself are no such numbers."""
    stored = {int(value) for value in tensors.values() if value.numel() == 1 and not value.is_floating_point()}
    numbers = {number for number in literals_of(calls) | stored if NEGLIGIBLE_LOGIT < number < 2**31}
    return numbers - {dim for dim in shape[:3] if isinstance(dim, int)}


def _example_lengths(tokens: Dim, literals: set[int], tensors: dict[Node, Tensor]) -> list[int]:
    """Values for the token symbol, the longest first; it decides the window.

    A window is a number in the graph or the shape of a stored mask, so the longest example goes beyond the former
    or to the end of the latter. It also tells positions from token ids: its row 0, 1, 2... holds every number that
    the graph could compare an id with.
    """
    stored = max((dim for value in tensors.values() if value.ndim >= 2 for dim in value.shape), default=0)
    reach = max((abs(literal) for literal in literals), default=0)
    if isinstance(tokens, int):
        if max(stored, reach) > tokens:
            raise NotCausalError(
                f"its mask mentions {max(stored, reach)} but was captured for exactly {tokens} tokens, so a sliding "
                "window cannot be ruled out; capture with a dynamic length"
            )
        return [tokens]
    longest = stored if stored and stored >= reach else max(reach + _MARGIN, _SHORT_LENGTHS[-1])
    if longest > MAX_EXAMPLE_TOKENS:
        raise NotCausalError(
            f"deciding whether its mask has a sliding window needs an example of {longest} tokens, "
            f"more than {MAX_EXAMPLE_TOKENS}"
        )
    return [longest, *(length for length in _SHORT_LENGTHS if length < longest)]


def _starts(length: int) -> tuple[int, ...]:
    """First positions of the rows to try, 0 first; later ones tell positions from indices."""
    return (0,) if length > _SHORT_LENGTHS[-1] else (0, _OFFSET)


def _sizes(shape: tuple[Dim, ...], length: int) -> SizeMap:
    return {symbol: _BATCH for symbol in symbols_of(shape[:1])} | {symbol: length for symbol in symbols_of(shape[2:3])}


def _feed(node: Node, tokens: Dim, start: int, tensors: dict[Node, Tensor], sizes: SizeMap) -> Tensor:
    if node in tensors:
        return tensors[node]
    value, shape = recorded(node), shape_of(node)
    if not shape or shape[-1] != tokens or value.is_floating_point() or value.dtype == torch.bool:
        raise NotCausalError(f"its mask depends on the input {node.name}, which is no row of positions")
    size = concrete(shape, sizes)
    row = torch.arange(start, start + size[-1], dtype=value.dtype, device=value.device)
    return row.expand(size).contiguous()


def _attended(mask: object) -> Tensor:
    """Bool mask, True = attend, of a bool or additive mask."""
    if not isinstance(mask, Tensor):
        raise NotCausalError(f"its mask is a {type(mask).__name__}")
    if mask.dtype == torch.bool:
        return mask
    if not mask.is_floating_point():
        raise NotCausalError(f"its mask has dtype {mask.dtype}")
    hidden = (mask <= max(NEGLIGIBLE_LOGIT, torch.finfo(mask.dtype).min)) & ~mask.isnan()
    if not (hidden | (mask == 0)).all():
        raise NotCausalError("its mask adds a bias to the logits")
    return ~hidden


def _window(attended: Tensor, length: int) -> int | None:
    """Window of a banded mask, read off its last row."""
    row = attended.reshape(-1, attended.shape[-1])[-1]
    seen = int(row.expand(length).sum()) if row.shape[0] in (1, length) else length
    return None if seen in (0, length) else seen


def _equals(attended: Tensor, expected: Tensor) -> bool:
    length = expected.shape[0]
    sizes = attended.shape[-2:] if attended.ndim >= 2 else (1, *attended.shape)
    if attended.ndim > 4 or any(size not in (1, length) for size in sizes):
        return False
    return bool((attended == expected).all())
