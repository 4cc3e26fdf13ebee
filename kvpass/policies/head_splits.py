"""Head splits: the order in which a layer's entries enter, across its KV heads."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from kvpass.policies.options import Parity
from kvpass.policies.released import rank_safeguarded
from kvpass.policies.scheduler import places, rank_by_score, rank_entries
from kvpass.policies.scores import above_all


class HeadSplit(ABC):
    """Division of a layer's budget among its KV heads; see :meth:`kvpass.policies.base.Policy.rank`."""

    @abstractmethod
    def rank(self, scores: Tensor, entries: Tensor) -> Tensor: ...

    def overspend(self, entries: int, kv_heads: int) -> int:
        """Return by how many entries one layer may exceed its budget."""
        return 0


@dataclass(frozen=True)
class UniformHeads(HeadSplit):
    """The same number of best entries for every head; the remainder goes by score."""

    def rank(self, scores: Tensor, entries: Tensor) -> Tensor:
        return rank_entries(scores, 1.0)


@dataclass(frozen=True)
class AdaptiveHeads(HeadSplit):
    """Top-k across all heads, blended with a uniform part ``alpha`` (Ada-KV's safeguard); 0 is plain top-k.

    ``normalize`` first multiplies a head's scores by the share that its best ``entries`` hold of their sum, as in
    KVCache-Factory's port of Ada-KV.

    With ``parity="code"``, as released, counts are rounded per head and the total is not repaired. The constant part of
    a head's count is ``int(alpha * n)`` in Ada-KV, where n is the layer's budget per head. LAVa's code fixes it at
    ``int(alpha * (entries + window))``, which overspends; ``frozen_window`` is then the window.
    """

    alpha: float = 0.0
    normalize: bool = False
    parity: Parity = "paper"
    frozen_window: int | None = None

    def rank(self, scores: Tensor, entries: Tensor) -> Tensor:
        if self.normalize:
            scores = normalized(scores, entries)
        if self.parity == "paper":
            return rank_entries(scores, self.alpha)
        if self.frozen_window is None:
            n = torch.arange(scores.shape[2] + 2, device=scores.device).expand(scores.shape[0], -1)
        else:
            n = (entries + self.frozen_window)[:, None].expand(-1, scores.shape[2] + 2)
        floor = (n.double() * self.alpha).floor().float()
        return rank_safeguarded(scores, self.alpha, floor)

    def overspend(self, entries: int, kv_heads: int) -> int:
        if self.parity == "paper":
            return 0
        frozen = 0 if self.frozen_window is None else int(self.alpha * (entries + self.frozen_window))
        return kv_heads * (frozen + 1)


@dataclass(frozen=True)
class SafeguardedHeads(HeadSplit):
    """Top-k across all heads, after each head's best ``alpha * n``: Ada-KV's safeguard as kvpress has it.

    n is the budget per head, ``window`` included, which counts to that certain part. The total is exact.
    """

    alpha: float
    window: int

    def certain(self, entries: Tensor) -> Tensor:
        """Return how many evictable entries each head has in any case, int64 ``[B]``."""
        if self.alpha == 0:
            return torch.zeros_like(entries)
        part = ((entries + self.window).double() * self.alpha).long().clamp(min=1)
        return (part - self.window).clamp(min=0)

    def rank(self, scores: Tensor, entries: Tensor) -> Tensor:
        place = places(scores)
        above = (place < self.certain(entries)[:, None, None]) & (scores > float("-inf"))
        return rank_by_score(torch.where(above, above_all(place), scores)).int()


def normalized(scores: Tensor, entries: Tensor) -> Tensor:
    """Return scores * (sum of the head's best ``entries``) / (sum of all), fp32 ``[B, K, N]``."""
    worth = torch.where(scores.isinf(), 0.0, scores)
    running = torch.nn.functional.pad(worth.sort(dim=2, descending=True).values.cumsum(2), (1, 0))
    top = running.gather(2, entries.clamp(max=scores.shape[2])[:, None, None].expand(-1, scores.shape[1], 1))
    total = worth.sum(2, keepdim=True)
    share = torch.where(total > 0, top / total, torch.ones_like(total))
    return torch.where(scores.isinf(), scores, scores * share)
