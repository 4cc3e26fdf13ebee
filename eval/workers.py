"""Answer the samples of ``kvpass eval`` in several processes; only the caller writes."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from kvpass.eval.records import Record

_ANSWER: Callable[[Share], list[Record]] | None = None
"""Answers a share in this process, if it is a worker."""


class Share(NamedTuple):
    """Samples of one task in one scope, and the numbers of the conditions under which they are answered."""

    conditions: tuple[int, ...]
    samples: tuple[int, ...]


def answer_in_processes(
    begin: Callable[[int], Callable[[Share], list[Record]]], most: int, shares: Sequence[Share]
) -> Iterator[list[Record]]:
    """Yield the records of each share when it is answered, in any order.

    Args:
        begin: called once in each worker with the number of workers begun before it; returns what answers a share.
        most: workers at a time.
    Raises:
        RuntimeError: a worker died.
    """
    workers, context = min(most, len(shares)), multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, context, _start, (begin, workers, context.Value("i", 0)))
    try:
        for future in as_completed([pool.submit(_answer, share) for share in shares]):
            yield future.result()
    except BrokenProcessPool:
        raise RuntimeError(
            f"workers={most}: one died, mostly for want of memory; the same command goes on where it stopped, perhaps "
            "with fewer"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


def _start(begin: Callable[[int], Callable[[Share], list[Record]]], workers: int, started: Any) -> None:
    """Make this process a worker.

    Args:
        started: how many workers there were before, shared by all.
    """
    global _ANSWER
    with started.get_lock():
        number, started.value = started.value, started.value + 1
    torch.set_num_threads(max(torch.get_num_threads() // workers, 1))
    _ANSWER = begin(number)


def _answer(share: Share) -> list[Record]:
    assert _ANSWER is not None
    return _ANSWER(share)
