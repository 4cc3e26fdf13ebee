"""Decode against a cache of constant size: attend, score the entries, evict, reuse the slots.

Has no host synchronisation if its two kernels have none. Several new tokens are processed one after another.

Source: CAKE (2503.12491) section 4, TOVA (2401.06104), H2O (2306.14048), StreamingLLM (2309.17453), R-KV (2505.24133),
TriAttention (2604.04921), each through its ``DecodeRule``.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from kvpass.operands import Attention, EvictBuffers, PrefillBuffers, SlotCache
from kvpass.ops import reference
from kvpass.ops.entry_formats import dequantise
from kvpass.ops.slots import ABSENT, EMPTY
from kvpass.policies.base import Policy
from kvpass.policies.decode_rules import Slots
from kvpass.ranks import ONE_PROCESS, Ranks
from kvpass.rotation import is_rotated, rotated_back


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
    position, numbers, quota = held.slot_positions[layer], held.decode_state[:, layer], held.quota[layer]
    state, protected = numbers[: rule.numbers_per_entry], numbers[rule.numbers_per_entry :]
    outputs, tokens = [], call.q.shape[2]
    scores = None
    if entering is not None:
        x = entering.reshape(len(position), tokens, -1)
        scores = policy.token_scores(x, layer, len(held.slot_positions), position.shape[1], ranks)
    for step in range(tokens):
        now = held.next_position + step
        lines = SlotCache(held.pool, held.offsets, held.tail, position, now)
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
            position,
            state,
            quota,
            new.v[:, :, 0],
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
        if len(protected):
            worth, state_after = worth.masked_fill(protected[0] > 0, float("inf")), torch.cat([state_after, protected])
        allowed = rule.quota_now(quota, due, worth, position)
        keep = implementation.evict_lowest(worth, position, allowed, rule.window)
        if len(numbers):
            numbers.copy_(torch.where(keep, state_after, 0.0))
    return outputs[0] if tokens == 1 else torch.cat([x.transpose(1, 2) for x in outputs], 1).transpose(1, 2)


def _keys_of(held: EvictBuffers, layer: int, key_dim: int) -> Tensor:
    """Return the keys in the slots of a layer, ``[B, K, S, D]``, anything in empty ones."""
    kv_heads, width = held.slot_positions.shape[2:]
    begins = held.offsets[:, layer * kv_heads :][:, :kv_heads]
    pool, tail = held.pool, held.tail.at(layer)
    rows = _pool_rows(begins, width - tail.k.shape[2], pool.k)
    in_pool = pool.k.gather(1, rows[..., None].expand(-1, -1, pool.k.shape[2]))
    keys = torch.cat([in_pool.unflatten(1, (kv_heads, -1)), tail.k], 2)
    if pool.k_scale is None or tail.k_scale is None:
        return keys
    scale = pool.k_scale.gather(1, rows).unflatten(1, (kv_heads, -1))
    keys = dequantise(keys, torch.cat([scale, tail.k_scale], 2), key_dim)
    return rotated_back(keys) if is_rotated(held, key_dim) else keys


def _pool_rows(begins: Tensor, slots: int, pool: Tensor) -> Tensor:
    """Return the rows of a pool that the first slots of lines are, int64 ``[B, lines * slots]``.

    Args:
        begins: first row of each line, int32 ``[B, lines]``. slots: of each; those behind its segment are other rows.
    """
    slot = torch.arange(slots, device=begins.device)
    return (begins[..., None] + slot).clamp(max=pool.shape[1] - 1).long().flatten(1)


def first_slots(
    prompt: PrefillBuffers, start: Tensor, columns: int, window: int, numbers: int
) -> tuple[Tensor, Tensor]:
    """Return the positions in the slots and the decode state right after a prompt was packed.

    Args:
        start: first real column int64 ``[B]``. columns: N. window: prompt columns in the tail. numbers: per entry, of
            the decode rule.
    """
    layers, b, kv_heads, capacity, _ = prompt.tail_k.shape
    lengths, device = prompt.offsets.diff(dim=1), start.device
    pool_slots = int(lengths.max())
    shape = (b, layers * kv_heads, pool_slots + capacity)
    position = torch.full(shape, EMPTY, dtype=torch.int32, device=device)
    decode_state = torch.zeros(numbers, *shape, dtype=torch.float32, device=device)
    present = torch.arange(pool_slots, device=device) < lengths[..., None]
    flat = _pool_rows(prompt.offsets[:, :-1], pool_slots, prompt.pool_k)

    def of_pool(plane: Tensor, absent: int) -> Tensor:
        return torch.where(present, plane.gather(1, flat).view(present.shape), absent)

    newest = torch.arange(columns - window, columns, device=device) - start[:, None]
    real, tail = (newest >= 0)[:, None], slice(pool_slots, pool_slots + window)
    position[..., :pool_slots] = of_pool(prompt.slots[reference.POSITION], ABSENT)
    position[..., tail] = torch.where(real, newest[:, None], EMPTY).int()
    planes = slice(reference.NUMBERS, reference.NUMBERS + numbers)
    stats = zip(decode_state, prompt.slot_stats[planes], prompt.window_stats[planes], strict=True)
    for state, of_slots, of_window in stats:
        state[..., :pool_slots] = of_pool(of_slots, 0)
        state[..., tail] = of_window[..., :window].flatten(1, 2) * real

    def by_layer(x: Tensor) -> Tensor:
        return x.unflatten(-2, (layers, kv_heads)).transpose(-4, -3).contiguous()

    return by_layer(position), by_layer(decode_state)
