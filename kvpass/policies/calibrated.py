"""Files of ``kvpass calibrate``: what policies read of them."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kvpass.policies.base import Policy
from kvpass.policies.observation import Observation
from kvpass.policies.options import check_text, option

MODEL = "kvpass_model"  # metadata: the digest of the model's weights
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


def contents_of(name: str, path: str, begins: str | tuple[str, ...], device: torch.device) -> Contents:
    """Return the tensors whose names begin so, of a file or of ``model.safetensors`` in a folder.

    It is the same object until the file changes.

    Raises:
        ValueError: there is no such file, or it does not hold tensors of finite numbers.
    """
    file = Path(path, "model.safetensors") if Path(path).is_dir() else Path(path)
    try:
        status = os.stat(file)
        return _loaded(str(file), status.st_mtime_ns, status.st_size, name, begins, device)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{name}={path!r}: cannot be read: {error}") from None


@functools.cache
def _loaded(
    path: str, changed: int, size: int, option: str, begins: str | tuple[str, ...], device: torch.device
) -> Contents:
    """Return the contents of a file, which is read again when it has changed; CUDA graphs may read the old ones."""
    with safe_open(path, "pt", device=str(device)) as file:
        names = [name for name in file.keys() if name.startswith(begins)]  # noqa: SIM118 (no mapping)
        tensors, metadata = {name: file.get_tensor(name).float() for name in names}, file.metadata() or {}
    for name, x in tensors.items():
        if not bool(x.isfinite().all()):
            raise ValueError(f"{option}={path!r}: {name}: all values must be finite")
    return Contents(path, tensors, metadata.get(MODEL))


@dataclass(frozen=True, kw_only=True)
class QueryStatistics(Policy):
    """Base class of policies that read statistics of queries before RoPE.

    Args:
        statistics: file of ``kvpass calibrate`` for this model: no query of the prompt is read. None: of each prompt.
    """

    read_statistics: ClassVar[tuple[str, ...]]  # names in the file

    statistics: str | None = option(None, check_text)

    @property
    def query_rows(self) -> int | None:
        return None if self.statistics is None else 0

    def made_for(self) -> str | None:
        return None if self.statistics is None else self._contents(torch.device("cpu")).model

    def _contents(self, device: torch.device) -> Contents:
        assert self.statistics is not None
        contents = contents_of("statistics", self.statistics, self.read_statistics, device)
        if contents.tensors.keys() != set(self.read_statistics):
            raise ValueError(
                f"statistics={self.statistics!r}: lacks {' or '.join(self.read_statistics)}, which 'kvpass calibrate' "
                "writes for models whose rotary embedding it finds"
            )
        return contents

    def layer_statistics(self, obs: Observation) -> list[Tensor]:
        """Return the statistics of a layer, of the heads of this process; ValueError: they are of other layers."""
        tensors, names = self._contents(obs.keys.device).tensors, self.read_statistics
        heads, dim = (obs.num_layers, obs.kv_heads * obs.ranks.size, obs.group), obs.keys.shape[3]
        sizes = {MEAN: (*heads, dim), MODULUS: (*heads, dim // 2), COVARIANCE: (*heads, dim, dim)}
        wanted, shapes = {name: sizes[name] for name in names}, {name: tuple(tensors[name].shape) for name in names}
        if shapes != wanted:
            raise ValueError(f"statistics={self.statistics!r}: holds {shapes}; layers of this model need {wanted}")
        return [obs.ranks.local_shard(tensors[name][obs.layer], 0) for name in names]
