"""Rewrite the attention ops of a graph that continues a cache.

Before::

    out = kvpass.site(q, k, v, scale)

After::

    out = kvpass.attend_cache(*call, *AppendBuffers.operands, layer, impl)

or, under a policy that evicts while decoding::

    out = kvpass.attend_evict(*call, *EvictBuffers.operands, layer, policy, impl, ranks, entering)

An attention op with a sliding window or chunks becomes ``attend_ring``, under every policy. One ``columns_held``
precedes all ops that share a ring. ``layer`` of an operator is its index among the layers of its pool or ring. Ops that
read the same keys and values are of one layer: each appends to the same slots what the first one has appended. The
tuples are defined in :mod:`kvpass.operands`. ``read_state`` becomes an input, ``write_state`` a ``store_state`` into
another.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch.fx import GraphModule, Node

from kvpass.config import Layout
from kvpass.graphs.canonical import READ_STATE, WRITE_STATE, find_sites, site_locations, state_of
from kvpass.graphs.fx_utils import recorded, refuse, replace_node
from kvpass.operands import AppendBuffers, EvictBuffers, RecompressBuffers, RingBuffers
from kvpass.policies.base import Policy
from kvpass.ranks import Ranks


def rewrite_cached_pass(
    gm: GraphModule, *, state: Mapping[str, Node], layout: Layout, policy: Policy, impl: str, ranks: Ranks
) -> int:
    """Replace attention ops by operators that append to the cache and attend it; return how many.

    If the state has buffers for recompression scores, ``observe_held`` follows ``attend_cache``. ``state``: the cache's
    tensors in the graph, by name; ``impl``: "cpp" or "eager", the implementation on a CPU.
    """
    call, rule, columns = partial(_call, gm), policy.decode_rule(), dict[str, Node]()
    sites, locations = find_sites(gm), site_locations(layout)
    readers = Counter(site.layer for site in sites)
    _bind_states(gm, state, layout)
    for site in sites:
        location = locations[site.layer]
        layer = location.layer
        with gm.graph.inserting_before(site.node):
            if location.ring:
                ring, seen, first = location.buffers(RingBuffers, state), state["seen"], state["first"]
                if location.prefix not in columns:
                    slots = recorded(ring.ring_k).shape[3]
                    columns[location.prefix] = call("columns_held", seen, first, slots, site.chunked)
                where = (columns[location.prefix], seen, layer, first if site.chunked else None)
                output = call("attend_ring", *site.call, *ring, *where, impl)
            elif rule is not None:
                lines = location.buffers(EvictBuffers, state).operands
                entering = site.attention_input if rule.reads_tokens else None
                output = call("attend_evict", *site.call, *lines, layer, policy.spec, impl, ranks.spec, entering)
            else:
                pool = location.buffers(AppendBuffers, state)
                output = call("attend_cache", *site.call, *pool.operands, layer, impl)
                scores = location.buffers(RecompressBuffers, state)
                if None not in scores:
                    if readers[site.layer] > 1:
                        raise refuse(site.node, "recompression of keys and values that several layers attend to")
                    value_dim = int(recorded(site.v).shape[3])
                    operands = (site.q, value_dim, *site.call[3:], *pool.operands[:5], pool.key_mean)
                    call("observe_held", *operands, list(scores[:3]), scores[3], layer, policy.spec, ranks.spec)
        output.meta = site.node.meta
        replace_node(site.node, output)
    return len(sites)


def _call(gm: GraphModule, name: str, *operands: Any) -> Node:
    return gm.graph.call_function(getattr(torch.ops.kvpass, name).default, operands)


def _bind_states(gm: GraphModule, state: Mapping[str, Node], layout: Layout) -> None:
    """Read states from the cache, and write them there."""
    places = {(shape.layer, shape.name): index for index, shape in enumerate(layout.states)}
    for node in gm.graph.find_nodes(op="call_function", target=READ_STATE):
        replace_node(node, state[f"state{places[state_of(node)]}_held"])
    for node in gm.graph.find_nodes(op="call_function", target=WRITE_STATE):
        with gm.graph.inserting_before(node):
            _call(gm, "store_state", node.args[0], state[f"state{places[state_of(node)]}_made"])
        gm.graph.erase_node(node)
