"""A first call says on a terminal, and to the logger, what takes its seconds."""

from __future__ import annotations

import io
import logging

import pytest
from rich.console import Console

import kvpass
import kvpass.progress
from tiny_models import random_ids, tiny_model


@pytest.fixture
def logged():
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("kvpass")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield lines
    logger.removeHandler(handler)
    logger.setLevel(level)


def test_the_first_call_of_a_batch_size_says_what_it_does(monkeypatch, logged):
    terminal = Console(file=io.StringIO(), force_terminal=True, width=80)
    monkeypatch.setattr(kvpass.progress, "progress_console", lambda: terminal)
    fast = kvpass.compile(tiny_model("llama"), policy="lava", budget=40, backend="eager")
    fast(random_ids(2, 50))
    assert "capturing the decoder, batch size 2" in terminal.file.getvalue()
    assert any(line.startswith("capturing the decoder, batch size 2: ") for line in logged)
    drawn, logged[:] = len(terminal.file.getvalue()), []
    fast(random_ids(2, 60))
    assert len(terminal.file.getvalue()) == drawn and logged == []


def test_the_environment_turns_it_off(monkeypatch, capfd):
    monkeypatch.setenv("KVPASS_PROGRESS", "0")
    kvpass.progress.progress_console.cache_clear()
    monkeypatch.setattr("rich.console.Console.is_terminal", True)
    with kvpass.progress.working("capturing"):
        pass
    kvpass.progress.progress_console.cache_clear()
    assert capfd.readouterr().err == ""
