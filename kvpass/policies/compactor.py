"""Compactor: keys that stand apart from the others, and tokens that their neighbours attend to."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvpass.policies.base import Policy
from kvpass.policies.head_splits import HeadSplit, SafeguardedHeads
from kvpass.policies.observation import Observation, with_rope
from kvpass.policies.options import check_float, check_int, option
from kvpass.policies.scores import above_all, pool_scores

_RIDGE = 0.01


@dataclass(frozen=True, kw_only=True)
class Compactor(Policy):
    """Keep keys that others cannot replace and tokens that are attended to: Compactor (2025, arXiv 2507.08143).

    Without the first ``sinks`` tokens and the window, per KV head:

    * leverage of a key: the diagonal of ``X (X^T X + 0.01 I)^-1 X^T``, where the rows of X are the keys before RoPE
      less their mean;
    * attention: the prompt is divided into chunks of ``chunk`` tokens; all tokens of a chunk attend to all of it, later
      ones too, with logits ``q . k``. The sum over queries, its mean over the group, times the L2 norm of the value,
      average-pooled over 3 positions.

    Both are standardised over all heads and positions of the layer: less the mean, divided by the standard deviation.
    The score is ``blend * leverage + attention``. The first ``sinks`` tokens come before others, the newest ``window``
    are always kept.

    It reads all queries of the prompt, yet needs no question among them.

    Departures: the code (the authors' and kvpress's) approximates leverage by random projections of the keys; here it
    is exact and nothing is random. Padding of the last chunk counts there, with logits near 0; here it does not.
    ``alpha=1`` are the paper's uniform heads. A logit cap and attention sinks of the model are left out.

    Args:
        sinks: first tokens, kept before others. chunk: tokens that attend to each other.
        blend: weight of leverage; None: the share of the prompt that is not kept, as in kvpress.
        alpha: each head's best ``alpha * n`` are kept, n being the mean number of a head's entries; the rest of the
            budget goes to the layer's best.
    """

    name = "compactor"
    inputs = frozenset({"keys", "queries", "rotation", "heads"})

    window: int = 4
    sinks: int = option(8, check_int, 0)
    chunk: int = option(256, check_int, 1)
    blend: float | None = option(None, check_float, 0.0)
    alpha: float = option(0.2, check_float, 0.0, 1.0)

    def score(self, obs: Observation) -> Tensor:
        positions = obs.positions[..., : obs.evictable].expand(*obs.keys.shape[:2], -1)
        first = above_all(positions[..., : self.sinks])
        if obs.evictable <= self.sinks:
            return first
        leverage, attention = (_standardised(obs, x) for x in (self._leverage(obs), self._attention(obs)))
        removed = 1 - (obs.entries_per_head + obs.window) / obs.length
        blend = removed.clamp(min=0)[:, None, None] if self.blend is None else self.blend
        return torch.cat([first, (blend * leverage + attention).float()], 2)

    def _leverage(self, obs: Observation) -> Tensor:
        """Leverage of the keys between sinks and window, one KV head at a time: fp64 ``[B, K, M - sinks]``."""
        cos, sin = obs.rotation(torch.arange(self.sinks, obs.evictable, device=obs.keys.device))
        found = []
        for keys in obs.keys[:, :, self.sinks : obs.evictable].unbind(1):
            x = with_rope(keys.float(), cos, -sin).double()
            x = x - x.mean(1, keepdim=True)
            ridge = _RIDGE * torch.eye(x.shape[2], dtype=x.dtype, device=x.device)
            lower, _ = torch.linalg.cholesky_ex(x.mT @ x + ridge)
            found.append(torch.linalg.solve_triangular(lower, x.mT, upper=False).square().sum(1))
        return torch.stack(found, 1)

    def _attention(self, obs: Observation) -> Tensor:
        """What the tokens of each chunk attend to, weighed by values: fp32 ``[B, K, M - sinks]``."""
        found = []
        for start in range(self.sinks, obs.evictable, self.chunk):
            end = min(start + self.chunk, obs.evictable)
            queries = obs.prompt_queries(start, end).unflatten(1, (obs.kv_heads, obs.group))
            logits = queries @ obs.keys[:, :, None, start:end].float().mT
            found.append(logits.softmax(-1).sum(3).mean(2))
        norms = obs.values[:, :, self.sinks : obs.evictable].float().norm(dim=-1)
        return pool_scores(torch.cat(found, 2) * norms, "avg", 3)

    def heads(self) -> HeadSplit:
        return SafeguardedHeads(self.alpha, self.window)


def _standardised(obs: Observation, x: Tensor) -> Tensor:
    """Return a statistic ``[B, K, n]``, fp64, less its mean and divided by its deviation over the layer's heads."""
    x = x.double()
    x = x - obs.all_heads(x.mean(2)).mean(1)[:, None, None]
    squares = obs.all_heads(x.square().sum(2))
    variance = squares.sum(1) / max(squares.shape[1] * x.shape[2] - 1, 1)
    return x / variance.sqrt().clamp(min=1e-6)[:, None, None]
