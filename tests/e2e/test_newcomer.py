"""What a newcomer does: a new virtual environment, what README says to install, README's code as it stands.

Needs a package index. ``pytest -m exhaustive tests/e2e/test_newcomer.py`` takes minutes.
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


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
def test_what_readme_installs_runs_the_code_of_readme_and_has_the_command(tmp_path: Path) -> None:
    """test_docs.py has what the code prints, test_cli.py and test_documents.py the commands."""
    python = tmp_path / "env/bin/python"
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "env"], check=True)
    for line in re.findall(r"^pip install ([^#\n]+)", README, re.MULTILINE):
        wanted = [re.sub(r"^\.(?=\[|$)", str(ROOT), word) for word in shlex.split(line)]
        subprocess.run([python, "-m", "pip", "install", "-q", *wanted], check=True)
    (tmp_path / "readme.py").write_text("".join(re.findall(r"```python\n(.*?)```", README, re.DOTALL)[1:]))
    env = {"PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}", "COLUMNS": "80", "HOME": str(tmp_path)}
    for command, said in (("python readme.py", "482 913"), ("kvpass demo --tokens 512 --facts 2", "transformers")):
        result = subprocess.run(command, shell=True, cwd=tmp_path, env=env, capture_output=True, text=True)
        assert result.returncode == 0 and said in result.stdout, result.stderr
