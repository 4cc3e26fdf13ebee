"""Integer budgets and head counts of the released code, for ``parity="code"``; they miss the total.

As in :mod:`kvpass.policies.scheduler`, an entry is kept when its rank is below its layer's budget. Budgets are
multiples of K, and a rank is ``K`` times the smallest budget per head at which the released code keeps the entry, minus
one. So ranks are not unique and the number kept is not the budget. Source: the authors' released repositories, compared
on the golden cases.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvpass.policies.scheduler import best_by_head, rank_by_score


def rank_safeguarded(scores: Tensor, alpha: float, floor: Tensor) -> Tensor:
    """Rank entries by Ada-KV's rounded safeguard; int32 ``[B, K, N]``.

    Head h keeps its best ``round(c_h * (1 - alpha) + floor)`` entries. c_h counts the head's entries among the
    ``K * n`` best of the layer, n being the budget per head; rounding is half to even, in fp32. A layer whose n exceeds
    its evictable positions is kept whole.

    Args:
        scores: fp32 ``[B, K, N]``, ``-inf`` where not evictable.
        floor: fp32 ``[B, N + 2]``, the constant part of a head's count for n = 0, 1, ..., N + 1.
    """
    batch, heads, length = scores.shape
    eligible = scores > float("-inf")
    available = eligible.sum(2).amax(1)[:, None, None]
    best = rank_by_score(scores)
    enters = torch.div(best, heads, rounding_mode="floor") + 1
    count = torch.zeros(batch, heads, length + 2, dtype=torch.int64, device=scores.device)
    count = count.scatter_add(2, enters, eligible.long()).cumsum(2)
    kept = (count.float() * (1 - alpha) + floor[:, None]).round().long()
    kept = torch.where(torch.arange(length + 2, device=scores.device) > available, length, kept)
    first = torch.searchsorted(kept, torch.arange(1, length + 1, device=scores.device).expand_as(best).contiguous())
    first = torch.zeros_like(best).flatten(1).scatter(1, best_by_head(best).flatten(1), first.flatten(1))
    first = first.gather(1, best.flatten(1)).view(best.shape)
    return torch.where(eligible, first * heads - 1, heads * (length + 2)).int()


def truncated_budgets(weights: Tensor, entries: Tensor, kv_heads: int, seen: int) -> Tensor:
    """LAVa's rule, int64 ``[B, L]`` over all heads; remainders are dropped, and there is no cap.

    A head gets ``trunc(e_l / sum of e over the layers seen * total)``. Arguments as in
    :func:`kvpass.policies.scheduler.adaptive_budgets`.
    """
    layers = weights.shape[1]
    per_head = (_parts(weights[:, :seen]) * (entries * layers).double()[:, None]).long()
    return torch.nn.functional.pad(per_head * kv_heads, (0, layers - seen))


def _parts(weights: Tensor) -> Tensor:
    """Return the part of each weight in the sum of its row; equal ones where that is 0."""
    parts = weights / weights.sum(1, keepdim=True)
    return torch.where(parts.isnan(), 1.0 / weights.shape[1], parts)


def pyramid_budgets(
    entries: Tensor, available: Tensor, layers: int, kv_heads: int, window: int, beta: int, *, short_uniform: bool
) -> Tensor:
    """PyramidKV's rule with floor divisions, int64 ``[B, L]`` over all heads; exceeds the total.

    ``short_uniform``: KVCache-Factory's branch (prompt < 2 * entries: every layer the same). The Ada-KV repository
    lacks it, so its pyramid is upside down for short prompts. With one layer, it gets ``entries``.
    """
    least = torch.div(entries, beta, rounding_mode="floor")
    most = 2 * entries - least
    least = torch.where(most >= available, 2 * entries - available, least)
    most = torch.where(most >= available, available, most)
    step = torch.div(most - least, max(layers - 1, 1), rounding_mode="floor")
    per_head = most[:, None] - torch.arange(layers, device=entries.device) * step[:, None]
    if layers == 1:
        per_head = entries[:, None]
    if short_uniform:
        length = available + window
        uniform = (length < 2 * entries) | (length < entries + window)
        per_head = torch.where(uniform[:, None], torch.minimum(entries, available)[:, None], per_head)
    return per_head * kv_heads


def cake_budgets(weights: Tensor, entries: Tensor, available: Tensor, kv_heads: int, seen: int) -> Tensor:
    """CAKE's integer rule, int64 ``[B, L]`` over all heads: truncate in fp32, clip, spread, repair, clip.

    Two amounts are spread over the layers below the cap: first what exceeds a layer's positions, then what truncation
    lost. Each layer gets an equal part, the first ones (lowest index) one more. A negative rest is taken in the same
    way from layers above 1.
    """
    layers = weights.shape[1]
    total, cap = entries * layers, available[:, None]
    x = (_parts(weights[:, :seen].float()) * total.float()[:, None]).long()
    excess = (x - cap).clamp(min=0).sum(1)
    x = torch.minimum(x, cap)
    x = x + _spread(excess, x < cap)
    rest = total - x.sum(1)
    x = x + _spread(rest.clamp(min=0), x < cap) - _spread((-rest).clamp(min=0), x > 1)
    return torch.nn.functional.pad(torch.minimum(x, cap) * kv_heads, (0, layers - seen))


def _spread(amount: Tensor, takers: Tensor) -> Tensor:
    """Divide ``amount`` int64 ``[B]`` among ``takers`` bool ``[B, m]``, remainder to the lowest; none: nothing."""
    divisor = takers.sum(1).clamp(min=1)
    each = torch.div(amount, divisor, rounding_mode="floor")
    more = takers.cumsum(1) <= (amount - each * divisor)[:, None]
    return torch.where(takers, each[:, None] + more, 0)
