"""Eager implementations of the ring operators: layers with a sliding window, whose cache is bounded by nature.

A query of column i sees the columns j with ``0 <= i - j < R``, R being the sliding window. Column c of a layer sits in
slot ``c % R`` of its ring ``[L, B, K, R, D]``, so a new token overwrites the one that just left the window.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvpass.reference import prompt_attention


def fill_ring(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    start: Tensor,
    ring_k: Tensor,
    ring_v: Tensor,
    scale: float,
    layer: int,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of one site over a left-padded prompt, whose last R columns go into the ring.

    Args:
        q: ``[B, H, N, D]``. k: ``[B, K, N, D]``. v: ``[B, K, N, Dv]``. start: first real column, int64 ``[B]``.
        layer: index in the ring.
    Returns:
        ``[B, H, N, Dv]`` in the dtype of q, zeros in padding.
    """
    slots = ring_k.shape[3]
    keep_newest(ring_k, ring_v, k, v, torch.arange(k.shape[2], device=k.device), layer)
    return prompt_attention(q, k, v, start, scale, softcap, sinks, slots)


def attend_ring(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ring_k: Tensor,
    ring_v: Tensor,
    seen: Tensor,
    first: Tensor,
    scale: float,
    layer: int,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend ring and new tokens inside the sliding window, then put the new tokens into the ring.

    Args:
        q: ``[B, H, T, D]``. k: ``[B, K, T, D]``. v: ``[B, K, T, Dv]``. seen: columns before the new ones, int64 ``[]``.
        first: first real column of each row, int64 ``[B]``. layer: index in the ring.
    Returns:
        ``[B, H, T, Dv]`` in the dtype of q; softmax in fp32. No value is read on the host.
    """
    b, h, t, _ = q.shape
    kv_heads, slots = k.shape[1], ring_k.shape[3]
    held = seen - 1 - (seen - 1 - torch.arange(slots, device=q.device)) % slots
    new = seen + torch.arange(t, device=q.device)
    columns = torch.cat([held, new])
    distance = new[:, None] - columns
    inside = (distance >= 0) & (distance < slots)
    allowed = inside & (columns >= first[:, None])[:, None]
    query = q.float().unflatten(1, (kv_heads, h // kv_heads))
    keys = torch.cat([ring_k[layer], k], 2).float()
    values = torch.cat([ring_v[layer], v], 2).float()
    logits = torch.einsum("bkgtd,bksd->bkgts", query, keys) * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logits = torch.where(allowed[:, None, None], logits, float("-inf"))
    if sinks is None:
        attention = logits.softmax(-1)
    else:
        extra = sinks.float().view(1, kv_heads, -1, 1, 1).expand(b, -1, -1, t, 1)
        attention = torch.cat([logits, extra], -1).softmax(-1)[..., :-1]
    out = torch.einsum("bkgts,bksd->bkgtd", attention, values)
    keep_newest(ring_k, ring_v, k, v, new, layer)
    return out.flatten(1, 2).transpose(1, 2).contiguous().transpose(1, 2).to(q.dtype)


def keep_newest(ring_k: Tensor, ring_v: Tensor, k: Tensor, v: Tensor, columns: Tensor, layer: int) -> None:
    """Put the last rows of k and v, those of ``columns`` int64 ``[T]``, into their slots."""
    count = min(k.shape[2], ring_k.shape[3])
    slots = columns[-count:] % ring_k.shape[3]
    ring_k[layer].index_copy_(2, slots, k[:, :, -count:])
    ring_v[layer].index_copy_(2, slots, v[:, :, -count:])
