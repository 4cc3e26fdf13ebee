"""Find how many tokens the decoder's tables of positions have rows for.

A lookup beyond a table is an error in eager mode, but compiled code ends the process or corrupts the CUDA context. So
the end is found beforehand, by running the lookups at the positions 0, 1, 2...
"""

from __future__ import annotations

import bisect
from collections.abc import Collection

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from kvpass.graphs.fx_utils import (
    is_integral,
    is_module_tensor,
    recorded,
    shape_of,
    symbols_of,
    target_name,
    value_inputs,
)
from kvpass.graphs.verify.apart import fed_by_inputs
from kvpass.graphs.verify.examples import EvaluationError, SizeMap, concrete
from kvpass.graphs.verify.find_positions import LOOKUPS, Search, example_of

_BEYOND = 64
"""Tokens beyond twice a table's rows; a lookup that succeeds there is taken as endless."""


def table_end(gm: GraphModule, numbering: Collection[Node] = ()) -> int | None:
    """Return the tokens for which all lookups by position find a row.

    None when no table ends, or for a capture of one length. Lookups that depend on other inputs, such as token ids, do
    not count. Two ends are not found: of a lookup that cannot be run, and of one in which less than every second
    position has its own row.

    Args:
        gm: with ``kvpass::site``. numbering: inputs that hold the positions, int64 ``[B, T]``.
    """
    search = Search(gm)
    live = search.flow.sources([gm.graph.output_node()])
    fed = fed_by_inputs([node for node in live if node not in numbering])
    end: int | None = None
    for node in live:
        looks_up = target_name(node).rstrip("_") in LOOKUPS or target_name(node).startswith("embedding")
        if looks_up and node not in fed and _is_by_token(node, search):
            end = _end_with(node, end, search, numbering)
    return end


def _is_by_token(node: Node, search: Search) -> bool:
    """Return whether a call has an integer operand with a token axis."""
    shapes = [shape_of(operand) or () for operand in value_inputs(node) if is_integral(operand)]
    return any(symbols_of(shape) & search.symbols for shape in shapes)


def _end_with(lookup: Node, known: int | None, search: Search, numbering: Collection[Node]) -> int | None:
    """Return the smaller of the known end and the lookup's end."""
    sources = search.flow.sources([lookup])
    positions = [node for node in sources if node in numbering]
    weights = [node for node in sources if is_module_tensor(node) and not is_integral(node)]
    tables = [node for node in weights if isinstance(recorded(node), Tensor) and recorded(node).numel() > 1]

    def is_found(tokens: int) -> bool:
        sizes = search.sizes(tokens)
        feeds = {node: _positions(node, sizes) for node in positions}
        feeds |= {node: _zeros(node) for node in tables}
        try:
            example_of(search.gm, search.flow, lookup, search.gm.graph.output_node(), sizes, feeds)
        except EvaluationError as error:
            return not _is_out_of_rows(error)
        return True

    rows = [size for operand in value_inputs(lookup) for size in shape_of(operand) or () if isinstance(size, int)]
    most = known or 2 * max(rows, default=0) + _BEYOND
    if is_found(most) or not is_found(1):
        return known
    return bisect.bisect_left(range(1, most), True, key=lambda tokens: not is_found(tokens))


def _is_out_of_rows(error: BaseException | None) -> bool:
    while error is not None and not isinstance(error, IndexError):
        error = error.__cause__
    return error is not None


def _positions(node: Node, sizes: SizeMap) -> Tensor:
    shape = concrete(shape_of(node), sizes)
    return torch.arange(shape[-1], device=recorded(node).device).expand(shape)


def _zeros(node: Node) -> Tensor:
    """Return zeros of a weight's shape that take no memory."""
    like = recorded(node)
    return torch.zeros((), dtype=like.dtype, device=like.device).expand(tuple(like.shape))
