"""Fail closed on a decoder that keeps what it has seen: a cache or counter of its own, beside those of kvpass.

It is written into (``self.k_cache[:, :, input_pos] = k``) or put in the place of what a call before has left there
(``self.prev = x[:, -1:]``). Either way a call gives something else than the same tokens at the end of the whole text,
and nothing takes it back when a call is refused, or goes on from another cache.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor
from torch._dynamo.symbolic_convert import tls
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.tensor import TensorVariable
from torch.fx import GraphModule, Node

from kvpass.graphs.apart import fed_by_inputs
from kvpass.graphs.fx_utils import DataFlow, dotted, is_module_tensor, mutated_inputs, recorded, refuse, storage_of


def check_own_state_pass(gm: GraphModule) -> int:
    """Refuse a graph that reads state which it also changes; changes nothing.

    State: tensors of the module, and others that are no numbers of tokens (a cache given as an argument).

    Raises:
        UnsupportedAttentionError: naming the call that makes what is kept.
    """
    held = {
        node: node._dynamo_source.name
        for node in gm.graph.find_nodes(op="placeholder")
        if isinstance(recorded(node), Tensor) and (is_module_tensor(node) or recorded(node).is_floating_point())
    }
    written = {storage_of(node): name for node, name in held.items()}
    for node in DataFlow(gm).sources([gm.graph.output_node()]):
        for operand in mutated_inputs(node):
            if storage_of(operand) in written:
                raise _refusal(node, written[storage_of(operand)])
    fed = {node.name: node for node in fed_by_inputs(list(gm.graph.nodes))}
    for place, made in _replaced():
        read = any(name == place or name.startswith((f"{place}.", f"{place}[")) for name in held.values())
        if read and made in fed:
            raise _refusal(fed[made], place)
    return 0


def _replaced() -> Iterator[tuple[str, str]]:
    """Places outside of the graph that the traced call puts tensors in, and the names of the nodes that make these."""
    translator = getattr(tls, "current_tx", None)
    if translator is None:
        return
    effects = translator.output.side_effects
    for variable in list(effects.id_to_variable.values()):
        if variable.source is None or not effects.is_modified(variable):
            continue
        base = variable.source.name
        stored = {f"{base}.{name}": value for name, value in effects.store_attr_mutations.get(variable, {}).items()}
        for place, value in (stored or {base: variable}).items():
            found: list[VariableTracker] = []
            VariableTracker.visit(found.append, value)
            yield from ((place, part.proxy.node.name) for part in found if isinstance(part, TensorVariable))


def _refusal(node: Node, place: str) -> Exception:
    return refuse(
        node,
        f"it changes {dotted(place)}, a cache or counter of the decoder's own, which goes on from call to call. Build "
        "the decoder without one (no setup_caches, no set_kv_cache): kvpass keeps the cache and counts the tokens",
    )
