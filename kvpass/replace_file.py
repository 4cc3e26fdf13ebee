"""Replace a file atomically: write a draft in the same folder, rename it when complete."""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

PRIVATE, SHARED = 0o600, 0o666
"""Permissions of a draft and of a new file: only its owner may read it, or who the umask lets."""


@contextmanager
def replacing(path: str | Path, mode: int = PRIVATE) -> Iterator[BinaryIO]:
    """Yield a file to write, which replaces ``path`` after the block; if the block raises, nothing changes.

    A symbolic link stays, and its target is written. A replaced file keeps its permissions, and its owner where the
    system allows it. A process that is killed leaves a draft, ``.kvpass-*.draft``.

    Args:
        mode: :data:`PRIVATE` or :data:`SHARED`.
    Raises:
        OSError: the folder does not exist, cannot be written or is full, or ``path`` is no regular file.
    """
    try:
        target, old = _target(path)
        draft = target.parent / f".kvpass-{secrets.token_hex(8)}.draft"  # short, whatever the target's name is
        try:
            with open(draft, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
                yield file
                file.flush()
                if old is not None:
                    with suppress(PermissionError):
                        os.fchown(file.fileno(), old.st_uid, old.st_gid)
                if old is not None or mode == PRIVATE:
                    os.fchmod(file.fileno(), PRIVATE if old is None else stat.S_IMODE(old.st_mode))
                os.fsync(file.fileno())
                os.replace(draft, target)
        finally:
            draft.unlink(missing_ok=True)
    except OSError as error:  # errors of writes name no file, and users do not know the draft
        raise OSError(error.errno, error.strerror, str(path)) from error


def write_shared(path: str | Path, content: bytes) -> None:
    """Write a file that others may read, as :func:`replacing` does."""
    with replacing(path, SHARED) as file:
        file.write(content)


def _target(path: str | Path) -> tuple[Path, os.stat_result | None]:
    """Return the path behind symbolic links, and the stat of its file; None for a new one."""
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
