"""Calls on a cache: prefill or append, with rollback on failure; else the cache is marked interrupted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

import torch
from torch import Tensor

from kvpass.cache.cache import CompressedCache
from kvpass.cache.prompt_record import PromptRecord
from kvpass.compiler.repeated_step import GraphCall
from kvpass.config import Block
from kvpass.errors import CacheMismatchError

R = TypeVar("R")

Phase = Literal["prefill", "extend", "decode"]
"""A prompt on an empty cache; several tokens on a filled one; one token."""


@dataclass
class Call:
    """A call of a graph on a cache, or of a prefill on several.

    Attributes:
        others: further caches that the prompt of a prefill fills.
        observed: the extension also computes recompression scores.
        one_token_prompt: the prompt of a prefill is one token.
        has_begun: the graph of the call was started. If not, the decoder ran without the cache.
        only_capture: capture the graph and do not run it.
        block: tokens of a block of a prompt, "auto" or at least 2.
        made: the call of the graph, where it can be made again without Dynamo.
    """

    cache: CompressedCache
    phase: Phase
    observed: bool = False
    one_token_prompt: bool = False
    has_begun: bool = False
    only_capture: bool = False
    block: Block = "auto"
    made: GraphCall | None = None
    others: Sequence[CompressedCache] = ()

    def begin(self) -> None:
        """Note that the graph starts; an interruption from here on may leave overwritten entries."""
        if self.has_begun:
            raise RuntimeError("two graphs ran in one call: a graph break cuts the decoder in two")
        self.has_begun = True
        self.cache.interrupted = self.phase != "prefill" and self.cache.overwrites

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
    others: Sequence[CompressedCache] = (),
    ids: Tensor | None = None,
) -> R:
    """Fill the cache, and others, with a prompt; on any exception they are empty.

    Args:
        start: first real column of each row, int64 ``[B]`` on the CPU. columns: N. run: captures the graph of the call
            if needed, and runs it. block: as in :class:`Call`. ids: of the prompt ``[B, N]``, where they are known.
    """
    try:
        for one in (cache, *others):
            one.begin_prefill(start, columns, ids)
        call = Call(cache, "prefill", one_token_prompt=columns == 1, block=block, others=others)
        result = run(call)
        call.check_begun()
        for one in (cache, *others):
            one.finish_prefill()
    except BaseException:
        for one in (cache, *others):
            one.reset()
        raise
    return result


def continued(cache: CompressedCache, rows: int, device: torch.device) -> CompressedCache:
    """Return the cache that a call appends to: this one, or a copy.

    A reusable cache is copied, and so is one of one row for a call of several: each continues that row.

    Args:
        rows, device: of the call.
    Raises:
        CacheMismatchError: the call does not fit, or the cache is interrupted.
    """
    if cache.interrupted:
        raise CacheMismatchError(f"{cache!r}: a call on it was interrupted, its entries are lost; reset it")
    if device != cache.device:
        raise CacheMismatchError(f"the call is on {device}, the cache on {cache.device}: use cache.to()")
    if cache.batch_size not in (1, rows):
        raise CacheMismatchError(f"the call has {rows} rows, the cache {cache.batch_size}")
    if rows != cache.batch_size:
        return cache.repeated(rows)
    return cache.clone() if cache.reusable else cache


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
    cache.ensure_room(tokens)
    record = None
    try:
        observed = tokens > 1 and cache.begin_recompression(tokens, threshold)
        call = Call(cache, "decode" if tokens == 1 else "extend", observed)
        result = run(call)
        call.check_begun()
        cache.interrupted = True
        cache.advance(tokens, ids)
        if observed:
            record = cache.recompress()
        cache.interrupted = False
    finally:
        cache.end_recompression()
    return result, record
