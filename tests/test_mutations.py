"""The faults of ``scripts/mutations`` are still in the code: a file that moved would be found only when it runs."""

import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FAULTS = runpy.run_path(str(ROOT / "scripts" / "mutations"))["FAULTS"]


@pytest.mark.parametrize("name", FAULTS)
def test_each_line_to_break_occurs_once_and_its_tests_exist(name):
    text = (ROOT / name).read_text()
    for old, new, tests in FAULTS[name]:
        assert text.count(old) == 1 and new not in ("", old)
        assert all((ROOT / word).is_file() for word in tests.split() if word.endswith(".py"))
