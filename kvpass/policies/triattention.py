"""TriAttention: what queries like those of a text would attend to, at distances that grow."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kvpass.policies import calibrated
from kvpass.policies.calibrated import QueryStatistics
from kvpass.policies.decode_rules import DecodeRule, Slots
from kvpass.policies.observation import Observation, with_rope
from kvpass.policies.options import check_choice, check_int, option
from kvpass.policies.scores import Group, reduce_group

Aggregate = Literal["mean", "max"]

MEAN, MODULUS, FREQUENCIES = 0, 1, 2
"""Rows of the decode rule; the last two take D / 2 columns."""


@dataclass(frozen=True, kw_only=True)
class TriAttention(QueryStatistics):
    """Keep what queries like those of a text would attend to at growing distances: TriAttention (arXiv 2604.04921).

    Channels j and ``j + D / 2`` before RoPE are one complex number of frequency w[j]. Of the queries of a text, per
    query head: their mean m and the mean M of their moduli. After t tokens, for a key k as it is cached, RoPE applied:

    ``a[i] = mean over d of Re(sum_j m[j] exp(1j (t + d) w[j]) conj(k[i, j])) + sum_j (M[j] - |m[j]|) |k[i, j]|``,

    d in 1, 2, 4, ... up to ``longest``; ``s[i]`` = the most over the group. (The paper turns keys back by their
    position p and takes cosines of ``(t - p + d) w[j]``: the same.) A prompt is cut to the budget. While decoding,
    ``buffer`` tokens gather beside the budget, then each head is cut to its budget again.

    The text is one to calibrate with: ``statistics`` names the file that ``kvpass calibrate`` made of it. Without one,
    it is the prompt itself, which is no rule of the paper.

    Departures: the authors' code evicts when the number of tokens is a multiple of ``buffer``, which ``parity="code"``
    reproduces; by default it does not count or evict the prompt, which here competes for the budget as every entry, and
    it has other selections than the best of each KV head, and standardised scores, which are not there. The model's
    factor of cos and sin (YaRN) is part of the queries and not of the distances.

    Args:
        window: 0 as in the authors' code; a positive number protects that many newest tokens.
        statistics: file of ``kvpass calibrate`` for this model. None: those of each prompt itself.
        longest: largest distance. aggregate: over distances, ``"mean"`` or ``"max"``.
        group: reduction over the query heads of a KV head. buffer: tokens between two evictions.
    """

    name = "triattention"
    inputs = frozenset({"keys", "queries", "rotation"})
    read_statistics = (calibrated.MEAN, calibrated.MODULUS)

    window: int = 0
    longest: int = option(1 << 16, check_int, 1)
    aggregate: Aggregate = option("mean", check_choice, Aggregate)
    group: Group = option("max", check_choice, Group)
    buffer: int = option(128, check_int, 1)

    def score(self, obs: Observation) -> Tensor:
        rule = self.decode_rule()
        rows = rule.first_rows(obs) if obs.asked.rule_rows is None else obs.asked.rule_rows
        tokens = torch.full((obs.keys.shape[0],), obs.length, device=obs.keys.device)
        return rule.worth(rows, obs.keys[:, :, : obs.evictable], tokens)

    def decode_rule(self) -> Distances:
        return Distances(window=self.window, every=self.buffer, options=self)


@dataclass(frozen=True, kw_only=True)
class Distances(DecodeRule):
    """TriAttention while decoding."""

    reads_keys = True
    rows_per_head = 3  # mean and mean modulus of the queries of a text, and the frequencies of the layer

    options: TriAttention

    def due(self, position: Tensor, quota: Tensor) -> Tensor | None:
        if self.options.parity == "paper":
            return super().due(position, quota)
        tokens = position.amax((1, 2))[:, None] + 1
        return (tokens % self.every == 0) & ((position >= 0).sum(2) - quota >= self.window)

    def first_rows(self, obs: Observation) -> Tensor:
        batch, kv_heads, group, dim = obs.keys.shape[0], obs.kv_heads, obs.group, obs.keys.shape[3]
        rows = obs.keys.new_zeros(batch, kv_heads, group, self.rows_per_head, dim, dtype=torch.float32)
        rows[..., FREQUENCIES, : dim // 2] = obs.frequencies
        if self.options.statistics is not None:
            rows[..., MEAN, :], rows[..., MODULUS, : dim // 2] = self.options.layer_statistics(obs)
            return rows
        for head in range(kv_heads):
            queries = obs.unrotated_queries(head, 0)
            rows[:, head, :, MEAN] = queries.mean(2)
            rows[:, head, :, MODULUS, : dim // 2] = pairwise_norms(queries).mean(2)
        return rows

    def observe(self, attention: Tensor, slots: Slots) -> tuple[Tensor, Tensor]:
        assert slots.keys is not None and slots.rows is not None
        tokens = slots.position.amax((1, 2)) + 1
        keys = torch.where((slots.position >= 0)[..., None], slots.keys, 0.0)
        return self.worth(slots.rows, keys, tokens), slots.decode_state

    def worth(self, rows: Tensor, keys: Tensor, tokens: Tensor) -> Tensor:
        """Return the score of each key ``[B, K, N, D]`` after ``tokens`` int64 ``[B]``: fp32 ``[B, K, N]``."""
        half = keys.shape[3] // 2
        mean, modulus, frequencies = rows[..., MEAN, :], rows[..., MODULUS, :half], rows[..., FREQUENCIES, :half]
        distances = 2 ** torch.arange(self.options.longest.bit_length(), device=keys.device)
        ahead = (tokens[:, None] + distances).float()[:, None, None, :, None] * frequencies[..., None, :]
        queries = with_rope(mean[..., None, :], ahead.cos(), ahead.sin())
        if self.options.aggregate == "mean":
            queries = queries.mean(3, keepdim=True)
        spare = modulus - pairwise_norms(mean)
        scores = []
        for head in range(keys.shape[1]):
            of_head = keys[:, head].float()
            certain = torch.einsum("bgod,bnd->bgon", queries[:, head], of_head).amax(2)
            of_group = certain + torch.einsum("bgf,bnf->bgn", spare[:, head], pairwise_norms(of_head))
            scores.append(reduce_group(of_group, 1, self.options.group))
        return torch.cat(scores, 1)


def pairwise_norms(x: Tensor) -> Tensor:
    """Return ``|x[j] + 1j x[j + D / 2]|`` of ``[..., D]``: ``[..., D / 2]``."""
    real, imaginary = x.chunk(2, -1)
    return torch.hypot(real, imaginary)
