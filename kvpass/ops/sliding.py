"""Ring buffers of layers with a sliding window or chunks: device-independent parts of the ring operators.

A query of column i attends the columns j with ``0 <= i - j < R``, R being the sliding window or the size of a chunk;
with chunks only those of its own, ``(i - first) // R == (j - first) // R``, counted from the row's first real column.
Column c of a layer is in slot ``c % R`` of its ring ``[L, B, K, R, D]``, so a new token overwrites the one that just
left the window.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from kvpass.operands import Attention, Entries, RingBuffers, SlotCache
from kvpass.ops.slots import ABSENT, EMPTY
from kvpass.policies.observation import attention_weights

ROW_BLOCK = 256
"""Queries processed at a time; limits logits per head to ROW_BLOCK x (2R + ROW_BLOCK)."""


def columns_held(seen: Tensor, first: Tensor, slots: int, chunked: bool = False) -> Tensor:
    """Return the column in each ring slot after ``seen`` columns; the same for all layers.

    Args:
        seen: int64 ``[]``. first: first real column of each row, int64 ``[B]``. chunked: chunks, not a window.
    Returns:
        int32 ``[B, R]``; EMPTY in the slot whose column has left the next token's window, ABSENT where a row has no
        column yet, or one of another chunk.
    """
    newest = seen - 1
    column = newest - (newest - torch.arange(slots, device=seen.device)) % slots
    begin = (seen - (seen - first) % slots if chunked else first)[:, None]
    there = torch.where(column >= begin, column, ABSENT)
    return there.masked_fill(column == seen - slots, EMPTY).int()


def attend_ring(
    call: Attention, ring: RingBuffers, held: Tensor, seen: Tensor, layer: int, first: Tensor | None = None
) -> Tensor:
    """Attend ring and new tokens inside the sliding window, then put the new tokens into the ring.

    Args:
        held: from :func:`columns_held`. seen: columns before the new ones, int64 ``[]``. layer: index in the ring.
        first: with chunks, the first real column of each row, int64 ``[B]``.
    Returns:
        ``[B, H, T, Dv]`` in the dtype of q; softmax in fp32. No value is read on the host.
    """
    q, k, v, scale, softcap, sinks = call
    ring_k, ring_v = ring
    b, h, t = q.shape[:3]
    kv_heads, slots = k.shape[1], ring_k.shape[3]
    new = seen + torch.arange(t, device=q.device)
    extra = None if sinks is None else sinks.view(kv_heads, -1, 1, 1)
    out = q.new_empty(b, t, h, v.shape[3]).transpose(1, 2)
    for begin in range(0, t, ROW_BLOCK):
        rows = slice(begin, min(begin + ROW_BLOCK, t))
        near = slice(max(begin - slots + 1, 0), rows.stop)
        columns = torch.cat([held.long(), new[near].expand(b, -1)], 1)[:, None]
        distance = new[rows, None] - columns
        hidden = (distance < 0) | (distance >= slots) | (columns < 0)
        if first is not None:
            hidden |= distance > (new[rows, None] - first[:, None, None]) % slots
        query = q[:, :, rows].float().unflatten(1, (kv_heads, h // kv_heads))
        keys = torch.cat([ring_k[layer], k[:, :, near]], 2).float()
        values = torch.cat([ring_v[layer], v[:, :, near]], 2).float()
        logits = torch.einsum("bkgtd,bksd->bkgts", query, keys) * scale
        attention = attention_weights(logits, hidden[:, None, None], softcap, extra)
        out[:, :, rows] = torch.einsum("bkgts,bksd->bkgtd", attention, values).flatten(1, 2).to(q.dtype)
    keep_newest(ring, k, v, new, layer)
    return out


def attend_ring_once(
    call: Attention, ring: RingBuffers, held: Tensor, layer: int, implementation: ModuleType
) -> Tensor:
    """:func:`attend_ring` for one new token, which takes the slot of the column that just left the window.

    Args:
        implementation: module whose ``attend_slots`` does the work.
    """
    position = held[:, None].expand(-1, call.k.shape[1], -1)
    return implementation.attend_slots(call, SlotCache(None, None, Entries(*ring), position), layer)[0]


def keep_newest(ring: RingBuffers, k: Tensor, v: Tensor, columns: Tensor, layer: int) -> None:
    """Copy the last rows of k and v, of ``columns`` int64 ``[T]``, into their ring slots."""
    ring_k, ring_v = ring
    count = min(k.shape[2], ring_k.shape[3])
    slots = columns[-count:] % ring_k.shape[3]
    ring_k[layer].index_copy_(2, slots, k[:, :, -count:])
    ring_v[layer].index_copy_(2, slots, v[:, :, -count:])
