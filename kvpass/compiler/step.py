"""Calls on a cache: prefill or append, with rollback on failure; else the cache is marked interrupted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

import torch
from torch import Tensor

from kvpass.adapt.images import Merged
from kvpass.cache.cache import CompressedCache
from kvpass.cache.prompt_record import PromptRecord
from kvpass.cache.recompression import Recompression
from kvpass.config import Block
from kvpass.errors import CacheMismatchError

R = TypeVar("R")

Phase = Literal["prefill", "extend", "decode"]
"""A prompt on an empty cache; several tokens on a filled one; one token."""


@dataclass
class Call:
    """A call of a graph on a cache, or of a prefill on several.

    Attributes:
        recompressions: whose scores the extension also computes.
        logits: of so many last tokens, of more; 0: of all.
        has_begun: the graph of the call was started. If not, the decoder ran without the cache.
        only_capture: capture the graph and do not run it. layers_once: trace layers of equal code once.
        block: tokens of a block of a prompt, "auto" or at least 2.
        take_over_guards: of the capture that is being traced, those on the model.
        merged: the text, where it has images.
    """

    cache: CompressedCache
    phase: Phase
    recompressions: Sequence[Recompression] = ()
    logits: int = 0
    has_begun: bool = False
    only_capture: bool = False
    layers_once: bool = False
    block: Block = "auto"
    take_over_guards: Callable[[], None] | None = None
    merged: Merged | None = None

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
    cache.check_entries()
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
