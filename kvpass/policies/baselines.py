"""Baselines: keep everything, or keep a random set."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvpass.policies.base import Policy
from kvpass.policies.layer_splits import AllLayers, LayerSplit
from kvpass.policies.observation import Observation
from kvpass.policies.options import check_int, option
from kvpass.policies.scores import hashed


@dataclass(frozen=True, kw_only=True)
class Full(Policy):
    """Keep every entry of the prompt; there is no budget."""

    name = "full"
    inputs = frozenset()
    needs_budget = False

    def score(self, obs: Observation) -> Tensor:
        return obs.keys.new_zeros(obs.keys.shape[0], obs.kv_heads, obs.evictable, dtype=torch.float32)

    def layers(self) -> LayerSplit:
        return AllLayers()


@dataclass(frozen=True, kw_only=True)
class Random(Policy):
    """Keep a random set of entries, the same for the same seed.

    Scores are a hash of (seed, layer, head, position), in [0, 1). Every batch row gets the same scores.

    Args:
        seed: int from 0 to 2**64.
    """

    name = "random"
    inputs = frozenset({"heads"})

    seed: int = option(0, check_int, 0, high=1 << 64)

    def score(self, obs: Observation) -> Tensor:
        position = obs.positions[..., : obs.evictable]
        head = obs.first_head + torch.arange(obs.kv_heads, device=obs.keys.device)[:, None]
        layer = torch.full_like(head, obs.layer)
        return hashed(self.seed, layer, head, position).expand(obs.keys.shape[0], -1, -1)
