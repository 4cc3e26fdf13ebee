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

from functools import partial

import torch
from torch.fx import GraphModule

from kvpass.graphs.canonical import POSITIONS_IN_KEYS, SLOPES, find_sites
from kvpass.graphs.fx_utils import recorded, refuse
from kvpass.graphs.insert_nodes import insert_function, insert_method
from kvpass.graphs.verify.offset_positions import MARK

STEP = 256


def fold_alibi_pass(gm: GraphModule) -> int:
    """Fold the slopes that ``emit_site`` recorded, refused beside soft-capping; return how many ops changed."""
    changed = 0
    for site in find_sites(gm):
        slopes = site.node.meta.pop(SLOPES, None)
        if slopes is None:
            continue
        if site.softcap is not None:
            raise refuse(site.node, "a bias that grows with the position (ALiBi) beside soft-capping cannot be folded")
        key = recorded(site.k)
        with gm.graph.inserting_before(site.node), key.fake_mode:
            insert = partial(insert_function, site.node)
            order = insert(torch.arange, insert_method(site.k, "size", 2), device=key.device)
            low = insert(torch.remainder, order, STEP)
            high = insert(torch.sub, order, low)
            for part in (low, high):
                part.meta[MARK] = (0,)
            ramp = insert(torch.tensor, [slope / site.scale for slope in slopes], dtype=key.dtype, device=key.device)
            of_queries = insert_method(ramp, "view", -1, 1, 1)
            of_keys = insert_method(insert(torch.stack, [high, low], -1), "to", key.dtype)
            for place, rows, columns in ((0, site.q, of_queries), (1, site.k, of_keys)):
                zeros = insert(torch.zeros_like, insert_method(rows, "narrow", -1, 0, 2))  # columns are broadcast
                site.node.update_arg(place, insert(torch.cat, [rows, insert(torch.add, zeros, columns)], -1))
        site.node.meta[POSITIONS_IN_KEYS] = True
        changed += 1
    return changed
