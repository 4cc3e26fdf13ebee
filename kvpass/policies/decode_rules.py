"""Decode rules: which entry a new token replaces, so that the cache keeps its size.

Pure tensor functions, batched, without host synchronisation. A step works on one layer's slots, ``[B, K, C]``; the new
token is already in its slot. A rule turns the new query's attention over the slots, or the keys in them, into scores.
:func:`keep_mask` then keeps each head's best entries and the newest ``window``. A rule may let tokens gather and evict
them together (:attr:`DecodeRule.every`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvpass.policies.observation import Observation
from kvpass.policies.scheduler import invert, places
from kvpass.policies.scores import Group, Pool, pool_scores, reduce_group
from kvpass.ranks import ONE_PROCESS, Ranks

_BEHIND = 1 << 30
"""Added to the position of an entry that has no place in storage order: it is stored behind those that have one."""


def rank_slots(scores: Tensor, storage_order: Tensor) -> Tensor:
    """Rank each head's slots, best score first, ties to the lower ``storage_order``; int64 ``[B, K, C]``."""
    order = storage_order.argsort(dim=2, stable=True)
    return places(scores.gather(2, order)).gather(2, invert(order))


def evictable_slots(position: Tensor, window: int) -> Tensor:
    """Return which entries compete: all but the newest ``window`` tokens; bool ``[B, K, C]``.

    ``position``: true positions, int64 ``[B, K, C]``, -1 = empty slot; every head holds the new token.
    """
    newest = position.amax((1, 2), keepdim=True)
    return (position >= 0) & (position <= newest - window)


def keep_mask(scores: Tensor, position: Tensor, quota: Tensor, window: int) -> Tensor:
    """Return the keep mask bool ``[B, K, C]``: the newest ``window`` tokens, and each head's best ``quota`` of others.

    ``scores``: fp32 ``[B, K, C]``; ``position``: as in :func:`evictable_slots`; ``quota``: int64 ``[B, K]``.
    """
    compete = evictable_slots(position, window)
    last = torch.iinfo(position.dtype).max
    rank = rank_slots(torch.where(compete, scores, float("-inf")), torch.where(compete, position, last))
    return (position >= 0) & (~compete | (rank < quota[:, :, None]))


def pool_in_order(
    attention: Tensor, position: Tensor, storage_order: Tensor, window: int, pool: Pool, kernel_size: int, group: Group
) -> Tensor:
    """Pool attention ``[B, H, C]`` over neighbours in storage order, reduced over the group: fp32 ``[B, K, C]``.

    ``position``: as in :class:`Slots`; ``storage_order``: ascending, same shape and dtype. The newest ``window`` tokens
    are left out, and get 0. The others are those of :mod:`kvpass.policies.scores`.
    """
    kv_heads = position.shape[1]
    compete = evictable_slots(position, window)
    order = torch.where(compete, storage_order, torch.iinfo(storage_order.dtype).max).argsort(dim=2, stable=True)
    in_order = compete.gather(2, order)
    a = attention.unflatten(1, (kv_heads, -1))
    a = torch.where(in_order[:, :, None], a.gather(3, order[:, :, None].expand_as(a)), 0.0)
    scores = reduce_group(pool_scores(a.flatten(1, 2), pool, kernel_size), kv_heads, group)
    return torch.zeros_like(scores).scatter(2, order, torch.where(in_order, scores, 0.0))


@dataclass(frozen=True, eq=False)
class Slots:
    """Entries and decode state of one layer while decoding.

    Attributes:
        position: true position, int32 or int64 ``[B, K, C]``, negative = empty.
        decode_state: the rule's numbers, fp32 ``[numbers_per_entry, B, K, C]``; 0 for tokens that came since the last
            call of :meth:`DecodeRule.observe`, as the new one.
        quota: entries a head may hold besides the newest ``window``, int64 ``[B, K]``.
        values: of the new token, ``[B, K, Dv]``.
        pool_in_order: :func:`pool_in_order`, or a kernel that does the same.
        due: heads from which the step evicts, as :meth:`DecodeRule.due` says, bool ``[B, K]``; None: all.
        keys: for rules that say ``reads_keys``, ``[B, K, C, D]``, RoPE applied, anything in empty slots.
        token_scores: for rules that say ``reads_tokens``, the policy's
            :meth:`~kvpass.policies.base.Policy.token_scores` of the new token, fp32 ``[B, K]``.
        rows: for rules that have :attr:`DecodeRule.rows_per_head`, fp32 ``[B, K, G, rows, D]``, the new token included.
        scale, softcap: of the attention logits, as in :class:`~kvpass.policies.observation.Observation`.
        ranks: processes that share the heads of the layer; attention and slots are then of the heads of this process.
    """

    position: Tensor
    decode_state: Tensor
    quota: Tensor
    values: Tensor
    pool_in_order: Callable[[Tensor, Tensor, Tensor, int, Pool, int, Group], Tensor] = pool_in_order
    due: Tensor | None = None
    keys: Tensor | None = None
    token_scores: Tensor | None = None
    rows: Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None
    ranks: Ranks = ONE_PROCESS

    def all_heads(self, x: Tensor) -> Tensor:
        """Return a statistic ``[B, heads, ...]`` of all heads of the layer, from that of the heads of this process.

        A slot is the same entry in every head only where all heads keep the same.
        """
        return self.ranks.gather(x, 1)

    @property
    def is_new(self) -> Tensor:
        """Whether a slot holds the new token, bool ``[B, K, C]``; every head holds it."""
        return self.position == self.position.amax((1, 2), keepdim=True)


@dataclass(frozen=True, kw_only=True)
class DecodeRule:
    """Base class of decode rules; a subclass must define only :meth:`observe`.

    Args:
        window: newest tokens that are never evicted, the new one included; 0: the new one competes too.
        every: a head evicts when it holds so many entries more than it may; until then they have slots beside the
            budget.
    """

    reads_keys: ClassVar[bool] = False  # whether Slots.keys are read
    reads_tokens: ClassVar[bool] = False  # whether Slots.token_scores are read, of a policy with that input
    reads_all_heads: ClassVar[bool] = False  # whether a slot must be the same entry in every head (Slots.all_heads)

    window: int = 0
    every: int = 1

    def due(self, position: Tensor, quota: Tensor) -> Tensor | None:
        """Return the heads from which a step evicts, bool ``[B, K]``; None, if ``every`` is 1: all, in each step.

        On the CPU a step in which no head is due does not call :meth:`observe`. ``position``, ``quota``: as in
        :class:`Slots`.
        """
        return None if self.every == 1 else (position >= 0).sum(2) - quota >= self.window + self.every

    def quota_now(self, quota: Tensor, due: Tensor | None, worth: Tensor, position: Tensor) -> Tensor:
        """Return the quota of a step, int64 ``[B, K]``: all slots for heads that are not due. ``worth``: the scores."""
        return quota if due is None else torch.where(due, quota, position.shape[2])

    @property
    def numbers_per_entry(self) -> int:
        """Numbers that the cache holds for each entry, outside the budget: :attr:`Slots.decode_state`."""
        return 0

    def start(self, obs: Observation, scores: Tensor) -> Tensor:
        """Return the numbers of prompt entries, ``[numbers_per_entry, B, K, N]``; a score ``-inf``: not scored."""
        return obs.keys.new_zeros(self.numbers_per_entry, *obs.keys.shape[:3], dtype=torch.float32)

    @property
    def rows_per_head(self) -> int:
        """Rows of D numbers that the cache holds for each query head of a layer, outside the budget."""
        return 0

    def first_rows(self, obs: Observation) -> Tensor:
        """Return the rows after a prompt, fp32 ``[B, K, G, rows, D]``."""
        raise NotImplementedError

    def next_rows(self, rows: Tensor, queries: Tensor, position: Tensor) -> Tensor:
        """Return the rows after a token of these queries ``[B, K, G, D]`` at position int64 ``[B]``: as they are."""
        return rows

    def observe(self, attention: Tensor, slots: Slots) -> tuple[Tensor, Tensor]:
        """Return scores fp32 ``[B, K, C]`` and the decode state after a step, from attention ``[B, H, C]``.

        Scores of heads that are not due are not read, nor is the state of evicted entries.
        """
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class StoredByScore(DecodeRule):
    """Base class of rules that use neighbours in storage order, and whose released code stores a head's entries anew.

    Otherwise storage order is that of positions. The released code stores entries by descending score when it evicts;
    the rule's number of an entry is then its place, 1, 2, ..., and 0 for what is stored behind, in order of positions.

    Args:
        released: entries are stored as the released code does.
    """

    released: bool = False

    def is_spared(self, scored: Tensor, entries: Tensor) -> Tensor:
        """Return which heads the released code does not store anew after a prompt, bool ``[B, K]``.

        ``scored``: entries of a head that have a score, int64 ``[B, K]``; ``entries``: evictable entries per KV head
        per layer on average, int64 ``[B, 1]``.
        """
        raise NotImplementedError

    def is_stored_anew(self, slots: Slots) -> Tensor:
        """Return which heads a step of the released code stores anew, bool ``[B, K]``: those from which it evicts."""
        return evictable_slots(slots.position, self.window).sum(2) > slots.quota

    @property
    def numbers_per_entry(self) -> int:
        """The place of an entry."""
        return int(self.released)

    def start(self, obs: Observation, scores: Tensor) -> Tensor:
        if not self.released:
            return super().start(obs, scores)
        scored = scores > float("-inf")
        stored = scored & ~self.is_spared(scored.sum(2), obs.entries_per_head[:, None])[:, :, None]
        return torch.where(stored, places(scores) + 1, 0).float()[None]

    def storage_order(self, slots: Slots) -> Tensor:
        """Return numbers that ascend in storage order, as :attr:`Slots.position`."""
        if not self.released:
            return slots.position
        place = slots.decode_state[0].to(slots.position.dtype)
        return torch.where(place > 0, place, slots.position + _BEHIND)

    def places(self, scores: Tensor, slots: Slots) -> Tensor:
        """Return the decode state after a step that gave these scores, fp32 ``[B, K, C]``."""
        if not self.released:
            return slots.decode_state
        compete = evictable_slots(slots.position, self.window)
        rank = rank_slots(torch.where(compete, scores, float("-inf")), self.storage_order(slots))
        anew = self.is_stored_anew(slots)[:, :, None]
        return torch.where(anew, torch.where(compete, rank + 1, 0), slots.decode_state)


@dataclass(frozen=True, kw_only=True)
class RollingWindow(DecodeRule):
    """StreamingLLM: keep the first ``sinks`` tokens and the latest ones."""

    sinks: int

    def observe(self, attention: Tensor, slots: Slots) -> tuple[Tensor, Tensor]:
        first = slots.position < self.sinks
        return torch.where(first, 2.0**25 - slots.position, slots.position.float()), slots.decode_state


@dataclass(frozen=True, kw_only=True)
class LastQuery(DecodeRule):
    """TOVA: score by the new query's attention, averaged over all query heads, same for every KV head."""

    reads_all_heads = True

    def observe(self, attention: Tensor, slots: Slots) -> tuple[Tensor, Tensor]:
        return slots.all_heads(attention).mean(1, keepdim=True).expand_as(slots.position), slots.decode_state


@dataclass(frozen=True, kw_only=True)
class Accumulated(DecodeRule):
    """H2O and VATP: score by attention, summed over all queries so far.

    ``value_norm`` multiplies each addition by the L1 norm of the value (VATP). ``rows`` limits the prompt's part to its
    last rows, and ``divisor`` divides that part. The first ``sinks`` tokens always stay.
    """

    group: Group = "mean"
    value_norm: bool = False
    sinks: int = 0
    rows: int | None = None
    divisor: int = 1

    @property
    def numbers_per_entry(self) -> int:
        """The sum, and of VATP the norm."""
        return 2 if self.value_norm else 1

    def start(self, obs: Observation, scores: Tensor) -> Tensor:
        over_rows = obs.column_sum if self.rows is None else obs.recent_sum(self.rows)
        total = reduce_group(over_rows, obs.kv_heads, self.group) / self.divisor
        return torch.stack([total * obs.value_norm, obs.value_norm]) if self.value_norm else total[None]

    def observe(self, attention: Tensor, slots: Slots) -> tuple[Tensor, Tensor]:
        added = reduce_group(attention, slots.position.shape[1], self.group)
        if self.value_norm:
            total, norm = slots.decode_state
            norm = torch.where(slots.is_new, slots.values.float().abs().sum(-1, keepdim=True), norm)
            decode_state = torch.stack([total + added * norm, norm])
        else:
            decode_state = slots.decode_state + added
        if self.sinks == 0:
            return decode_state[0], decode_state
        first = slots.position < self.sinks
        return torch.where(first, torch.finfo(torch.float32).max, decode_state[0]), decode_state


@dataclass(frozen=True, kw_only=True)
class PooledLastQuery(StoredByScore):
    """CAKE: score by the new query's attention, pooled over neighbouring older entries, averaged over the group.

    Neighbours are taken in storage order. The released code stores every head anew that went through a selection;
    prompts of up to ``budget + window`` tokens did not.
    """

    pool: Pool = "avg"
    kernel_size: int = 5
    group: Group = "mean"

    def is_spared(self, scored: Tensor, entries: Tensor) -> Tensor:
        return scored <= entries + self.window

    def observe(self, attention: Tensor, slots: Slots) -> tuple[Tensor, Tensor]:
        how = (self.window, self.pool, self.kernel_size, self.group)
        scores = slots.pool_in_order(attention, slots.position, self.storage_order(slots), *how)
        return scores, self.places(scores, slots)
