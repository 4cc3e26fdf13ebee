"""The released code's own arithmetic, for ``parity="code"``: integer layer budgets and head counts that miss the total.

Everything here keeps the form of :mod:`kvpass.policies.scheduler`: an entry is kept when its rank is below its
layer's budget. Budgets are multiples of K, and a rank is ``K`` times the smallest budget per head at which the released
code keeps the entry, minus one; ranks are therefore not unique and the number kept is not the budget. Source: the
authors' released repositories, read and compared with on the golden cases.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvpass.policies.scheduler import best_by_head, rank_by_score


def rank_safeguarded(scores: Tensor, alpha: float, floor: Tensor) -> Tensor:
    """Order of entry under Ada-KV's rounded safeguard: head h keeps ``round(c_h * (1 - alpha) + floor)`` of its best.

    c_h counts the head's entries among the ``K * n`` best of the layer, n being the budget per head; rounding is half
    to even, in fp32. A layer whose n exceeds its evictable positions is kept whole.

    Args:
        scores: fp32 ``[B, K, N]``, ``-inf`` where not evictable.
        floor: fp32 ``[B, N + 2]``, the constant part of a head's count for n = 0, 1, ..., N + 1.
    Returns:
        int32 ``[B, K, N]``.
    """
    batch, heads, length = scores.shape
    eligible = scores > float("-inf")
    available = eligible.sum(2).amax(1)[:, None, None]
    best = rank_by_score(scores)
    enters = torch.div(best, heads, rounding_mode="floor") + 1
    count = torch.zeros(batch, heads, length + 2, dtype=torch.int64, device=scores.device)
    count = count.scatter_add(2, enters, eligible.long()).cumsum(2)
    kept = (count.float() * (1 - alpha) + floor[:, None]).round().long()
    n = torch.arange(length + 2, device=scores.device)
    kept = torch.where(n > available, length, kept)
    first = torch.searchsorted(kept, torch.arange(1, length + 1, device=scores.device).expand_as(best).contiguous())
    first = torch.zeros_like(best).flatten(1).scatter(1, best_by_head(best).flatten(1), first.flatten(1))
    first = first.gather(1, best.flatten(1)).view(best.shape)
    return torch.where(eligible, first * heads - 1, heads * (length + 2)).int()


def truncated_budgets(weights: Tensor, entries: Tensor, kv_heads: int, seen: int) -> Tensor:
    """LAVa: ``trunc(e_l / sum of e over the layers seen * total)`` per head; remainders dropped, no cap.

    Args and result as :func:`kvpass.policies.scheduler.adaptive_budgets`.
    """
    layers = weights.shape[1]
    known = weights[:, :seen]
    part = known / known.sum(1, keepdim=True)
    part = torch.where(part.isnan(), 1.0 / seen, part)
    per_head = (part * (entries * layers).double()[:, None]).long()
    return torch.nn.functional.pad(per_head * kv_heads, (0, layers - seen))


def pyramid_budgets(
    entries: Tensor, available: Tensor, layers: int, kv_heads: int, *, window: int, beta: int, short_uniform: bool
) -> Tensor:
    """PyramidKV with the released floor divisions, int64 ``[B, L]`` over all heads; the total overshoots.

    ``short_uniform``: KVCache-Factory's branch (prompt < 2 * entries: every layer the same), which the Ada-KV
    repository lacks, so that its pyramid stands on its head for short prompts. One layer gets ``entries``.
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

    What exceeds a layer's positions, and then what truncation lost, is spread over layers below the cap: an equal
    part each, the first ones (lowest index) one more. A negative rest is taken the same way from layers above 1.
    """
    layers = weights.shape[1]
    known = weights[:, :seen].float()
    ratio = known / known.sum(1, keepdim=True)
    ratio = torch.where(ratio.isnan(), 1.0 / seen, ratio)
    total, cap = entries * layers, available[:, None]
    x = (ratio * total.float()[:, None]).long()
    excess = (x - cap).clamp(min=0).sum(1)
    x = torch.minimum(x, cap)
    x = x + _spread(excess, x < cap)
    rest = total - x.sum(1)
    x = x + _spread(rest.clamp(min=0), x < cap) - _spread((-rest).clamp(min=0), x > 1)
    return torch.nn.functional.pad(torch.minimum(x, cap) * kv_heads, (0, layers - seen))


def _spread(amount: Tensor, takers: Tensor) -> Tensor:
    """``amount`` int64 ``[B]`` divided among ``takers`` bool ``[B, m]``, remainder to the lowest; none: nothing."""
    count = takers.sum(1)
    divisor = count.clamp(min=1)
    each = torch.div(amount, divisor, rounding_mode="floor")
    more = takers.cumsum(1) <= (amount - each * divisor)[:, None]
    return torch.where(takers, each[:, None] + more, 0)
