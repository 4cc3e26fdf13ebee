"""SnapKV: the attention that the last prompt tokens pay to each earlier position."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvpass.observation import Observation
from kvpass.policies.base import Policy
from kvpass.policies.scores import Group, Pool, check_score_options, pool_scores, reduce_group


@dataclass(frozen=True, kw_only=True)
class SnapKV(Policy):
    """SnapKV (Li et al. 2024, arXiv 2404.14469), per KV head as in Ada-KV's released code.

    ``s[k, i] = pool(reduce over group(mean over window rows of a[h, :, i]))``; every head of every layer keeps the
    same number of its own best.

    Departures: the paper sums over window rows and stores one cache per query head; the mean over rows and over the
    group ranks a head the same way and stores G times less. Max pooling with kernel 7 as in all published comparisons
    (the class default of the first release was average, 5).

    Args:
        pool: ``"max"``, ``"avg"`` or None. kernel_size: odd width of the pooling.
        group: how the query heads of a KV head are reduced: ``"mean"``, ``"max"`` or ``"sum"``.
    """

    name: ClassVar[str] = "snapkv"

    pool: Pool = "max"
    kernel_size: int = 7
    group: Group = "mean"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_score_options(self.pool, self.kernel_size, self.group)

    def score(self, obs: Observation) -> Tensor:
        mean = reduce_group(obs.mean[..., : obs.evictable], obs.kv_heads, self.group)
        return pool_scores(mean, self.pool, self.kernel_size)
