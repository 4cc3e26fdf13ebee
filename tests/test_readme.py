"""The example of the README runs as it stands (without Inductor, to be quick)."""

from __future__ import annotations

import re
from pathlib import Path

README = Path(__file__).resolve().parent.parent / "README.md"


def test_the_example_runs_and_answers(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    example = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)[1]
    assert example.count("budget=128)") == 1
    exec(compile(example.replace("budget=128)", 'budget=128, backend="eager")'), "README.md", "exec"), {})
    printed = capsys.readouterr().out
    shown = re.findall(r"print\(tokenizer.*\)  # (.*)", example)
    assert len(shown) == 2 and [line for line in printed.splitlines() if "482 913" in line] == shown
    assert "attention mass" in printed
    assert (tmp_path / "kept.png").exists()
