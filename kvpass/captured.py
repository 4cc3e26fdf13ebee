"""One Dynamo capture of a decoder, from which the phases of every policy are made when a call first needs them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch._dynamo.convert_frame import compile_lock
from torch._guards import TracingContext, tracing
from torch.fx import GraphModule

from kvpass.backend import Phase, PhaseCompiler, bound_call
from kvpass.graphs.bind_state import fake_inputs
from kvpass.policies.base import Policy


class CapturedDecoder:
    """Called in place of the captured graph, inside :func:`~kvpass.backend.bind_call`.

    Args:
        gm, example_inputs: as Dynamo gives them to a backend, in whose trace this must be made.

    Raises:
        UnsupportedAttentionError: an attention call is not understood.
    """

    def __init__(self, gm: GraphModule, example_inputs: Sequence[Any], compiler: PhaseCompiler) -> None:
        self.graph = compiler.canonicalize(gm)
        self._compiler = compiler
        self._inputs = fake_inputs(example_inputs)
        self._context = TracingContext.get()
        self._functions: dict[tuple[type[Policy], str, Phase, bool], Callable[..., Any]] = {}

    def __call__(self, *inputs: Any) -> Any:
        return self.function()(*inputs)

    def function(self) -> Callable[..., Any]:
        """The compiled callable of the bound call."""
        call = bound_call()
        policy = call.cache.policy
        key = (type(policy), policy.spec, call.phase, call.observed)  # a policy may be defined again by the same name
        if key in self._functions:
            return self._functions[key]
        with compile_lock, tracing(self._context):
            if key not in self._functions:
                self._functions[key] = self._compiler.compile(self.graph, self._inputs)
        return self._functions[key]
