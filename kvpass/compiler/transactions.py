"""How a call begins and ends on a cache, through either door: fill it, or append to it and survive a failure."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from kvpass.cache.cache import CompressedCache
from kvpass.cache.prompt_record import PromptRecord
from kvpass.compiler.backend import Call, bind_call
from kvpass.errors import CacheMismatchError

R = TypeVar("R")


def prefill(
    cache: CompressedCache,
    start: Tensor,
    columns: int,
    prepare: Callable[[], object],
    run: Callable[[], R],
) -> R:
    """Fill the cache with a prompt; whatever happens before the end leaves it empty.

    Args:
        start: first real column of each row, int64 ``[B]`` on the CPU. columns: N. prepare: makes the graph. run:
            calls it. Both find the call bound.
    """
    try:
        cache.begin_prefill(start, columns)
        call = Call(cache, "prefill", one_token_prompt=columns == 1)
        with bind_call(call):
            prepare()
            result = run()
        call.check_begun()
        cache.finish_prefill()
    except BaseException:
        cache.reset()
        raise
    return result


def continued(cache: CompressedCache, rows: int, device: torch.device) -> CompressedCache:
    """The cache that a call of ``rows`` rows on ``device`` appends to: this one, or a copy of a reusable one.

    Raises:
        CacheMismatchError: the call does not fit, or an interrupted one has spoiled the cache.
    """
    if cache.interrupted:
        raise CacheMismatchError(f"{cache!r}: a call on it was interrupted, its entries are lost; reset it")
    if device != cache.device:
        raise CacheMismatchError(f"the call is on {device}, the cache on {cache.device}: use cache.to()")
    if rows != cache.batch_size:
        raise CacheMismatchError(f"the call has {rows} rows, the cache {cache.batch_size}")
    return cache.clone() if cache.reusable else cache


def append(
    cache: CompressedCache,
    tokens: int,
    prepare: Callable[[], object],
    run: Callable[[], R],
    occasion: float = float("inf"),
) -> tuple[R, PromptRecord | None]:
    """Append T tokens. A call that fails did not happen, or where entries were overwritten the cache is refused later.

    Args:
        cache: from :func:`continued`. prepare, run: see :func:`prefill`; what ``prepare`` raises spoils nothing.
        occasion: rows that then hold more than so many budgets are compressed again.
    Returns:
        what ``run`` returned, and the record of what was kept when all rows were compressed again.
    """
    cache.ensure_room(tokens)
    record = None
    try:
        observed = tokens > 1 and cache.begin_turn(tokens, occasion)
        call = Call(cache, "decode" if tokens == 1 else "extend", observed)
        with bind_call(call):
            prepare()
            result = run()
        call.check_begun()
        cache.interrupted = True
        cache.advance(tokens)
        if observed:
            record = cache.recompress()
        cache.interrupted = False
    finally:
        cache.end_turn()
    return result, record
