"""One eviction step while decoding: pure tensor functions, batched, without host synchronisation."""

from __future__ import annotations

import torch
from torch import Tensor


def rank_slots(scores: Tensor, storage_order: Tensor) -> Tensor:
    """Rank each head's slots, best score first, ties to the lower ``storage_order``; int64 ``[B, K, C]``."""
    order = storage_order.argsort(dim=2, stable=True)
    order = order.gather(2, scores.gather(2, order).argsort(dim=2, descending=True, stable=True))
    places = torch.arange(scores.shape[2], device=scores.device).expand_as(order)
    return torch.zeros_like(order).scatter(2, order, places)


def older(position: Tensor, window: int) -> Tensor:
    """Return which entries compete: all but the newest ``window`` tokens; bool ``[B, K, C]``.

    Args:
        position: true positions, int64 ``[B, K, C]``, -1 = empty slot; every head holds the new token.
    """
    newest = position.amax((1, 2), keepdim=True)
    return (position >= 0) & (position <= newest - window)


def keep_mask(scores: Tensor, position: Tensor, quota: Tensor, window: int) -> Tensor:
    """Return the keep mask: the newest ``window`` tokens, and each head's best ``quota`` of the others.

    Args:
        scores: fp32 ``[B, K, C]``. position: as in :func:`older`. quota: int64 ``[B, K]``.
    Returns:
        bool ``[B, K, C]``.
    """
    compete = older(position, window)
    last = torch.iinfo(position.dtype).max
    rank = rank_slots(torch.where(compete, scores, float("-inf")), torch.where(compete, position, last))
    return (position >= 0) & (~compete | (rank < quota[:, :, None]))
