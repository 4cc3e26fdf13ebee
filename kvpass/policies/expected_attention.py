"""Expected attention: how much queries that are still to come would attend to an entry."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kvpass.policies.calibrated import COVARIANCE, MEAN, QueryStatistics
from kvpass.policies.head_splits import HeadSplit, SafeguardedHeads, UniformHeads
from kvpass.policies.observation import Observation, with_rope
from kvpass.policies.options import check_bool, check_choice, check_float, check_int, option
from kvpass.policies.refinement import Refinable


@dataclass(frozen=True, kw_only=True)
class ExpectedAttention(Refinable, QueryStatistics):
    """Keep what future queries are expected to attend to: Expected Attention (Devoto et al. 2025, arXiv 2510.00636).

    Queries are taken to be Gaussian. Their mean m and covariance C, per query head, are those of the prompt's queries
    without the first ``sinks``, before RoPE; or, with ``statistics``, of the texts of ``kvpass calibrate``. A is the
    mean rotation of RoPE over the ``n_future`` positions after the prompt. With c the factor of the logits, per query
    head:

    ``a = softmax_i(c * (A m) . k[i] + c^2 / 2 * k[i] . (A C A^T) k[i])``, over the entries after the sinks;
    ``s[i] = (mean of a over the group + epsilon) * |v[i]|``, the L2 norm of the value.

    The first ``sinks`` entries score above all others of the layer. The total is the budget; no window is protected.

    Without a file it reads all queries of the prompt, yet needs no question among them: they stand for those that
    follow. Prompts of at most ``sinks`` tokens are kept from the front.

    Departures: kvpress's code is the source, which has ``epsilon`` beside the paper's rule. There a prompt of at most
    ``sinks`` tokens raises, and its wrapper evicts every 512 decoded tokens; here decoding appends. Softcap and
    attention sinks of the model (a further logit) are left out, as there.

    Args:
        window: 0 as in the paper; a positive number protects that many newest tokens.
        n_future: positions after the prompt over which rotations are averaged. sinks: first tokens, kept before others.
        epsilon: added to the attention before it is multiplied by the norm of the value; 0.01 or 0.02 with adaptive
            heads in kvpress's own comparisons.
        covariance: whether the term with C counts. value_norm: whether attention (and ``epsilon``) is multiplied by
            the norm.
        head_split: ``"uniform"`` or ``"adaptive"``, the layer's best after each head's best ``alpha * n``, n being the
            mean number of a head's entries. alpha: that certain part.
        statistics: as in :class:`~kvpass.policies.calibrated.QueryStatistics`.
    """

    name = "expected_attention"
    inputs = frozenset({"keys", "queries", "rotation", "heads"})
    read_statistics = (MEAN, COVARIANCE)

    window: int = 0
    n_future: int = option(512, check_int, 1, 1 << 16)
    sinks: int = option(4, check_int, 0)
    epsilon: float = option(0.0, check_float, 0.0)
    covariance: bool = option(True, check_bool)
    value_norm: bool = option(True, check_bool)
    head_split: Literal["uniform", "adaptive"] = option("uniform", check_choice, ("uniform", "adaptive"))
    alpha: float = option(0.2, check_float, 0.0, 1.0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.critical and self.value_norm:
            raise ValueError(
                f"critical=True with policy {self.name!r}: its score is multiplied by the norm of the value already; "
                "give value_norm=False"
            )

    def score(self, obs: Observation) -> Tensor:
        batch, kv_heads, n, _ = obs.keys.shape
        if n <= self.sinks:
            return obs.keys.new_ones(batch, kv_heads, obs.evictable, dtype=torch.float32)
        worth = torch.cat([self._attention(obs, kv_head) for kv_head in range(kv_heads)], 1)
        if self.value_norm:
            worth = (worth + self.epsilon) * obs.values[:, :, self.sinks :].float().norm(dim=-1)
        above = obs.all_heads(worth.amax(2)).amax(1) + 1
        sinks = above[:, None, None].expand(-1, kv_heads, self.sinks)
        return torch.cat([sinks, worth], 2)[..., : obs.evictable]

    def _attention(self, obs: Observation, kv_head: int) -> Tensor:
        """Expected attention to the entries after the sinks, mean over the group: fp32 ``[B, 1, N - sinks]``."""
        mean, covariance = self._queries(obs, kv_head)
        after = torch.arange(obs.length, obs.length + self.n_future, device=obs.keys.device)
        cos, sin = (part.mean(0) for part in obs.rotation(after))
        keys = obs.keys[:, kv_head, None, self.sinks :].float()
        logits = obs.scale * (keys * with_rope(mean, cos, sin)).sum(-1)
        if self.covariance:
            spread = with_rope(with_rope(covariance, cos, sin).mT, cos, sin)
            logits = logits + obs.scale**2 / 2 * ((keys @ spread) * keys).sum(-1)
        return logits.softmax(-1).mean(1, keepdim=True)

    def _queries(self, obs: Observation, kv_head: int) -> tuple[Tensor, Tensor]:
        """Mean and covariance of queries before RoPE, fp32 ``[B or 1, G, 1, D]`` and ``[B or 1, G, D, D]``."""
        if self.statistics is not None:
            means, covariances = self.layer_statistics(obs)
            return means[None, kv_head, :, None], covariances[None, kv_head]
        queries = obs.unrotated_queries(kv_head, self.sinks)
        mean = queries.mean(2, keepdim=True)
        centred = queries - mean
        return mean, centred.mT @ centred / queries.shape[2]

    def heads(self) -> HeadSplit:
        return SafeguardedHeads(self.alpha, self.window) if self.head_split == "adaptive" else UniformHeads()
