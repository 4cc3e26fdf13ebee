"""DropKV: how much the output of attention would change if one entry were missing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kvpass.policies.base import Policy
from kvpass.policies.head_splits import AdaptiveHeads, HeadSplit
from kvpass.policies.observation import Observation
from kvpass.policies.options import check_choice, check_float, check_odd, option
from kvpass.policies.scores import pool_scores

_TINY = 1e-6


@dataclass(frozen=True, kw_only=True)
class DropKV(Policy):
    """Keep the entries without which the output of attention changes most: DropKV (OpenReview MqfNzH3TVH).

    Without entry j, whose share of the attention of query i is ``p[i, j]``, the softmax over the others gives an output
    that differs from o[i] by ``p[i, j] / (1 - p[i, j]) * (o[i] - v[j])``. The score is the sum over the window's rows
    of the square of this vector's length, its mean over the group, average-pooled.

    ``form="caote"`` is CAOTE's (Goel et al. 2025, arXiv 2504.14051): the length for the newest query alone, its mean
    over the group, not pooled.

    Departures: both are judged once, with the prompt; CAOTE evicts at each decoded token, here decoding appends.
    ``1 - p`` counts 1e-6 more, as in the code of DropKV.

    Args:
        form: ``"dropkv"`` or ``"caote"``. kernel_size: odd width of DropKV's average pooling.
        alpha: 1: every head of a layer keeps as many entries, as in the papers; below it heads compete, as in
            ``ada_snapkv``.
    """

    name = "dropkv"
    inputs = frozenset({"question"})

    form: Literal["dropkv", "caote"] = option("dropkv", check_choice, ("dropkv", "caote"))
    kernel_size: int = option(7, check_odd)
    alpha: float = option(1.0, check_float, 0.0, 1.0)

    def score(self, obs: Observation) -> Tensor:
        changes = [self._change(obs, kv_head, a) for kv_head, a in enumerate(obs.window_attention())]
        scores = torch.stack(changes, 1)
        return scores if self.form == "caote" else pool_scores(scores, "avg", self.kernel_size)

    def _change(self, obs: Observation, kv_head: int, attention: Tensor) -> Tensor:
        """Return the score before pooling of one KV head, fp32 ``[B, M]``; attention is ``[B, G, rows, N]``."""
        values, group = obs.values[:, kv_head].float(), attention.shape[1]
        rows = (attention[:, :, -1:] if self.form == "caote" else attention).flatten(1, 2)
        # not by scalar products: an entry with nearly all attention has nearly the output's value
        away = torch.cdist(rows @ values, values, compute_mode="donot_use_mm_for_euclid_dist")
        change = (rows / (1 - rows + _TINY) * away)[..., : obs.evictable]
        return (change if self.form == "caote" else change.square()).sum(1) / group

    def heads(self) -> HeadSplit:
        return AdaptiveHeads(self.alpha)
