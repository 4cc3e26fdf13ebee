"""Decode rules: which entry gives way to a new token, so that the cache keeps its size for any output length.

A step sees one layer's slots, ``[B, K, C]``, the new token in its slot already. A rule turns the new query's attention
over the slots into scores; :func:`kvpass.policies.decode.survivors` then keeps each head's best and the newest
``window``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kvpass.policies.decode import older, rank_slots
from kvpass.policies.observation import Observation
from kvpass.policies.scores import Group, Pool, column_sum, pool_scores, reduce_group


def pool_in_order(
    attention: Tensor, position: Tensor, place: Tensor, window: int, pool: Pool, kernel_size: int, group: Group
) -> Tensor:
    """Attention ``[B, H, C]`` of the older entries, pooled over neighbours in storage order, reduced over the group.

    Args:
        position, place: as in :class:`Slots`. window: newest tokens that have no part in it.
        pool, kernel_size, group: as in :mod:`kvpass.policies.scores`.
    Returns:
        fp32 ``[B, K, C]``, 0 in slots that have no part in it.
    """
    kv_heads = position.shape[1]
    compete = older(position, window)
    order = torch.where(compete, place, torch.iinfo(place.dtype).max).argsort(dim=2, stable=True)
    in_order = compete.gather(2, order)
    a = attention.unflatten(1, (kv_heads, -1))
    a = torch.where(in_order[:, :, None], a.gather(3, order[:, :, None].expand_as(a)), 0.0)
    scores = reduce_group(pool_scores(a.flatten(1, 2), pool, kernel_size), kv_heads, group)
    return torch.zeros_like(scores).scatter(2, order, torch.where(in_order, scores, 0.0))


@dataclass(frozen=True, eq=False)
class Slots:
    """What one layer holds while decoding.

    Attributes:
        position: true position, int32 or int64 ``[B, K, C]``, negative = empty.
        place: storage order, ascending, as position; a new token comes last.
        memory: what the rule remembers of each entry, fp32 ``[B, K, C]``; 0 for the new token.
        value_norm: L1 norm of each value row, fp32 ``[B, K, C]``.
        pool_in_order: :func:`pool_in_order`, or a kernel that does the same.
    """

    position: Tensor
    place: Tensor
    memory: Tensor
    value_norm: Tensor
    pool_in_order: Callable[[Tensor, Tensor, Tensor, int, Pool, int, Group], Tensor] = pool_in_order


@dataclass(frozen=True, kw_only=True)
class DecodeRule:
    """The parts of a rule; only :meth:`observe` must be written.

    Args:
        window: newest tokens that are never evicted, the new one included; 0: the new one competes too.
    """

    window: int = 0

    def start(self, obs: Observation) -> Tensor:
        """Memory of every prompt entry, fp32 ``[B, K, N]``."""
        return obs.keys.new_zeros(obs.keys.shape[:3], dtype=torch.float32)

    def first_place(self, scores: Tensor, position: Tensor, entries: Tensor) -> Tensor:
        """Storage order of the prompt after prefill, int64 ``[B, K, N]``, below ``2 * N``.

        Args:
            scores: of the prompt, fp32 ``[B, K, N]``, ``-inf`` where not scored. position: alike.
            entries: evictable entries per KV head per layer on average, int64 ``[B]``.
        """
        return position

    def observe(self, attention: Tensor, slots: Slots) -> tuple[Tensor, Tensor]:
        """Scores and memory after a step, both fp32 ``[B, K, C]``, from the new query's attention ``[B, H, C]``."""
        raise NotImplementedError

    def next_place(self, scores: Tensor, slots: Slots, keep: Tensor) -> Tensor:
        """Storage order after the step that kept ``keep``."""
        return slots.place


@dataclass(frozen=True, kw_only=True)
class RollingWindow(DecodeRule):
    """StreamingLLM: the first ``sinks`` tokens and the latest ones."""

    sinks: int

    def observe(self, attention: Tensor, slots: Slots) -> tuple[Tensor, Tensor]:
        first = slots.position < self.sinks
        return torch.where(first, 2.0**25 - slots.position, slots.position.float()), slots.memory


@dataclass(frozen=True, kw_only=True)
class LastQuery(DecodeRule):
    """TOVA: the new query's attention, averaged over all query heads; every KV head holds the same tokens."""

    def observe(self, attention: Tensor, slots: Slots) -> tuple[Tensor, Tensor]:
        return attention.mean(1, keepdim=True).expand_as(slots.memory), slots.memory


@dataclass(frozen=True, kw_only=True)
class Accumulated(DecodeRule):
    """H2O: attention summed over all queries so far; ``value_norm`` weighs each addition by the value's L1 norm (VATP).

    ``rows`` limits the prompt's part to its last rows, ``divisor`` divides that part. The first ``sinks`` tokens always
    stay.
    """

    group: Group = "mean"
    value_norm: bool = False
    sinks: int = 0
    rows: int | None = None
    divisor: int = 1

    def start(self, obs: Observation) -> Tensor:
        total = reduce_group(column_sum(obs, self.rows), obs.kv_heads, self.group) / self.divisor
        return total * obs.value_norm if self.value_norm else total

    def observe(self, attention: Tensor, slots: Slots) -> tuple[Tensor, Tensor]:
        added = reduce_group(attention, slots.memory.shape[1], self.group)
        memory = slots.memory + (added * slots.value_norm if self.value_norm else added)
        if self.sinks == 0:
            return memory, memory
        return torch.where(slots.position < self.sinks, torch.finfo(torch.float32).max, memory), memory


@dataclass(frozen=True, kw_only=True)
class PooledLastQuery(DecodeRule):
    """CAKE: the new query's attention, pooled over neighbouring older entries, averaged over the group.

    Neighbours are those in position order; in the released code those in storage order, which is by descending score
    in every head that went through a selection (``storage_order``); prompts of up to ``budget + window`` tokens do not.
    """

    pool: Pool = "avg"
    kernel_size: int = 5
    group: Group = "mean"
    storage_order: bool = False

    def first_place(self, scores: Tensor, position: Tensor, entries: Tensor) -> Tensor:
        if not self.storage_order:
            return position
        scored = scores > float("-inf")
        spared = (scored.sum(2) <= entries[:, None] + self.window)[:, :, None]
        return torch.where(scored & ~spared, rank_slots(scores, position), position + position.shape[2])

    def observe(self, attention: Tensor, slots: Slots) -> tuple[Tensor, Tensor]:
        how = (self.window, self.pool, self.kernel_size, self.group)
        return slots.pool_in_order(attention, slots.position, slots.place, *how), slots.memory

    def next_place(self, scores: Tensor, slots: Slots, keep: Tensor) -> Tensor:
        if not self.storage_order:
            return slots.place
        compete = older(slots.position, self.window)
        rank = rank_slots(torch.where(compete, scores, float("-inf")), slots.place)
        evicted = ((slots.position >= 0) & ~keep).any(2, keepdim=True)
        stored = torch.where(compete, rank, 2 * slots.position.shape[2] + slots.position)
        return torch.where(evicted, stored, slots.place)
