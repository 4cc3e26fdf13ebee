"""Parts of scores: pooling over positions, and reduction over a KV head's query heads."""

from __future__ import annotations

from typing import Literal

from torch import Tensor
from torch.nn.functional import avg_pool1d, max_pool1d

from kvpass.policies.observation import Observation
from kvpass.policies.options import check_choice, check_odd

Pool = Literal["max", "avg"] | None
Group = Literal["mean", "max", "sum"]

POOLS = ("max", "avg", None)
GROUPS = ("mean", "max", "sum")


def pool_scores(scores: Tensor, pool: Pool, kernel_size: int) -> Tensor:
    """Smooth fp32 ``[B, heads, M]`` along positions, stride 1, same length; averages count padded zeros."""
    if pool is None or scores.shape[-1] == 0:
        return scores
    reduce = max_pool1d if pool == "max" else avg_pool1d
    return reduce(scores, kernel_size, stride=1, padding=kernel_size // 2)


def reduce_group(scores: Tensor, kv_heads: int, group: Group) -> Tensor:
    """Reduce ``[B, H, M]`` over the query heads of each KV head to ``[B, K, M]``."""
    if scores.shape[1] == kv_heads:
        return scores
    grouped = scores.unflatten(1, (kv_heads, scores.shape[1] // kv_heads))
    match group:
        case "mean":
            return grouped.mean(2)
        case "max":
            return grouped.amax(2)
        case "sum":
            return grouped.sum(2)


def check_score_options(pool: object, kernel_size: object, group: object) -> None:
    """Check the three options that most scores share."""
    check_choice("pool", pool, POOLS)
    check_odd("kernel_size", kernel_size)
    check_choice("group", group, GROUPS)


def column_sum(obs: Observation, rows: int | None = None) -> Tensor:
    """Return the sum of a over the last ``rows`` prompt rows (default: all), fp32 ``[B, H, N]``."""
    return obs.column_sum if rows is None else obs.recent_sum(rows)
