"""Decode against a cache of constant size: attend, let the policy's rule pick the losers, reuse their slots.

Every KV head owns a line of S slots: its segment of the pool (the first P, ragged) and its row of the tail (the last
C). The slot table says what sits where; a new token takes the first empty slot of each head. Works without host
synchronisation; one token after another when several are appended at once.

Source: CAKE (2503.12491) section 4, TOVA (2401.06104), H2O (2306.14048), StreamingLLM (2309.17453), each through its
``DecodeRule``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvpass.decode import survivors
from kvpass.observation import attention_weights
from kvpass.policies.base import Policy
from kvpass.policies.decode_rules import Slots

SLOT_POSITION, SLOT_PLACE = 0, 1
"""Planes of the slot table, int32 ``[2, L, B, K, S]``: true position, storage order."""
SLOT_MEMORY, SLOT_NORM = 0, 1
"""Planes of the slot memory, fp32 ``[2, L, B, K, S]``: memory of the decode rule, L1 norm of the value row."""
EMPTY, ABSENT = -1, -2
"""Positions of a slot that can be taken, and of one behind the end of a head's pool segment."""
NEWEST = 1 << 30
"""Added to a new token's position to make it the last in storage order."""


def attend_evict(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pool_k: Tensor,
    pool_v: Tensor,
    offsets: Tensor,
    tail_k: Tensor,
    tail_v: Tensor,
    table: Tensor,
    memory: Tensor,
    quota: Tensor,
    position: Tensor,
    scale: float,
    layer: int,
    policy: Policy,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend pool and tail with T new tokens, each evicting what the policy's decode rule says after its step.

    Args:
        q: ``[B, H, T, D]``. k: ``[B, K, T, D]``. v: ``[B, K, T, Dv]``. pool_k, pool_v: ``[B, E, D]``, cut by offsets
            int32 ``[B, L*K + 1]``. tail_k, tail_v: ``[L, B, K, C, D]``. table, memory: the slot table. quota: entries
            a head may hold besides its newest, int64 ``[L, B, K]``. position: true position of the first new token,
            int64 ``[B]``.
    Returns:
        ``[B, H, T, Dv]`` in the dtype of q; a step's output uses the cache before that step's eviction.
    """
    b, h, t, _ = q.shape
    kv_heads = k.shape[1]
    rule = policy.decode_rule()
    if rule is None:
        raise ValueError(f"policy {policy.name!r} does not evict while decoding")
    pool_slots = table.shape[-1] - tail_k.shape[3]
    first = offsets[:, layer * kv_heads : (layer + 1) * kv_heads].long()
    rows = torch.arange(b, device=q.device)[:, None]
    heads = torch.arange(kv_heads, device=q.device)
    segment = (first[..., None] + torch.arange(pool_slots, device=q.device)).clamp(max=pool_k.shape[1] - 1)
    outputs = []
    for step in range(t):
        positions, places = table[SLOT_POSITION, layer].long(), table[SLOT_PLACE, layer].long()
        slot = (positions == EMPTY).int().argmax(-1)
        now = (position + step)[:, None].expand(b, kv_heads)
        in_pool = slot < pool_slots
        pool_row = segment.gather(2, slot.clamp(max=max(pool_slots - 1, 0))[..., None])[..., 0] if pool_slots else first
        tail_slot = (slot - pool_slots).clamp(min=0)
        for pool, tail, new in ((pool_k, tail_k, k[:, :, step]), (pool_v, tail_v, v[:, :, step])):
            if pool_slots:
                pool[rows, pool_row] = _same_at_same_row(pool_row, in_pool, new, pool[rows, pool_row])
            tail[layer][rows, heads, tail_slot] = torch.where(
                in_pool[..., None], tail[layer][rows, heads, tail_slot], new
            )
        index = slot[..., None]
        positions = positions.scatter(2, index, now[..., None])
        places = places.scatter(2, index, now[..., None] + NEWEST)
        remembered = memory[SLOT_MEMORY, layer].scatter(2, index, 0.0)
        norm = memory[SLOT_NORM, layer].scatter(2, index, v[:, :, step].float().abs().sum(-1)[..., None])

        keys = torch.cat([pool_k[rows[..., None], segment], tail_k[layer]], 2).float()
        values = torch.cat([pool_v[rows[..., None], segment], tail_v[layer]], 2).float()
        live = positions >= 0
        values = values.masked_fill(~live[..., None], 0.0)
        query = q[:, :, step].float().unflatten(1, (kv_heads, h // kv_heads))
        logits = torch.einsum("bkgd,bksd->bkgs", query, keys) * scale
        extra = None if sinks is None else sinks.view(kv_heads, -1, 1)
        attention = attention_weights(logits, ~live[:, :, None], softcap, extra)
        outputs.append(torch.einsum("bkgs,bksd->bkgd", attention, values).flatten(1, 2))

        slots = Slots(positions, places, torch.where(live, remembered, 0.0), norm)
        worth, remembered = rule.observe(attention.flatten(1, 2), slots)
        keep = survivors(worth, positions, quota[layer], rule.window)
        places = rule.next_place(worth, slots, keep)
        absent = table[SLOT_POSITION, layer] == ABSENT
        table[SLOT_POSITION, layer] = torch.where(keep, positions, torch.where(absent, ABSENT, EMPTY)).int()
        table[SLOT_PLACE, layer] = places.int()
        memory[SLOT_MEMORY, layer] = remembered
        memory[SLOT_NORM, layer] = norm
    return torch.stack(outputs, 1).to(q.dtype).transpose(1, 2)


def _same_at_same_row(row: Tensor, is_new: Tensor, new: Tensor, old: Tensor) -> Tensor:
    """What each head writes to its row of the pool: its new entry, or where it has none what will be there.

    The row of a head without one may be the row that another head fills, and the order of writes to one row is not
    defined: so both must write the same.

    Args:
        row: int64 ``[B, K]``. is_new: bool ``[B, K]``. new, old: ``[B, K, D]``.
    """
    fills = (row[:, :, None] == row[:, None, :]) & is_new[:, None, :]
    filler = fills.int().argmax(-1)
    entry = new.gather(1, filler[..., None].expand_as(new))
    return torch.where(fills.any(-1)[..., None], entry, old)


def first_slots(
    offsets: Tensor,
    slots: Tensor,
    slot_traces: Tensor,
    window_traces: Tensor,
    pool_v: Tensor,
    tail_v: Tensor,
    start: Tensor,
    columns: int,
    window: int,
) -> tuple[Tensor, Tensor]:
    """The slot table and memory right after a prompt was packed.

    Args:
        slots int32 ``[2, B, E]``: true position and place. slot_traces fp32 ``[B, E]``: memory. window_traces fp32
        ``[B, L, K, window]``: memory. tail_v ``[L, B, K, C, Dv]`` with the window in the first slots. start: first real
        column int64 ``[B]``. columns: N. window: prompt columns in the tail.
    """
    layers, b, kv_heads, capacity, _ = tail_v.shape
    lengths = offsets.diff(dim=1)
    pool_slots = int(lengths.max())
    total = pool_slots + capacity
    table = torch.full((2, b, layers * kv_heads, total), EMPTY, dtype=torch.int32, device=offsets.device)
    memory = torch.zeros(2, b, layers * kv_heads, total, dtype=torch.float32, device=offsets.device)
    line = torch.arange(pool_slots, device=offsets.device)
    present = line < lengths[..., None]
    row = (offsets[:, :-1, None] + line).clamp(max=pool_v.shape[1] - 1).long()
    flat = row.flatten(1)
    norm = pool_v.float().abs().sum(-1)
    for plane, source in enumerate(slots):
        found = source.gather(1, flat).view(present.shape)
        table[plane, :, :, :pool_slots] = torch.where(present, found, ABSENT)
    for plane, source in enumerate((slot_traces, norm)):
        memory[plane, :, :, :pool_slots] = torch.where(present, source.gather(1, flat).view(present.shape), 0.0)
    newest = torch.arange(columns - window, columns, device=offsets.device) - start[:, None]
    real = newest >= 0
    tail = slice(pool_slots, pool_slots + window)
    table[SLOT_POSITION, :, :, tail] = torch.where(real, newest, EMPTY)[:, None].int()
    table[SLOT_PLACE, :, :, tail] = (newest + columns)[:, None].int()
    memory[SLOT_MEMORY, :, :, tail] = window_traces[..., :window].flatten(1, 2) * real[:, None]
    tail_norm = tail_v[:, :, :, :window].float().abs().sum(-1).transpose(0, 1).flatten(1, 2)
    memory[SLOT_NORM, :, :, tail] = torch.where(real[:, None], tail_norm, 0.0)
    shape = (2, b, layers, kv_heads, total)
    return tuple(t.view(shape).transpose(1, 2).contiguous() for t in (table, memory))  # type: ignore[return-value]
