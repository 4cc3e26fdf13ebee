"""The captures of one model of transformers: one a batch size, number of logits, and one token against several."""

from __future__ import annotations

import types
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.exc import BackendCompilerFailed, TorchRuntimeError, Unsupported
from torch._dynamo.source import LocalSource
from torch.fx import GraphModule, Node

from kvpass.backend import PhaseCompiler, bound_call
from kvpass.captured import CapturedDecoder
from kvpass.graphs.bind_state import placeholders
from kvpass.graphs.examples import EXAMPLE_LENGTHS
from kvpass.graphs.fx_utils import recorded, shape_of
from kvpass.graphs.length_guards import check_length, longest_length
from kvpass.graphs.rewrite_attention import find_sites
from kvpass.graphs.table_ends import table_end

Forward = Callable[..., Any]
"""``forward`` of a causal language model of transformers."""


_ONLY_CAPTURE: ContextVar[bool] = ContextVar("kvpass_only_capture", default=False)


class _OnlyCaptured(Exception):
    """Raised in place of running what was captured."""


class Decoders:
    """Runs a model's forward as captured graphs, inside :func:`~kvpass.backend.bind_call`.

    Args:
        compiler: makes the phases of every capture.
    """

    def __init__(self, compiler: PhaseCompiler) -> None:
        self.compiler = compiler
        self._ends: set[int] = set()
        self._captured: dict[tuple[int, int, bool], Callable[..., Tensor]] = {}

    @property
    def longest(self) -> int | None:
        """Tokens in all that the captures so far hold for; None when any number."""
        return min(self._ends, default=None)

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
            captured = _capturing(forward, self.compiler, logits_to_keep, self._ends)
            if tokens > 1:
                self._capture(captured, ids)
            elif all(one for _, _, one in self._captured):
                # a cache from another process: what the decoder does with one token is recognised by what it does
                # with several
                several = _capturing(forward, self.compiler, 0, self._ends)
                self._capture(several, ids.expand(rows, EXAMPLE_LENGTHS[-1]))
            self._captured[key] = captured
        call = bound_call()
        check_length(self.longest, 0 if call.phase == "prefill" else call.cache.columns, tokens)
        return _called(self._captured[key], ids, positions)

    def _capture(self, captured: Callable[..., Tensor], ids: Tensor) -> None:
        """Capture without running, at the positions of a prompt: those of the call may start anywhere."""
        token = _ONLY_CAPTURE.set(True)
        try:
            _called(captured, ids.clone(memory_format=torch.contiguous_format), _counted(ids))
        except _OnlyCaptured:
            return
        finally:
            _ONLY_CAPTURE.reset(token)


def _counted(ids: Tensor) -> Tensor:
    """Positions ``[B, T]`` of rows that are not padded."""
    return torch.arange(ids.shape[1], device=ids.device).repeat(len(ids), 1)


def _called(captured: Callable[..., Tensor], ids: Tensor, positions: Tensor) -> Tensor:
    tokens = ids.shape[1]
    if tokens > 1:
        for tensor in (ids, positions):
            torch._dynamo.maybe_mark_dynamic(tensor, 1)
    try:
        return captured(ids, positions)
    except BackendCompilerFailed as failure:
        inner = failure.inner_exception
        raise (inner if isinstance(inner, (ValueError, torch.OutOfMemoryError)) else failure) from None
    except Unsupported as failure:
        raise ValueError(f"the decoder cannot be captured as one graph: {failure}") from failure
    except TorchRuntimeError as failure:
        raise ValueError(f"the decoder fails on an input of {tokens} tokens: {failure}") from failure


def _capturing(forward: Forward, compiler: PhaseCompiler, logits_to_keep: int, ends: set[int]) -> Callable[..., Tensor]:
    """The forward, captured when it is first called; what its captures take at most is added to ``ends``."""

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
        ends.update(_ends_of(decoder.graph.gm, max(logits_to_keep + 1, 2)))

        def run(*inputs: Any) -> Any:
            if _ONLY_CAPTURE.get():
                raise _OnlyCaptured
            return decoder(*inputs)

        if not _ONLY_CAPTURE.get() or bound_call().phase != "decode":
            decoder.function()  # now, so that Dynamo checks what the compiler assumes
        return run

    # dynamic=False: what earlier captures of this line saw, another logits_to_keep, makes nothing a symbol in this one
    return torch.compile(_own_code(step), backend=backend, fullgraph=True, dynamic=False)


def _ends_of(gm: GraphModule, shortest: int) -> set[int]:
    """The tokens in all that a capture holds for at most; none when it shows no end.

    Raises:
        ValueError: it holds for one number of tokens only, or for some and not for others.
    """
    inputs = placeholders(gm)
    shape = shape_of(find_sites(gm)[0].q)
    if shape is not None and isinstance(shape[2], int) and shape[2] > 1:
        raise ValueError(
            f"the decoder was captured for exactly {shape[2]} tokens and no other number: something makes a constant "
            "of it, or a table of positions ends there"
        )
    ends = [longest_length(gm, size, shortest) for size in map(recorded, inputs) if isinstance(size, torch.SymInt)]
    ends.append(table_end(gm, [node for node in inputs if _is_named(node, "position_ids")]))
    return {end for end in ends if end is not None}


def _is_named(node: Node, name: str) -> bool:
    source = node._dynamo_source  # type: ignore[attr-defined]
    return isinstance(source, LocalSource) and source.local_name == name


def _own_code(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A twin with a code object of its own: Dynamo keeps compiled entries, and counts them, per code object."""
    assert isinstance(function, types.FunctionType)
    twin = types.FunctionType(
        function.__code__.replace(), function.__globals__, function.__name__, None, function.__closure__
    )
    twin.__kwdefaults__ = function.__kwdefaults__
    return twin
