"""Rewrite canonical attention sites for one phase.

Before::

    out = kvpass.site(q, k, v, scale, layer)

After, prefill (once per layer, and one ``pack`` at the end of the graph)::

    out, scores, traces, weight = kvpass.observe_attention(q, k, v, start, scale, layer, L, policy)
    kvpass.cascade_step(pool_k, ..., k, v, scores, traces, weight, entries, start, layer, policy)

After, decode and extend::

    out = kvpass.attend_cache(q, k, v, pool_k, pool_v, offsets, tail_k, tail_v, tail_start, tail_used, scale, layer)

or, under a policy that evicts while decoding::

    out = kvpass.attend_evict(q, k, v, pool_k, pool_v, offsets, tail_k, tail_v, table, memory, ..., layer, policy)
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import GraphModule, Node

import kvpass.ops  # noqa: F401 (registers the operators)
from kvpass.config import Geometry
from kvpass.errors import UnsupportedAttentionError
from kvpass.graphs.bind_state import example_value
from kvpass.graphs.fx_utils import module_path_of

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
        names = ["q", "k", "v", "scale", "layer", "sliding_window", "softcap", "sinks", "refusal"]
        given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
        return cls(node=node, **{**given, "layer": layer})  # type: ignore[arg-type]

    @property
    def module_path(self) -> str:
        return module_path_of(self.node)

    def refuse(self, reason: str) -> UnsupportedAttentionError:
        return UnsupportedAttentionError(self.module_path, self.node.name, reason)


def find_sites(gm: GraphModule) -> list[Site]:
    """The canonical sites in execution order; layers are numbered in that order."""
    nodes = [node for node in gm.graph.nodes if node.op == "call_function" and node.target is SITE]
    return [Site.of(node, layer) for layer, node in enumerate(nodes)]


def check_sites_pass(gm: GraphModule, *, expected: int | None = None) -> int:
    """Fail closed on sites whose cache kvpass cannot hold; changes nothing.

    Args:
        expected: attention layers the model is known to have; None when unknown.
    Raises:
        UnsupportedAttentionError: no site, a site that was refused while tracing, a sliding window, layers of
            different geometry, or layers without a site.
    """
    sites = find_sites(gm)
    if not sites:
        raise UnsupportedAttentionError("", "output", "the graph has no attention that kvpass understands")
    if expected is not None and len(sites) != expected:
        raise UnsupportedAttentionError(
            "",
            "output",
            f"found {len(sites)} attention sites in a model of {expected} layers; the rest keep other state",
        )
    geometries = {}
    for site in sites:
        if site.refusal is not None:
            raise site.refuse(site.refusal)
        if site.sliding_window is not None:
            raise site.refuse(f"sliding_window={site.sliding_window}: sliding-window layers have no ring cache yet")
        geometries[site.layer] = _shape(site)
        if geometries[site.layer] != geometries[0]:
            raise site.refuse(
                f"KV geometry {geometries[site.layer]} differs from {geometries[0]} of the first layer; "
                "one pool per geometry is not implemented yet"
            )
    return 0


def _shape(site: Site) -> tuple[int, int, int]:
    k, v = example_value(site.k), example_value(site.v)
    return int(k.shape[1]), int(k.shape[3]), int(v.shape[3])


def geometry_of(gm: GraphModule) -> tuple[Geometry, torch.dtype, torch.device]:
    """KV geometry, dtype and device of a graph that passed :func:`check_sites_pass`."""
    sites = find_sites(gm)
    kv_heads, key_dim, value_dim = _shape(sites[0])
    k = example_value(sites[0].k)
    geometry = Geometry(
        layers=len(sites), kv_heads=kv_heads, key_dim=key_dim, value_dim=value_dim, itemsize=k.dtype.itemsize
    )
    return geometry, k.dtype, k.device


def rewrite_prefill_pass(gm: GraphModule, *, state: Mapping[str, Node], policy: str) -> int:
    """Sites -> ``observe_attention`` + ``cascade_step``, one ``pack`` before the output; returns the sites."""
    graph = gm.graph
    sites = find_sites(gm)
    pool = [state[name] for name in ("pool_k", "pool_v", "slots", "slot_traces")]
    ledger = [state[name] for name in ("ledger", "window_traces", "tail_k", "tail_v")]
    for site in sites:
        with graph.inserting_before(site.node):
            observed = graph.call_function(
                torch.ops.kvpass.observe_attention.default,
                (
                    site.q,
                    site.k,
                    site.v,
                    state["start"],
                    site.scale,
                    site.layer,
                    len(sites),
                    policy,
                    site.softcap,
                    site.sinks,
                ),
            )
            observed.meta = {"nn_module_stack": site.node.meta.get("nn_module_stack")}
            output, scores, traces, weight = (graph.call_function(operator.getitem, (observed, i)) for i in range(4))
            graph.call_function(
                torch.ops.kvpass.cascade_step.default,
                (
                    *pool,
                    *ledger,
                    site.k,
                    site.v,
                    scores,
                    traces,
                    weight,
                    state["entries"],
                    state["start"],
                    site.layer,
                    policy,
                ),
            )
        output.meta = site.node.meta
        site.node.replace_all_uses_with(output)
        graph.erase_node(site.node)
    with graph.inserting_before(graph.output_node()):
        graph.call_function(torch.ops.kvpass.pack.default, (*pool, state["offsets"]))
    return len(sites)


def rewrite_cached_pass(gm: GraphModule, *, state: Mapping[str, Node], impl: str) -> int:
    """Sites -> ``attend_cache`` (decode and extend); returns the sites."""
    names = ("pool_k", "pool_v", "offsets", "tail_k", "tail_v", "tail_start", "tail_used")
    operands = [state[name] for name in names]
    return _replace_sites(
        gm,
        torch.ops.kvpass.attend_cache.default,
        lambda site: (site.q, site.k, site.v, *operands, site.scale, site.layer, impl, site.softcap, site.sinks),
    )


def rewrite_evicting_pass(gm: GraphModule, *, state: Mapping[str, Node], policy: str) -> int:
    """Sites -> ``attend_evict`` (decode and extend of a policy that evicts while decoding); returns the sites."""
    names = ("pool_k", "pool_v", "offsets", "tail_k", "tail_v", "table", "memory", "quota", "next_position")
    operands = [state[name] for name in names]
    return _replace_sites(
        gm,
        torch.ops.kvpass.attend_evict.default,
        lambda site: (site.q, site.k, site.v, *operands, site.scale, site.layer, policy, site.softcap, site.sinks),
    )


def _replace_sites(gm: GraphModule, target: OpOverload, arguments: Callable[[Site], tuple[Any, ...]]) -> int:
    sites = find_sites(gm)
    for site in sites:
        with gm.graph.inserting_before(site.node):
            output = gm.graph.call_function(target, arguments(site))
        output.meta = site.node.meta
        site.node.replace_all_uses_with(output)
        gm.graph.erase_node(site.node)
    return len(sites)
