"""Decode against a cache of constant size: attend, score the entries, evict, reuse the slots.

Has no host synchronisation if its two kernels have none. Several new tokens are processed one after another.

Source: CAKE (2503.12491) section 4, TOVA (2401.06104), H2O (2306.14048), StreamingLLM (2309.17453), R-KV (2505.24133),
TriAttention (2604.04921), each through its ``DecodeRule``.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from kvpass.operands import Attention, EvictBuffers, PrefillBuffers, SlotCache, SlotTables
from kvpass.ops import reference
from kvpass.ops.entry_formats import dequantise
from kvpass.ops.slots import ABSENT, EMPTY
from kvpass.policies.base import Policy
from kvpass.policies.decode_rules import Slots
from kvpass.ranks import ONE_PROCESS, Ranks
from kvpass.rotation import is_rotated, rotated_back

SLOT_POSITION, SLOT_ORDER = 0, 1
"""Planes of the slot table, int32 ``[2, L, B, K, S]``: true position, storage order."""
SLOT_STATE, SLOT_NORM = 0, 1
"""Planes of the decode state of each slot, fp32 ``[2, L, B, K, S]``: decode state, L1 norm of the value row."""


def attend_evict(
    call: Attention,
    held: EvictBuffers,
    layer: int,
    policy: Policy,
    implementation: ModuleType = reference,
    ranks: Ranks = ONE_PROCESS,
    entering: Tensor | None = None,
) -> Tensor:
    """Attend pool and tail with T new tokens; after each one, evict by the policy's decode rule.

    Args:
        implementation: module whose ``attend_slots``, ``evict_lowest`` and ``pool_in_order`` do the work.
        ranks: processes that share the heads of the layer. entering: what enters the attention layer,
            ``[B, T, hidden]`` or ``[B * T, hidden]``, for rules that read scores of tokens.
    Returns:
        ``[B, H, T, Dv]`` in the dtype of q; a step's output uses the cache before that step's eviction.
    """
    rule = policy.decode_rule()
    if rule is None:
        raise ValueError(f"policy {policy.name!r} does not evict while decoding")
    (position, storage_order), (state, norm) = held.table[:, layer], held.decode_state[:, layer]
    outputs, tokens, quota = [], call.q.shape[2], held.quota[layer]
    scores = None
    if entering is not None:
        x = entering.reshape(len(position), tokens, -1)
        scores = policy.token_scores(x, layer, held.table.shape[1], position.shape[1], ranks)
    for step in range(tokens):
        now = held.next_position + step
        lines = SlotCache(*held[:5], position, SlotTables(storage_order, state, norm, now), *held[10:])
        new = call if tokens == 1 else call.rows(slice(None), slice(step, step + 1))
        out, attention = implementation.attend_slots(new, lines, layer)
        assert attention is not None
        outputs.append(out)
        rows = None if held.rule_rows is None else held.rule_rows[layer]
        if rows is not None:
            rows_after = rule.next_rows(rows, new.q[:, :, 0].unflatten(1, rows.shape[1:3]), now)
            if rows_after is not rows:
                rows.copy_(rows_after)
        due = rule.due(position, quota)
        if due is not None and due.is_cpu and not bool(due.any()):
            continue
        before = Slots(
            position.clone(),
            storage_order,
            state,
            norm,
            implementation.pool_in_order,
            due=due,
            keys=_keys_of(held, layer, call.q.shape[3]) if rule.reads_keys else None,
            token_scores=None if scores is None else scores[..., step],
            rows=rows,
            scale=call.scale,
            softcap=call.softcap,
            ranks=ranks,
        )
        worth, state_after = rule.observe(attention, before)
        state_after = state_after.contiguous()
        allowed = rule.quota_now(quota, due, worth, position)
        keep = implementation.evict_lowest(worth, position, state_after, allowed, rule.window)
        order_after = rule.next_storage_order(worth, before, keep)
        if state_after is not state:
            state.copy_(state_after)
        if order_after is not storage_order:
            storage_order.copy_(order_after)
    return outputs[0] if tokens == 1 else torch.cat([x.transpose(1, 2) for x in outputs], 1).transpose(1, 2)


def _keys_of(held: EvictBuffers, layer: int, key_dim: int) -> Tensor:
    """Return the keys in the slots of a layer, ``[B, K, S, D]``, anything in empty ones."""
    kv_heads, width = held.table.shape[3:]
    begins = held.offsets[:, layer * kv_heads :][:, :kv_heads]
    rows = _pool_rows(begins, width - held.tail_k.shape[3], held.pool_k)
    pool = held.pool_k.gather(1, rows[..., None].expand(-1, -1, held.pool_k.shape[2]))
    keys = torch.cat([pool.unflatten(1, (kv_heads, -1)), held.tail_k[layer]], 2)
    if held.pool_k_scale is None or held.tail_k_scale is None:
        return keys
    scale = held.pool_k_scale.gather(1, rows).unflatten(1, (kv_heads, -1))
    keys = dequantise(keys, torch.cat([scale, held.tail_k_scale[layer]], 2), key_dim)
    return rotated_back(keys) if is_rotated(held, key_dim) else keys


def _pool_rows(begins: Tensor, slots: int, pool: Tensor) -> Tensor:
    """Return the rows of a pool that the first slots of lines are, int64 ``[B, lines * slots]``.

    Args:
        begins: first row of each line, int32 ``[B, lines]``. slots: of each; those behind its segment are other rows.
    """
    slot = torch.arange(slots, device=begins.device)
    return (begins[..., None] + slot).clamp(max=pool.shape[1] - 1).long().flatten(1)


def first_slots(prompt: PrefillBuffers, start: Tensor, columns: int, window: int) -> tuple[Tensor, Tensor]:
    """Return the slot table and the slots' decode state right after a prompt was packed.

    Args:
        start: first real column int64 ``[B]``. columns: N. window: prompt columns in the tail.
    """
    offsets, pool_v, tail_v = prompt.offsets, prompt.pool_v, prompt.tail_v
    planes = prompt.slots[reference.POSITION], prompt.slots[reference.STORAGE_ORDER]
    layers, b, kv_heads, capacity, _ = tail_v.shape
    lengths = offsets.diff(dim=1)
    pool_slots = int(lengths.max())
    total = pool_slots + capacity
    table = torch.full((2, b, layers * kv_heads, total), EMPTY, dtype=torch.int32, device=offsets.device)
    decode_state = torch.zeros(2, b, layers * kv_heads, total, dtype=torch.float32, device=offsets.device)
    present = torch.arange(pool_slots, device=offsets.device) < lengths[..., None]
    flat = _pool_rows(offsets[:, :-1], pool_slots, pool_v)
    norm = _l1_norm(pool_v)
    for plane, source in enumerate(planes):
        found = source.gather(1, flat).view(present.shape)
        table[plane, :, :, :pool_slots] = torch.where(present, found, ABSENT)
    for plane, source in enumerate((prompt.slot_stats[reference.DECODE_STATE], norm)):
        decode_state[plane, :, :, :pool_slots] = torch.where(present, source.gather(1, flat).view(present.shape), 0.0)
    newest = torch.arange(columns - window, columns, device=offsets.device) - start[:, None]
    real = newest >= 0
    tail = slice(pool_slots, pool_slots + window)
    table[SLOT_POSITION, :, :, tail] = torch.where(real, newest, EMPTY)[:, None].int()
    table[SLOT_ORDER, :, :, tail] = (newest + columns)[:, None].int()
    decode_state[SLOT_STATE, :, :, tail] = (
        prompt.window_stats[reference.DECODE_STATE, ..., :window].flatten(1, 2) * real[:, None]
    )
    tail_norm = _l1_norm(tail_v[:, :, :, :window]).transpose(0, 1).flatten(1, 2)
    decode_state[SLOT_NORM, :, :, tail] = torch.where(real[:, None], tail_norm, 0.0)
    shape = (2, b, layers, kv_heads, total)
    return tuple(t.view(shape).transpose(1, 2).contiguous() for t in (table, decode_state))  # type: ignore[return-value]


def _l1_norm(values: Tensor) -> Tensor:
    """Return the L1 norm of each row, fp32, without copying the rows to fp32."""
    return torch.linalg.vector_norm(values, 1, dim=-1, dtype=torch.promote_types(values.dtype, torch.float32)).float()
