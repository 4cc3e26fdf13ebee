"""Results of checks in a folder: used only whole, by the same code, and never needed."""

from __future__ import annotations

import errno
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kvpass import remembered as module
from kvpass import version
from kvpass.remembered import remembered

WRITE = """
import sys
from kvpass.remembered import remembered
for number in range(50):
    assert remembered([str(number)], lambda: [number] * 1000) == [number] * 1000
"""


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("KVPASS_CACHE", str(tmp_path))
    return tmp_path / "checks"


def made_anew(*given: str, result: object = 1) -> bool:
    """Whether the check is made, and not known."""
    made = []
    found = remembered(given, lambda: made.append(1) or result)
    assert found == result
    return bool(made)


def test_a_result_is_known_for_the_same_input_only(folder):
    assert made_anew("a", "b")
    assert not made_anew("a", "b")
    assert made_anew("ab")
    assert made_anew("a', 'b")
    assert made_anew("a", "c")
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {file.stat().st_mode & 0o777 for file in folder.iterdir()} == {0o600}


@pytest.mark.parametrize("name", ["lava.py", "decode_cpu.cpp", "cpu_block.h", "configs.json"])
def test_other_code_makes_the_check_anew(folder, monkeypatch, name):
    """A changed policy or kernel is another kvpass."""
    assert made_anew("a")
    read = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda file: read(file) + b" " * (file.name == name))
    assert made_anew("a")
    assert name in {Path(path).name for path in version.source_files()}


@pytest.mark.parametrize(
    ("owner", "name", "other"),
    [
        (torch, "__version__", "9.0"),
        (torch.version, "git_version", "0123"),
        (sys, "version", "9.0"),
        (torch.backends.cpu, "get_cpu_capability", lambda: "other"),
    ],
)
def test_other_versions_or_another_processor_make_the_check_anew(folder, monkeypatch, owner, name, other):
    assert made_anew("a")
    monkeypatch.setattr(owner, name, other)
    assert made_anew("a")


def test_an_error_is_not_kept(folder):
    def fail() -> int:
        raise ValueError("refused")

    for _ in range(2):
        with pytest.raises(ValueError, match="refused"):
            remembered(["a"], fail)
    assert not folder.exists() or list(folder.iterdir()) == []


def test_damaged_files_are_never_used(folder):
    """Cut after each byte, and 200 copies with changed bytes."""
    assert made_anew("a", result=[[1, [2, 3], 4]] * 9)
    (file,) = folder.iterdir()
    whole = file.read_bytes()
    choose = random.Random(0)
    copies = [whole[:length] for length in range(len(whole))]
    for _ in range(200):
        copy = bytearray(whole)
        for place in choose.sample(range(len(whole)), choose.randint(1, 3)):
            copy[place] ^= choose.randint(1, 255)
        copies.append(bytes(copy))
    for copy in copies:
        file.write_bytes(copy)
        assert made_anew("a", result=[[1, [2, 3], 4]] * 9), copy
    assert file.read_bytes() == whole
    assert not made_anew("a", result=[[1, [2, 3], 4]] * 9)


def test_a_file_of_another_check_is_not_used(folder):
    made_anew("a", result=1)
    (first,) = folder.iterdir()
    made_anew("b", result=2)
    (second,) = set(folder.iterdir()) - {first}
    second.write_bytes(first.read_bytes())
    assert made_anew("b", result=2)


def test_a_folder_that_others_can_write_to_or_a_link_to_one_is_not_used(folder, tmp_path):
    made_anew("a")
    folder.chmod(0o777)
    assert made_anew("a")
    folder.chmod(0o700)
    assert not made_anew("a")
    folder.rename(tmp_path / "other")
    folder.symlink_to(tmp_path / "other")
    assert made_anew("a")


def no_home() -> Path:
    raise RuntimeError("Could not determine home directory.")


def full_disk(**given):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("why", ["0", "/dev/null", "no home", "full disk"])
def test_without_a_folder_every_check_is_made(why, folder, monkeypatch):
    if why == "full disk":
        monkeypatch.setattr(module.tempfile, "mkstemp", full_disk)
    elif why == "no home":
        monkeypatch.setattr(Path, "home", no_home)
        for name in ("KVPASS_CACHE", "XDG_CACHE_HOME"):
            monkeypatch.delenv(name, raising=False)
    else:
        monkeypatch.setenv("KVPASS_CACHE", why)
    assert made_anew("a") and made_anew("a")


def test_the_oldest_files_of_too_many_are_removed(folder, monkeypatch):
    monkeypatch.setattr(module, "_MOST_FILES", 3)
    for number in range(5):
        made_anew(str(number))
        for file in folder.iterdir():
            os.utime(file, (file.stat().st_mtime - 10,) * 2)
    assert len(list(folder.iterdir())) == 3
    assert [made_anew(str(number)) for number in (2, 3, 4)] == [False] * 3


def test_processes_that_write_at_once_do_not_disturb_each_other(folder):
    environment = {**os.environ, "PYTHONPATH": str(Path(module.__file__).parent.parent), "PYTHONSAFEPATH": "1"}
    processes = [subprocess.Popen([sys.executable, "-c", WRITE], env=environment) for _ in range(2)]
    assert [process.wait() for process in processes] == [0, 0]
    assert not any(made_anew(str(number), result=[number] * 1000) for number in range(50))
    assert all(file.suffix == ".json" for file in folder.iterdir())
