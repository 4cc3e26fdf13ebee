"""Processes with a group (gloo) that stay and run what tests name, so that torch and transformers are imported once."""

import multiprocessing
import os
import pickle
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, wait
from datetime import timedelta
from tempfile import TemporaryDirectory
from typing import Any, TypeVar
from unittest import mock

import torch
import torch.distributed as dist

from cheap_captures import cheap_captures

IMPORTED = ["torch._dynamo", "transformers.models.auto.modeling_auto", "transformers.distributed", "kvpass.api"]
"""What the processes have when they start: they are forks of one that has imported it."""
PATIENCE = 300
"""Seconds within which all processes must answer."""

R = TypeVar("R")


class Processes:
    """So many processes of one group. They start with the first call, and anew after one that failed."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._folder = TemporaryDirectory()
        self._groups = 0
        self._started: list[ProcessPoolExecutor] = []

    def run(self, function: Callable[..., Any], *args: Any, **given: Any) -> list[Any]:
        """Return what a function of a module that can be imported gives in each process, in the order of their ranks.

        Raises:
            AssertionError: it raised in a process, or did not return. Then all are ended: the others may wait for it.
        """
        return self.run_beside(lambda: None, function, *args, **given)[0]

    def run_beside(self, own: Callable[[], R], function: Callable[..., Any], *args: Any, **given: Any) -> tuple[Any, R]:
        """As :meth:`run`, and what another function gives that runs here at the same time."""
        if not self._started:
            self._start()
        call = pickle.dumps((function, args, given))
        answers = [process.submit(_answer, call) for process in self._started]
        try:
            expected = own()
            done, silent = wait(answers, PATIENCE, FIRST_EXCEPTION)
            for rank, answer in enumerate(answers):
                if answer in done and answer.exception() is not None:
                    raise AssertionError(f"process {rank} of {self.size} failed") from answer.exception()
            assert not silent, f"nothing for {PATIENCE} seconds"
        except BaseException:
            self.end()
            raise
        return [pickle.loads(answer.result()) for answer in answers], expected

    def _start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(IMPORTED)
        self._groups += 1
        met = os.path.join(self._folder.name, str(self._groups))
        for rank in range(self.size):
            self._started.append(ProcessPoolExecutor(1, context, _join, (rank, self.size, met)))
            with mock.patch.dict(os.environ, OMP_NUM_THREADS="1"):
                self._started[-1].submit(int)  # starts the process

    def end(self) -> None:
        """End the processes."""
        for pool in self._started:
            for process in list((pool._processes or {}).values()):
                process.kill()
            pool.shutdown()
        self._started = []


def _join(rank: int, size: int, met: str) -> None:
    """Make this process one of the group."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size))
    torch.set_num_threads(1)
    cheap_captures()
    dist.init_process_group(
        "gloo", init_method=f"file://{met}", rank=rank, world_size=size, timeout=timedelta(seconds=PATIENCE)
    )


def _answer(call: bytes) -> bytes:
    """What a call gives; as bytes, else tensors would be shared with this process."""
    function, args, given = pickle.loads(call)
    return pickle.dumps(function(*args, **given))
