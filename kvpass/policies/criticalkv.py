"""CriticalKV: half of a head's entries by attention, the rest by attention times the norm of the projected value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from kvpass.policies.head_splits import HeadSplit, SafeguardedHeads, UniformHeads, raised
from kvpass.policies.observation import Observation, takes_padding
from kvpass.policies.options import check_choice, check_float, option
from kvpass.policies.scheduler import invert, rank_by_score
from kvpass.policies.scores import Pool
from kvpass.policies.snapkv import WindowAttention


@dataclass(frozen=True, kw_only=True)
class CriticalKV(WindowAttention):
    """Bound the change of the layer's output: CriticalKV (Feng et al. 2025, arXiv 2502.03805).

    With n entries of a head, window included, the best ``first_stage * n`` by SnapKV's score s are kept; the others by
    ``(s + epsilon) * norm``, where norm is the mean over the group of the L1 norm of ``W_h v``, W_h being the columns
    of the output projection that read query head h. The window counts to the first stage.

    How many entries a head keeps follows from s alone: all the same (``base="snapkv"``), or, with
    ``base="ada_snapkv"``, as many as it has among the layer's best, each head's best ``alpha * n`` in any case. These
    also come before the second stage. Layers are uniform, so that n is known when a layer is scored; both stages are
    then one order of entry, and the kept sets those of deciding once. ``parity`` makes no difference: paper and code
    have the same total.

    Departure: the code takes at least one entry by s, however small ``first_stage * n``; the same here.

    Args:
        first_stage: part of a head's entries that is kept by s alone. epsilon: added to s in the second stage.
        base: ``"snapkv"`` or ``"ada_snapkv"``. alpha: of ``"ada_snapkv"``, each head's certain part of n.
    """

    name: ClassVar[str] = "criticalkv"
    reads_projection: ClassVar[bool] = True

    pool: Pool = "avg"
    kernel_size: int = 5
    base: Literal["snapkv", "ada_snapkv"] = option("snapkv", check_choice, ("snapkv", "ada_snapkv"))
    alpha: float = option(0.2, check_float, 0.0, 1.0)
    first_stage: float = option(0.5, check_float, 0.0, 1.0)
    epsilon: float = option(1e-4, check_float, 0.0)

    @takes_padding
    def score(self, obs: Observation) -> Tensor:
        attention = super().score(obs)
        if obs.padding is not None:
            attention = torch.where(obs.positions[..., : obs.evictable] < 0, float("-inf"), attention)
        worth = (attention + self.epsilon) * obs.projected_value_norm[..., : obs.evictable]
        refined = in_two_stages(attention, worth, self._first(obs, attention))
        return torch.where(refined > float("-inf"), refined, 0.0)

    def _first(self, obs: Observation, attention: Tensor) -> Tensor:
        """Return how many entries each head keeps by attention alone, int64 ``[B, K]``."""
        entries = obs.entries_per_head
        if self.base == "snapkv":
            held = entries[:, None].expand(-1, obs.kv_heads)
            certain = torch.zeros_like(held)
        else:
            every = obs.all_heads(attention)
            certain = self.heads().certain(entries)[:, None].expand(-1, obs.kv_heads)  # type: ignore[attr-defined]
            best = rank_by_score(raised(every, certain[:, :1].expand(-1, every.shape[1])))
            among = (best < (entries * every.shape[1])[:, None, None]) & (every > float("-inf"))
            own = slice(obs.first_head, obs.first_head + obs.kv_heads)
            held = among.sum(2)[:, own]
        by_attention = ((held + self.window).double() * self.first_stage).long().clamp(min=1) - self.window
        return torch.maximum(by_attention, certain).clamp(min=0)

    def heads(self) -> HeadSplit:
        return UniformHeads() if self.base == "snapkv" else SafeguardedHeads(self.alpha, self.window)


def in_two_stages(scores: Tensor, worth: Tensor, first: Tensor) -> Tensor:
    """Return the scores of each head, permuted, so that they fall in the order of two stages; fp32 ``[B, K, M]``.

    The best ``first`` entries of a head by score come first, in that order, then the others by ``worth``; ties: lower
    position. As a head's scores stay the same but for the order (and equal ones, which get neighbouring numbers), how
    many entries it has among the best of its layer does not change.

    Args:
        first: int64 ``[B, K]``.
    """
    m = scores.shape[2]
    place = invert(scores.argsort(dim=2, descending=True, stable=True))
    later = invert(worth.argsort(dim=2, descending=True, stable=True))
    key = torch.where(scores == float("-inf"), 2 * m + place, torch.where(place < first[..., None], place, m + later))
    return _distinct(scores.sort(dim=2, descending=True).values).gather(2, invert(key.argsort(dim=2, stable=True)))


def _distinct(falling: Tensor) -> Tensor:
    """Return numbers fp32 ``[..., M]`` in falling order, equal ones replaced by the next lower numbers."""
    bits = (falling + 0.0).view(torch.int32)
    whole = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()
    index = torch.arange(falling.shape[-1], device=falling.device)
    apart = ((whole + index).cummin(-1).values - index).int()
    numbers = (apart ^ ((apart >> 31) & 0x7FFFFFFF)).view(torch.float32)
    return torch.where(falling == float("-inf"), falling, numbers)
