"""Pass keys and values to attention ops before their repeat to the query heads.

Before::

    rows = k[:, :, None].expand(B, K, G, T, D)      # or repeat_interleave(k, G, dim=1), or any other way
    k_repeated = rows.reshape(B, H, T, D)
    out = kvpass.site(q, k_repeated, v_repeated, scale)

After::

    out = kvpass.site(q, k, v, scale)

The repeat is recognised by evaluating it: query head h must read KV head h // G. A repeat in another order, or one
that cannot be evaluated, stays: the result is correct, but the cache then has H heads.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from kvpass.graphs.canonical import Site, find_sites
from kvpass.graphs.find.operands import Operand, base_of, holds_for_examples
from kvpass.graphs.fx_utils import DataFlow, erase_dead_nodes, shape_of


def strip_repeat_kv_pass(gm: GraphModule) -> int:
    """Remove the repeat of keys and values; return how many attention ops changed."""
    flow = DataFlow(gm)
    repeats: list[tuple[Site, Operand, Operand]] = []
    for site in find_sites(gm):
        k, v = _find_base(flow, site.k), _find_base(flow, site.v)
        if k is not None and v is not None and k.shape[1] == v.shape[1]:
            repeats.append((site, k, v))
    replaced = flow.needed([node for site, _, _ in repeats for node in (site.k, site.v)])
    for site, k, v in repeats:
        with gm.graph.inserting_before(site.node):
            site.node.update_arg(1, k.emit())
            site.node.update_arg(2, v.emit())
    erase_dead_nodes(gm, replaced)
    return len(repeats)


def _find_base(flow: DataFlow, repeated: Node) -> Operand | None:
    """Return the nearest tensor, ``[B, K, T, D]`` or ``[B, T, K, D]``, that ``repeated`` is a head repeat of."""

    def repeats(base: Operand, chain: Sequence[Node]) -> bool:
        (batch, kv_heads, tokens, dim), (_, heads, *_) = base.shape, shape_of(repeated) or ()
        if shape_of(repeated) != (batch, heads, tokens, dim):
            return False
        if not (isinstance(heads, int) and isinstance(kv_heads, int)) or kv_heads >= heads or heads % kv_heads:
            return False

        def is_repeat(rows: Tensor, result: Tensor) -> bool:
            expected = rows.repeat_interleave(heads // kv_heads, dim=1)
            return result.dtype == expected.dtype and torch.equal(result, expected)

        return holds_for_examples(base, chain, is_repeat)

    return base_of(flow, repeated, [(0, 1, 2, 3), (0, 2, 1, 3)], repeats)
