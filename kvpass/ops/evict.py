"""Decode against a cache of constant size: attend, let the policy's rule judge the entries, reuse the losers' slots.

Works without host synchronisation where its two kernels do; one token after another when several are appended at once.

Source: CAKE (2503.12491) section 4, TOVA (2401.06104), H2O (2306.14048), StreamingLLM (2309.17453), each through its
``DecodeRule``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from kvpass.ops import slots
from kvpass.ops.slots import ABSENT, EMPTY
from kvpass.policies.base import Policy
from kvpass.policies.decode_rules import Slots, pool_in_order

SLOT_POSITION, SLOT_PLACE = 0, 1
"""Planes of the slot table, int32 ``[2, L, B, K, S]``: true position, storage order."""
SLOT_MEMORY, SLOT_NORM = 0, 1
"""Planes of the slot memory, fp32 ``[2, L, B, K, S]``: memory of the decode rule, L1 norm of the value row."""


class Kernels(NamedTuple):
    """Implementations, on one device, of functions of :mod:`kvpass.ops.slots` and of the decode rules."""

    attend_slots: Callable[..., tuple[Tensor, Tensor | None]]
    evict_losers: Callable[..., Tensor]
    pool_in_order: Callable[..., Tensor]


EAGER = Kernels(slots.attend_slots, slots.evict_losers, pool_in_order)


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
    kernels: Kernels = EAGER,
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
    rule = policy.decode_rule()
    if rule is None:
        raise ValueError(f"policy {policy.name!r} does not evict while decoding")
    held = (pool_k, pool_v, offsets, tail_k, tail_v)
    (sits, place), (remembered, norm) = table[:, layer], memory[:, layer]
    outputs = []
    for step in range(q.shape[2]):
        new = (x[:, :, step : step + 1] for x in (q, k, v))
        entered = (place, remembered, norm, position + step)
        out, attention = kernels.attend_slots(*new, *held, sits, entered, layer, scale, softcap, sinks)
        assert attention is not None
        outputs.append(out)
        before = Slots(sits.clone(), place, remembered, norm, kernels.pool_in_order)
        worth, memory_after = rule.observe(attention, before)
        memory_after = memory_after.contiguous()
        keep = kernels.evict_losers(worth, sits, memory_after, quota[layer], rule.window)
        place_after = rule.next_place(worth, before, keep)
        if memory_after is not remembered:
            remembered.copy_(memory_after)
        if place_after is not place:
            place.copy_(place_after)
    return outputs[0] if len(outputs) == 1 else torch.cat([x.transpose(1, 2) for x in outputs], 1).transpose(1, 2)


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
    norm = _l1_norm(pool_v)
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
    tail_norm = _l1_norm(tail_v[:, :, :, :window]).transpose(0, 1).flatten(1, 2)
    memory[SLOT_NORM, :, :, tail] = torch.where(real[:, None], tail_norm, 0.0)
    shape = (2, b, layers, kv_heads, total)
    return tuple(t.view(shape).transpose(1, 2).contiguous() for t in (table, memory))  # type: ignore[return-value]


def _l1_norm(values: Tensor) -> Tensor:
    """Of each row, fp32; makes no copy of the rows in fp32."""
    return torch.linalg.vector_norm(values, 1, dim=-1, dtype=torch.float32)
