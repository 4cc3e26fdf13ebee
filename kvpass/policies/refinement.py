"""CriticalKV's second stage: of what a head keeps, a part by score alone, the rest by score times a norm."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvpass.policies.base import Policy
from kvpass.policies.head_splits import SafeguardedHeads, UniformHeads
from kvpass.policies.layer_splits import UniformLayers
from kvpass.policies.observation import Observation
from kvpass.policies.options import check_bool, option
from kvpass.policies.scheduler import invert, ordered_bits, places


@dataclass(frozen=True, kw_only=True)
class Refinable(Policy):
    """Base class of policies whose score is attention and can be refined as in CriticalKV.

    Args:
        critical: half of what a head keeps is chosen by the score s, the rest by ``(s + 1e-4) * norm``; see
            :class:`~kvpass.policies.criticalkv.CriticalKV`. How much a head keeps stays as it is.
    """

    critical: bool = option(False, check_bool)

    def __post_init__(self) -> None:
        super().__post_init__()
        layers = self.layers()
        if self.critical and not isinstance(layers, UniformLayers):
            raise ValueError(
                f"critical=True with policy {self.name!r}: how much a head keeps must be known when its layer is "
                f"scored, and {type(layers).__name__} divides the budget among layers later; take uniform layers"
            )
        if self.critical:
            object.__setattr__(self, "inputs", self.inputs | {"projection", "heads"})

    def checked_score(self, obs: Observation) -> Tensor:
        scores = super().checked_score(obs)
        return refine_scores(self, obs, scores) if self.critical else scores


def refine_scores(
    policy: Policy, obs: Observation, scores: Tensor, first_stage: float = 0.5, epsilon: float = 1e-4
) -> Tensor:
    """Return the scores (attention, at least 0) of a policy with uniform layers, permuted in each head; ``[B, K, M]``.

    With n entries of a head, window included, the best ``first_stage * n`` by score come first, then the others by
    ``(score + epsilon) * norm``, norm being :attr:`Observation.projected_value_norm`; ties: lower position. As a head's
    scores stay the same but for the order (and equal ones, which get neighbouring numbers), how many entries it has
    among the best of its layer does not change.
    """
    worth = (scores + epsilon) * obs.projected_value_norm[..., : obs.evictable]
    place, first = places(scores), _first(policy, obs, scores, first_stage)
    key = torch.where(place < first[..., None], place, obs.evictable + places(worth))
    return _distinct(scores.sort(dim=2, descending=True).values).gather(2, invert(key.argsort(dim=2, stable=True)))


def _first(policy: Policy, obs: Observation, scores: Tensor, first_stage: float) -> Tensor:
    """Return how many entries each head keeps by score alone, int64 ``[B, K]``."""
    entries, heads = obs.entries_per_head, policy.heads()
    count = entries[:, None].expand(-1, obs.kv_heads)
    if not isinstance(heads, UniformHeads):
        of_all = obs.all_heads(scores)
        kept = heads.rank(of_all, entries) < (entries * of_all.shape[1])[:, None, None]
        count = kept.sum(2)[:, obs.first_head : obs.first_head + obs.kv_heads]
    first = (((count + policy.window).double() * first_stage).long().clamp(min=1) - policy.window).clamp(min=0)
    return torch.maximum(first, heads.certain(entries)[:, None]) if isinstance(heads, SafeguardedHeads) else first


def _distinct(falling: Tensor) -> Tensor:
    """Return numbers fp32 ``[..., M]`` in falling order, equal ones replaced by the next lower numbers."""
    whole = ordered_bits((falling + 0.0).view(torch.int32)).long()
    index = torch.arange(falling.shape[-1], device=falling.device)
    apart = ((whole + index).cummin(-1).values - index).int()
    return ordered_bits(apart).view(torch.float32)
