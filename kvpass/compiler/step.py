"""Calls on a cache: prefill or append, with rollback on failure; else the cache is marked interrupted.

A decode step that Dynamo has checked is called again without Dynamo, which checks about 30 guards a layer in every
call, one millisecond for 32 layers. Little of that can change between decode steps, so a step is called directly as
long as what :class:`RepeatedStep` compares stays the same. The rest (elements of lists and of objects that are
neither modules nor configurations, functions and classes replaced by others) is checked again after the next call of
several tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from transformers import PretrainedConfig

from kvpass.cache.cache import CompressedCache
from kvpass.cache.prompt_record import PromptRecord
from kvpass.cache.recompression import Recompression
from kvpass.config import Block
from kvpass.errors import CacheMismatchError
from kvpass.graphs.bind_state import held_by_module, ids_and_positions, placeholders
from kvpass.graphs.fx_utils import recorded
from kvpass.torch_compat import GlobalStateGuard, dict_version, dynamo_settings, modes_are_active, traced_effects

R = TypeVar("R")

Phase = Literal["prefill", "extend", "decode"]
"""A prompt on an empty cache; several tokens on a filled one; one token."""

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


@dataclass
class Call:
    """A call of a graph on a cache, or of a prefill on several.

    Attributes:
        recompressions: whose scores the extension also computes.
        has_begun: the graph of the call was started. If not, the decoder ran without the cache.
        only_capture: capture the graph and do not run it. layers_once: trace layers of equal code once.
        block: tokens of a block of a prompt, "auto" or at least 2.
        made: the call of the graph, where it can be made again without Dynamo.
    """

    cache: CompressedCache
    phase: Phase
    recompressions: Sequence[Recompression] = ()
    has_begun: bool = False
    only_capture: bool = False
    layers_once: bool = False
    block: Block = "auto"
    made: GraphCall | None = None

    @property
    def observed(self) -> bool:
        """Whether the extension also computes recompression scores."""
        return bool(self.recompressions)

    def begin(self) -> None:
        """Note that the graph starts; an interruption from here on may leave overwritten entries."""
        if self.has_begun:
            raise RuntimeError("two graphs ran in one call: a graph break cuts the decoder in two")
        self.has_begun = True
        self.cache.interrupted = self.phase != "prefill" and self.cache.state.overwrites

    def check_begun(self) -> None:
        """Raise RuntimeError when no captured graph ran: then nothing was written to the cache."""
        if not self.has_begun:
            raise RuntimeError(
                "the captured graph did not run, so the cache was not used and is unchanged: torch.compile is disabled "
                "(TORCH_COMPILE_DISABLE, torch._dynamo.config.disable), or torch.compiler.set_stance has it run "
                "eagerly; call the model outside of that"
            )


def prefill(
    cache: CompressedCache,
    start: Tensor,
    columns: int,
    run: Callable[[Call], R],
    block: Block = "auto",
    ids: Tensor | None = None,
) -> R:
    """Fill the cache, and those that it ``fills``, with a prompt; on any exception they are empty.

    Args:
        start: first real column of each row, int64 ``[B]`` on the CPU. columns: N. run: captures the graph of the call
            if needed, and runs it. block: as in :class:`Call`. ids: of the prompt ``[B, N]``, where they are known.
    """
    filled = (cache, *cache.fills)
    try:
        for one in filled:
            one.begin_prefill(start, columns, ids)
        call = Call(cache, "prefill", block=block)
        result = run(call)
        call.check_begun()
        for one in filled:
            one.finish_prefill()
    except BaseException:
        for one in filled:
            one.reset()
        raise
    return result


def continued(cache: CompressedCache, rows: int, device: torch.device) -> CompressedCache:
    """Return the cache that a call appends to: this one, or a copy.

    A reusable cache is copied, and so is one of one row for a call of several: each continues that row.

    Raises:
        CacheMismatchError: a call of so many rows on this device does not fit, or the cache is interrupted.
    """
    if cache.interrupted:
        raise CacheMismatchError(f"{cache!r}: a call on it was interrupted, its entries are lost; reset it")
    if device != cache.device:
        raise CacheMismatchError(f"the call is on {device}, the cache on {cache.device}: use cache.to()")
    if cache.batch_size not in (1, rows):
        raise CacheMismatchError(f"the call has {rows} rows, the cache {cache.batch_size}")
    if not cache.reusable and rows == cache.batch_size:
        return cache
    cache = cache.clone()
    if rows != cache.batch_size:
        cache.batch_repeat_interleave(rows)
    return cache


def append(
    cache: CompressedCache,
    tokens: int,
    run: Callable[[Call], R],
    threshold: float = float("inf"),
    ids: Tensor | None = None,
) -> tuple[R, PromptRecord | None]:
    """Append T tokens. A failed call is rolled back, or marks the cache interrupted if entries were overwritten.

    Args:
        cache: from :func:`continued`. run: see :func:`prefill`; before the graph begins its errors change nothing.
        threshold: recompression threshold; rows that then hold more than this many budgets are compressed.
        ids: of the tokens ``[B, T]``, where they are known.
    Returns:
        what ``run`` returned, and the new record if all rows were compressed.
    """
    state, record = cache.state, None
    state.ensure_room(tokens, cache.expected)
    recompressions = state.begin_recompression(tokens, threshold) if tokens > 1 else ()
    call = Call(cache, "decode" if tokens == 1 else "extend", recompressions)
    result = run(call)
    call.check_begun()
    cache.interrupted = True
    state.advance(tokens, ids)
    if recompressions:
        record = state.recompress(recompressions)
    cache.record, cache.interrupted = record or cache.record, False
    return result, record


def given_places(gm: GraphModule) -> tuple[int | None, ...] | None:
    """Where ids and positions are among the inputs of a capture; None if it can only be called by Dynamo.

    That is where another input is neither held by the module nor a size, or where the call changes objects: then
    Dynamo's code does more than to call the graph. To be called in the trace.
    """
    given = ids_and_positions(gm)
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
        """Whether the step is what Dynamo checked: ids of the same form, no attribute written, no tensor elsewhere."""
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
