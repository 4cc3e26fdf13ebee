"""Turn an ALiBi bias into two additional columns of queries and keys.

ALiBi: Press et al. 2022, "Train short, test long", section 3. Before (the mask proof has found the slopes)::

    out = kvpass.site(q, k, v, scale)                # + slope[h] * position of the key

After::

    order = arange(T)
    q = cat([q, slope / scale, slope / scale], -1)
    k = cat([k, order // 256 * 256, order % 256], -1)       # two columns: both parts are exact in 16-bit keys
    out = kvpass.site(q, k, v, scale)

Each KV entry then carries its own position, whatever is evicted. Only differences of positions matter, because softmax
ignores a constant added to all logits. So column indices serve as positions, also with left padding. ``order`` is
marked as :mod:`~kvpass.graphs.verify.offset_positions` reads it, so it goes on from the tokens seen.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from kvpass.graphs.canonical import SLOPES, find_sites
from kvpass.graphs.fx_utils import recorded, refuse
from kvpass.graphs.insert_nodes import insert_function, insert_method
from kvpass.graphs.verify.offset_positions import MARK

_STEP = 256


def fold_alibi_pass(gm: GraphModule) -> int:
    """Fold the ALiBi slopes that ``emit_site`` recorded; return how many attention ops changed.

    Raises:
        UnsupportedAttentionError: the op also uses soft-capping, which would cap the slopes too.
    """
    changed = 0
    for site in find_sites(gm):
        slopes = site.node.meta.pop(SLOPES, None)
        if slopes is None:
            continue
        if site.softcap is not None:
            raise refuse(site.node, "a bias that grows with the position (ALiBi) beside soft-capping cannot be folded")
        key = recorded(site.k)
        with gm.graph.inserting_before(site.node), key.fake_mode:
            tokens = insert_method(gm, "size", site.k, 2)
            order = insert_function(gm, site.node, torch.arange, tokens, device=key.device)
            low = insert_function(gm, site.node, torch.remainder, order, _STEP)
            high = insert_function(gm, site.node, torch.sub, order, low)
            for part in (low, high):
                part.meta[MARK] = (0,)
            columns = insert_function(gm, site.node, torch.stack, [high, low], -1)
            ramp = insert_function(
                gm,
                site.node,
                torch.tensor,
                [slope / site.scale for slope in slopes],
                dtype=key.dtype,
                device=key.device,
            )
            q = _widened(gm, site.node, site.q, insert_method(gm, "view", ramp, -1, 1, 1))
            k = _widened(gm, site.node, site.k, insert_method(gm, "to", columns, key.dtype))
        site.node.update_arg(0, q)
        site.node.update_arg(1, k)
        changed += 1
    return changed


def _widened(gm: GraphModule, site: Node, rows: Node, columns: Node) -> Node:
    """Append two columns to ``rows``; ``columns`` is broadcast to the other axes."""
    shape = insert_function(gm, site, torch.zeros_like, insert_method(gm, "narrow", rows, -1, 0, 2))
    return insert_function(gm, site, torch.cat, [rows, insert_function(gm, site, torch.add, shape, columns)], -1)
