"""Inputs that index a table directly: token ids, and positions that a caller passes.

An index beyond a table is an error in eager mode, but compiled code on the CPU may end the process, and on CUDA it
corrupts the context. So inputs on the CPU are compared with their tables before the graph runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.nn.functional import embedding

from kvpass.graphs.bind_state import placeholders
from kvpass.graphs.fx_utils import module_path_of, recorded, shape_of, source_of, target_name

_INDICES = {torch.int32, torch.int64}
_SAME_VALUES = set("view reshape flatten unsqueeze squeeze expand contiguous to long int clone detach".split())


@dataclass(frozen=True)
class InputLookup:
    """An input of the graph that indexes a table; its numbers must be in ``[lowest, rows)``.

    Attributes:
        place: index among the graph's inputs. name: as Dynamo recorded it.
        lowest: 0, or ``-rows`` if negative numbers count from the end. module_path: module of the lookup.
    """

    place: int
    name: str
    lowest: int
    rows: int
    module_path: str

    def check(self, inputs: Sequence[Any]) -> None:
        """Check a call's input; inputs on CUDA are not checked, to avoid host synchronisation.

        Raises:
            ValueError: a number is outside.
        """
        given = inputs[self.place]
        if given.device.type != "cpu" or given.numel() == 0:
            return
        low, high = (int(bound) for bound in given.aminmax())
        if low < self.lowest or high >= self.rows:
            wrong = low if low < self.lowest else high
            raise ValueError(
                f"{self.name} has the value {wrong}, which {self.module_path or 'the module'} looks up in a table of "
                f"{self.rows} rows: must be in [{self.lowest}, {self.rows})"
            )


def input_lookups(gm: GraphModule) -> tuple[InputLookup, ...]:
    """Return lookups in tables of constant size: embeddings, ``table[index]`` and ``index_select``."""
    inputs = placeholders(gm)
    found = set()
    for node in gm.graph.nodes:
        table, index, wraps = _lookup(node)
        if table is None or index is None:
            continue
        index, (rows, *_) = _origin(index), shape_of(table) or (None,)
        if index in inputs and isinstance(rows, int):
            name = getattr(source_of(index), "local_name", index.name)
            found.add(InputLookup(inputs.index(index), name, -rows if wraps else 0, rows, module_path_of(node)))
    return tuple(sorted(found, key=lambda lookup: (lookup.place, lookup.rows)))


def _lookup(node: Node) -> tuple[Node | None, Node | None, bool]:
    """Return table and index of a lookup, and whether negative numbers count from the end."""
    table: Any = None
    index: Any = None
    name, args = target_name(node), node.args
    if node.target is embedding and len(args) >= 2:
        index, table = args[:2]
    elif name == "index_select" and len(args) == 3 and args[1] == 0:
        table, _, index = args
    elif name == "getitem" and len(args) == 2:
        table, index = args
    nodes = isinstance(table, Node) and isinstance(index, Node)
    if not nodes or shape_of(table) is None or shape_of(index) is None or recorded(index).dtype not in _INDICES:
        return None, None, False
    return table, index, name == "getitem"


def _origin(index: Node) -> Node:
    """Return the input that an index is a view of, or the index itself."""
    while index.op in ("call_method", "call_function") and target_name(index) in _SAME_VALUES:
        operand = index.args[0]
        if not isinstance(operand, Node):
            break
        index = operand
    return index
