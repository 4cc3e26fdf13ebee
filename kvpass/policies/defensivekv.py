"""DefensiveKV: the largest attention that any of the window's queries pays, not the mean."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvpass.policies.base import Policy
from kvpass.policies.head_splits import AdaptiveHeads, HeadSplit
from kvpass.policies.layer_splits import GlobalLayers, LayerSplit
from kvpass.policies.observation import Observation
from kvpass.policies.options import check_odd, option
from kvpass.policies.scores import pool_scores

_COVERED = 0.9  # part of the attention that the entries of the first stage hold, together with the window


@dataclass(frozen=True, kw_only=True)
class DefensiveKV(Policy):
    """Guard against the worst case of the window's queries: DefensiveKV (Feng et al. 2025, arXiv 2510.13334).

    Each row of the window's attention to evictable positions is average-pooled and scaled to its mass before. The score
    is the maximum over rows and group, at least its own mean over positions, times the position's share, among the KV
    heads, of the norm of the projected value. First come those entries of each head that hold 0.9 of its mean attention
    less the window's part: they score as the layer's best. Heads of a layer compete, without a certain part.

    ``parity="code"``: the window's part is measured on the last evictable columns, as many as the window has, and a
    negative limit on the first stage (a budget below about two windows) counts from the end, as released.

    Args:
        kernel_size: odd width of the average pooling.
    """

    name = "defensivekv"
    inputs = frozenset({"question", "projection", "heads"})

    kernel_size: int = option(5, check_odd)

    def score(self, obs: Observation) -> Tensor:
        m = obs.evictable
        if m == 0:
            return obs.keys.new_zeros(*obs.keys.shape[:2], 0, dtype=torch.float32)
        worst, mean, near = [], [], []
        for attention in obs.window_attention():
            rows = attention.flatten(1, 2)
            part = rows[..., :m]
            pooled = pool_scores(part, "avg", self.kernel_size)
            scaled = pooled * part.sum(-1, keepdim=True) / pooled.sum(-1, keepdim=True).clamp(min=1e-30)
            worst.append(scaled.amax(1))
            mean.append(part.mean(1))
            recent = part[..., max(m - obs.window, 0) :] if self.parity == "code" else rows[..., m:]
            near.append(recent.sum(-1).mean(1))
        risk = torch.stack(worst, 1)
        norm = obs.projected_value_norm[..., :m]
        share = norm / obs.all_heads(norm).sum(1, keepdim=True).clamp(min=1e-30)
        scores = torch.maximum(risk, risk.mean(-1, keepdim=True)) * share
        beta = obs.all_heads(torch.stack(near, 1)).mean(1)
        certain = self._certain(obs, torch.stack(mean, 1), _COVERED - beta)
        best = obs.all_heads(scores.amax(-1)).amax(1)[:, None, None]
        return torch.where(certain, best, scores)

    def _certain(self, obs: Observation, mean: Tensor, covered: Tensor) -> Tensor:
        """Return the entries that hold the part ``covered`` ``[B]`` of a head's mean attention: bool ``[B, K, M]``."""
        m, n = obs.evictable, obs.entries_per_head + obs.window
        falling, order = (mean / mean.sum(-1, keepdim=True).clamp(min=1e-30)).sort(dim=-1, descending=True, stable=True)
        below = falling.cumsum(-1) < covered[:, None, None]
        count = torch.where(below.all(-1), 0, below.sum(-1))
        limit = (n.double() * m / obs.length - obs.window).long()
        limit = limit.clamp(min=0) if self.parity == "paper" else limit
        count = torch.minimum(count, limit[:, None])
        count = torch.where(count < 0, (count + m).clamp(min=0), count)
        first = torch.arange(m, device=mean.device) < count[..., None]
        return torch.zeros_like(first).scatter(-1, order, first)

    def heads(self) -> HeadSplit:
        return AdaptiveHeads(0.0)


@dataclass(frozen=True, kw_only=True)
class LayerDefensiveKV(DefensiveKV):
    """DefensiveKV whose layers compete too: the best scores of all layers stay (arXiv 2510.13334)."""

    name = "layer_defensivekv"

    def layers(self) -> LayerSplit:
        return GlobalLayers()
