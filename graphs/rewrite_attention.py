"""Rewrite the attention ops of a graph for one phase.

Before::

    out = kvpass.site(q, k, v, scale)

After, prefill (once per layer, and one ``pack`` at the end of the graph)::

    out, scores, stats, weight = kvpass.observe_attention(*call, start, first, layer, L, policy, *PolicyInputs, ranks)
    kvpass.cascade_step(*PrefillBuffers, *Candidates(k, v, scores, stats, weight, first), layer, policy, ranks)

After, decode and extend::

    out = kvpass.attend_cache(*call, *AppendBuffers, layer, impl)

or, under a policy that evicts while decoding::

    out = kvpass.attend_evict(*call, *EvictBuffers, layer, policy, impl, ranks, entering)

An attention op with a sliding window or chunks becomes ``fill_ring`` in prefill and ``attend_ring`` in decode and
extend, under every policy. One ``columns_held`` precedes all ops that share a ring. ``layer`` of an operator is its
index among the ops of its pool or ring. The tuples are defined in :mod:`kvpass.operands`.

``read_state`` becomes an input, ``write_state`` a ``store_state`` into another; in prefill ``real_tokens`` gets the
first columns.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from kvpass.config import Layout
from kvpass.graphs.canonical import (
    READ_STATE,
    REAL_TOKENS,
    WRITE_STATE,
    Site,
    SiteLocation,
    find_sites,
    site_locations,
    state_of,
)
from kvpass.graphs.find.rotary import rotary_frequencies
from kvpass.graphs.fx_utils import recorded
from kvpass.operands import AppendBuffers, EvictBuffers, PolicyInputs, PrefillBuffers, RecompressBuffers, RingBuffers
from kvpass.policies.base import Policy
from kvpass.ranks import ONE_PROCESS, Ranks


@dataclass(frozen=True)
class Rewriter:
    """Replace the attention ops of a graph by operators on the cache.

    Attributes:
        state: the cache's tensors in the graph, by name. layout: of the entries. impl: "cpp" or "eager", the CPU
            implementation of operators that attend the cache. ranks: processes that share the heads.
    """

    gm: GraphModule
    state: Mapping[str, Node]
    layout: Layout
    policy: Policy
    impl: str = "eager"
    ranks: Ranks = ONE_PROCESS

    def prefill(self) -> int:
        """Replace ops by ``observe_attention`` and ``cascade_step``; return how many.

        One ``pack`` per pool is added at the end.
        """
        self._bind_states()
        for node in self.gm.graph.find_nodes(op="call_function", target=REAL_TOKENS):
            node.args = (node.args[0], self.state["first"])
        count = self._each(lambda site, at: self._fill_ring(site, at) if at.ring else self._prune(site, at))
        with self.gm.graph.inserting_before(self.gm.graph.output_node()):
            for location in site_locations(self.layout).values():
                if not location.ring and location.layer == 0:
                    self._call("pack", *location.buffers(PrefillBuffers, self.state))
        return count

    def cached(self) -> int:
        """Replace ops by ``attend_cache``, ``attend_evict`` or ``attend_ring``; return how many.

        If the state has buffers for recompression scores, ``observe_held`` follows ``attend_cache``.
        """
        columns: dict[str, Node] = {}
        self._bind_states()

        def attend(site: Site, location: SiteLocation) -> Node:
            if location.ring:
                return self._attend_ring(site, location, columns)
            layer, policy, ranks = location.layer, self.policy.spec, self.ranks.spec
            rule = self.policy.decode_rule()
            if rule is not None:
                held = location.buffers(EvictBuffers, self.state)
                entering = site.attention_input if rule.reads_tokens else None
                return self._call("attend_evict", *site.call, *held, layer, policy, self.impl, ranks, entering)
            held = location.buffers(AppendBuffers, self.state)
            output = self._call("attend_cache", *site.call, *held, layer, self.impl)
            found = location.buffers(RecompressBuffers, self.state)
            if None not in found:
                self._call("observe_held", *site.call, *held, *found, layer, location.layers, policy, ranks)
            return output

        return self._each(attend)

    def _bind_states(self) -> None:
        """Read states from the cache, and write them there."""
        places = {(state.layer, state.name): index for index, state in enumerate(self.layout.states)}
        for node in self.gm.graph.find_nodes(op="call_function", target=READ_STATE):
            node.replace_all_uses_with(self.state[f"state{places[state_of(node)]}_held"])
            self.gm.graph.erase_node(node)
        for node in self.gm.graph.find_nodes(op="call_function", target=WRITE_STATE):
            with self.gm.graph.inserting_before(node):
                self._call("store_state", node.args[0], self.state[f"state{places[state_of(node)]}_made"])
            self.gm.graph.erase_node(node)

    def _each(self, rewrite: Callable[[Site, SiteLocation], Node]) -> int:
        sites, locations = find_sites(self.gm), site_locations(self.layout)
        for site in sites:
            with self.gm.graph.inserting_before(site.node):
                output = rewrite(site, locations[site.layer])
            output.meta = site.node.meta
            site.node.replace_all_uses_with(output)
            self.gm.graph.erase_node(site.node)
        return len(sites)

    def _call(self, name: str, *operands: Any) -> Node:
        return self.gm.graph.call_function(getattr(torch.ops.kvpass, name).default, operands)

    def _prune(self, site: Site, location: SiteLocation) -> Node:
        start, first, layer = self.state["start"], self.state["first"], location.layer
        buffers = location.buffers(PrefillBuffers, self.state)
        frequencies: Any = rotary_frequencies(site) if self.policy.reads_rotation else None
        rows: Any = self.state.get(f"{location.prefix}_rule_rows")
        policy_inputs = PolicyInputs(self._projection(site), frequencies, buffers.entries, rule_rows=rows)
        asked = (self.policy.spec, *policy_inputs, self.ranks.spec)
        observed = self._call("observe_attention", *site.call, start, first, layer, location.layers, *asked)
        observed.meta = {"nn_module_stack": site.node.meta.get("nn_module_stack")}
        output, *seen = (self.gm.graph.call_function(operator.getitem, (observed, i)) for i in range(4))
        candidates = (site.k, site.v, *seen, first)
        self._call("cascade_step", *buffers, *candidates, layer, self.policy.spec, self.ranks.spec)
        return output

    def _projection(self, site: Site) -> Any:
        """Insert the weight of the output projection ``[hidden, H * Dv]``, where the policy reads it."""
        if not self.policy.reads_projection:
            return None
        found = site.output_projection
        if not found.inputs_first:
            return found.weight
        node = self.gm.graph.call_method("t", (found.weight,))
        node.meta = {**found.weight.meta, "example_value": recorded(found.weight).t()}
        return node

    def _fill_ring(self, site: Site, location: SiteLocation) -> Node:
        ring = location.buffers(RingBuffers, self.state)
        return self._call("fill_ring", *site.call, *ring, self.state["start"], location.layer, site.chunked)

    def _attend_ring(self, site: Site, location: SiteLocation, columns: dict[str, Node]) -> Node:
        ring, seen, first = location.buffers(RingBuffers, self.state), self.state["seen"], self.state["first"]
        if location.prefix not in columns:
            slots = recorded(ring.ring_k).shape[3]
            columns[location.prefix] = self._call("columns_held", seen, first, slots, site.chunked)
        where = (columns[location.prefix], seen, location.layer, first if site.chunked else None)
        return self._call("attend_ring", *site.call, *ring, *where, self.impl)


def rewrite_prefill_pass(
    gm: GraphModule, *, state: Mapping[str, Node], layout: Layout, policy: Policy, ranks: Ranks
) -> int:
    """Replace attention ops by operators that compress a prompt; return how many."""
    return Rewriter(gm, state, layout, policy, ranks=ranks).prefill()


def rewrite_cached_pass(
    gm: GraphModule, *, state: Mapping[str, Node], layout: Layout, policy: Policy, impl: str, ranks: Ranks
) -> int:
    """Replace attention ops by operators that append to the cache and attend it; return how many."""
    return Rewriter(gm, state, layout, policy, impl, ranks).cached()
