"""What a newcomer does: a new virtual environment, the wheel, README's code as it stands, each command at 80 columns.

Needs a package index. ``pytest -m exhaustive tests/e2e/test_newcomer.py`` takes about ten minutes.
"""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
DOCUMENT = "the code of bara dador is 482 913 . " + 50 * "the old farmer carried the lamp near the river . "
SMALL = "--samples 2 --length 256 --backend eager"
COMMANDS = {
    "--version": "kvpass ",
    "--help": "compress",
    "policies": "streaming_llm",
    "compress document.txt -o document.kv --budget 0.5": "written: document.kv",
    "ask document.kv 'question the code of bara dador is' --new-tokens 3": "482 913 .",
    "demo --tokens 512 --facts 2 --backend eager": "full",
    f"eval builtin --tasks multi_needle --policies full,lava --budgets 64 {SMALL}": "multi_needle",
    "bench --model tiny --contexts 256 --budget 64 --repeats 1 --new-tokens 4 --backend eager": "lava",
}

pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(3600)]


@pytest.fixture(scope="module")
def newcomer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an environment in ``env`` that has what README says to install, and a document."""
    folder = tmp_path_factory.mktemp("newcomer")
    (folder / "document.txt").write_text(DOCUMENT)
    subprocess.run([sys.executable, "-m", "venv", folder / "env"], check=True)
    for line in re.findall(r"^pip install ([^#\n]+)", README, re.MULTILINE):
        wanted = [re.sub(r"^\.(?=\[|$)", str(ROOT), word) for word in shlex.split(line)]
        subprocess.run([folder / "env/bin/python", "-m", "pip", "install", "-q", *wanted], check=True)
    return folder


def run(folder: Path, command: str) -> subprocess.CompletedProcess[str]:
    env = {"PATH": f"{folder / 'env/bin'}{os.pathsep}{os.environ['PATH']}", "COLUMNS": "80", "HOME": str(folder)}
    return subprocess.run(command, shell=True, cwd=folder, env=env, capture_output=True, text=True)


def test_the_code_of_readme_prints_what_it_shows(newcomer: Path) -> None:
    (newcomer / "readme.py").write_text("".join(re.findall(r"```python\n(.*?)```", README, re.DOTALL)[1:]))
    result = run(newcomer, "python readme.py")
    assert result.returncode == 0, result.stderr
    shown = re.findall(r"^print\(tokenizer.*\)  # (.*)$", README, re.MULTILINE)
    assert [line for line in result.stdout.splitlines() if "482 913" in line] == shown
    assert "entries kept: 3072 of 12408 (24.8%)" in result.stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_says_what_it_should_in_80_columns(newcomer: Path, command: str) -> None:
    result = run(newcomer, f"kvpass {command}")
    assert result.returncode == 0, result.stderr
    assert COMMANDS[command] in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80


def test_a_bad_path_is_one_line(newcomer: Path) -> None:
    result = run(newcomer, "kvpass ask nothing.kv question")
    assert result.returncode == 2 and "nothing.kv" in result.stderr and "Traceback" not in result.stderr
