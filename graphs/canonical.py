"""The canonical form of a captured decoder, which passes make of its attention and others read.

Each attention op is one ``kvpass::site`` node, numbered in order of execution; states of recurrent layers are
``read_state`` and ``write_state``. :mod:`kvpass.graphs.rewrite_attention` puts operators on the cache in their place.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch.fx import GraphModule, Node

import kvpass.ops.schemas  # noqa: F401 (registers the operators)
from kvpass.config import Geometry, LayerGroup, Layout, PoolFacts, StateShape
from kvpass.errors import UnsupportedAttentionError
from kvpass.graphs.fx_utils import Dim, arguments_of, dim_of, module_path_of, recorded, refuse
from kvpass.graphs.model_parts import OutputProjection, attention_input, output_projection
from kvpass.operands import Attention, from_names

SITE = torch.ops.kvpass.site.default
READ_STATE = torch.ops.kvpass.read_state.default
WRITE_STATE = torch.ops.kvpass.write_state.default
REAL_TOKENS = torch.ops.kvpass.real_tokens.default
ABSORBED_QUERY = torch.ops.kvpass.absorbed_query.default
EXPANDED_OUTPUT = torch.ops.kvpass.expanded_output.default
SLOPES = "kvpass_slopes"  # key in the meta of an attention op: its ALiBi slopes, until fold_alibi has run
POSITIONS_IN_KEYS = "kvpass_positions_in_keys"
"""Key in the meta of an attention op: true once ``fold_alibi`` has added columns to its keys."""

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Site:
    """Arguments of one ``kvpass::site`` node."""

    node: Node
    q: Node
    k: Node
    v: Node
    scale: float
    layer: int
    sliding_window: int | None
    softcap: float | None
    sinks: Node | None
    refusal: str | None
    chunked: bool
    up: Node | None
    nope: int

    @property
    def call(self) -> Attention:
        """Operands of the call, with nodes in place of tensors."""
        return Attention(self.q, self.k, self.v, self.scale, self.softcap, self.sinks)  # type: ignore[arg-type]

    @property
    def output_projection(self) -> OutputProjection:
        """The linear layer that reads the output; UnsupportedAttentionError: there is none."""
        return self.needed(
            output_projection(self.node) if self.up is None else None,  # what is cached are no values of heads
            "the output projection of the layer, which must be a linear layer (or addmm, or a matrix product with a "
            "parameter) that reads the output of attention, heads side by side, and nothing else may read that output",
        )

    @property
    def attention_input(self) -> Node:
        """What the linear layers of queries, keys and values read, ``[B, T, hidden]`` or ``[B * T, hidden]``."""
        return self.needed(
            attention_input(self.q, self.k, self.v),
            "what enters the attention layer: one tensor that the linear layers of queries, keys and values read",
        )

    def needed(self, part: T | None, what: str) -> T:
        """Return what a policy reads of the model; raise UnsupportedAttentionError if it was not found."""
        if part is None:
            advice = "take a policy that does not need it, see docs/which-policy.md"
            raise refuse(self.node, f"the policy needs {what}; {advice}")
        return part

    @property
    def module_path(self) -> str:
        return module_path_of(self.node)


def find_sites(gm: GraphModule) -> list[Site]:
    """Return the attention ops in execution order.

    Layers are numbered in that order. An op without a window that reads keys and values of an earlier one is of its
    layer, unless another such op with keys and values of its own is between them: entries are kept layer after layer.
    """
    sites: list[Site] = []
    latest, layers = None, 0
    for node in gm.graph.find_nodes(op="call_function", target=SITE):
        site = Site(node=node, layer=layers, **arguments_of(node))
        if site.sliding_window is None:
            if latest is not None and site.sinks is None and site.call[1:] == latest.call[1:]:
                site = replace(site, layer=latest.layer)
            latest = site
        layers = max(layers, site.layer + 1)
        sites.append(site)
    return sites


def _first_sites(gm: GraphModule) -> list[Site]:
    """Return the first attention op of each layer."""
    first = {site.layer: site for site in reversed(find_sites(gm))}
    return [first[layer] for layer in sorted(first)]


def state_of(node: Node) -> tuple[int, str]:
    """Return layer and name of the state that a ``read_state`` or ``write_state`` is of."""
    layer, name = node.args[1:3]
    assert isinstance(layer, int) and isinstance(name, str)
    return layer, name


def results_of(gm: GraphModule) -> list[Node]:
    """Return the output of a graph, and what writes states for the call after it."""
    return [*gm.graph.find_nodes(op="call_function", target=WRITE_STATE), gm.graph.output_node()]


def batch_and_tokens(gm: GraphModule) -> tuple[Dim, Dim]:
    """Return the batch size and the number of tokens of the attention ops, of which there must be some."""
    shape = recorded(find_sites(gm)[0].q).shape
    return dim_of(shape[0]), dim_of(shape[2])


def check_sites_pass(gm: GraphModule, *, expected: int | None = None) -> int:
    """Raise if kvpass cannot hold the cache of an attention op; the graph is not changed.

    Refused are no attention op, different dtypes or devices, and layers without an op, of ``expected`` ones if known.
    """
    sites = find_sites(gm)
    if not sites:
        raise UnsupportedAttentionError("", "output", "the graph has no attention that kvpass understands")
    modules = {site.module_path for site in sites}  # differential attention has two ops in each
    if expected is not None and expected not in (len(sites), len(modules)):
        raise UnsupportedAttentionError(
            "",
            "output",
            f"found {len(sites)} attention ops in {len(modules)} modules of a model of {expected} layers; the others "
            "keep a state that kvpass does not know",
        )
    first = recorded(sites[0].k)
    for site in sites:
        q, k, v = (recorded(node) for node in (site.q, site.k, site.v))
        if not q.dtype == k.dtype == v.dtype:
            raise refuse(site.node, f"queries of {q.dtype} beside keys of {k.dtype} and values of {v.dtype}")
        if (k.dtype, k.device) != (first.dtype, first.device):
            here, there = f"{k.dtype} on {k.device}", f"{first.dtype} on {first.device}"
            raise refuse(site.node, f"keys of {here} beside {there} in the first layer")
    return 0


def _group(site: Site) -> LayerGroup:
    """Return the layer of an attention op as a group of its own."""
    window = site.sliding_window
    k, v = recorded(site.k), recorded(site.v)
    first_columns = (site.k, (..., slice(None, v.shape[3], None)))  # values written as k[..., :n]
    geometry = Geometry(
        layers=1,
        kv_heads=int(k.shape[1]),
        key_dim=int(k.shape[3]),
        value_dim=int(v.shape[3]),
        itemsize=k.dtype.itemsize,
        values_in_keys=site.v.target is operator.getitem and site.v.args == first_columns and window is None,
    )
    return LayerGroup(geometry=geometry, layers=(site.layer,), sliding_window=window, chunked=site.chunked)


def layout_of(gm: GraphModule) -> tuple[Layout, torch.dtype, torch.device]:
    """Return layout, dtype and device of the KV entries of a graph that passed :func:`check_sites_pass`."""
    sites = _first_sites(gm)
    k = recorded(sites[0].k)
    reads = {state_of(node): recorded(node) for node in gm.graph.find_nodes(op="call_function", target=READ_STATE)}
    states = [StateShape.of(*state, value) for state, value in reads.items()]
    return Layout.of(list(map(_group, sites)), states), k.dtype, k.device


def pool_facts(gm: GraphModule, layout: Layout) -> tuple[PoolFacts, ...]:
    """Return what a cache must know of each pool beside the layout."""
    sites, facts = _first_sites(gm), []
    for layers in (group.layers for group in layout.pools):
        heads, kv_heads = (recorded(x).shape[1] for x in (sites[layers[0]].q, sites[layers[0]].k))
        plain = all(sites[layer].softcap is None and sites[layer].sinks is None for layer in layers)
        facts.append(PoolFacts(int(heads) // int(kv_heads), plain))
    return tuple(facts)


@dataclass(frozen=True)
class SiteLocation:
    """Where the KV entries of an attention op are stored: in a ring buffer, else in a store."""

    ring: bool
    prefix: str  # of the state tensors' names
    layer: int  # index there
    layers: int  # number of ops there

    def buffers(self, buffers: Any, state: Mapping[str, Any]) -> Any:
        """Return such a tuple of buffers, out of the cache's state by name; None where it lacks a buffer."""
        return from_names(buffers, state, f"{self.prefix}_")


def site_locations(layout: Layout) -> dict[int, SiteLocation]:
    """Return where the KV entries of each attention op are stored, by its index in execution order."""
    return {
        layer: SiteLocation(name == "ring", f"{name}{index}", position, len(group.layers))
        for name, groups in (("store", layout.pools), ("ring", layout.rings))
        for index, group in enumerate(groups)
        for position, layer in enumerate(group.layers)
    }
