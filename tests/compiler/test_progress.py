"""A first call says on a terminal, and to the logger, what takes its seconds."""

import io
import logging
import re
import time

import pytest
from rich.console import Console
from typer.testing import CliRunner

import kvpass
import kvpass.progress
from kvpass.cli.main import app
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


@pytest.fixture
def terminal(monkeypatch):
    made = Console(file=io.StringIO(), force_terminal=True, width=80)
    monkeypatch.setattr(kvpass.progress, "progress_console", lambda: made)
    return made


@pytest.fixture
def fast():
    return kvpass.compile(tiny_model("llama", layers=1), policy="lava", budget=40, backend="eager")


def test_the_first_call_of_several_rows_says_what_it_does(terminal, logged, fast):
    fast(random_ids(2, 50))
    assert "capturing the decoder for 2 or more rows" in terminal.file.getvalue()
    assert any(line.startswith("capturing the decoder for 2 or more rows: ") for line in logged)
    drawn, logged[:] = len(terminal.file.getvalue()), []
    fast(random_ids(2, 60))
    assert len(terminal.file.getvalue()) == drawn and logged == []


def test_a_command_says_that_it_imports(terminal):
    assert CliRunner().invoke(app, ["demo", "--output", "map.txt"]).exit_code == 2
    assert "importing torch and transformers" in terminal.file.getvalue()


def test_after_a_warmup_calls_capture_and_compile_nothing(logged, fast):
    fast.warmup([1, 2], turns=True)
    with pytest.raises(ValueError, match="nothing to report"):
        fast.report()
    assert any("2 or more rows" in line for line in logged)
    logged.clear()
    for rows in (1, 2):
        out = fast.generate(random_ids(rows, 70), max_new_tokens=3, do_sample=False, return_dict_in_generate=True)
        fast(random_ids(rows, 5), past_key_values=out.past_key_values, logits_to_keep=1)
    assert logged == []


@pytest.mark.parametrize("bad", [{"batch_sizes": [0]}, {"batch_sizes": ["1"]}, {"prompt_tokens": 1}])
def test_a_warmup_of_no_row_or_one_token_is_an_error(bad, fast):
    with pytest.raises(ValueError, match=r"batch_sizes=.*must be an int|prompt_tokens=1: must be an int"):
        fast.warmup(**bad)


def test_without_a_terminal_lines_say_how_far_it_is(monkeypatch):
    monkeypatch.setattr(kvpass.progress, "LINE_SECONDS", 0.01)
    log = io.StringIO()
    for console in (Console(file=log, quiet=True), Console(file=log, width=40)):
        assert not log.getvalue()
        with kvpass.progress.progress_bar(console) as progress:
            bar = progress.add_task("", total=40, completed=10)
            for _ in range(2):
                progress.update(bar, advance=1, description="5 conditions [prompt]", score=0.5)
            while not console.quiet and "12 of 40" not in log.getvalue():
                time.sleep(0.01)
    lines = log.getvalue().splitlines()
    assert re.fullmatch(r"kvpass: 12 of 40, 5 conditions \[prompt\], 0 s, about \d+ s left, last score 0.50", lines[-1])


def test_without_a_terminal_lines_say_what_compiles(monkeypatch):
    monkeypatch.setattr(kvpass.progress, "LINE_SECONDS", 0.01)
    log = io.StringIO()
    monkeypatch.setattr(kvpass.progress, "progress_console", lambda: Console(file=log, width=40))
    with kvpass.progress.working("compiling a step [fast]"):
        while "\n" not in log.getvalue():
            time.sleep(0.01)
    assert log.getvalue().splitlines()[0] == "kvpass: compiling a step [fast], 0 s"


def test_the_environment_turns_it_off(monkeypatch, capfd):
    monkeypatch.setenv("KVPASS_PROGRESS", "0")
    kvpass.progress.progress_console.cache_clear()
    monkeypatch.setattr("rich.console.Console.is_terminal", True)
    with kvpass.progress.working("capturing"):
        pass
    kvpass.progress.progress_console.cache_clear()
    assert capfd.readouterr().err == ""
