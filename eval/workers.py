"""Answer the samples of ``kvpass eval`` in several processes; only the caller writes."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from typing import Any, NamedTuple, TypeVar

import torch

Answers = TypeVar("Answers")


class Share(NamedTuple):
    """Samples of one task in one scope, and the numbers of the conditions under which they are answered."""

    conditions: tuple[int, ...]
    samples: tuple[int, ...]


def answer_in_processes(
    answer: Callable[[Share], Answers], most: int, shares: Sequence[Share], device: str
) -> Iterator[Answers]:
    """Yield what ``answer`` returns for each share, in any order.

    Args:
        answer: called in a worker. most: workers at a time. device: with ``"cuda"`` each worker has another one, as far
            as there are.
    Raises:
        RuntimeError: a worker died.
    """
    workers, context = min(most, len(shares)), multiprocessing.get_context("spawn")
    threads = max(torch.get_num_threads() // workers, 1)
    pool = ProcessPoolExecutor(workers, context, _begin, (threads, device, context.Value("i", 0)))
    try:
        for future in as_completed([pool.submit(answer, share) for share in shares]):
            yield future.result()
    except BrokenProcessPool:
        raise RuntimeError(
            f"workers={most}: one died, mostly for want of memory; the same command goes on where it stopped, perhaps "
            "with fewer"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


def _begin(threads: int, device: str, started: Any) -> None:
    """Give this worker its threads and its device; ``started``: how many workers began before, shared by all."""
    torch.set_num_threads(threads)
    with started.get_lock():
        number, started.value = started.value, started.value + 1
    if device == "cuda":
        torch.cuda.set_device(number % torch.cuda.device_count())
