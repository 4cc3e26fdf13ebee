"""The examples of the README run as they stand (without Inductor, to be quick) and print what it shows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

README = Path(__file__).resolve().parent.parent / "README.md"


def numbers(text: str) -> list[float]:
    """Those of the report's table and of the two lines below it."""
    report = re.search(r"kvpass: lava, budget 128 *\n.*would hold \d+", text, re.DOTALL)
    assert report is not None
    return [float(number) for number in re.findall(r"\d+(?:\.\d+)?", report[0])]


def test_the_example_runs_and_answers(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    example = "".join(re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)[1:])
    assert example.count("budget=128)") == 1
    exec(compile(example.replace("budget=128)", 'budget=128, backend="eager")'), "README.md", "exec"), {})
    printed = capsys.readouterr().out
    shown = re.findall(r"print\(tokenizer.*\)  # (.*)", example)
    assert len(shown) == 2 and [line for line in printed.splitlines() if "482 913" in line] == shown
    assert numbers(printed) == pytest.approx(numbers(README.read_text()), rel=0.05, abs=3)
    assert (tmp_path / "document.kv").exists()
