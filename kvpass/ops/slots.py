"""Reused slots: attention of one new token to a cache of constant size, and eviction after it.

Every KV head has a line of S slots: its segment of the pool (the first S - C, ragged) and its row of the tail (the last
C). A table gives the position in each slot. The entry of a new token takes the first empty slot of each line.

Legend: B batch, H query heads, K KV heads, G = H / K, D head dim, L layers, E pool entries, C tail capacity.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvpass.operands import Attention, Entries, SlotCache
from kvpass.ops.entry_formats import entries_held, store
from kvpass.policies.decode_rules import keep_mask
from kvpass.policies.observation import attention_weights
from kvpass.rotation import rotated_output, rotated_queries

EMPTY, ABSENT = -1, -2
"""Positions of a free slot, and of an unusable one (such as behind a head's pool segment)."""


def attend_slots(call: Attention, lines: SlotCache, layer: int) -> tuple[Tensor, Tensor | None]:
    """Store one new token in each line's first empty slot; attend slots that hold an entry.

    Args:
        call: of one token. lines: positions of slots may be :data:`EMPTY` or :data:`ABSENT`.
    Returns:
        output ``[B, H, 1, Dv]`` in the dtype of q, softmax in fp32; if the entry is recorded, the attention over the
        slots, fp32 ``[B, H, S]``, 0 in slots without an entry; else None.
    Raises:
        ValueError: a line has no empty slot.
    """
    q, k, v, scale, softcap, sinks = rotated_queries(call, lines)
    rows, heads, _, key_dim = q.shape
    position, now, value_dim = lines.position, lines.now, v.shape[3]
    kv_heads, width = position.shape[1:]
    group, behind = heads // kv_heads, width - lines.tail.k.shape[3]
    if not bool((position == EMPTY).any(2).all()):
        raise ValueError(f"layer {layer} has a line of {width} slots without an empty one")
    out = q.new_empty(rows, 1, heads, value_dim).transpose(1, 2)
    attention = q.new_zeros(rows, heads, width, dtype=torch.float32)
    none_hidden = torch.zeros(1, dtype=torch.bool, device=q.device)
    for row in range(rows):
        for head in range(kv_heads):
            slot = int((position[row, head] == EMPTY).nonzero()[0])
            of_head = slice(head * group, (head + 1) * group)
            sides = _line(lines, layer, row, head)
            in_tail = slot >= behind
            at = slice(slot - behind, slot - behind + 1) if in_tail else slice(slot, slot + 1)
            store(k[row, head], v[row, head], sides[in_tail], at)
            of_pool = torch.arange(len(sides[0].k), device=q.device)
            index = torch.cat([of_pool, torch.arange(behind, width, device=q.device)])
            live = (position[row, head, index] >= 0) | (index == slot)
            held = [entries_held(side, key_dim, value_dim) for side in sides]
            keys, values = (torch.cat(pair)[live].float() for pair in zip(*held, strict=True))
            logits = q[row, of_head, 0].float() @ keys.T * scale
            extra = None if sinks is None else sinks[of_head, None]
            weights = attention_weights(logits, none_hidden, softcap, extra)
            out[row, of_head, 0] = (weights @ values).to(q.dtype)
            attention[row, of_head][:, index[live]] = weights
            if now is not None:
                position[row, head, slot] = now[row]
    return rotated_output(out, call, lines), None if now is None else attention


def _line(lines: SlotCache, layer: int, row: int, head: int) -> tuple[Entries, Entries]:
    """Return what the slots of a line hold: those of its pool segment, and of its tail."""
    tail = (layer, row, head)
    if lines.pool is None or lines.offsets is None:
        return lines.tail.at((*tail, slice(0, 0))), lines.tail.at(tail)
    segment = layer * lines.position.shape[1] + head
    kept = slice(*lines.offsets[row, segment : segment + 2].tolist())
    return lines.pool.at((row, kept)), lines.tail.at(tail)


def evict_lowest(worth: Tensor, position: Tensor, quota: Tensor, window: int) -> Tensor:
    """Evict the lowest scores after a step: empty their slots.

    Args:
        worth: fp32 ``[B, K, S]``. position: int32, same shape. quota: entries a head may hold besides the newest
            ``window``, int64 ``[B, K]``.
    Returns:
        which slots still hold an entry, bool ``[B, K, S]``.
    """
    keep = keep_mask(worth, position.long(), quota, window)
    position.masked_fill_((position >= 0) & ~keep, EMPTY)
    return keep
