"""What a run was made of: versions, machine, model, settings, and what it measured; enough to do it again."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from kvpass.cache.fingerprint import Identity
from kvpass.eval.environment import machine, versions
from kvpass.eval.records import Row


def fingerprint(model: PreTrainedModel) -> str:
    """Digest of a model: class, dtype, configuration, weights (:class:`~kvpass.cache.fingerprint.Identity`)."""
    text = json.dumps(Identity(model).describe(), sort_keys=True)
    return hashlib.blake2s(text.encode(), digest_size=8).hexdigest()


def write_manifest(
    path: Path,
    *,
    settings: Mapping[str, Any],
    model: Mapping[str, Any],
    device: torch.device,
    rows: Sequence[Row],
    seconds: float | None,
) -> None:
    """Write the manifest in one step; ``seconds`` is None while the run goes on, and ``rows`` is empty then."""
    manifest = {
        "written": datetime.now(UTC).isoformat(timespec="seconds"),
        "finished": seconds is not None,
        "seconds": seconds,
        "versions": versions(),
        "machine": machine(device),
        "model": dict(model),
        "settings": dict(settings),
        "results": [asdict(row) for row in rows],
    }
    part = path.with_suffix(".part")
    part.write_text(json.dumps(manifest, indent=1, ensure_ascii=False, default=str) + "\n", encoding="utf-8")
    os.replace(part, path)
