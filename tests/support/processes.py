"""Processes with a group (gloo) that stay and run what tests name, so that torch and transformers are imported once."""

import multiprocessing
import os
import pickle
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
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
        self._started: list[tuple[Any, Connection]] = []

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
        for _, pipe in self._started:
            pipe.send_bytes(call)
        try:
            expected = own()
        except BaseException:
            self.end()
            raise
        return self._answers(), expected

    def _answers(self) -> list[Any]:
        places: dict[Any, int] = {pipe: rank for rank, (_, pipe) in enumerate(self._started)}
        found: dict[int, Any] = {}
        while places:
            ready = wait(list(places), PATIENCE)
            said = None if ready else f"nothing for {PATIENCE} seconds"
            for rank in [places.pop(pipe) for pipe in ready]:
                try:
                    raised, value = pickle.loads(self._started[rank][1].recv_bytes())
                except EOFError:
                    raised, value = True, "it ended"
                if raised:
                    said = f"process {rank} of {self.size}: {value}"
                found[rank] = value
            if said is not None:
                self.end()
                raise AssertionError(said)
        return [found[rank] for rank in range(self.size)]

    def _start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(IMPORTED)
        self._groups += 1
        met = os.path.join(self._folder.name, str(self._groups))
        with mock.patch.dict(os.environ, OMP_NUM_THREADS="1"):
            for rank in range(self.size):
                ours, theirs = context.Pipe()
                process = context.Process(target=_answer, args=(rank, self.size, met, theirs), daemon=True)
                process.start()
                theirs.close()
                self._started.append((process, ours))

    def end(self) -> None:
        """End the processes."""
        for _, pipe in self._started:
            pipe.close()  # a process that waits for a call returns then
        for process, _ in self._started:
            process.join(5)
            process.kill()
            process.join()
        self._started = []


def _answer(rank: int, size: int, met: str, pipe: Connection) -> None:
    """Answer calls until the pipe is closed."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size))
    torch.set_num_threads(1)
    cheap_captures()
    dist.init_process_group(
        "gloo", init_method=f"file://{met}", rank=rank, world_size=size, timeout=timedelta(seconds=PATIENCE)
    )
    while True:
        try:
            function, args, given = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        try:
            answer = False, function(*args, **given)
        except BaseException:
            answer = True, traceback.format_exc()
        pipe.send_bytes(pickle.dumps(answer))
