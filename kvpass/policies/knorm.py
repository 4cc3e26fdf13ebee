"""Knorm: the norm of the key alone."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kvpass.policies.base import Policy
from kvpass.policies.observation import Observation


@dataclass(frozen=True, kw_only=True)
class Knorm(Policy):
    """Keep the keys of the smallest L2 norm (Devoto et al. 2024, arXiv 2406.11430): a baseline.

    The score reads no query, so it is the same before and after the question is known. Nothing is protected. As in
    kvpress, every layer is compressed; the paper leaves the first two whole.

    Args:
        window: 0 as in the paper; a positive number protects that many newest tokens.
    """

    name = "knorm"
    inputs = frozenset({"keys"})

    window: int = 0

    def score(self, obs: Observation) -> Tensor:
        return -obs.keys[:, :, : obs.evictable].float().norm(dim=-1)
