"""LagKV: how much keys and values stand out against those that follow."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvpass.policies.base import Policy
from kvpass.policies.observation import Observation
from kvpass.policies.options import check_bool, check_int, option


@dataclass(frozen=True, kw_only=True)
class LagKV(Policy):
    """Keep tokens whose channels spread most within the range of the next tokens: LagKV (2025, arXiv 2504.04704).

    After the first ``sinks`` tokens the prompt is divided into parts of ``lag`` tokens. Keys of a part are scaled,
    channel by channel, so that the next part lies in 0..1; the score is the softmax, over the part, of their standard
    deviation over the channels. The same with values; the mean of both. It reads no query, so it is the same before and
    after the question is known. Sinks, the last whole part and what is left score 1, above all others; a prompt without
    two parts is scored by recency.

    Departures: the budget decides how much is kept, as in kvpress (in the authors' code a fixed share of each part);
    a channel in which the next part is constant counts 0 (elsewhere it gives NaN).

    Args:
        window: 0 as in the paper; a positive number protects that many newest tokens.
        sinks: first tokens, which score 1. lag: tokens of a part.
        cross_scoring: compare scores between parts; False: each part's ranks, so that all give up the same share.
    """

    name = "lagkv"
    inputs = frozenset({"keys", "prompt"})

    window: int = 0
    sinks: int = option(4, check_int, 0)
    lag: int = option(128, check_int, 2)
    cross_scoring: bool = option(False, check_bool)

    def score(self, obs: Observation) -> Tensor:
        n, m = obs.length, obs.evictable
        if n < self.sinks + 2 * self.lag:
            recency = (obs.positions - self.sinks) / max(n - self.sinks, 1)
            short = torch.where(obs.positions < self.sinks, 1.0, recency).float()
            return short[..., :m].expand(*obs.keys.shape[:2], -1)
        end = n - (n - self.sinks) % self.lag
        keys, values = (self._spread(x[:, :, self.sinks : end].float()) for x in (obs.keys, obs.values))
        inner = (keys + values) / 2
        if not self.cross_scoring:
            inner = inner.argsort(dim=-1, stable=True).argsort(dim=-1) / self.lag
        scores = obs.keys.new_ones(*obs.keys.shape[:2], n, dtype=torch.float32)
        scores[..., self.sinks : end - self.lag] = inner.flatten(2)
        return scores[..., :m]

    def _spread(self, x: Tensor) -> Tensor:
        """Share of each token in the spread of its part, ``[B, K, P - 1, lag]``, of x ``[B, K, P * lag, D]``."""
        x = x.unflatten(2, (-1, self.lag))
        low, high = x.aminmax(dim=3, keepdim=True)
        width = (high - low)[:, :, 1:]
        scaled = torch.where(width > 0, (x[:, :, :-1] - low[:, :, 1:]) / width, 0.0)
        return scaled.std(-1).softmax(-1)
