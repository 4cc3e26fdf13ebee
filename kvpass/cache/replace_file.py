"""Write or replace a file as one step: a draft in the same folder, renamed when it is complete."""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

PRIVATE = 0o600
"""Permissions of a draft, and of a file that replaces none: only its owner may read it."""


@contextmanager
def replacing(path: str | Path) -> Iterator[BinaryIO]:
    """A file to write to, which is found at ``path`` once the block ends; if the block raises, nothing has changed.

    A symbolic link stays one, and its target is written. Permissions of a replaced file are kept, its owner too where
    the system allows it. A process that is killed leaves a draft; the next call in the folder removes it.

    Raises:
        OSError: there is no such folder, it cannot be written to, it is full, or ``path`` is no regular file.
    """
    try:
        target, old = _target(path)
        _remove_stale_drafts(target.parent)
        draft, descriptor = _open_draft(target.parent)
        try:
            with os.fdopen(descriptor, "wb") as file:
                yield file
                file.flush()
                if old is not None:
                    with suppress(PermissionError):
                        os.fchown(file.fileno(), old.st_uid, old.st_gid)
                os.fchmod(file.fileno(), PRIVATE if old is None else stat.S_IMODE(old.st_mode))
                os.fsync(file.fileno())
                os.replace(draft, target)
        finally:
            draft.unlink(missing_ok=True)
    except OSError as error:  # a write names no file, and nobody knows the draft
        raise OSError(error.errno, error.strerror, str(path)) from error


def _target(path: str | Path) -> tuple[Path, os.stat_result | None]:
    """Where symbolic links lead, and the file that is there; None for a new one."""
    try:
        target = os.path.realpath(path, strict=True)
    except FileNotFoundError:
        return Path(os.path.realpath(path)), None
    found = os.stat(target)
    if stat.S_ISDIR(found.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "not a regular file")
    return Path(target), found


def _open_draft(folder: Path) -> tuple[Path, int]:
    """A new file that nobody else has, locked as long as it is open. Its name is short, whatever the target's is."""
    while True:
        draft = folder / f".kvpass-{secrets.token_hex(8)}.draft"
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, PRIVATE)
        with suppress(OSError):  # a file system without locks: nobody can take the draft for a stale one there
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        if draft.exists():
            return draft, descriptor
        os.close(descriptor)  # another process removed it between its creation and its lock


def _remove_stale_drafts(folder: Path) -> None:
    """Remove the drafts of processes that are gone: a lock goes with its process."""
    for draft in folder.glob(".kvpass-*.draft"):
        with suppress(OSError):  # locked, renamed meanwhile, or of another user
            descriptor = os.open(draft, os.O_RDONLY | os.O_NONBLOCK)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                draft.unlink()
            finally:
                os.close(descriptor)
