"""Base class of policies that score by the attention of the last prompt tokens."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kvpass.policies.base import Policy
from kvpass.policies.observation import Observation
from kvpass.policies.scores import Group, Pool, check_score_options, pool_scores, reduce_group


@dataclass(frozen=True, kw_only=True)
class WindowAttention(Policy):
    """SnapKV's score, ``s[k, i] = pool(reduce over group(mean over window rows of a[h, :, i]))``.

    Args:
        pool: ``"max"``, ``"avg"`` or None. kernel_size: odd width of the pooling.
        group: reduction over the query heads of a KV head: ``"mean"``, ``"max"`` or ``"sum"``.
    """

    pool: Pool = "max"
    kernel_size: int = 7
    group: Group = "mean"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_score_options(self.pool, self.kernel_size, self.group)

    def score(self, obs: Observation) -> Tensor:
        mean = reduce_group(obs.mean[..., : obs.evictable], obs.kv_heads, self.group)
        return pool_scores(mean, self.pool, self.kernel_size)
