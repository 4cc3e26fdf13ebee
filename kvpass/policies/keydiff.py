"""KeyDiff: how much a key differs from the mean key."""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from kvpass.policies.base import Policy
from kvpass.policies.observation import Observation


@dataclass(frozen=True, kw_only=True)
class KeyDiff(Policy):
    """Keep the keys least similar to the mean of all keys: KeyDiff (Park et al. 2025, arXiv 2504.15364).

    ``s[i] = -cos(k[i], c)``, where c is the mean of ``k / |k|`` over all positions of the prompt. It reads no query, so
    it is the same before and after the question is known. Nothing is protected.

    Departure: the prompt is judged once, as a whole, as by kvpress. In the paper it is read in blocks, after each of
    which the budget is kept, and decoding evicts; here decoding appends.

    Args:
        window: 0 as in the paper; a positive number protects that many newest tokens.
    """

    name = "keydiff"
    inputs = frozenset({"keys"})

    window: int = 0

    def score(self, obs: Observation) -> Tensor:
        keys = obs.keys.float()
        anchor = F.normalize(keys, dim=-1).sum(2, keepdim=True)  # N times the mean
        return -F.cosine_similarity(keys[:, :, : obs.evictable], anchor, dim=-1)
