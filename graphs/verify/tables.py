"""Tables that a decoder looks up: by inputs directly, and by positions, whose tables end.

An index beyond a table is an error in eager mode, but compiled code on the CPU may end the process, and on CUDA it
corrupts the context. So inputs on the CPU that index a table directly (token ids, positions that a caller passes) are
compared with it before the graph runs. And the end of tables of positions is found beforehand, by running the lookups
at the positions 0, 1, 2...
"""

from __future__ import annotations

import bisect
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from kvpass.graphs.bind_state import placeholders
from kvpass.graphs.canonical import batch_and_tokens
from kvpass.graphs.fx_utils import (
    DataFlow,
    argument_of,
    is_integral,
    is_scalar,
    lookup_of,
    module_path_of,
    module_tensor,
    recorded,
    shape_of,
    symbols_of,
    target_name,
    value_inputs,
)
from kvpass.graphs.verify.examples import (
    LOOKUPS,
    EvaluationError,
    SizeMap,
    concrete,
    evaluate,
    example_sizes,
    input_dependent_nodes,
)

_BEYOND = 64  # tokens beyond twice a table's rows; a lookup that succeeds there is taken as endless
_LOOKUPS = {"getitem", "take_along_dim", *LOOKUPS}  # calls that pick rows by an index


@dataclass(frozen=True)
class InputLookup:
    """An input of the graph that indexes a table; its numbers must be in ``[lowest, rows)``."""

    place: int  # among the graph's inputs
    name: str  # as Dynamo recorded it
    lowest: int  # 0, or -rows if negative numbers count from the end
    rows: int
    module_path: str  # of the lookup

    def check(self, inputs: Sequence[Any]) -> None:
        """Raise ValueError if a number is outside; inputs on CUDA are not checked, to avoid host synchronisation."""
        numbers = inputs[self.place]
        if numbers.device.type != "cpu" or numbers.numel() == 0:
            return
        low, high = (int(bound) for bound in numbers.aminmax())
        if low < self.lowest or high >= self.rows:
            wrong = low if low < self.lowest else high
            raise ValueError(
                f"{self.name} has the value {wrong}, which {self.module_path or 'the module'} looks up in a table of "
                f"{self.rows} rows: must be in [{self.lowest}, {self.rows})"
            )


def input_lookups(gm: GraphModule) -> tuple[InputLookup, ...]:
    """Return lookups in tables of constant size: embeddings, ``table[index]`` and ``index_select``."""
    inputs = placeholders(gm)
    lookups = set()
    for node in gm.graph.nodes:
        rows, index = lookup_of(node) or (None, node)
        if index in inputs and rows is not None:
            name = argument_of(index) or index.name
            lowest = -rows if target_name(node) == "getitem" else 0
            lookups.add(InputLookup(inputs.index(index), name, lowest, rows, module_path_of(node)))
    return tuple(sorted(lookups, key=lambda lookup: (lookup.place, lookup.rows)))


def table_end(gm: GraphModule, numbering: Collection[Node] = ()) -> int | None:
    """Return the tokens for which all lookups by position find a row, the positions being inputs ``numbering``.

    None when no table ends, or for a capture of one length. Lookups that depend on other inputs, such as token ids, do
    not count. Two ends are not found: of a lookup that cannot be run, and of one in which less than every second
    position has its own row.
    """
    flow = DataFlow(gm)
    tokens = symbols_of(batch_and_tokens(gm)[1:])
    live = flow.sources([gm.graph.output_node()])
    dependent = input_dependent_nodes([node for node in live if node not in numbering])
    end: int | None = None
    for node in live:
        looks_up = target_name(node).rstrip("_") in _LOOKUPS or target_name(node).startswith("embedding")
        indices = filter(is_integral, value_inputs(node))
        by_token = any(symbols_of(shape_of(index) or ()) & tokens for index in indices)
        if looks_up and by_token and node not in dependent:
            end = _end_with(flow, node, numbering, end)
    return end


def _end_with(flow: DataFlow, node: Node, numbering: Collection[Node], end: int | None) -> int | None:
    """Return the end of the tables so far, or that of a lookup where it is smaller."""
    sources, dims = flow.sources([node]), batch_and_tokens(flow.gm)
    inputs = [source for source in sources if source.op in ("placeholder", "get_attr") and not is_scalar(source)]

    def is_found(length: int) -> bool:
        sizes = example_sizes(*dims, length)
        feeds = {source: _feed(source, source in numbering, sizes) for source in inputs}
        try:
            evaluate(node, sources, feeds, sizes)
        except EvaluationError as error:
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, IndexError):
                cause = cause.__cause__
            return cause is None
        return True

    rows = [size for operand in value_inputs(node) for size in shape_of(operand) or () if isinstance(size, int)]
    most = end or 2 * max(rows, default=0) + _BEYOND
    if is_found(most) or not is_found(1):
        return end
    return bisect.bisect_left(range(1, most), True, key=lambda length: not is_found(length))


def _feed(node: Node, numbers_tokens: bool, sizes: SizeMap) -> Tensor:
    """Positions 0, 1, 2..., whole numbers and single numbers of the module, and tables that take no memory."""
    like = recorded(node)
    if numbers_tokens:
        shape = concrete(shape_of(node), sizes)
        return torch.arange(shape[-1], device=like.device).expand(shape)
    content = module_tensor(node)
    if content is not None and (is_integral(node) or like.numel() == 1):
        return content
    return torch.zeros((), dtype=like.dtype, device=like.device).expand(tuple(like.shape))
