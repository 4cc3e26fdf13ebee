"""Weights that stay on the host: inputs of the graph that whoever runs it copies to the device first."""

from __future__ import annotations

from collections.abc import Sequence

from torch.fx import GraphModule, Node

from kvpass.graphs.fx_utils import recorded, storage_of
from kvpass.host_weights import TO_DEVICE, room_of

_HOST = "kvpass_host_weight"
"""Mark of such an input: the storages that the trace gave its copies."""


def take_host_weights_pass(gm: GraphModule) -> int:
    """Replace ``kvpass::to_device(weight)`` by ``weight``, recorded as on the device; returns how many."""
    calls = [node for node in gm.graph.nodes if node.target is TO_DEVICE]
    for node in calls:
        weight = node.args[0]
        weight.meta[_HOST] = weight.meta.get(_HOST, frozenset()) | {storage_of(node)}
        weight.meta["example_value"] = recorded(node)
        node.replace_all_uses_with(weight)
        gm.graph.erase_node(node)
    return len(calls)


def is_host_weight(node: Node) -> bool:
    """Whether a node is an input that stays on the host."""
    return _HOST in node.meta


def host_weights(nodes: Sequence[Node]) -> list[Node]:
    """Return those of the nodes that stay on the host, each once."""
    return list(dict.fromkeys(filter(is_host_weight, nodes)))


def rooms_of(groups: Sequence[Sequence[Node]]) -> list[int]:
    """Return the bytes of the copies of each group of such inputs that has any."""
    return [room_of(map(recorded, group)) for group in groups if group]


def storages_of_copies(nodes: Sequence[Node]) -> set[object]:
    """Return keys of the storages, as of ``storage_of``, of copies of those nodes that stay on the host."""
    return {storage for node in host_weights(nodes) for storage in node.meta[_HOST]}
