"""Parts of scores: pooling over positions, and reduction over a KV head's query heads."""

from __future__ import annotations

from typing import Literal

from torch import Tensor
from torch.nn.functional import avg_pool1d, max_pool1d

Pool = Literal["max", "avg", None]
Group = Literal["mean", "max", "sum"]


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
