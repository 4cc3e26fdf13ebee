"""What a run was made of: versions, machine, model, settings, and what it measured; enough to do it again."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

import kvpass
from kvpass.eval.records import Row

_LIBRARIES = ("torch", "transformers", "tokenizers", "datasets", "rouge", "rapidfuzz", "jieba", "rouge_score")
_SAMPLES = 64
"""Values of each parameter that enter the fingerprint."""


def fingerprint(model: PreTrainedModel) -> str:
    """A digest of configuration and weights: of every tensor name, shape, dtype and 64 values spread over it."""
    digest = hashlib.blake2s(digest_size=8)
    config = {key: value for key, value in model.config.to_dict().items() if not key.startswith("_")}
    for volatile in ("transformers_version", "dtype", "name_or_path"):
        config.pop(volatile, None)
    digest.update(json.dumps(config, sort_keys=True, default=str).encode())
    for name, tensor in model.state_dict().items():
        flat = tensor.detach().reshape(-1)
        index = torch.linspace(0, flat.numel() - 1, min(_SAMPLES, flat.numel()), dtype=torch.float64).long()
        digest.update(f"{name} {list(tensor.shape)} {tensor.dtype}".encode())
        digest.update(flat[index.to(flat.device)].float().cpu().numpy().tobytes())
    return digest.hexdigest()


def versions() -> dict[str, str]:
    """Versions of kvpass, Python and the libraries that decide numbers, as far as installed."""
    found = {"kvpass": kvpass.__version__, "python": platform.python_version()}
    for name in _LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def machine() -> dict[str, Any]:
    """Where it runs."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {"processor": platform.machine(), "gpu": gpu, "threads": torch.get_num_threads()}


def write_manifest(
    path: Path, *, settings: Mapping[str, Any], model: Mapping[str, Any], rows: Sequence[Row], seconds: float | None
) -> None:
    """Write the manifest in one step; ``seconds`` is None while the run goes on, and ``rows`` is empty then."""
    manifest = {
        "written": datetime.now(UTC).isoformat(timespec="seconds"),
        "finished": seconds is not None,
        "seconds": seconds,
        "versions": versions(),
        "machine": machine(),
        "model": dict(model),
        "settings": dict(settings),
        "results": [asdict(row) for row in rows],
    }
    part = path.with_suffix(".part")
    part.write_text(json.dumps(manifest, indent=1, ensure_ascii=False, default=str) + "\n", encoding="utf-8")
    os.replace(part, path)
