"""Says what takes seconds: a spinner with the time on a terminal, the logger ``kvpass`` elsewhere."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

_LOGGER = logging.getLogger("kvpass")

_READING: ContextVar[Callable[[int, float], None] | None] = ContextVar("kvpass_reading", default=None)

LINE_SECONDS = 30.0
"""Seconds between lines of progress where there is no terminal."""


@cache
def progress_console() -> Console:
    """Standard error; everything that moves is drawn on it, so that spinners stand below bars."""
    from rich.console import Console

    return Console(stderr=True, quiet=os.environ.get("KVPASS_PROGRESS") == "0")


@contextmanager
def progress_bar(console: Console, *, counted: bool = True) -> Iterator[Progress]:
    """A bar that is gone at its end; its clock runs also while a first step takes long. Without ``counted`` a spinner.

    Without a terminal a line every ``LINE_SECONDS``, with the field ``score`` of the task where it has one.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    text = TextColumn("{task.description}", markup=False)
    bar = (BarColumn(16), MofNCompleteColumn()) if counted else ()
    columns = SpinnerColumn(), text, *bar, TimeElapsedColumn()
    drawn = console.is_terminal and not console.quiet
    ended = threading.Event()
    # the period: of the speed from which the seconds left follow
    progress = Progress(*columns, console=console, transient=True, disable=not drawn, speed_estimate_period=3600.0)

    def print_lines() -> None:
        while not drawn and not ended.wait(LINE_SECONDS):
            for task in progress.tasks:
                left, score = task.time_remaining, task.fields.get("score")
                line = f"kvpass: {task.completed:.0f} of {task.total or 0:.0f}, " if counted else ""
                line += f"{task.description}, " if task.description else ""
                line += f"{task.elapsed or 0:.0f} s"
                line += "" if left is None else f", about {left:.0f} s left"
                line += "" if score is None else f", last score {score:.2f}"
                console.print(line, markup=False, highlight=False, soft_wrap=True)

    printer = threading.Thread(target=print_lines, daemon=True)
    printer.start()
    try:
        with progress:
            yield progress
    finally:
        ended.set()
        printer.join()


@contextmanager
def working(what: str) -> Iterator[None]:
    """Show ``what`` while the block runs, as ``progress_bar`` does, and log it with its seconds at the end.

    ``KVPASS_PROGRESS=0`` in the environment shows nothing; the logger is left to its own level.
    """
    began = time.perf_counter()
    with progress_bar(progress_console(), counted=False) as progress:
        progress.add_task(f"kvpass: {what}", total=None)
        _LOGGER.info("%s", what)
        try:
            yield
        finally:
            _LOGGER.info("%s: %.1f s", what, time.perf_counter() - began)


@contextmanager
def reading(tokens: int) -> Iterator[None]:
    """Show how many of a prompt's tokens have been read while the block runs: their number times the layers' share."""
    with progress_bar(progress_console()) as progress:
        bar = progress.add_task("tokens read (compiling)", total=tokens)

        def show(read: int, share: float) -> None:
            if read == tokens:  # else an example, on which a capture is checked
                progress.update(bar, completed=round(share * tokens), description="tokens read")

        outer = _READING.set(show)
        try:
            yield
        finally:
            _READING.reset(outer)


def say_read(tokens: int, share: float) -> None:
    """Say that a share of the layers has read a prompt."""
    if (show := _READING.get()) is not None:
        show(tokens, share)
