"""Answer the samples of ``kvpass eval`` in several processes; only the caller writes."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from kvpass.eval.records import Record
    from kvpass.eval.run import EvalSettings, Evaluation

MOST_DEATHS = 5
"""How often in a row workers may die before one of them has answered a share."""

_EVALUATION: Evaluation | None = None
"""That of this process, if it is a worker."""


class Share(NamedTuple):
    """Samples of one task in one scope, and the numbers of the conditions under which they are answered."""

    conditions: tuple[int, ...]
    samples: tuple[int, ...]


def answer_in_processes(settings: EvalSettings, shares: Sequence[Share]) -> Iterator[list[Record]]:
    """Yield the records of each share when it is answered, in any order.

    Each worker loads the model. If one is killed, all begin anew, with what is not answered yet.

    Raises:
        RuntimeError: workers died five times in a row.
    """
    waiting, deaths = dict(enumerate(shares)), 0
    context = multiprocessing.get_context("spawn")
    while waiting:
        workers = min(settings.workers, len(waiting))
        pool = ProcessPoolExecutor(workers, context, _start, (settings, workers, context.Value("i", 0)))
        try:
            futures = {pool.submit(_answer, share): number for number, share in waiting.items()}
            for future in as_completed(futures):
                records = future.result()
                del waiting[futures[future]]
                deaths = 0
                yield records
        except BrokenProcessPool:
            deaths += 1
            if deaths == MOST_DEATHS:
                raise RuntimeError(
                    f"workers={settings.workers}: they died {deaths} times in a row before they answered anything, "
                    "mostly for want of memory; take fewer"
                ) from None
        finally:
            pool.shutdown(cancel_futures=True)


def _start(settings: EvalSettings, workers: int, started: Any) -> None:
    """Make this process a worker.

    Args:
        started: how many workers there were before, shared by all.
    """
    from kvpass.eval.run import Evaluation

    global _EVALUATION
    with started.get_lock():
        number, started.value = started.value, started.value + 1
    device = settings.device
    if device == "cuda":
        device = f"cuda:{number % torch.cuda.device_count()}"
    torch.set_num_threads(max(torch.get_num_threads() // workers, 1))
    unread = settings.output / "worker"  # never made: the file of records is the caller's
    _EVALUATION = Evaluation(replace(settings, output=unread, device=device, workers=1))


def _answer(share: Share) -> list[Record]:
    assert _EVALUATION is not None
    return [record for records in _EVALUATION.answers(share) for record in records]
