"""Rewrite the attention ops of a graph for one phase.

Before::

    out = kvpass.site(q, k, v, scale)

After, prefill (once per layer, and one ``pack`` at the end of the graph)::

    out, scores, stats, weight = kvpass.observe_attention(*call, start, first, layer, L, policy, *PolicyInputs, ranks)
    kvpass.cascade_step(*PrefillBuffers, *Candidates(k, v, scores, stats, weight, first), layer, policy, ranks)

After, decode and extend::

    out = kvpass.attend_cache(*call, *AppendBuffers, layer, impl)

or, under a policy that evicts while decoding::

    out = kvpass.attend_evict(*call, *EvictBuffers, layer, policy, impl, ranks)

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
from kvpass.graphs.canonical import READ_STATE, REAL_TOKENS, WRITE_STATE, Place, Site, find_sites, places_of, state_of
from kvpass.graphs.fx_utils import recorded
from kvpass.operands import (
    AppendBuffers,
    EvictBuffers,
    PolicyInputs,
    PrefillBuffers,
    RecompressBuffers,
    RingBuffers,
)
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
        places = places_of(self.layout)
        self._bind_states()
        for node in self.gm.graph.find_nodes(op="call_function", target=REAL_TOKENS):
            node.args = (node.args[0], self.state["first"])
        count = self._each(lambda site, place: self._fill_ring(site, place) if place.ring else self._prune(site, place))
        with self.gm.graph.inserting_before(self.gm.graph.output_node()):
            for place in places.values():
                if not place.ring and place.layer == 0:
                    self._call("pack", *self._buffers(PrefillBuffers, place))
        return count

    def cached(self) -> int:
        """Replace ops by ``attend_cache``, ``attend_evict`` or ``attend_ring``; return how many.

        If the state has buffers for recompression scores, ``observe_held`` follows ``attend_cache``.
        """
        columns: dict[str, Node] = {}
        self._bind_states()

        def attend(site: Site, place: Place) -> Node:
            if place.ring:
                return self._attend_ring(site, place, columns)
            if self.policy.decode_rule() is not None:
                held = self._buffers(EvictBuffers, place)
                return self._call(
                    "attend_evict", *site.call, *held, place.layer, self.policy.spec, self.impl, self.ranks.spec
                )
            held = self._buffers(AppendBuffers, place)
            output = self._call("attend_cache", *site.call, *held, place.layer, self.impl)
            if f"{place.prefix}_{RecompressBuffers._fields[0]}" in self.state:
                found = self._buffers(RecompressBuffers, place)
                where = (place.layer, place.layers)
                self._call("observe_held", *site.call, *held, *found, *where, self.policy.spec, self.ranks.spec)
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

    def _each(self, rewrite: Callable[[Site, Place], Node]) -> int:
        sites, places = find_sites(self.gm), places_of(self.layout)
        for site in sites:
            with self.gm.graph.inserting_before(site.node):
                output = rewrite(site, places[site.layer])
            output.meta = site.node.meta
            site.node.replace_all_uses_with(output)
            self.gm.graph.erase_node(site.node)
        return len(sites)

    def _call(self, name: str, *operands: Any) -> Node:
        return self.gm.graph.call_function(getattr(torch.ops.kvpass, name).default, operands)

    def _buffers(self, kind: Any, place: Place) -> list[Node | None]:
        """Return the operands of a tuple of buffers; None where the cache has no such buffer."""
        return [self.state.get(f"{place.prefix}_{name}") for name in kind._fields]

    def _prune(self, site: Site, place: Place) -> Node:
        start, first = self.state["start"], self.state["first"]
        buffers = self._buffers(PrefillBuffers, place)
        entries = buffers[PrefillBuffers._fields.index("entries")]
        frequencies = site.rotary_frequencies if self.policy.reads_rotation else None
        rows = self.state.get(f"{place.prefix}_rule_rows")
        policy_inputs = PolicyInputs(self._projection(site), frequencies, entries, rule_rows=rows)  # type: ignore[arg-type]
        asked = (self.policy.spec, *policy_inputs, self.ranks.spec)
        observed = self._call("observe_attention", *site.call, start, first, place.layer, place.layers, *asked)
        observed.meta = {"nn_module_stack": site.node.meta.get("nn_module_stack")}
        output, *seen = (self.gm.graph.call_function(operator.getitem, (observed, i)) for i in range(4))
        candidates = (site.k, site.v, *seen, first)
        self._call("cascade_step", *buffers, *candidates, place.layer, self.policy.spec, self.ranks.spec)
        return output

    def _projection(self, site: Site) -> Node | None:
        """Insert the weight of the output projection ``[hidden, H * Dv]``, where the policy reads it."""
        if not self.policy.reads_projection:
            return None
        found = site.output_projection
        if not found.inputs_first:
            return found.weight
        node = self.gm.graph.call_method("t", (found.weight,))
        node.meta = {**found.weight.meta, "example_value": recorded(found.weight).t()}
        return node

    def _fill_ring(self, site: Site, place: Place) -> Node:
        ring = self._buffers(RingBuffers, place)
        return self._call("fill_ring", *site.call, *ring, self.state["start"], place.layer, site.chunked)

    def _attend_ring(self, site: Site, place: Place, columns: dict[str, Node]) -> Node:
        ring, seen, first = self._buffers(RingBuffers, place), self.state["seen"], self.state["first"]
        if place.prefix not in columns:
            assert ring[0] is not None
            slots = recorded(ring[0]).shape[3]
            columns[place.prefix] = self._call("columns_held", seen, first, slots, site.chunked)
        where = (columns[place.prefix], seen, place.layer, first if site.chunked else None)
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
