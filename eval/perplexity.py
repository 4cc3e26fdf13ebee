"""Perplexity of a text whose first part was compressed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


@torch.no_grad()
def perplexity(model: Any, ids: Tensor, compressed: int) -> Tensor:
    """Return the perplexity of the end of each text against the compressed cache of its first part, fp32 ``[B]``.

    Args:
        model: from :func:`kvpass.compile`. ids: int64 ``[B, N]``, without padding.
        compressed: first tokens, which are compressed; the token behind them is fed, and those behind it are scored.
    Raises:
        ValueError: nothing would be compressed or scored.
    """
    if not 1 <= compressed <= ids.shape[1] - 2:
        raise ValueError(f"compressed={compressed}: must be 1 to {ids.shape[1] - 2} of {ids.shape[1]} tokens")
    cache = model.compress(ids[:, :compressed])
    logits = model(ids[:, compressed:-1], past_key_values=cache).logits.float()
    losses = torch.nn.functional.cross_entropy(logits.mT, ids[:, compressed + 1 :], reduction="none")
    return losses.mean(1).exp()
