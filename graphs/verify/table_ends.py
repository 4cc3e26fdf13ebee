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

from kvpass.graphs.canonical import batch_and_tokens
from kvpass.graphs.fx_utils import (
    DataFlow,
    Dim,
    is_integral,
    is_scalar,
    module_tensor,
    recorded,
    shape_of,
    symbols_of,
    target_name,
    value_inputs,
)
from kvpass.graphs.verify.examples import (
    EvaluationError,
    SizeMap,
    concrete,
    evaluate,
    example_sizes,
    input_dependent_nodes,
)

_BEYOND = 64
"""Tokens beyond twice a table's rows; a lookup that succeeds there is taken as endless."""

_LOOKUPS = set(
    "getitem index_select gather take take_along_dim index index_add index_copy index_put scatter "
    "scatter_add scatter_reduce".split()
)
"""Calls that pick rows by an index, embeddings aside."""


def table_end(gm: GraphModule, numbering: Collection[Node] = ()) -> int | None:
    """Return the tokens for which all lookups by position find a row.

    None when no table ends, or for a capture of one length. Lookups that depend on other inputs, such as token ids, do
    not count. Two ends are not found: of a lookup that cannot be run, and of one in which less than every second
    position has its own row.

    Args:
        gm: with ``kvpass::site``. numbering: inputs that hold the positions, int64 ``[B, T]``.
    """
    flow = DataFlow(gm)
    batch, tokens = batch_and_tokens(gm)
    live = flow.sources([gm.graph.output_node()])
    dependent = input_dependent_nodes([node for node in live if node not in numbering])
    end: int | None = None
    for node in live:
        looks_up = target_name(node).rstrip("_") in _LOOKUPS or target_name(node).startswith("embedding")
        by_token = any(
            symbols_of(shape_of(operand) or ()) & symbols_of([tokens])
            for operand in value_inputs(node)
            if is_integral(operand)
        )
        if looks_up and by_token and node not in dependent:
            end = _end_with(gm, flow, node, numbering, batch, tokens, end)
    return end


def _end_with(
    gm: GraphModule, flow: DataFlow, node: Node, numbering: Collection[Node], batch: Dim, tokens: Dim, known: int | None
) -> int | None:
    """The known end, or that of a lookup where it is smaller."""
    sources = flow.sources([node])
    inputs = [source for source in sources if source.op in ("placeholder", "get_attr")]
    calls = [source for source in sources if source not in inputs]

    def is_found(length: int) -> bool:
        sizes = example_sizes([batch], [tokens], length)
        feeds = {source: _feed(gm, source, source in numbering, sizes) for source in inputs if not is_scalar(source)}
        try:
            evaluate(gm, node, calls, feeds, sizes)
        except EvaluationError as error:
            return not _is_out_of_rows(error)
        return True

    rows = [size for operand in value_inputs(node) for size in shape_of(operand) or () if isinstance(size, int)]
    most = known or 2 * max(rows, default=0) + _BEYOND
    if is_found(most) or not is_found(1):
        return known
    return bisect.bisect_left(range(1, most), True, key=lambda length: not is_found(length))


def _feed(gm: GraphModule, node: Node, numbers_tokens: bool, sizes: SizeMap) -> Tensor:
    """Positions 0, 1, 2..., whole numbers and single numbers of the module, and tables that take no memory."""
    like = recorded(node)
    if numbers_tokens:
        shape = concrete(shape_of(node), sizes)
        return torch.arange(shape[-1], device=like.device).expand(shape)
    content = module_tensor(gm, node)
    if content is not None and (is_integral(node) or like.numel() == 1):
        return content
    return torch.zeros((), dtype=like.dtype, device=like.device).expand(tuple(like.shape))


def _is_out_of_rows(error: BaseException | None) -> bool:
    while error is not None and not isinstance(error, IndexError):
        error = error.__cause__
    return error is not None
