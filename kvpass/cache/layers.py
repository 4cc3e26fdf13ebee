"""Pool and tails of the layers of one KV geometry, which hold the kept entries.

Legend: B batch, L layers of this geometry, K KV heads, D head dim, E pool slots, C tail capacity.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Self

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvpass.cache.buffer_reuse import NO_REUSE, BufferReuse
from kvpass.cache.part import CachePart
from kvpass.cache.prompt_record import entries_of
from kvpass.cache.segments import POOL, TAIL
from kvpass.config import EntryFormat, LayerGroup
from kvpass.operands import BUFFERS, AppendBuffers, EvictBuffers, names_of, written_in
from kvpass.ops.slots import EMPTY
from kvpass.policies.base import Policy
from kvpass.ranks import ONE_PROCESS, Ranks

TAIL_STEP = 64
"""Tails have room for a multiple of this number of slots, besides the prompt's."""
MOST_SPARE = 1024
"""A tail grows by half, or by what is known to come, but at most by this many slots. Few lengths mean few captures of a
decode step."""


class StoreBuffers(NamedTuple):
    """Buffers of the layers of one KV geometry, after the prompt: see :mod:`kvpass.operands`."""

    pool_k: Tensor
    pool_v: Tensor
    pool_positions: Tensor
    offsets: Tensor
    tail_k: Tensor
    tail_v: Tensor
    tail_start: Tensor
    tail_used: Tensor
    arrivals: Tensor | None = None
    pool_k_scale: Tensor | None = None
    pool_v_scale: Tensor | None = None
    tail_k_scale: Tensor | None = None
    tail_v_scale: Tensor | None = None
    key_mean: Tensor | None = None
    slot_positions: Tensor | None = None
    decode_state: Tensor | None = None
    quota: Tensor | None = None
    next_position: Tensor | None = None
    rule_rows: Tensor | None = None


class FullAttentionLayers(CachePart):
    """KV entries of the layers ``group.layers`` for one batch of sequences, read and appended to by graphs.

    Args:
        group: the layers and their geometry. policy: decides what is kept.
        tensors: those of :class:`StoreBuffers` that a file holds. Nothing is checked.
        ranks: processes that share the heads of the layers; the store and the geometry are of those of this process.
        entry_format: of pool and tail. used: tail slots in use; None: all.
    """

    buffers: StoreBuffers

    def __init__(
        self,
        group: LayerGroup,
        tensors: Mapping[str, Tensor],
        policy: Policy,
        ranks: Ranks = ONE_PROCESS,
        entry_format: EntryFormat = "model",
        used: int | None = None,
    ) -> None:
        self.group = self.key = group
        self.geometry, self.policy, self.ranks = group.geometry, policy, ranks
        self.entry_format: EntryFormat = entry_format
        self.evicts = self.overwrites = policy.decode_rule() is not None
        self.used = tensors["tail_k"].shape[3] if used is None else used
        tail_used = torch.tensor(self.used, dtype=torch.int64, device=tensors["offsets"].device)
        self.buffers = StoreBuffers(**tensors, tail_used=tail_used)
        self._count_programs()
        self._tail_bound = self._most_slots() if self.evicts else 0

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Without the counters of programs, which say nothing of the entries."""
        return {name: x for name, x in super().tensors.items() if name != "arrivals"}

    @property
    def stored(self) -> dict[str, Tensor]:
        """The buffers that are saved to files and row-selected in beam search."""
        return {name: x for name, x in self.tensors.items() if BUFFERS[name].saved}

    def _count_programs(self) -> None:
        """Make the counters for the rows anew; the CPU and ``attend_evict`` need none."""
        arrivals = None
        if self.buffers.offsets.is_cuda and not self.evicts:
            sizes = {"programs": self.rows * self.geometry.kv_heads}
            arrivals = BUFFERS["arrivals"].new(sizes, self.buffers.offsets.device)
        self.buffers = self.buffers._replace(arrivals=arrivals)

    def _most_slots(self) -> int:
        """Return the most slots of the tail that a head needs while decoding evicts."""
        rule, b = self.policy.decode_rule(), self.buffers
        assert rule is not None and b.slot_positions is not None and b.quota is not None
        needed = torch.maximum(b.quota + (rule.window + rule.every), (b.slot_positions >= 0).sum(-1) + 1)
        return max(int((needed - self.pool_lengths.transpose(0, 1)).max()), 1)

    # -- decode and extend ------------------------------------------------------------------------------------------

    @property
    def cached_state(self) -> dict[str, Tensor]:
        """Buffers that decode and extend graphs read; they append to the tail in place."""
        buffers, names = self.buffers._asdict(), names_of(EvictBuffers if self.evicts else AppendBuffers)
        return {name: buffers[name] for name in names if buffers.get(name) is not None}

    def ensure_room(self, tokens: int, expected: int = 0, reuse: BufferReuse = NO_REUSE) -> None:
        old_capacity = self.buffers.tail_k.shape[3]
        needed = min(self.used + tokens, self._tail_bound) if self.evicts else self.used + tokens
        if needed <= old_capacity:
            return
        spare = old_capacity // 2 if expected <= 0 else self.used + expected - old_capacity
        capacity = rounded_up(max(needed, old_capacity + min(spare, MOST_SPARE)))
        tensors, grown = self.tensors, dict[str, Tensor]()
        if self.evicts:
            capacity = min(capacity, self._tail_bound)
            extra = (0, capacity - old_capacity)
            for name, fill in (("slot_positions", EMPTY), ("decode_state", 0)):
                grown[name] = reuse.copy((self.group, name, "grown"), pad(tensors[name], extra, value=fill))
        for name in TAIL & tensors.keys():
            old = tensors[name]
            shape = (*old.shape[:3], capacity, *old.shape[4:])
            grown[name] = reuse.empty((self.group, name, "grown"), shape, old.dtype, old.device)
            grown[name][:, :, :, :old_capacity] = old
        self.buffers = self.buffers._replace(**grown)  # all or none, since an allocation may fail

    def advance(self, tokens: int) -> None:
        self.used += tokens
        self.buffers.tail_used.add_(tokens)
        if self.buffers.next_position is not None:
            self.buffers.next_position.add_(tokens)

    def crop(self, tokens: int) -> None:
        self.used -= tokens
        self.buffers.tail_used.sub_(tokens)

    def clone(self, reuse: BufferReuse) -> Self:
        """Return an independent copy, in memory from ``reuse``; buffers that no call writes are shared."""
        copied = written_in("evict" if self.evicts else "append") | {
            n for n, buffer in BUFFERS.items() if buffer.counter
        }
        return super().mapped(lambda name, x: reuse.copy((self.group, name), x) if name in copied else x)

    def to(self, device: torch.device) -> Self:
        self.geometry.check_format(self.entry_format, device)
        return super().to(device)

    def mapped(self, change: Callable[[str, Tensor], Tensor]) -> Self:
        twin = super().mapped(change)
        twin._count_programs()
        return twin

    def with_rows(self, index: Tensor) -> Self:
        """Return a store whose row i is row ``index[i]`` of this one; a pool of one row serves them all."""

        def picked(name: str, x: Tensor) -> Tensor:
            if x.ndim == 0:
                return x.clone()
            return x if self._serves_all(name, x) else x.index_select(BUFFERS[name].row_dim, index.to(x.device))

        return self.mapped(picked)

    def _serves_all(self, name: str, tensor: Tensor) -> bool:
        """Whether a stored buffer has one row that no call writes, for any number of rows."""
        buffer = BUFFERS[name]
        return buffer.of_pool and not self.evicts and tensor.shape[buffer.row_dim] == 1

    @property
    def of_rows(self) -> dict[str, Tensor]:
        """The :attr:`stored` with a row for each row of the batch; those of a pool that serves all are one."""
        sizes = {"pool_batch": self.rows}
        return {
            name: x.expand([sizes.get(dim, size) for dim, size in zip(BUFFERS[name].sizes, x.shape, strict=True)])
            if self._serves_all(name, x)
            else x
            for name, x in self.stored.items()
        }

    def holding(self, tensors: Mapping[str, Tensor], used: int) -> Self:
        """Return a store of the same layers with other entries.

        Args:
            tensors: in place of :attr:`stored` of the same names. used: slots of the tails in use.
        """
        tensors = {**self.stored, **tensors}
        return type(self)(self.group, tensors, self.policy, self.ranks, self.entry_format, used)

    @classmethod
    def joined(cls, parts: Sequence[Self], shifts: Sequence[int], order: Tensor) -> Self:
        """Return a store of the rows of several, with the used slots of the fullest."""
        used, tensors = max(part.used for part in parts), dict[str, Tensor]()
        # tails in the order of their tokens end where the fullest ends
        behind = [0 if part.evicts else used - part.used for part in parts]
        stored, by_row = [part.stored for part in parts], [part.of_rows for part in parts]
        for name, first in stored[0].items():
            if parts[0]._serves_all(name, first) and all(of_part[name] is first for of_part in stored):
                continue
            buffer, row, begins = BUFFERS[name], 0, []
            rows = [of_part[name] for of_part in by_row]
            if name == "tail_start":
                rows = [x + slots for x, slots in zip(rows, behind, strict=True)]
            for x, slots in zip(rows, behind, strict=True):
                begins.append([slots if size == "tail" else 0 for size in buffer.sizes])
                begins[-1][buffer.row_dim] = row
                row += x.shape[buffer.row_dim]
            ends = [list(map(operator.add, begin, x.shape)) for begin, x in zip(begins, rows, strict=True)]
            sizes = [max(of_dim) for of_dim in zip(*ends, strict=True)]
            whole = first.new_full(sizes, EMPTY if name in ("pool_positions", "slot_positions") else 0)
            for x, begin, end in zip(rows, begins, ends, strict=True):
                whole[tuple(map(slice, begin, end))] = x
            tensors[name] = whole.index_select(buffer.row_dim, order.to(whole.device))
        return parts[0].holding(tensors, used)

    # -- files and devices ------------------------------------------------------------------------------------------

    @property
    def saved(self) -> dict[str, Tensor]:
        """The store's tensors without unused capacity, zeros in slots without an entry."""
        b, tensors = self.buffers, self.of_rows
        count = b.offsets[:, -1].long()
        slots = max(2, int(count.max()))
        spare = torch.arange(slots, device=count.device) >= count[:, None]
        for name in POOL & tensors.keys():
            tensors[name] = tensors[name][:, :slots].clone()
            tensors[name][spare.to(tensors[name].device)] = EMPTY if name == "pool_positions" else 0
        if b.slot_positions is not None:
            dead = b.slot_positions[..., -b.tail_k.shape[3] :] < 0
        else:
            tensors |= {name: tensors[name][:, :, :, : self.used] for name in TAIL & tensors.keys()}
            dead = (torch.arange(self.used, device=count.device) < b.tail_start[:, None])[None, :, None]
        for name in TAIL & tensors.keys():
            tensors[name] = tensors[name].masked_fill(dead if tensors[name].ndim == 4 else dead[..., None], 0)
        return tensors

    # -- what a user reads ------------------------------------------------------------------------------------------

    @property
    def rows(self) -> int:
        return self.buffers.offsets.shape[0]

    @property
    def entry_bytes(self) -> int:
        """Bytes of the entries held, scales included."""
        return int(self.lengths.sum()) * self.geometry.entry_bytes(self.entry_format)

    @property
    def lengths(self) -> Tensor:
        """Entries held per row, layer and KV head, window and appended tokens included; int64 ``[B, L, K]``."""
        if self.buffers.slot_positions is not None:
            return (self.buffers.slot_positions >= 0).sum(-1).transpose(0, 1)
        return self.pool_lengths + (self.used - self.buffers.tail_start)[:, None, None]

    @property
    def pool_lengths(self) -> Tensor:
        """Entries of each segment of the pool, int64 ``[B, L, K]``."""
        return entries_of(self.buffers.offsets, self.group)

    def positions(self, seen: Tensor) -> Tensor:
        """Return true positions of the entries, ascending, -1 where a head has fewer; int64 ``[B, L, K, P]``.

        Args:
            seen: real tokens seen of each row, int64 ``[B]``.
        """
        lengths, b = self.lengths, self.buffers
        if b.slot_positions is not None:
            slots, last = b.slot_positions.long().transpose(0, 1), torch.iinfo(torch.int64).max
            slots = torch.where(slots < 0, last, slots).sort(-1).values[..., : int(lengths.max())]
            return torch.where(slots == last, -1, slots)
        line, in_pool = torch.arange(int(lengths.max()), device=lengths.device), self.pool_lengths[..., None]
        slot = (b.offsets[:, :-1, None] + line).clamp(max=b.pool_positions.shape[1] - 1)
        of_pool = b.pool_positions.gather(1, slot.flatten(1).long()).view(*lengths.shape, -1)
        before = (seen - (self.used - b.tail_start))[:, None, None, None]  # positions that are not in the tail
        of_tail = torch.where(line < lengths[..., None], line - in_pool + before, -1)
        return torch.where(line < in_pool, of_pool, of_tail)


def rounded_up(slots: int) -> int:
    """Return slots of a tail that has room for so many more than the prompt's."""
    return -(-slots // TAIL_STEP) * TAIL_STEP
