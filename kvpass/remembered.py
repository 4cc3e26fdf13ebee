"""Results of slow checks and captures, kept for later processes under a digest of everything that they depend on.

One JSON file a result, in ``KVPASS_CACHE`` or the user's cache folder. A folder that others can write to is not
used, nor a file that is not whole; where nothing can be written, every process checks for itself.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import stat
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import torch

from kvpass.replace_file import replacing

_LOG = logging.getLogger(__name__)
_CODE = (".py", ".cpp", ".h", ".json")
_PACKAGE = Path(__file__).parent
_MOST_FILES = 500
_MOST_BYTES = 2**24
_MOST_BYTES_IN_ALL = 2**26

T = TypeVar("T")


def remembered(kind: str, given: Iterable[object], make: Callable[[], T]) -> T:
    """Return the result of a check in this process or an earlier one; plain JSON, None is not kept.

    Args:
        kind: the name of the check. given: what the result depends on, beside the processor and the code of kvpass
            and torch; each has an exact text.
        make: makes the check.
    """
    given = list(given)
    known: T | None = recall(kind, given)
    if known is not None:
        return known
    result = make()
    if result is not None:
        keep(kind, given, result)
    return result


def recall(kind: str, given: Iterable[object]) -> Any:
    """Return what :func:`keep` was given for the same ``kind`` and ``given``; None if there is none."""
    file = _file(kind, given)
    with suppress(OSError, ValueError, RecursionError):
        if file is not None:
            known = _read(file)
            _LOG.debug("%s: known from an earlier process", kind)
            return known
    return None


def keep(kind: str, given: Iterable[object], result: Any) -> None:
    """Keep a result for :func:`recall`, where it can be written."""
    file = _file(kind, given)
    try:
        if file is not None:
            _write(file, result)
    except OSError as error:
        _LOG.info("%s is not kept for later processes: %s", kind, error)


def keeps_results() -> bool:
    """Whether results are kept for later processes: there is a folder for them."""
    return _folder() is not None


def kept_files() -> list[Path]:
    """Return the files of results, of any code and processor."""
    folder = _folder()
    return [] if folder is None else sorted(folder.glob("*.json"))


def _file(kind: str, given: Iterable[object]) -> Path | None:
    folder = _folder()
    if folder is None:
        return None
    return folder / f"{kind}-{digest_of((kind, *_surroundings(), *given))}.json"


def digest_of(parts: Iterable[object]) -> str:
    """Return a digest of the texts of some objects, in their order."""
    digest = hashlib.sha256()
    for part in parts:
        text = str(part).encode()
        digest.update(f"{len(text)}:".encode() + text)
    return digest.hexdigest()


def _folder() -> Path | None:
    """The folder of results; None where they are not kept."""
    chosen = os.environ.get("KVPASS_CACHE")
    if chosen == "0":
        return None
    try:
        caches = chosen or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvpass"
        folder = Path(caches) / "checks"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.lstat()
    except (OSError, RuntimeError) as error:  # RuntimeError: the user has no home
        _LOG.info("results of checks are not kept: %s", error)
        return None
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
        _LOG.warning("%s is not a folder that only this user can write to: results of checks are not kept", folder)
        return None
    return folder


def source_files() -> dict[str, Path]:
    """Return the files of kvpass's code by their paths in the package, such as ``kernels/cpu.py``."""
    folders = os.walk(_PACKAGE, followlinks=True)  # of a checkout some are links
    files = [Path(folder, name) for folder, _, names in folders for name in names if name.endswith(_CODE)]
    return {file.relative_to(_PACKAGE).as_posix(): file for file in files}


def source_digest(files: Mapping[str, Path]) -> str:
    """Return a digest of some of :func:`source_files`."""
    digest = hashlib.sha256()
    for name, file in sorted(files.items()):
        digest.update(f"{name}\n".encode() + file.read_bytes())
    return digest.hexdigest()


@cache
def _surroundings() -> tuple[str, ...]:
    """Code and processor: what every result depends on."""
    lines: list[str] = []
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    listed = (line for line in lines if line.startswith(("flags", "Features")))
    processor = next(listed, "") or platform.processor()  # which starts a process
    return source_digest(source_files()), f"{torch.__version__} {torch.version.git_version}", sys.version, processor


def _read(file: Path) -> Any:
    """Return the result in a file; ValueError and RecursionError: it is not what was written."""
    with open(os.open(file, os.O_RDONLY | os.O_NOFOLLOW), "rb") as opened:
        content = opened.read(_MOST_BYTES)
    checksum, _, text = content.partition(b"\n")
    if checksum != _checksum(file, text):
        raise ValueError(f"{file} is damaged")
    return json.loads(text)


def _write(file: Path, result: Any) -> None:
    """Write a file, and remove the oldest ones, where there are too many or too large ones in all."""
    text = json.dumps(result).encode()
    with replacing(file) as opened:
        opened.write(_checksum(file, text) + b"\n" + text)
    held = sorted(((path.stat(), path) for path in file.parent.glob("*.json")), key=lambda one: one[0].st_mtime)
    total = sum(found.st_size for found, _ in held)
    for number, (found, path) in enumerate(held):
        if len(held) - number <= _MOST_FILES and total <= _MOST_BYTES_IN_ALL:
            break
        path.unlink(missing_ok=True)
        total -= found.st_size


def _checksum(file: Path, text: bytes) -> bytes:
    return hashlib.sha256(file.name.encode() + text).hexdigest().encode()
