"""Full cache: nothing is evicted; the baseline for every other policy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvpass.policies.base import Policy
from kvpass.policies.observation import Observation


@dataclass(frozen=True, kw_only=True)
class Full(Policy):
    """Keep every entry of the prompt; there is no budget."""

    name: ClassVar[str] = "full"
    needs_budget: ClassVar[bool] = False

    def score(self, obs: Observation) -> Tensor:
        return obs.keys.new_zeros(obs.keys.shape[0], obs.kv_heads, obs.evictable, dtype=torch.float32)

    def layer_budgets(self, weights: Tensor, entries: Tensor, available: Tensor, kv_heads: int, seen: int) -> Tensor:
        """Return all available entries, whatever ``entries`` is."""
        layer = torch.arange(weights.shape[1], device=weights.device)
        return torch.where(layer < seen, (available * kv_heads)[:, None], 0)
