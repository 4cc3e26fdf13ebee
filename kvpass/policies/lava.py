"""LAVa: a score that can be compared across heads, and layer budgets by entropy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvpass.policies.base import Policy
from kvpass.policies.head_splits import AdaptiveHeads, HeadSplit, ReleasedAdaptiveHeads
from kvpass.policies.layer_splits import EntropyLayers, LayerSplit
from kvpass.policies.observation import Observation
from kvpass.policies.options import check_float
from kvpass.policies.scores import Group, Pool, check_score_options, pool_scores, reduce_group


@dataclass(frozen=True, kw_only=True)
class Lava(Policy):
    """Eviction with dynamic head and layer budgets: LAVa (Shen et al. 2025, arXiv 2509.09754).

    ``s[k, i] = max over group(pool(mean over window rows of a[h, :, i])) * max_{j < M} |v[k, j]|_1``; heads compete for
    the entries of their layer (top-k across heads); layers share the total in proportion to the normalised entropy of
    their scores (:class:`EntropyLayers`).

    Departures from the paper: the largest value norm is taken over evictable positions, since window entries are never
    evicted (as in the released code). The released code adds a safeguard whose constant part, ``int(alpha * budget)``
    per head, includes the window and so overspends; ``parity="code"`` reproduces this. It also crashes if a layer's
    share exceeds its entries; here such a layer is kept whole.

    Args:
        pool, kernel_size, group: as in :class:`~kvpass.policies.snapkv.SnapKV`; the group is reduced after pooling.
        alpha: uniform part of a layer's budget, 0 to 1; None: 0 as in the paper, 0.2 with ``parity="code"``.
    """

    name: ClassVar[str] = "lava"

    pool: Pool = "max"
    kernel_size: int = 7
    group: Group = "max"
    alpha: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_score_options(self.pool, self.kernel_size, self.group)
        if self.alpha is not None:
            check_float("alpha", self.alpha, 0.0, 1.0)

    def score(self, obs: Observation) -> Tensor:
        pooled = pool_scores(obs.mean[..., : obs.evictable], self.pool, self.kernel_size)
        s = reduce_group(pooled, obs.kv_heads, self.group)
        if obs.evictable == 0:
            return s
        return s * obs.value_norm[..., : obs.evictable].amax(-1, keepdim=True)

    def heads(self) -> HeadSplit:
        if self.parity == "code":
            alpha = 0.2 if self.alpha is None else self.alpha
            return ReleasedAdaptiveHeads(alpha, frozen_window=self.window)
        return AdaptiveHeads(self.alpha or 0.0)

    def layers(self) -> LayerSplit:
        return EntropyLayers(self.parity)
