"""Random eviction: a baseline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvpass.policies.base import Policy
from kvpass.policies.observation import Observation
from kvpass.policies.options import check_int


@dataclass(frozen=True, kw_only=True)
class Random(Policy):
    """Keep a random set of entries, the same for the same seed.

    Scores are the top 24 bits of a multiply-xorshift hash of (seed, layer, head, position), in [0, 1). There is no
    generator and no state, and every batch row gets the same scores.

    Args:
        seed: int from 0 to 2**64.
    """

    name: ClassVar[str] = "random"

    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_int("seed", self.seed, 0, high=1 << 64)

    def score(self, obs: Observation) -> Tensor:
        position = torch.arange(obs.evictable, device=obs.keys.device)
        head = torch.arange(obs.kv_heads, device=obs.keys.device)[:, None]
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
