"""Baselines: keep everything, or keep a random set."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvpass.policies.base import Policy
from kvpass.policies.layer_splits import zero_unseen_layers
from kvpass.policies.observation import Observation, takes_padding
from kvpass.policies.options import check_int, option


@dataclass(frozen=True, kw_only=True)
class Full(Policy):
    """Keep every entry of the prompt; there is no budget."""

    name: ClassVar[str] = "full"
    query_rows = 0
    needs_question: ClassVar[bool] = False
    needs_budget: ClassVar[bool] = False

    @takes_padding
    def score(self, obs: Observation) -> Tensor:
        return obs.keys.new_zeros(obs.keys.shape[0], obs.kv_heads, obs.evictable, dtype=torch.float32)

    def layer_budgets(self, weights: Tensor, entries: Tensor, available: Tensor, kv_heads: int, seen: int) -> Tensor:
        """Return all available entries, whatever ``entries`` is."""
        return zero_unseen_layers(seen, (available * kv_heads)[:, None].expand(weights.shape))


@dataclass(frozen=True, kw_only=True)
class Random(Policy):
    """Keep a random set of entries, the same for the same seed.

    Scores are the top 24 bits of a multiply-xorshift hash of (seed, layer, head, position), in [0, 1). There is no
    generator and no state, and every batch row gets the same scores.

    Args:
        seed: int from 0 to 2**64.
    """

    name: ClassVar[str] = "random"
    query_rows = 0
    needs_question: ClassVar[bool] = False

    seed: int = option(0, check_int, 0, high=1 << 64)

    @takes_padding
    def score(self, obs: Observation) -> Tensor:
        position = obs.positions[..., : obs.evictable]
        head = obs.first_head + torch.arange(obs.kv_heads, device=obs.keys.device)[:, None]
        bits = torch.full_like(head, self.seed & _MASK)
        for number in (torch.full_like(head, obs.layer), head, position):
            bits = _mix(bits ^ _mix(number + 1))
        return ((bits >> 8).float() / 2**24).expand(obs.keys.shape[0], -1, -1)


_MASK = 0xFFFFFFFF


def _mix(x: Tensor) -> Tensor:
    """Bijection on 32-bit numbers held in int64; every input bit affects every output bit."""
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x = ((x ^ (x >> shift)) * factor) & _MASK
    return x ^ (x >> 16)
