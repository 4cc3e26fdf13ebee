"""Files of ``kvpass calibrate``: what policies read of them."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kvpass.policies.observation import Observation

MODEL = "kvpass_model"
"""Metadata: the digest of the model's weights."""
SHARES, MAXIMA, DISTANCES = "head_shares", "head_maxima", "head_distances"
"""Numbers of heads, ``[L, K]``."""
MEAN, MODULUS, COVARIANCE = "query_mean", "query_modulus", "query_covariance"
"""Of queries before RoPE: ``[L, K, G, D]``, ``[L, K, G, D / 2]`` and ``[L, K, G, D, D]``."""


@dataclass(frozen=True, eq=False)
class Contents:
    """Some tensors of a file, fp32, and the digest of the model that it was made for; files of others have none."""

    path: str
    tensors: Mapping[str, Tensor]
    model: str | None


def contents_of(option: str, path: str, begins: str | tuple[str, ...], device: torch.device) -> Contents:
    """Return the tensors whose names begin so, of a file or of ``model.safetensors`` in a folder.

    It is the same object until the file changes.

    Raises:
        ValueError: there is no such file, or it does not hold tensors of finite numbers.
    """
    file = Path(path, "model.safetensors") if Path(path).is_dir() else Path(path)
    try:
        found = os.stat(file)
        return _loaded(str(file), found.st_mtime_ns, found.st_size, option, begins, device)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{option}={path!r}: cannot be read: {error}") from None


@functools.cache
def _loaded(
    path: str, changed: int, size: int, option: str, begins: str | tuple[str, ...], device: torch.device
) -> Contents:
    """Return the contents of a file, which is read again when it has changed; CUDA graphs may read the old ones."""
    with safe_open(path, "pt", device=str(device)) as file:
        names = [name for name in file.keys() if name.startswith(begins)]  # noqa: SIM118 (no mapping)
        tensors, told = {name: file.get_tensor(name).float() for name in names}, file.metadata() or {}
    for name, x in tensors.items():
        if not bool(x.isfinite().all()):
            raise ValueError(f"{option}={path!r}: {name}: all values must be finite")
    return Contents(path, tensors, told.get(MODEL))


def statistics_of(path: str, names: tuple[str, ...], device: torch.device) -> Contents:
    """Return statistics of queries in a file.

    Raises:
        ValueError: as :func:`contents_of`, or it lacks one of these.
    """
    found = contents_of("statistics", path, names, device)
    if found.tensors.keys() != set(names):
        raise ValueError(
            f"statistics={path!r}: lacks {' or '.join(names)}, which 'kvpass calibrate' writes for models whose rotary "
            "embedding it finds"
        )
    return found


def layer_statistics(path: str, names: tuple[str, ...], obs: Observation) -> list[Tensor]:
    """Return statistics of a layer in a file, of the heads of this process.

    Raises:
        ValueError: as :func:`statistics_of`, or they are of other layers.
    """
    tensors = statistics_of(path, names, obs.keys.device).tensors
    heads, dim = (obs.num_layers, obs.kv_heads * obs.ranks.size, obs.group), obs.keys.shape[3]
    sizes = {MEAN: (*heads, dim), MODULUS: (*heads, dim // 2), COVARIANCE: (*heads, dim, dim)}
    wanted, found = {name: sizes[name] for name in names}, {name: tuple(tensors[name].shape) for name in names}
    if found != wanted:
        raise ValueError(f"statistics={path!r}: holds {found}; layers of this model need {wanted}")
    return [obs.ranks.local_shard(tensors[name][obs.layer], 0) for name in names]
