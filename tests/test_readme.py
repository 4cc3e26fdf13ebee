"""The example of the README runs as it stands (without Inductor, to be quick)."""

from __future__ import annotations

import re
from pathlib import Path

README = Path(__file__).resolve().parent.parent / "README.md"


def test_the_example_runs_and_answers(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    example = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)[1]
    assert "kernel_size=13)" in example
    exec(compile(example.replace("kernel_size=13)", 'kernel_size=13, backend="eager")'), "README.md", "exec"), {})
    printed = capsys.readouterr().out
    assert "riges is 4 8 2 9 1" in printed.split("question")[1] and "attention mass" in printed
    assert (tmp_path / "kept.png").exists()
