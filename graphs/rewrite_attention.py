"""Rewrite canonical attention sites for one phase.

Before::

    out = kvpass.site(q, k, v, scale)

After, prefill (once per layer, and one ``pack`` at the end of the graph)::

    out, scores, traces, weight = kvpass.observe_attention(q, k, v, start, scale, layer, L, policy)
    kvpass.cascade_step(pool_k, ..., k, v, scores, traces, weight, entries, start, layer, policy)

After, decode and extend::

    out = kvpass.attend_cache(q, k, v, pool_k, pool_v, offsets, tail_k, tail_v, tail_start, tail_used, scale, layer)

or, under a policy that evicts while decoding::

    out = kvpass.attend_evict(q, k, v, pool_k, pool_v, offsets, tail_k, tail_v, table, memory, ..., layer, policy)

A site with a sliding window becomes ``fill_ring`` in prefill and ``attend_ring`` in decode and extend, whatever the
policy; ``columns_held`` comes once before all that share a ring. ``layer`` of an operator counts the sites that share
its pool or ring.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

import kvpass.ops.schemas  # noqa: F401 (registers the operators)
from kvpass.config import Layout, SiteShape
from kvpass.errors import UnsupportedAttentionError
from kvpass.graphs.bind_state import example_value
from kvpass.graphs.fx_utils import module_path_of, refuse

SITE = torch.ops.kvpass.site.default


@dataclass(frozen=True, kw_only=True)
class Site:
    """Arguments of one canonical attention node."""

    node: Node
    q: Node
    k: Node
    v: Node
    scale: float
    layer: int
    sliding_window: int | None = None
    softcap: float | None = None
    sinks: Node | None = None
    refusal: str | None = None

    @classmethod
    def of(cls, node: Node, layer: int) -> Site:
        names = ["q", "k", "v", "scale", "sliding_window", "softcap", "sinks", "refusal"]
        given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
        return cls(node=node, layer=layer, **given)  # type: ignore[arg-type]

    @property
    def module_path(self) -> str:
        return module_path_of(self.node)


def find_sites(gm: GraphModule) -> list[Site]:
    """The canonical sites in execution order; layers are numbered in that order."""
    nodes = [node for node in gm.graph.nodes if node.op == "call_function" and node.target is SITE]
    return [Site.of(node, layer) for layer, node in enumerate(nodes)]


def check_sites_pass(gm: GraphModule, *, expected: int | None = None) -> int:
    """Fail closed on sites whose cache kvpass cannot hold; changes nothing.

    Args:
        expected: attention layers the model is known to have; None when unknown.
    Raises:
        UnsupportedAttentionError: no site, sites of different dtypes or devices, or layers without a site.
    """
    sites = find_sites(gm)
    if not sites:
        raise UnsupportedAttentionError("", "output", "the graph has no attention that kvpass understands")
    modules = {site.module_path for site in sites}  # differential attention has two sites in each
    if expected is not None and expected not in (len(sites), len(modules)):
        raise UnsupportedAttentionError(
            "",
            "output",
            f"found {len(sites)} attention ops in {len(modules)} modules of a model of {expected} layers; the others "
            "keep a state that kvpass does not know",
        )
    first = example_value(sites[0].k)
    for site in sites:
        q, k, v = (example_value(node) for node in (site.q, site.k, site.v))
        if not q.dtype == k.dtype == v.dtype:
            raise refuse(site.node, f"queries of {q.dtype} beside keys of {k.dtype} and values of {v.dtype}")
        if (k.dtype, k.device) != (first.dtype, first.device):
            here, there = f"{k.dtype} on {k.device}", f"{first.dtype} on {first.device}"
            raise refuse(site.node, f"keys of {here} beside {there} in the first layer")
    return 0


def _shape(site: Site) -> SiteShape:
    k, v = example_value(site.k), example_value(site.v)
    return SiteShape(
        kv_heads=int(k.shape[1]),
        key_dim=int(k.shape[3]),
        value_dim=int(v.shape[3]),
        itemsize=k.dtype.itemsize,
        sliding_window=site.sliding_window,
    )


def layout_of(gm: GraphModule) -> tuple[Layout, torch.dtype, torch.device]:
    """Layout, dtype and device of the entries of a graph that passed :func:`check_sites_pass`."""
    sites = find_sites(gm)
    k = example_value(sites[0].k)
    return Layout.of([_shape(site) for site in sites]), k.dtype, k.device


@dataclass(frozen=True)
class Place:
    """Where the entries of a site live.

    Attributes:
        ring: in a ring (else in a store). prefix: of the state tensors' names. layer: index there. layers: sites there.
    """

    ring: bool
    prefix: str
    layer: int
    layers: int

    def of(self, state: Mapping[str, Node], *names: str) -> list[Node]:
        """State tensors of this place."""
        return [state[f"{self.prefix}_{name}"] for name in names]


def _places(layout: Layout) -> dict[int, Place]:
    found = {}
    for ring, groups in ((False, layout.pools), (True, layout.rings)):
        for index, group in enumerate(groups):
            for position, layer in enumerate(group.layers):
                prefix = f"{'ring' if ring else 'store'}{index}"
                found[layer] = Place(ring, prefix, position, len(group.layers))
    return found


def rewrite_prefill_pass(gm: GraphModule, *, state: Mapping[str, Node], layout: Layout, policy: str) -> int:
    """Sites -> ``observe_attention`` + ``cascade_step``, one ``pack`` a pool before the output; returns the sites."""
    graph = gm.graph
    sites = find_sites(gm)
    places = _places(layout)
    for site in sites:
        with graph.inserting_before(site.node):
            output = _prefill_site(gm, site, places[site.layer], state, policy)
        _replace(gm, site, output)
    with graph.inserting_before(graph.output_node()):
        for place in places.values():
            if not place.ring and place.layer == 0:
                operands = place.of(state, "pool_k", "pool_v", "slots", "slot_traces", "offsets")
                graph.call_function(torch.ops.kvpass.pack.default, tuple(operands))
    return len(sites)


def _prefill_site(gm: GraphModule, site: Site, place: Place, state: Mapping[str, Node], policy: str) -> Node:
    graph, start = gm.graph, state["start"]
    if place.ring:
        ring = place.of(state, "ring_k", "ring_v")
        arguments = (site.q, site.k, site.v, start, *ring, site.scale, place.layer, site.softcap, site.sinks)
        return graph.call_function(torch.ops.kvpass.fill_ring.default, arguments)
    observed = graph.call_function(
        torch.ops.kvpass.observe_attention.default,
        (
            site.q,
            site.k,
            site.v,
            start,
            site.scale,
            place.layer,
            place.layers,
            policy,
            site.softcap,
            site.sinks,
        ),
    )
    observed.meta = {"nn_module_stack": site.node.meta.get("nn_module_stack")}
    output, scores, traces, weight = (graph.call_function(operator.getitem, (observed, i)) for i in range(4))
    buffers = ("pool_k", "pool_v", "slots", "slot_traces", "ledger", "window_traces", "tail_k", "tail_v")
    graph.call_function(
        torch.ops.kvpass.cascade_step.default,
        (
            *place.of(state, *buffers),
            site.k,
            site.v,
            scores,
            traces,
            weight,
            *place.of(state, "entries"),
            start,
            place.layer,
            policy,
        ),
    )
    return output


def rewrite_cached_pass(gm: GraphModule, *, state: Mapping[str, Node], layout: Layout, impl: str, policy: str) -> int:
    """Sites -> ``attend_cache`` or ``attend_ring`` (decode and extend); returns the sites.

    Where the state has room for what a policy sees in a turn, ``observe_held`` follows ``attend_cache``.
    """
    names = ("pool_k", "pool_v", "offsets", "tail_k", "tail_v", "tail_start", "tail_used")
    turn = ("turn_scores", "turn_masses", "turn_ledger", "turn_window")

    def attend(site: Site, place: Place) -> Node:
        tables = [state.get(f"{place.prefix}_{name}") for name in ("tiles", "tile_offsets")]
        arguments = (*place.of(state, *names), site.scale, place.layer, impl, site.softcap, site.sinks, *tables)
        output = gm.graph.call_function(torch.ops.kvpass.attend_cache.default, (site.q, site.k, site.v, *arguments))
        if f"{place.prefix}_{turn[0]}" in state:
            held: tuple[Any, ...] = (*place.of(state, *names, *turn), site.scale, place.layer, place.layers, policy)
            gm.graph.call_function(torch.ops.kvpass.observe_held.default, (site.q, *held, site.softcap, site.sinks))
        return output

    return _rewrite_cached(gm, state, layout, impl, attend)


def rewrite_evicting_pass(gm: GraphModule, *, state: Mapping[str, Node], layout: Layout, impl: str, policy: str) -> int:
    """The same for a policy that evicts while decoding: ``attend_evict`` or ``attend_ring``; returns the sites."""
    names = ("pool_k", "pool_v", "offsets", "tail_k", "tail_v", "table", "memory", "quota", "next_position")

    def attend(site: Site, place: Place) -> Node:
        arguments = (*place.of(state, *names), site.scale, place.layer, policy, impl, site.softcap, site.sinks)
        return gm.graph.call_function(torch.ops.kvpass.attend_evict.default, (site.q, site.k, site.v, *arguments))

    return _rewrite_cached(gm, state, layout, impl, attend)


def _rewrite_cached(
    gm: GraphModule, state: Mapping[str, Node], layout: Layout, impl: str, attend: Callable[[Site, Place], Node]
) -> int:
    sites = find_sites(gm)
    places = _places(layout)
    held: dict[str, Node] = {}
    for site in sites:
        place = places[site.layer]
        with gm.graph.inserting_before(site.node):
            if place.ring:
                ring_k, ring_v = place.of(state, "ring_k", "ring_v")
                if place.prefix not in held:
                    columns = (state["seen"], state["first"], example_value(ring_k).shape[3])
                    held[place.prefix] = gm.graph.call_function(torch.ops.kvpass.columns_held.default, columns)
                ring = (ring_k, ring_v, held[place.prefix], state["seen"])
                output = gm.graph.call_function(
                    torch.ops.kvpass.attend_ring.default,
                    (site.q, site.k, site.v, *ring, site.scale, place.layer, impl, site.softcap, site.sinks),
                )
            else:
                output = attend(site, place)
        _replace(gm, site, output)
    return len(sites)


def _replace(gm: GraphModule, site: Site, output: Node) -> None:
    output.meta = site.node.meta
    site.node.replace_all_uses_with(output)
    gm.graph.erase_node(site.node)
