"""The captures of one model of transformers: one a batch size, number of logits, and one token against several."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.exc import BackendCompilerFailed, TorchRuntimeError, Unsupported
from torch.fx import GraphModule

from kvpass.backend import PhaseCompiler
from kvpass.captured import CapturedDecoder
from kvpass.graphs.fx_utils import recorded, shape_of
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
        self._ends: set[int] = set()
        self._captured: dict[tuple[int, int, bool], Callable[..., Tensor]] = {}

    def __call__(self, forward: Forward, ids: Tensor, positions: Tensor, logits_to_keep: int) -> Tensor:
        """Logits ``[B, T or logits_to_keep, vocabulary]`` of contiguous ids and positions ``[B, T]``.

        Args:
            forward: the model's; the same in every call. logits_to_keep: of the last so many tokens; 0 = all.
        Raises:
            ValueError: the decoder is not understood, is no single graph, or is another one for other lengths.
        """
        rows, tokens = ids.shape
        if logits_to_keep >= tokens:
            logits_to_keep = 0
        key = (rows, logits_to_keep, tokens == 1)
        if key not in self._captured:
            self._captured[key] = self._capturing(forward, logits_to_keep, several=tokens > 1)
        if tokens > 1:
            for tensor in (ids, positions):
                torch._dynamo.maybe_mark_dynamic(tensor, 1)
        try:
            return self._captured[key](ids, positions)
        except BackendCompilerFailed as failure:
            inner = failure.inner_exception
            raise (inner if isinstance(inner, (ValueError, torch.OutOfMemoryError)) else failure) from None
        except Unsupported as failure:
            raise ValueError(f"the decoder cannot be captured as one graph: {failure}") from failure
        except TorchRuntimeError as failure:
            raise ValueError(f"the decoder fails on an input of {tokens} tokens: {failure}") from failure

    @property
    def longest(self) -> int | None:
        """Tokens in all that the captures so far hold for; None when any number."""
        return min(self._ends, default=None)

    def check_length(self, seen: int, tokens: int) -> None:
        """Whether the decoder takes ``tokens`` more after ``seen``, as far as captures have shown.

        Raises:
            ValueError: it does not.
        """
        if self.longest is not None and seen + tokens > self.longest:
            raise ValueError(
                f"{tokens} tokens after {seen}: the decoder does not take more than {self.longest}, or does otherwise "
                "from there on"
            )

    def _capturing(self, forward: Forward, logits_to_keep: int, *, several: bool) -> Callable[..., Tensor]:
        def step(input_ids: Tensor, position_ids: Tensor) -> Tensor:
            logits: Tensor = forward(
                input_ids=input_ids,
                position_ids=position_ids,
                use_cache=False,
                logits_to_keep=logits_to_keep,
                return_dict=True,
            ).logits
            return logits

        compiler, ends = self.compiler, self._ends

        # Dynamo keeps every backend for good: it must not keep the model, so not this object either
        def backend(gm: GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
            decoder = CapturedDecoder(gm, example_inputs, compiler)
            if several:
                ends.update(_ends_of(decoder.graph.gm, max(logits_to_keep + 1, 2)))
            decoder.function()  # now, so that Dynamo checks what the compiler assumes
            return decoder.__call__

        # dynamic=False: what earlier captures of this line saw, another logits_to_keep, makes no symbol in this one
        return torch.compile(_own_code(step), backend=backend, fullgraph=True, dynamic=False)


def _ends_of(gm: GraphModule, shortest: int) -> set[int]:
    """The tokens that a capture of several holds for at most; none when it holds for any number of them.

    Raises:
        ValueError: it holds for one number of tokens only, or for some and not for others.
    """
    inputs = gm.graph.find_nodes(op="placeholder")
    if all(isinstance(size, int) for node in inputs for size in shape_of(node) or ()):
        raise ValueError(
            "the decoder was captured for exactly this number of tokens and no other: something makes a constant of "
            "it, or a table of positions ends there"
        )
    sizes = (size for size in map(recorded, inputs) if isinstance(size, torch.SymInt))
    return {most for size in sizes if (most := longest_length(gm, size, shortest)) is not None}


def _own_code(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A twin with a code object of its own: Dynamo keeps compiled entries, and counts them, per code object."""
    assert isinstance(function, types.FunctionType)
    twin = types.FunctionType(
        function.__code__.replace(), function.__globals__, function.__name__, None, function.__closure__
    )
    twin.__kwdefaults__ = function.__kwdefaults__
    return twin
