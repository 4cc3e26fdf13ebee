"""Version of the package, and a digest of its sources."""

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

__version__ = "0.1.0"

_PACKAGE = Path(__file__).parent
_CODE = (".py", ".cpp", ".h", ".json")


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
