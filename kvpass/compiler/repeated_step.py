"""A decode step that Dynamo has checked, called again without Dynamo.

Dynamo checks about 30 guards a layer in every call, one millisecond for 32 layers. Little of that can change between
decode steps, so a step is called directly as long as what is compared here stays the same. The rest (elements of lists
and of objects that are neither modules nor configurations, functions and classes replaced by others) is checked again
after the next call of several tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.fx import GraphModule
from transformers import PretrainedConfig

from kvpass.graphs.bind_state import held_by_module, input_named, placeholders
from kvpass.graphs.fx_utils import recorded
from kvpass.torch_compat import GlobalStateGuard, dict_version, dynamo_settings, modes_are_active, traced_effects

_PLAIN = (Tensor, nn.Parameter)

_UNUSED = vars(nn.Module()).keys() - {"_parameters", "_buffers", "_modules"}
"""Dictionaries of every module that no forward reads, but for hooks: those are compared in every call."""


@dataclass(frozen=True)
class GraphCall:
    """A call of a captured graph, as Dynamo made it.

    Attributes:
        graph: ``graph(call, *inputs)``. inputs: of the graph. outputs: what it returned. given: where ids and
            positions are among the inputs, None where the graph does not use them.
    """

    graph: Callable[..., Sequence[Any]]
    inputs: tuple[Any, ...]
    outputs: Sequence[Any]
    given: tuple[int | None, ...]


def given_places(gm: GraphModule) -> tuple[int | None, ...] | None:
    """Where ids and positions are among the inputs of a capture; None if it can only be called by Dynamo.

    That is where another input is neither held by the module nor a size, or where the call changes objects: then
    Dynamo's code does more than to call the graph. To be called in the trace.
    """
    given = tuple(input_named(gm, name) for name in ("input_ids", "position_ids"))
    held = {*held_by_module(gm), *given}
    others = (node for place, node in enumerate(placeholders(gm)) if place not in held)
    if traced_effects() or any(isinstance(recorded(node), Tensor) for node in others):
        return None
    return given


class RepeatedStep:
    """A decode step, to be called again with other ids and positions ``[B, 1]``.

    Args:
        module: the decoder. made: its last call. given: ids and positions of that call. result: what the decoder
            returned, one of the graph's outputs.
    """

    def __init__(self, module: nn.Module, made: GraphCall, given: Sequence[Tensor], result: Tensor) -> None:
        self._graph, self._inputs, self._given = made.graph, made.inputs, made.given
        self._output = next(place for place, value in enumerate(made.outputs) if value is result)
        self._form = list(map(_form, given))
        self._attributes = list(_attributes(module))
        self._versions = list(map(dict_version, self._attributes))
        named = {id(value) for attributes in self._attributes for value in attributes.values()}
        held = [x for place, x in enumerate(made.inputs) if isinstance(x, Tensor) and place not in made.given]
        self._comparable = all(type(x) in _PLAIN and id(x) in named for x in held)
        self._held = held if self._comparable else []
        self._addresses = list(map(Tensor.data_ptr, self._held))  # "tensor.data = other" writes no attribute
        self._global_state, self._settings = GlobalStateGuard(), dynamo_settings()

    def holds(self, given: Sequence[Tensor]) -> bool:
        """Whether the step is still what Dynamo checked: no attribute was written, tensors are at the same addresses,
        and torch is in the same state."""
        return (
            self._comparable
            and self._form == list(map(_form, given))
            and self._versions == list(map(dict_version, self._attributes))
            and self._addresses == list(map(Tensor.data_ptr, self._held))
            and self._global_state.check()
            and dynamo_settings() == self._settings
            and not modes_are_active()
        )

    def __call__(self, call: Any, given: Sequence[Tensor]) -> Tensor:
        """Run the graph for ``call``, which has one token."""
        inputs = list(self._inputs)
        for place, value in zip(self._given, given, strict=True):
            if place is not None:
                inputs[place] = value
        result: Tensor = self._graph(call, *inputs)[self._output]
        return result


def _attributes(module: nn.Module) -> Iterator[dict[Any, Any]]:
    """Dictionaries that hold attributes of modules and of their configurations, or are attributes themselves."""
    holders: dict[int, Any] = {}
    for child in module.modules():
        holders[id(child)] = child
        holders |= {id(value): value for value in vars(child).values() if isinstance(value, PretrainedConfig)}
    for holder in holders.values():
        yield vars(holder)
        for name, value in vars(holder).items():
            if isinstance(value, dict) and name not in _UNUSED:
                yield value


def _form(x: Tensor) -> tuple[Any, ...]:
    return type(x), x.shape, x.stride(), x.dtype, x.device
