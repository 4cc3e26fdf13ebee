"""Record the values of a graph anew, from fake inputs of it.

Layers repeat, and a fake value says nothing of elements: the same call on operands of the same form is run once.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.fx.node import map_arg

from kvpass.graphs.fx_utils import dim_of, mutated_inputs
from kvpass.torch_compat import FakeTensor, FakeTensorMode, enable_python_dispatcher

_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device)


def record_values(
    gm: GraphModule, inputs: Sequence[Any], mode: FakeTensorMode, known: dict[Hashable, Any] | None = None
) -> None:
    """Record the values that fake inputs give; ``known``: those of another graph in this mode, to which they are added.

    Calls that differ only in elements may have one object as their value, also where they are two tensors. It is not
    so where a call writes into a tensor: there one must know what shares memory.
    """
    with mode, enable_python_dispatcher(), torch.no_grad():  # as Dynamo records: else polar fixes the number of rows
        _Recorder(gm, mode, {} if known is None else known).run(*inputs)


class _Recorder(Interpreter):
    def __init__(self, gm: GraphModule, mode: FakeTensorMode, known: dict[Hashable, Any]) -> None:
        super().__init__(gm)
        self.mode, self.extra_traceback = mode, False
        self._is_shared = not any(map(mutated_inputs, gm.graph.nodes))
        self._forms: dict[int, Hashable] = {}
        self._known = known

    def run_node(self, n: Node) -> Any:
        key = self._key(n) if self._is_shared and n.op.startswith("call_") else None
        value = super().run_node(n) if key is None or key not in self._known else self._known[key]
        if n.op == "get_attr" and isinstance(value, Tensor) and not isinstance(value, FakeTensor):
            value = self.mode.from_tensor(value)
        if key is not None and value is not None and self._form(value) is not None:  # None: called for its effect
            self._known[key] = value
        if n.op != "output":
            n.meta["example_value"] = value
        return value

    def _key(self, n: Node) -> Hashable:
        """What the value of a call depends on; None if on more than the forms of its operands."""
        place = {node: f"%{index}" for index, node in enumerate(n.all_input_nodes)}
        forms = [self._form(self.env[node]) for node in place]
        if None in forms:
            return None
        state = torch.is_grad_enabled(), *(torch.is_autocast_enabled(device) for device in ("cpu", "cuda"))
        return n.op, n.target, repr(map_arg((n.args, n.kwargs), place.__getitem__)), state, *forms

    def _form(self, value: Any) -> Hashable:
        """What calls read of a value beside its elements; None if they may read more."""
        if id(value) not in self._forms:
            self._forms[id(value)] = _form(value)
        return self._forms[id(value)]


def _form(value: Any) -> Hashable:
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return None if free_unbacked_symbols(value) else (type(value), value.node.expr)
    if isinstance(value, _PLAIN):
        return type(value), value
    if isinstance(value, (tuple, list)):
        forms = tuple(map(_form, value))
        return None if None in forms else (type(value), forms)
    if type(value) is not FakeTensor or value.layout != torch.strided or value.constant is not None:
        return None
    sizes = *value.shape, *value.stride(), value.storage_offset()
    flags = value.dtype, value.device, value.requires_grad, value.is_conj(), value.is_neg()
    return None if free_unbacked_symbols(sizes) else (*flags, *map(dim_of, sizes))
