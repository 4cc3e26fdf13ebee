"""Parts of scores: pooling over positions, reduction over a KV head's query heads, and hashed numbers."""

from __future__ import annotations

from typing import Literal

import torch
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
    if group == "max":
        return grouped.amax(2)
    return grouped.sum(2) if group == "sum" else grouped.mean(2)


PROTECTED = float("inf")
"""Score of an entry that is kept in any case; those of policies are finite."""


def above_all(place: Tensor) -> Tensor:
    """Return scores fp32 that are above all others, the lowest place (an int) highest."""
    return torch.finfo(torch.float32).max / (place + 2).clamp(min=1)


def sinks_first(scores: Tensor, positions: Tensor, sinks: int) -> Tensor:
    """Return scores with those of the first tokens above all others, the lowest position highest."""
    return torch.where(positions < sinks, above_all(positions), scores)


def hashed(seed: int, *numbers: Tensor) -> Tensor:
    """Return numbers in [0, 1), fp32: the top 24 bits of a multiply-xorshift hash of the low 32 bits of all arguments.

    There is no generator and no state: every device and every process gets the same. The numbers are int64, and their
    shapes broadcast.
    """
    bits = torch.full_like(numbers[0], seed & _MASK)
    for number in numbers:
        bits = _mix(bits ^ _mix(number + 1))
    return (bits >> 8).float() / 2**24


_MASK = 0xFFFFFFFF


def _mix(x: Tensor) -> Tensor:
    """Bijection on 32-bit numbers held in int64; every input bit affects every output bit."""
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x = ((x ^ (x >> shift)) * factor) & _MASK
    return x ^ (x >> 16)
