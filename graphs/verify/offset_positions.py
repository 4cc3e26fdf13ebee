"""Let a decoder that counts its own positions go on counting from the tokens a cache has seen.

Before::

    order = arange(T)
    x = embed(ids) + table[:T] + learned(order)

After, in extend and decode, ``seen`` being the tokens before this call::

    order = arange(T) + seen
    x = embed(ids) + table.index_select(0, arange(T) + seen) + learned(order)

Counters are found by their form (``shift_positions``); that the result is right is shown by ``self_check``.
"""

from __future__ import annotations

from torch.fx import GraphModule, Node

from kvpass.graphs.fx_utils import DataFlow, shape_of
from kvpass.graphs.rewrite_attention import find_sites
from kvpass.graphs.verify.shift_positions import COUNTED, MARK, shift


def counts_positions(gm: GraphModule) -> bool:
    """Whether ``self_check`` found that the decoder counts its positions, in this graph or the one it is a copy of."""
    return any(node.meta.get(COUNTED, 0) for node in gm.graph.nodes)


def offset_positions_pass(gm: GraphModule, *, seen: Node) -> int:
    """Offset the marked positions by the tokens seen; returns how many.

    Args:
        seen: int64 tensor without axes.
    """
    flow = DataFlow(gm)
    marked = [node for node in flow.nodes if node.meta.get(MARK)]
    shape = shape_of(find_sites(gm)[0].q)
    assert shape is not None
    done: dict[tuple[Node, ...], Node | None] = {}
    changed = 0
    for node in marked:
        operands = node.all_input_nodes
        for index in node.meta.pop(MARK):
            sources = flow.sources([operands[index]], before=node)
            key = (operands[index], *sources)
            if key not in done:
                done[key] = shift(gm.graph, sources, node, seen, shape[2]).get(operands[index])
            shifted = done[key]
            assert shifted is not None, "self_check showed that there is an offset"
            node.replace_input_with(operands[index], shifted)
            changed += 1
    return changed
