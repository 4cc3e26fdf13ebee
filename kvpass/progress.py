"""Says what takes seconds: a spinner with the time on a terminal, the logger ``kvpass`` elsewhere."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

_LOGGER = logging.getLogger("kvpass")


@cache
def progress_console() -> Console:
    """Standard error; everything that moves is drawn on it, so that spinners stand below bars."""
    from rich.console import Console

    return Console(stderr=True, quiet=os.environ.get("KVPASS_PROGRESS") == "0")


def progress_bar(console: Console) -> Progress:
    """A bar that is gone at its end; its clock runs also while a first step takes long."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    text = TextColumn("{task.description}", markup=False)
    columns = SpinnerColumn(), text, BarColumn(16), MofNCompleteColumn(), TimeElapsedColumn()
    return Progress(*columns, console=console, transient=True, disable=console.quiet or not console.is_terminal)


@contextmanager
def working(what: str) -> Iterator[None]:
    """Show ``what`` while the block runs, and log it with its seconds at the end.

    ``KVPASS_PROGRESS=0`` in the environment shows nothing; the logger is left to its own level.
    """
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    console = progress_console()
    columns = SpinnerColumn(), TextColumn("kvpass: {task.description}"), TimeElapsedColumn()
    began = time.perf_counter()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        progress.add_task(what, total=None)
        _LOGGER.info("%s", what)
        try:
            yield
        finally:
            _LOGGER.info("%s: %.1f s", what, time.perf_counter() - began)
