"""Budgets and ranks: which entries the layers and heads of a sequence keep.

Pure tensor functions, batched, without host synchronisation. They answer two questions, independently of each other, so
that cascading equals deciding once:

* the layer split: how many entries each layer may hold (:func:`adaptive_budgets`, :func:`fixed_budgets`);
* the head split: in which order the entries of one layer enter as its share grows (:func:`rank_entries`).

An entry is kept when its rank is below its layer's budget. Rows of a batch never influence each other. Integers are
int64 and shares fp64; the same input gives the same output on every run.
"""

from __future__ import annotations

from fractions import Fraction

import torch
from torch import Tensor

_SNAP = 1e-6
_REMAINDER_STEPS = 2**20


def water_fill(weights: Tensor, total: Tensor, cap: Tensor) -> Tensor:
    """Share ``total`` in proportion to ``weights``, capped at ``cap``; the others share the surplus.

    Equal to ``min(cap, x * weights)`` with x chosen so that the shares add up to ``min(total, m * cap)``. Zero weights
    beside positive ones share equally what the positive ones cannot hold; all-zero weights share uniformly. No share
    grows when a layer is added; this makes cascading exact.

    Args:
        weights: fp64 ``[B, m]``, finite, >= 0.
        total: int64 ``[B]``. cap: int64 ``[B]``, the same for every layer of a row.
    Returns:
        fp64 ``[B, m]``.
    """
    m = weights.shape[1]
    order = weights.argsort(dim=1, descending=True, stable=True)
    peak = weights.amax(1, keepdim=True)
    w = (weights / torch.where(peak > 0, peak, torch.ones_like(peak))).gather(1, order)
    full = torch.arange(m, dtype=torch.float64, device=w.device)
    size = cap.double()[:, None]
    left = total.double()[:, None] - full * size
    rest = w.flip(1).cumsum(1).flip(1)
    fits = left * w <= size * rest
    capped = fits.logical_not().long().cumprod(1).sum(1, keepdim=True)
    first = capped.clamp(max=m - 1)
    left, rest = left.gather(1, first), rest.gather(1, first)
    proportional = left * w / torch.where(rest > 0, rest, torch.ones_like(rest))
    uniform = (left / (m - first)).expand_as(w)
    share = torch.where(full < capped, size, torch.where(rest > 0, proportional, uniform))
    share = torch.minimum(share.clamp(min=0.0), size)
    return torch.zeros_like(share).scatter(1, order, share)


def round_shares(shares: Tensor, total: Tensor, cap: Tensor) -> Tensor:
    """Round shares by largest remainder to a sum of ``min(total, m * cap)``; ties: lower layer.

    Remainders closer than 2**-20 count as equal, so that rounding in the shares cannot break a tie.

    Args:
        shares: from :func:`water_fill` with the same ``total`` and ``cap``.
    Returns:
        int64 ``[B, m]``, each the floor of its share or one more, none above ``cap``.
    """
    m = shares.shape[1]
    floor = (shares + _SNAP).floor()
    whole = floor.long()
    missing = torch.minimum(total, cap * m) - whole.sum(1)
    remainder = ((shares - floor) * _REMAINDER_STEPS).round().long()
    remainder = torch.where(whole < cap[:, None], remainder, -_REMAINDER_STEPS)
    return whole + (places(remainder) < missing[:, None])


def adaptive_budgets(weights: Tensor, entries: Tensor, available: Tensor, kv_heads: int, seen: int) -> Tensor:
    """Split by weights that become known one layer after another.

    While layers are missing, a seen layer may hold one entry more than its share. So its final number is never above
    what it held at any earlier stage, and all seen layers together hold at most ``total + L``.

    Args:
        weights: fp64 ``[B, L]``, >= 0; columns ``>= seen`` are not read.
        entries: int64 ``[B]``, evictable entries per KV head per layer on average.
        available: int64 ``[B]``, evictable positions. seen: layers known, ``1 <= seen <= L``.
    Returns:
        int64 ``[B, L]`` entries over all KV heads, zero for layers not seen. If ``seen == L`` they add up to
        ``min(entries, available) * L * kv_heads``.
    """
    layers = weights.shape[1]
    total, cap = entries * (layers * kv_heads), available * kv_heads
    shares = water_fill(weights[:, :seen], total, cap)
    if seen == layers:
        return round_shares(shares, total, cap)
    hold = torch.minimum((shares + _SNAP).floor().long() + 1, cap[:, None])
    return torch.nn.functional.pad(hold, (0, layers - seen))


def fixed_budgets(weights: Tensor, entries: Tensor, available: Tensor, kv_heads: int, seen: int) -> Tensor:
    """Split by weights known before prefill: each layer gets its final number at once.

    Arguments and result as in :func:`adaptive_budgets`, but every column of ``weights`` is read at every stage.
    """
    layers = weights.shape[1]
    total, cap = entries * (layers * kv_heads), available * kv_heads
    final = round_shares(water_fill(weights, total, cap), total, cap)
    return torch.where(torch.arange(layers, device=final.device) < seen, final, 0)


def best_over_layers(scores: Tensor, layer: Tensor, total: Tensor, layers: int, least: float) -> Tensor:
    """Return how many of the ``total`` best scores each layer has, fp64 ``[B, L]``; ties: lower layer.

    Called with the best of the layers before and all entries of one more layer, it gives what it gives of all entries
    of all these layers: what is not among the best of some layers is not among those of more.

    Args:
        scores: fp32 ``[B, C]``, ``-inf`` for no entry; lower ones than ``least`` do not count. layer: of each score,
            int64 ``[B, C]``. total: int64 ``[B]``.
    """
    scores = scores.masked_fill(scores < least, float("-inf"))
    last = (total - 1).clamp(min=0, max=scores.shape[1] - 1)
    bound = scores.sort(dim=1, descending=True).values.gather(1, last[:, None])
    above, equal = scores > bound, (scores == bound) & (scores > float("-inf"))
    none = torch.zeros(scores.shape[0], layers, dtype=torch.int64, device=scores.device)
    certain, ties = (none.scatter_add(1, layer, found.long()) for found in (above, equal))
    left = (total - certain.sum(1)).clamp(min=0)[:, None] - (ties.cumsum(1) - ties)
    return (certain + torch.minimum(ties, left.clamp(min=0))).double()


def rank_entries(scores: Tensor, alpha: float = 0.0) -> Tensor:
    """Return the order in which a layer's entries enter as its budget grows: a permutation per row.

    ``alpha = 0`` is top-k across all heads. ``alpha = 1`` gives every head the same number (the best next scores get
    the remainder). Between them it is Ada-KV's safeguard (arXiv 2407.11550, as in the released code): with n entries,
    head h holds its best ``(1 - alpha) * c_h(n) + alpha * n / K``, where c_h is its number among the n best of the
    layer. So entry r of head h enters at the smallest n for which this reaches ``r + 1``; entries of the same n follow
    by score. The heads' quotas add up to n, so the total is exact for every n and the kept sets are nested.

    Args:
        scores: fp32 ``[B, K, N]``; ``-inf`` where not evictable, in any columns, the same number in every head.
        alpha: part of the budget that all heads share equally, in ``[0, 1]``, exact to six decimals.
    Returns:
        int32 ``[B, K, N]``. Equal scores: the lower position first, then the lower head. ``-inf`` ranks last.
    """
    batch, heads, length = scores.shape
    best = rank_by_score(scores)
    part = Fraction(alpha).limit_denominator(10**6)
    if part == 0:
        return best.int()
    by_head = best_by_head(best)
    if part == 1:
        enters = torch.arange(1, length + 1, device=scores.device).mul(heads).expand_as(by_head)
    else:
        enters = _quota_reached(by_head, part)
    last = heads * length
    eligible = (scores > float("-inf")).flatten(1).sum(1)[:, None, None]
    enters = torch.where(by_head < eligible, enters.clamp(max=last), last + 1)
    order = (enters * (last + 1) + by_head).flatten(1).sort(dim=1).values % (last + 1)
    return invert(order).gather(1, best.flatten(1)).view(batch, heads, length).int()


def rank_by_score(scores: Tensor) -> Tensor:
    """Rank a layer's entries by score, int64 ``[B, K, N]``; ties: lower position, then lower head.

    The sort key holds the score's bits, changed to ascend as the score falls, above the entry's index.
    """
    batch, heads, length = scores.shape
    falling = ~ordered_bits((scores.transpose(1, 2).flatten(1) + 0.0).view(torch.int32))
    index = torch.arange(heads * length, device=scores.device)
    order = ((falling.long() << 32) | index).sort(dim=1).values & 0xFFFFFFFF
    return invert(order).view(batch, length, heads).transpose(1, 2)


def best_by_head(best: Tensor) -> Tensor:
    """Return the ranks of :func:`rank_by_score` of each head's entries, ascending, int64 ``[B, K, N]``."""
    head = torch.arange(best.shape[1], device=best.device)[:, None]
    return ((head << 32) | best).flatten(1).sort(dim=1).values.view(best.shape) & 0xFFFFFFFF


def _quota_reached(best: Tensor, part: Fraction) -> Tensor:
    """Return the smallest n at which each head's blended quota reaches its 1st, 2nd, ... entry.

    Exact integer arithmetic: with ``part = p / q`` the quota condition times ``q * K`` reads
    ``K * (q - p) * c_h(n) + p * n >= (r + 1) * q * K``. The left side jumps at each entry of the head and grows by p
    per step between, so the answer is either a jump or lies in the stretch before it.
    """
    heads, length = best.shape[1], best.shape[2]
    p, q = part.numerator, part.denominator
    jump = heads * (q - p)
    count = torch.arange(length + 1, device=best.device)
    met = torch.cat([torch.zeros_like(best[..., :1]), best + 1], 2)
    target = (count[1:] * (q * heads)).expand_as(best).contiguous()
    after = torch.searchsorted((met * p + count * jump).contiguous(), target)
    stretch = -torch.div((after - 1) * jump - target, p, rounding_mode="floor")
    at_jump = met.gather(2, after.clamp(max=length))
    return torch.where(after > length, stretch, torch.minimum(at_jump, stretch))


def places(x: Tensor) -> Tensor:
    """Return the place of each number along the last dimension, the largest first; ties: the first."""
    return invert(x.argsort(dim=-1, descending=True, stable=True))


def ordered_bits(bits: Tensor) -> Tensor:
    """Return int32 that ascend as the fp32 whose bits are given do; of these again the bits."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def invert(order: Tensor) -> Tensor:
    """Return the index of each element in ``order``, along the last dimension."""
    places = torch.arange(order.shape[-1], device=order.device).expand_as(order)
    return torch.zeros_like(order).scatter(-1, order, places)
