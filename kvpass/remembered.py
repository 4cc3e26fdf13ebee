"""What the self check found, kept for later processes under a digest of all that it depends on.

One JSON file a graph, in ``KVPASS_CACHE`` or the user's cache folder; ``KVPASS_CACHE=0`` keeps none. A folder that
others can write to is not used, nor a file that is not whole; where nothing can be written, every process checks.
"""

from __future__ import annotations

import json
import os
import stat
import sys
import tempfile
from collections.abc import Callable, Iterable
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import TypeVar

import torch

from kvpass.version import source_digest, source_files

_MOST_FILES = 500
T = TypeVar("T")


def remembered(given: Iterable[str], make: Callable[[], T]) -> T:
    """Return what ``make`` returns, or returned in an earlier process for the same texts, code and processor."""
    code = source_digest(source_files()), f"{torch.__version__} {torch.version.git_version}", sys.version
    key = sha256(repr((*code, torch.backends.cpu.get_cpu_capability(), *given)).encode()).hexdigest()
    with suppress(OSError, RuntimeError, ValueError):  # RuntimeError: the user has no home
        checksum, _, text = (_folder() / f"{key}.json").read_text().partition("\n")
        if checksum == _checksum(key, text):
            known: T = json.loads(text)
            return known
    result = make()
    with suppress(OSError, RuntimeError):
        descriptor, draft = tempfile.mkstemp(dir=_folder())
        with open(descriptor, "w") as file:
            file.write(f"{_checksum(key, json.dumps(result))}\n{json.dumps(result)}")
        os.replace(draft, _folder() / f"{key}.json")
        for old in sorted(_folder().iterdir(), key=os.path.getmtime)[:-_MOST_FILES]:
            old.unlink()
    return result


def _checksum(key: str, text: str) -> str:
    return sha256(f"{key}{text}".encode()).hexdigest()


def _folder() -> Path:
    """Return the folder of results; OSError where they are not kept."""
    chosen, caches = os.environ.get("KVPASS_CACHE"), os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(chosen or Path(caches, "kvpass"), "checks")
    if chosen != "0":
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.lstat()
        if stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o022:
            return folder
    raise OSError(f"{folder} is not for results, or not a folder that only this user can write to")
