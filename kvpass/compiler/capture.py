"""The captures of one model, which Dynamo makes: for one row and for several, of ids or embeddings."""

from __future__ import annotations

import logging
import re
import threading
import types
from collections.abc import Callable
from contextlib import nullcontext, suppress
from contextvars import copy_context
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers.utils
from torch import Tensor
from torch.fx import GraphModule

from kvpass.adapt.images import Parts, unpacked
from kvpass.cache.fingerprint import ModelFingerprint
from kvpass.cache.model_state import Global, ModelState
from kvpass.compiler.backend import PhaseCompiler, no_garbage_collection, rows_text
from kvpass.compiler.guards import are_alike, take_over_guards
from kvpass.compiler.step import Call
from kvpass.errors import UnsupportedAttentionError
from kvpass.graphs.bind_state import placeholders
from kvpass.graphs.canonical import batch_and_tokens
from kvpass.graphs.fx_utils import argument_of, recorded
from kvpass.graphs.verify.examples import EXAMPLE_LENGTHS
from kvpass.graphs.verify.length_guards import longest_length
from kvpass.graphs.verify.tables import table_end
from kvpass.policies.base import Policy
from kvpass.progress import working
from kvpass.ranks import run_on_all_ranks
from kvpass.torch_compat import (
    REPEATS_LAYERS,
    BackendCompilerFailed,
    TorchRuntimeError,
    Unsupported,
    UserError,
    maybe_mark_dynamic,
    repeated_where,
)
from kvpass.tracing import CALL

log = logging.getLogger(__name__)

Further = Callable[[Tensor], dict[str, Any]]
"""Makes arguments of a forward from the positions; traced with it."""

Key = tuple[int, bool, Parts, int]
"""Rows (2: any number from 2 on), whether ids are embeddings, what is behind these, and axes of positions (0: none)."""

MAX_STATES = 8
"""States of a model of which captures are kept, as other adapters; that of the longest ago is dropped first."""

_NOT_ITS_CODE = (*torch.__path__, *transformers.utils.__path__, str(Path(__file__).parent))
"""Folders of code that is never a model's own."""

_ONE_CALL = threading.RLock() if torch.__version__ < "2.13" else nullcontext()
"""Before 2.13 ``torch.compile(dynamic=False)`` sets Dynamo's settings for the whole process while a call runs. Calls
that overlap would leave them set, and every module that is compiled afterwards would be captured with them."""


class _OnlyCaptured(Exception):
    """Raised in place of running what was captured."""


class _OneTokenAlone(ValueError):
    """Dynamo captured one token alone, which does not show what the decoder does with several."""


@dataclass
class _LengthLimits:
    """Where captures of a model end. Dynamo keeps it for good, so it must not know the model.

    Attributes:
        columns: tokens in all, padding included, that some captures hold for at most.
        positions: how many there are in tables that some captures look them up in.
    """

    columns: set[int] = field(default_factory=set)
    positions: set[int] = field(default_factory=set)

    @property
    def longest(self) -> int | None:
        """Tokens in all that the captures take; None when any number."""
        return min(self.columns | self.positions, default=None)

    def check_positions(self, seen: int, positions: Tensor) -> None:
        """Whether tables have rows for the positions, at which those on CUDA are looked at only near an end."""
        end, tokens = min(self.positions, default=None), positions.shape[1]
        if end is None or (positions.is_cuda and seen + tokens <= end):
            return
        last = int(positions.max())
        if last >= end:
            raise ValueError(
                f"{tokens} tokens after {seen}: the decoder does not take more than {end}, its table of positions ends "
                f"there and one would be at {last}"
            )

    def check_replays(self, policy: Policy, positions: Tensor) -> None:
        """Whether the decoder takes what the policy replays behind a prompt at these positions."""
        if self.longest is None:
            return
        tokens = positions.shape[1]
        replays = policy.replays(torch.zeros(1, tokens, dtype=torch.int64, device="cpu"))
        replayed = max((replay.ids.shape[1] for replay in replays), default=0)
        last = max(int(positions.max()) + 1, tokens)
        if last + replayed > self.longest:
            raise ValueError(
                f"policy {policy.name!r} replays {replayed} tokens behind a prompt of {tokens}, but the decoder does "
                f"not take more than {self.longest}, or does otherwise from there on; give a smaller chunk, or a "
                "shorter prompt"
            )


@dataclass(eq=False)
class _Captures:
    """Captures of a model in one of its states.

    Attributes:
        state: of the attributes with these names, which the captures read. compiled: what runs them. ends: of them.
    """

    state: Any
    names: frozenset[str | Global] = frozenset()
    compiled: dict[Key, Callable[..., Tensor]] = field(default_factory=dict)
    ends: _LengthLimits = field(default_factory=_LengthLimits)


class CaptureCache:
    """Runs a model's forward as captured graphs.

    Args:
        compiler: makes the phases of every capture. model: tells its present state. further: of the positions, what
            else the forward is captured with.
    """

    def __init__(self, compiler: PhaseCompiler, model: ModelFingerprint, further: Further | None = None) -> None:
        self.compiler, self.model, self.further = compiler, model, further
        self._states: list[_Captures] = []  # the present one first
        self._present: ModelState | None = None

    @property
    def longest(self) -> int | None:
        """Tokens in all that the captures of the model's present state take; None when any number."""
        return self._captures().ends.longest

    def _captures(self) -> _Captures:
        """Captures of the model in its present state: there may be some from when it was in this state before."""
        attributes = self.model.seen.attributes
        if self._present is not attributes:
            states = [captures for captures in self._states if captures.compiled]
            fits = (x for x in states if x.state == self.model.attributes(x.names).value)
            present = next(fits, None) or _Captures(self.model.attributes(frozenset()).value)
            self._states = [present, *(captures for captures in states if captures is not present)][:MAX_STATES]
            self._present = attributes
        return self._states[0]

    def run(self, call: Call, forward: types.MethodType, ids: Tensor, positions: Tensor, logits_to_keep: int) -> Tensor:
        """Logits ``[B, T or logits_to_keep, vocabulary]`` of a call; captures and compiles first what it needs.

        The model must be in the state in which its fingerprint last was.

        Args:
            forward: the model's. ids, positions: contiguous ``[B, T]``; ids may be embeddings ``[B, T, D]``, and
                positions have axes, ``[B, T, axes]``. logits_to_keep: of the last so many tokens; 0 = all.
        Raises:
            ValueError: the decoder is not understood, is no single graph, is another one for other lengths, or does
                not take so many tokens.
        """
        captures = self._captures()
        scope, watch = {"L": {"forward": forward}, "G": globals()}, partial(self._watch, captures)
        call.take_over_guards = partial(take_over_guards, scope, watch)
        parts = () if call.merged is None else call.merged.parts
        axes = positions.shape[2] if positions.ndim == 3 else 0
        key, ends = (min(len(ids), 2), ids.ndim == 3, parts, axes), captures.ends
        call.logits = logits_to_keep if logits_to_keep < ids.shape[1] else 0
        if key not in captures.compiled:
            # a capture is made of several tokens, also where the call has one, and serves one as well
            compiled = _make_compiled_forward(forward, self.further, self.compiler, key, ends)
            self._capture_on_all_ranks(compiled, call, ids if ids.shape[1] > 1 else _several(ids), axes)
            captures.compiled[key] = compiled
        seen = 0 if call.phase == "prefill" else call.cache.state.columns
        check_length(min(ends.columns, default=None), seen, ids.shape[1])
        ends.check_positions(seen, positions)
        for cache in (call.cache, *call.cache.fills) if call.phase == "prefill" else ():
            if cache.policy.replays_prompt:
                ends.check_replays(cache.policy, positions)
        compiled = captures.compiled[key]
        try:
            return _call_compiled(compiled, call, ids, positions)
        except _OneTokenAlone:  # the decoder is another one after its first call: with a table that it made there
            self._capture_on_all_ranks(compiled, call, _several(ids), axes)
            return _call_compiled(compiled, call, ids, positions)

    def _watch(self, captures: _Captures, names: frozenset[str | Global]) -> ModelState:
        """The state of the attributes that captures of the model read: now those of these names too."""
        captures.names |= names
        attributes = self.model.attributes(captures.names)
        captures.state = attributes.value
        return attributes

    def _capture_on_all_ranks(self, compiled: Callable[..., Tensor], call: Call, ids: Tensor, axes: int) -> None:
        """Capture without running, in all processes that share the weights or in none.

        At the positions of a prompt: those of the call may start anywhere.
        """
        what, only_capture = f"capturing the decoder for {rows_text(len(ids))}", replace(call, only_capture=True)
        ids = ids.clone(memory_format=torch.contiguous_format)
        positions = torch.arange(ids.shape[1], device=ids.device).repeat(len(ids), 1)
        positions = positions[..., None].repeat(1, 1, axes) if axes else positions

        def capture_once(layers_once: bool) -> None:
            once = replace(only_capture, layers_once=layers_once)
            with suppress(_OnlyCaptured), repeated_where(are_alike) if layers_once else nullcontext():
                _call_compiled(compiled, once, ids, positions)
                once.check_begun()

        def capture() -> None:
            with working(what), no_garbage_collection():
                is_captured = False
                if REPEATS_LAYERS:
                    try:
                        capture_once(layers_once=True)
                        is_captured = True
                    except UnsupportedAttentionError as error:
                        if "equal_layers.py" not in error.line:  # where a repeated layer is called, as one node
                            raise
                    except Exception:  # limits of this way; an error of the model is raised below
                        log.debug("captured again, with every layer traced", exc_info=True)
                if not is_captured:
                    capture_once(layers_once=False)

        run_on_all_ranks(self.compiler.ranks, what, capture)


def check_length(longest: int | None, seen: int, tokens: int) -> None:
    """Check that a decoder takes ``tokens`` more tokens after ``seen``, of ``longest`` in all (None: of any number)."""
    if longest is not None and seen + tokens > longest:
        raise ValueError(
            f"{tokens} tokens after {seen}: the decoder does not take more than {longest}, or does otherwise from "
            "there on"
        )


def _several(ids: Tensor) -> Tensor:
    """Ids for a capture of several tokens, from those of a call of one."""
    return ids.expand(-1, EXAMPLE_LENGTHS[-1], *ids.shape[2:])


def _call_compiled(compiled: Callable[..., Tensor], call: Call, ids: Tensor, positions: Tensor) -> Tensor:
    tokens = ids.shape[1]
    for tensor in (ids, positions):
        for axis, size in enumerate(tensor.shape[:2]):
            if size > 1:
                maybe_mark_dynamic(tensor, axis)
    context = copy_context()  # Python ends it, also where an interrupt would keep a line of ours from doing so
    context.run(CALL.set, call)
    try:
        with _ONE_CALL:
            return context.run(compiled, ids, positions)
    except BackendCompilerFailed as failure:
        inner = failure.inner_exception
        raise (inner if isinstance(inner, (ValueError, torch.OutOfMemoryError)) else failure) from None
    except (Unsupported, UserError, TorchRuntimeError) as failure:
        # what fails in the model's own code is Unsupported since torch 2.15
        if isinstance(failure, TorchRuntimeError) or "failed to run FX node with fake tensors" in str(failure):
            raise ValueError(f"the decoder fails on an input of {tokens} tokens: {_stop(failure)}") from failure
        raise ValueError(
            f"the decoder cannot be captured as one graph: {_stop(failure)}; change that, or use the model uncompiled"
        ) from failure


def _stop(failure: Unsupported | UserError | TorchRuntimeError) -> str:
    """Where in the model's code Dynamo stopped and why, in one line."""
    text = str(failure)
    detail = re.search(r"Developer debug context: (.+)|got (\w+\(.+\))", text)
    reason = text.splitlines()[0] + (f" ({detail[1] or detail[2]})" if detail else "")
    stack = failure.real_stack or ()
    frames = [frame for frame in stack if not any(map(Path(frame.filename).is_relative_to, _NOT_ITS_CODE))]
    if not frames:
        return reason
    return f"{Path(frames[-1].filename).name}, line {frames[-1].lineno}, `{frames[-1].line}`: {reason}"


def _make_compiled_forward(
    forward: types.MethodType, further: Further | None, compiler: PhaseCompiler, key: Key, ends: _LengthLimits
) -> Callable[..., Tensor]:
    """The forward, captured when it is first called; what its captures take at most is added to ``ends``."""
    _, embedded, parts, axes = key

    def step(input_ids: Tensor, position_ids: Tensor) -> Tensor:
        if position_ids.shape[:2] != input_ids.shape[:2]:  # never; tells Dynamo that both have one size
            raise AssertionError
        text = unpacked(input_ids, parts) if parts else {"inputs_embeds" if embedded else "input_ids": input_ids}
        logits: Tensor = forward(
            **text,
            position_ids=position_ids.permute(2, 0, 1) if axes else position_ids,
            use_cache=False,
            logits_to_keep=0,
            return_dict=True,
            **({} if further is None else further(position_ids[..., 0] if axes else position_ids)),
        ).logits
        return logits

    # Dynamo keeps every backend for good: it must not keep the model
    def backend(gm: GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        call: Call = CALL.get()
        decoder = compiler.canonicalize(gm, example_inputs)
        _find_ends(decoder.gm, ends)

        def run(*inputs: Any) -> Any:
            call: Call = CALL.get()
            if call.only_capture:
                raise _OnlyCaptured
            return decoder(call, *inputs)

        decoder.runner(call)  # now, so that Dynamo checks what the compiler assumes
        decoder.admit_one_token()
        assert call.take_over_guards is not None
        call.take_over_guards()
        return run

    # dynamic=False: what earlier captures of this line saw makes nothing a symbol in this one
    return torch.compile(_own_code(step), backend=backend, fullgraph=True, dynamic=False)


def _find_ends(gm: GraphModule, ends: _LengthLimits) -> None:
    """Add the ends of a capture.

    Raises:
        _OneTokenAlone: it is of one token. ValueError: it holds for some numbers of tokens and not for others.
    """
    inputs = placeholders(gm)
    if batch_and_tokens(gm)[1] == 1:
        raise _OneTokenAlone("the decoder is another one for one token than for several")
    sizes = (size for size in map(recorded, inputs) if isinstance(size, torch.SymInt))
    ends.columns.update(most for size in sizes if (most := longest_length(gm, size)) is not None)
    end = table_end(gm, [node for node in inputs if argument_of(node) == "position_ids"])
    ends.positions.update([] if end is None else [end])


def _own_code(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A twin with a code object of its own: Dynamo keeps compiled entries, and counts them, per code object."""
    assert isinstance(function, types.FunctionType)
    twin = types.FunctionType(
        function.__code__.replace(), function.__globals__, function.__name__, None, function.__closure__
    )
    twin.__kwdefaults__ = function.__kwdefaults__
    return twin
