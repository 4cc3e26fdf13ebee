"""Raise if the decoder keeps a cache or counter of its own.

The decoder may write into it (``self.k_cache[:, :, input_pos] = k``), replace it (``self.prev = x[:, -1:]``), or count
(``self.start += tokens``). A call then differs from the same tokens at the end of the whole text, and the state is not
rolled back when a call raises or continues from another cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.fx import GraphModule, Node
from torch.nn import Parameter

from kvpass.errors import UnsupportedAttentionError
from kvpass.graphs.canonical import results_of
from kvpass.graphs.fx_utils import (
    DataFlow,
    dotted,
    is_module_tensor,
    mutated_inputs,
    recorded,
    refuse,
    shape_of,
    source_of,
    storage_of,
    symbols_in,
    symbols_of,
    target_name,
    token_sizes,
)
from kvpass.graphs.verify.examples import input_dependent_nodes
from kvpass.torch_compat import (
    ChainedSource,
    ConstantVariable,
    GlobalSource,
    LocalSource,
    SymNodeVariable,
    TensorVariable,
    VariableTracker,
    changed_objects,
)

_ANEW = (
    "it counts, or keeps results in a dict or list, outside of the call, as a forward hook may, and each call would be "
    "captured anew. Remove it, or use the uncompiled model"
)


def check_own_state_pass(gm: GraphModule) -> int:
    """Raise if the graph changes a tensor that it reads, or stores a size or table; the graph is not changed.

    Checked are tensors of the module, and floating-point arguments, which may be a cache. A stored table counts if its
    size depends on the length. A call that counts, or keeps results in a dict or list, as forward hooks may, is refused
    too: it would be captured anew each time.
    """
    places = {
        node: source_of(node).name
        for node in gm.graph.find_nodes(op="placeholder")
        if isinstance(recorded(node), Tensor)
        and (is_module_tensor(node) or recorded(node).is_floating_point())
        and not isinstance(recorded(node), Parameter)  # a call that writes to weights invalidates caches filled before
    }
    place_of = {storage_of(node): name for node, name in places.items()}
    dependent = {node.name for node in input_dependent_nodes(list(gm.graph.nodes))}
    for node in DataFlow(gm).sources(results_of(gm)):
        for operand in mutated_inputs(node):
            # allowed: rewritten whole in every call before it is read, such as the frequencies of longrope
            made_anew = target_name(node) == "copy_" and operand in places and min(operand.users) is node
            if storage_of(operand) in place_of and not made_anew:
                raise _refusal(node, place_of[storage_of(operand)])
    lengths = symbols_of(token_sizes(gm.graph.nodes))
    for place, node, in_container in _replaced():
        size = symbols_in(node) & lengths
        table = symbols_of(shape_of(node) or ()) & lengths
        read = any(source == place or source.startswith((f"{place}.", f"{place}[")) for source in places.values())
        if in_container and node.name in dependent and not size:
            raise refuse(node, _ANEW)
        if size or (read and node.name in dependent):
            raise _refusal(node, place)
        if table and node.name not in dependent:
            raise refuse(
                node,
                f"it leaves a table for the length of this call in {dotted(place)}, and would take it for another. "
                "Call the decoder once on the longest text before it is compiled: then the table is there",
            )
        if read and node.name not in dependent:
            raise refuse(
                node,
                f"it changes {dotted(place)} by what stands there, as layers do that pack weights in their first call. "
                "Call the decoder once before it is compiled: then they are packed",
            )
    for variable, attributes in changed_objects():
        if _counts(variable, attributes):  # of a hook's variable, the module that has the hook is named
            source: Any = variable.source
            raise UnsupportedAttentionError(dotted(source.name.partition("._forward_")[0]), "a counter", _ANEW)
    return 0


def _counts(variable: VariableTracker, attributes: Mapping[str, VariableTracker]) -> bool:
    """Whether a changed object holds other whole numbers after the call, in an attribute or as a container."""
    if not attributes:
        return not _computed(variable)
    before = getattr(variable, "value", None)
    numbers = {name: x.value for name, x in attributes.items() if isinstance(x, ConstantVariable)}
    return any(type(new) is int and getattr(before, name, None) != new for name, new in numbers.items())


def _computed(variable: VariableTracker) -> list[Any]:
    """Return the tensors and sizes that the call computes in a variable."""
    variables: list[VariableTracker] = []
    VariableTracker.visit(variables.append, variable)
    return [part for part in variables if isinstance(part, TensorVariable | SymNodeVariable)]


def _replaced() -> Iterator[tuple[str, Node, bool]]:
    """Yield where the traced call stores tensors or sizes, with their nodes, and whether that is a container."""
    for variable, attributes in changed_objects():
        source: Any = variable.source
        root = source.get_base() if isinstance(source, ChainedSource) else source
        if not isinstance(root, LocalSource | GlobalSource):
            continue
        stored = {f"{source.name}.{name}": value for name, value in attributes.items()}
        for place, value in (stored or {source.name: variable}).items():
            yield from ((place, part.proxy.node, not stored) for part in _computed(value))


def _refusal(node: Node, place: str) -> Exception:
    return refuse(
        node,
        f"it changes {dotted(place)}, a cache or counter of the decoder's own, which goes on from call to call. Build "
        "the decoder without one (no setup_caches, no set_kv_cache): kvpass keeps the cache and counts the tokens",
    )
