"""The captures of one model of transformers: one a batch size, number of logits, and one token against several."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.exc import BackendCompilerFailed, Unsupported
from torch.fx import GraphModule
from torch.fx.experimental.symbolic_shapes import ConstraintViolationError

from kvpass.backend import PhaseCompiler
from kvpass.captured import CapturedDecoder
from kvpass.graphs.fx_utils import recorded
from kvpass.graphs.length_guards import longest_length

Forward = Callable[..., Any]
"""``forward`` of a causal language model of transformers."""


class Decoders:
    """Runs a model's forward as captured graphs, inside :func:`~kvpass.backend.bind_call`.

    Args:
        compiler: makes the phases of every capture.
    """

    def __init__(self, compiler: PhaseCompiler) -> None:
        self.compiler = compiler
        self._captured: dict[tuple[int, int, bool], Callable[..., Tensor]] = {}

    def __call__(self, forward: Forward, ids: Tensor, positions: Tensor, logits_to_keep: int) -> Tensor:
        """Logits ``[B, T or logits_to_keep, vocabulary]`` of contiguous ids and positions ``[B, T]``.

        Args:
            forward: the model's; the same in every call. logits_to_keep: of the last so many tokens; 0 = all.
        Raises:
            ValueError: the decoder is not understood, is no single graph, or does not take a prompt of any length.
        """
        rows, tokens = ids.shape
        if logits_to_keep >= tokens:
            logits_to_keep = 0
        key = (rows, logits_to_keep, tokens == 1)
        if key not in self._captured:
            self._captured[key] = _capturing(forward, self.compiler, logits_to_keep)
        if tokens > 1:
            for tensor in (ids, positions):
                torch._dynamo.mark_dynamic(tensor, 1)
        try:
            return self._captured[key](ids, positions)
        except BackendCompilerFailed as failure:
            inner = failure.inner_exception
            raise (inner if isinstance(inner, (ValueError, torch.OutOfMemoryError)) else failure) from None
        except Unsupported as failure:
            raise ValueError(f"the decoder cannot be captured as one graph: {failure}") from failure
        except ConstraintViolationError as violation:
            raise ValueError(f"the decoder does not take a prompt of any length: {violation}") from violation


def _capturing(forward: Forward, compiler: PhaseCompiler, logits_to_keep: int) -> Callable[..., Tensor]:
    def step(input_ids: Tensor, position_ids: Tensor) -> Tensor:
        logits: Tensor = forward(
            input_ids=input_ids,
            position_ids=position_ids,
            use_cache=False,
            logits_to_keep=logits_to_keep,
            return_dict=True,
        ).logits
        return logits

    # Dynamo keeps every backend for good: it must not keep the model
    def backend(gm: GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        decoder = CapturedDecoder(gm, example_inputs, compiler)
        _check_any_length(decoder.graph.gm, max(logits_to_keep + 1, 2))
        decoder.function()  # now, so that Dynamo checks what the compiler assumes
        return decoder.__call__

    # dynamic=False: what earlier captures of this line saw, another logits_to_keep, makes nothing a symbol in this one
    return torch.compile(_own_code(step), backend=backend, fullgraph=True, dynamic=False)


def _check_any_length(gm: GraphModule, shortest: int) -> None:
    """Refuse a decoder whose trace holds for some lengths only: what it does at others is another decoder."""
    for size in (recorded(node) for node in gm.graph.find_nodes(op="placeholder")):
        if isinstance(size, torch.SymInt) and (most := longest_length(gm, size, shortest)) is not None:
            raise ValueError(
                "the decoder does not take a prompt of any length, perhaps for a table of positions that ends: "
                f"tokens <= {most}"
            )


def _own_code(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A twin with a code object of its own: Dynamo keeps compiled entries, and counts them, per code object."""
    assert isinstance(function, types.FunctionType)
    twin = types.FunctionType(
        function.__code__.replace(), function.__globals__, function.__name__, None, function.__closure__
    )
    twin.__kwdefaults__ = function.__kwdefaults__
    return twin
