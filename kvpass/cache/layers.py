"""Pool and tails of the layers of one KV geometry, which hold the kept entries.

Legend: B batch, N prompt columns, L layers of this geometry, K KV heads, D head dim, E pool slots, C tail capacity.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvpass.cache.buffer_reuse import NO_REUSE
from kvpass.cache.metadata import saved_names
from kvpass.cache.part import CachePart, PromptFacts
from kvpass.cache.prompt_record import LayersRecord, entries_of
from kvpass.config import EntryFormat, LayerGroup, PoolFacts
from kvpass.operands import BITS, BUFFERS, CODES, AppendBuffers, EvictBuffers, PrefillBuffers, written_in
from kvpass.ops import entry_formats
from kvpass.ops.evict import first_slots
from kvpass.ops.reference import MASS, OWNER, POSITION
from kvpass.ops.slots import EMPTY
from kvpass.policies.base import Policy
from kvpass.ranks import ONE_PROCESS, Ranks

TAIL_STEP = 64
"""Tails have room for a multiple of this number of slots, besides the prompt's."""
MOST_SPARE = 1024
"""A tail grows by half, or by what is known to come, but at most by this many slots. Few lengths mean few captures of a
decode step."""


class FullAttentionLayers(CachePart):
    """KV entries of the layers ``group.layers`` for one batch of sequences.

    Made when a prompt begins, written by the prefill graph, then read and appended to by decode and extend graphs.

    Args:
        group: the layers and their geometry. policy: decides what is kept. ranks: processes that share the heads of
            the layers; the store and the geometry are of those of this process. entry_format: of pool and tail, from
            the end of the prompt on.
    Attributes:
        used: tail slots in use. arrivals: of :class:`kvpass.operands.AppendBuffers`; None on the CPU.
    """

    pool_k: Tensor
    pool_v: Tensor
    pool_k_scale: Tensor
    pool_v_scale: Tensor
    pool_positions: Tensor
    offsets: Tensor
    tail_k: Tensor
    tail_v: Tensor
    tail_k_scale: Tensor
    tail_v_scale: Tensor
    key_mean: Tensor
    tail_start: Tensor
    tail_used: Tensor
    slot_positions: Tensor
    decode_state: Tensor
    quota: Tensor
    next_position: Tensor
    rule_rows: Tensor

    def __init__(
        self, group: LayerGroup, policy: Policy, ranks: Ranks = ONE_PROCESS, entry_format: EntryFormat = "model"
    ) -> None:
        self.group = self.key = group
        self.geometry = group.geometry
        self.policy = policy
        self.ranks = ranks
        self.entry_format: EntryFormat = entry_format
        rule = policy.decode_rule()
        self.evicts = self.overwrites = rule is not None
        self._rows_per_head = 0 if rule is None else rule.rows_per_head
        self.used = 0
        self.arrivals: Tensor | None = None
        self._tail_bound = 0
        self._prefill: PrefillBuffers | None = None

    @property
    def buffers(self) -> dict[str, Tensor]:
        """Without the counters of programs, which say nothing of the entries."""
        return {name: x for name, x in super().buffers.items() if name != "arrivals"}

    @property
    def saved_names(self) -> list[str]:
        """Names of buffers that are saved to files and row-selected in beam search."""
        return saved_names(self.policy, self.geometry, self.entry_format)

    @property
    def pool_names(self) -> list[str]:
        """Names of the saved buffers that have one element or row for each slot of the pool."""
        return [name for name in self.saved_names if BUFFERS[name].sizes[:2] in (("B", "E"), ("Z", "E"))]

    @property
    def tail_names(self) -> list[str]:
        """Names of the saved buffers that have one number or row for each slot of the tail."""
        return [name for name in self.saved_names if "C" in BUFFERS[name].sizes]

    @property
    def _leaves_slots(self) -> bool:
        """Whether the pool of a prompt may stay partly empty, so that its entries then move to one of their size."""
        return self.ranks.several or self.policy.leaves_room

    # -- prefill ----------------------------------------------------------------------------------------------------

    @property
    def prefill_state(self) -> dict[str, Tensor]:
        assert self._prefill is not None
        return {name: x for name, x in self._prefill._asdict().items() if x is not None}

    def capacity(self, entries: int) -> int:
        """Return the most slots of the pool that a prompt of any length takes.

        Args:
            entries: evictable ones per KV head per layer.
        """
        heads = self.geometry.kv_heads * self.ranks.size  # all entries may be of this process
        return self.policy.capacity(entries, self.geometry.layers, heads)

    def begin_prefill(self, prompt: PromptFacts, facts: PoolFacts) -> None:
        """Allocate the buffers of a prompt; ``facts``: what the graph says of the layers."""
        self._prompt, self._plain, self.reuse = prompt, facts.plain, prompt.reuse
        n, g, window = prompt.columns, self.geometry, self.policy.window
        entries = [max(budget - window, 0) for budget in prompt.budgets]
        bound = g.layers * g.kv_heads * max(n - window, 0) + g.layers
        slots = max(2, min(self.capacity(max(entries)), bound))
        tail = min(window, n) + _rounded_up(1 if self.evicts else min(max(prompt.expected, 1), MOST_SPARE))

        sizes = {"B": prompt.rows, "E": slots, "D": g.key_dim, "V": g.stored_value_dim, "L": g.layers, "K": g.kv_heads}
        sizes |= {"C": tail, "W": max(window, 1), "P": g.layers * g.kv_heads + 1, "G": facts.group}
        sizes |= {"Q": self._rows_per_head, "F": self.policy.stat_planes}

        def allocate(name: str) -> Tensor:
            buffer = BUFFERS[name]
            stays = name in self._cached and not (buffer.packed and self.entry_format != "model")
            place = self.reuse if stays and not (buffer.of_pool and self._leaves_slots) else NO_REUSE
            found = place.empty((self.group, name), buffer.shape(sizes), buffer.dtype or prompt.dtype, prompt.device)
            return found if buffer.initial is None else found.fill_(buffer.initial)

        asked = {"rule_rows": self._rows_per_head > 0, "output_errors": self.policy.compact}
        names = [name for name in PrefillBuffers._fields if asked.get(name, True)]
        self._prefill = PrefillBuffers(**{name: allocate(name) for name in names})
        self._prefill.entries.copy_(torch.tensor(entries, device="cpu"))

    def finish_prefill(self) -> LayersRecord:
        """Also drop tables that only the cascade needs."""
        held, g, n, device = self._prefill, self.geometry, self._prompt.columns, self._prompt.device
        assert held is not None
        self._prefill, errors = None, held.output_errors
        window = min(self.policy.window, n)
        if self._leaves_slots:
            held = _without_spare_slots(held)
        self.pool_k, self.pool_v, self.offsets = held.pool_k, held.pool_v, held.offsets
        self.tail_k, self.tail_v = held.tail_k, held.tail_v
        self.pool_positions = held.slots[POSITION].clone()
        self.tail_start = (self._prompt.start - (n - window)).clamp(min=0).to(device)
        self.tail_used = torch.tensor(window, dtype=torch.int64, device=device)
        self.used = window
        owner = held.slots[OWNER].long()
        heads = g.layers * g.kv_heads
        mass = torch.zeros(owner.shape[0], heads + 1, dtype=torch.float32, device=device)
        mass.scatter_add_(1, torch.where(owner < 0, heads, owner), held.slot_stats[MASS])
        window_mass, weights = held.window_stats[MASS].sum(-1), held.layer_weights
        if self.evicts:
            self._begin_evicting(held)
        if self.entry_format != "model":
            del held
            self._pack()
        self._count_programs()
        for name, x in self.cached_state.items():
            if name not in PrefillBuffers._fields:
                setattr(self, name, self.reuse.copy((self.group, name), x))
        del self._prompt
        return LayersRecord(
            group=self.group,
            mass=mass[:, :heads].view(-1, g.layers, g.kv_heads) + window_mass,
            weights=weights,
            positions=self.pool_positions,
            offsets=self.offsets.clone(),  # the record outlives the cache
            output_errors=errors,
        )

    def _pack(self) -> None:
        """Quantise the entries, one buffer after the other: then only one of them is held twice."""
        bits, dtype, g = BITS[self.entry_format], CODES[self.entry_format], self.geometry
        has_mean = "key_mean" in self.saved_names
        mean = None
        if has_mean and self._plain:
            held = self.tail_k[..., : self.used, :]
            mean = self.key_mean = entry_formats.key_mean(self.pool_k, self.offsets, held, self.tail_start)
        elif has_mean:
            sizes = {"L": g.layers, "B": self.rows, "K": g.kv_heads, "D": g.key_dim}
            self.key_mean = BUFFERS["key_mean"].new(sizes, self.offsets.device)
        for name in ("pool_k", "pool_v", "tail_k", "tail_v"):
            floats: Tensor = getattr(self, name)
            shape = (*floats.shape[:-1], floats.shape[-1] * bits // 8)
            codes = self.reuse.empty((self.group, name, "packed"), shape, dtype, floats.device)
            if shape[-1]:  # else values are stored in keys
                scale = torch.empty(floats.shape[:-1], dtype=torch.float32, device=floats.device)
                used = slice(self.used if name in self.tail_names else None)
                into = codes[..., used, :], scale[..., used]
                entry_formats.quantise_buffer(name, floats[..., used, :], *into, self.offsets, mean)
                setattr(self, f"{name}_scale", scale)
            setattr(self, name, codes)
            del floats

    def _count_programs(self) -> None:
        """Make the counters for the rows anew; the CPU and ``attend_evict`` need none."""
        self.arrivals = None
        if self.offsets.is_cuda and not self.evicts:
            sizes = {"A": self.rows * self.geometry.kv_heads}
            self.arrivals = BUFFERS["arrivals"].new(sizes, self.offsets.device)

    def _begin_evicting(self, held: PrefillBuffers) -> None:
        """Make the tables for eviction while decoding: slots of entries, quota of each head."""
        columns, first = self._prompt.columns, self._prompt.start.to(self.offsets.device)
        rule = self.policy.decode_rule()
        assert rule is not None
        window = min(self.policy.window, columns)
        self.slot_positions, self.decode_state = first_slots(held, first, columns, window, rule.numbers_per_entry)
        kept = self.pool_lengths.transpose(0, 1)
        available = (columns - first - self.policy.window).clamp(min=0)
        self.quota = self.policy.decode_quota(kept, held.entries, available, self.ranks).contiguous()
        self.next_position = columns - first
        if held.rule_rows is not None:
            self.rule_rows = held.rule_rows
        self._tail_bound = self._most_slots()

    def _most_slots(self) -> int:
        """Return the most slots of the tail that a head needs while decoding evicts."""
        rule = self.policy.decode_rule()
        assert rule is not None
        occupied = (self.slot_positions >= 0).sum(-1)
        needed = rule.slots_needed(self.quota, occupied) - self.pool_lengths.transpose(0, 1)
        return max(int(needed.max()), 1)

    # -- decode and extend ------------------------------------------------------------------------------------------

    @property
    def cached_state(self) -> dict[str, Tensor]:
        """Buffers that decode and extend graphs read; they append to the tail in place."""
        held = vars(self)
        return {name: held[name] for name in self._cached if held.get(name) is not None}

    @property
    def _cached(self) -> tuple[str, ...]:
        return EvictBuffers._fields if self.evicts else AppendBuffers._fields

    def ensure_room(self, tokens: int, expected: int = 0) -> None:
        old_capacity = self.tail_k.shape[3]
        needed = min(self.used + tokens, self._tail_bound) if self.evicts else self.used + tokens
        if needed <= old_capacity:
            return
        spare = old_capacity // 2 if expected <= 0 else self.used + expected - old_capacity
        capacity = _rounded_up(max(needed, old_capacity + min(spare, MOST_SPARE)))
        grown: dict[str, Tensor] = {}
        if self.evicts:
            capacity = min(capacity, self._tail_bound)
            extra = (0, capacity - old_capacity)
            for name, fill in (("slot_positions", EMPTY), ("decode_state", 0)):
                grown[name] = self.reuse.copy((self.group, name, "grown"), pad(getattr(self, name), extra, value=fill))
        for name in self.tail_names:
            old: Tensor = getattr(self, name)
            shape = (*old.shape[:3], capacity, *old.shape[4:])
            grown[name] = self.reuse.empty((self.group, name, "grown"), shape, old.dtype, old.device)
            grown[name][:, :, :, :old_capacity] = old
        vars(self).update(grown)  # all or none, since an allocation may fail

    def advance(self, tokens: int) -> None:
        self.used += tokens
        self.tail_used.add_(tokens)
        if self.evicts:
            self.next_position.add_(tokens)

    def crop(self, tokens: int) -> None:
        self.used -= tokens
        self.tail_used.sub_(tokens)

    def clone(self) -> FullAttentionLayers:
        """Return an independent copy; buffers that no call writes are shared."""
        written = written_in("evict" if self.evicts else "append")
        twin = copy.copy(self)
        for name, x in self.buffers.items():
            if name in written or BUFFERS[name].counter:
                setattr(twin, name, self.reuse.copy((self.group, name), x))
        return twin

    def to(self, device: torch.device) -> FullAttentionLayers:
        self.geometry.check_format(self.entry_format, device)
        return super().to(device)

    def mapped(self, change: Callable[[str, Tensor], Tensor]) -> FullAttentionLayers:
        twin = super().mapped(change)
        twin._count_programs()
        return twin

    def with_rows(self, index: Tensor) -> FullAttentionLayers:
        """Return a store whose row i is row ``index[i]`` of this one; a pool of one row serves them all."""

        def picked(name: str, x: Tensor) -> Tensor:
            if x.ndim == 0:
                return x.clone()
            return x if self._serves_all(name) else x.index_select(BUFFERS[name].row_dim, index.to(x.device))

        return self.mapped(picked)

    def _serves_all(self, name: str) -> bool:
        """Whether a saved buffer has one row that no call writes, for any number of rows."""
        buffer = BUFFERS[name]
        return buffer.of_pool and not self.evicts and getattr(self, name).shape[buffer.row_dim] == 1

    def of_rows(self, name: str) -> Tensor:
        """Return a saved buffer with a row for each row of the batch; those of a pool that serves all are one."""
        tensor: Tensor = getattr(self, name)
        if not self._serves_all(name):
            return tensor
        sizes = list(tensor.shape)
        sizes[BUFFERS[name].row_dim] = self.rows
        return tensor.expand(sizes)

    def holding(self, tensors: Mapping[str, Tensor], used: int | None = None) -> FullAttentionLayers:
        """Return a store of the same layers with the entries of these :attr:`saved`, one for each of ``saved_names``.

        Nothing is checked.

        Args:
            used: slots of the tails in use; None: all.
        """
        twin = copy.copy(self)
        vars(twin).update(tensors)
        twin.used = twin.tail_k.shape[3] if used is None else used
        twin._tail_bound = twin._most_slots() if self.evicts else 0
        twin.tail_used = torch.tensor(twin.used, dtype=torch.int64, device=twin.offsets.device)
        twin._count_programs()
        return twin

    @classmethod
    def joined(cls, parts: Sequence[FullAttentionLayers], shifts: Sequence[int], order: Tensor) -> FullAttentionLayers:
        """Return a store of the rows of several, with the used slots of the fullest."""
        used, tensors = max(part.used for part in parts), dict[str, Tensor]()
        # tails in the order of their tokens end where the fullest ends
        behind = [0 if part.evicts else used - part.used for part in parts]
        for name in parts[0].saved_names:
            first: Tensor = getattr(parts[0], name)
            if all(part._serves_all(name) and getattr(part, name) is first for part in parts):
                tensors[name] = first
                continue
            buffer, row, begins = BUFFERS[name], 0, []
            held = [part.of_rows(name) for part in parts]
            if name == "tail_start":
                held = [x + slots for x, slots in zip(held, behind, strict=True)]
            for x, slots in zip(held, behind, strict=True):
                begins.append([slots if size == "C" else 0 for size in buffer.sizes])
                begins[-1][buffer.row_dim] = row
                row += x.shape[buffer.row_dim]
            ends = [list(map(operator.add, begin, x.shape)) for begin, x in zip(begins, held, strict=True)]
            sizes = [max(of_dim) for of_dim in zip(*ends, strict=True)]
            joined = first.new_full(sizes, EMPTY if name in ("pool_positions", "slot_positions") else 0)
            for x, begin, end in zip(held, begins, ends, strict=True):
                joined[tuple(map(slice, begin, end))] = x
            tensors[name] = joined.index_select(buffer.row_dim, order.to(joined.device))
        return parts[0].holding(tensors, used)

    # -- files and devices ------------------------------------------------------------------------------------------

    @property
    def saved(self) -> dict[str, Tensor]:
        """The store's tensors without unused capacity, zeros in slots without an entry."""
        tensors = {name: self.of_rows(name) for name in self.saved_names}
        count = self.offsets[:, -1].long()
        held = max(2, int(count.max()))
        spare = torch.arange(held, device=count.device) >= count[:, None]
        for name in self.pool_names:
            tensors[name] = tensors[name][:, :held].clone()
            tensors[name][spare.to(tensors[name].device)] = EMPTY if name == "pool_positions" else 0
        if self.evicts:
            dead = self.slot_positions[..., -self.tail_k.shape[3] :] < 0
        else:
            tensors |= {name: tensors[name][:, :, :, : self.used] for name in self.tail_names}
            dead = (torch.arange(self.used, device=count.device) < self.tail_start[:, None])[None, :, None]
        for name in self.tail_names:
            tensors[name] = tensors[name].masked_fill(dead if tensors[name].ndim == 4 else dead[..., None], 0)
        return tensors

    # -- what a user reads ------------------------------------------------------------------------------------------

    @property
    def rows(self) -> int:
        """B."""
        return self.offsets.shape[0]

    @property
    def nbytes(self) -> int:
        held = [*(getattr(self, name) for name in self.saved_names), self.arrivals]
        return sum(x.untyped_storage().nbytes() for x in held if x is not None)

    @property
    def entry_bytes(self) -> int:
        """Bytes of the entries held, scales included."""
        return int(self.lengths.sum()) * self.geometry.entry_bytes(self.entry_format)

    @property
    def lengths(self) -> Tensor:
        """Entries held per row, layer and KV head, window and appended tokens included; int64 ``[B, L, K]``."""
        if self.evicts:
            return (self.slot_positions >= 0).sum(-1).transpose(0, 1)
        return self.pool_lengths + (self.used - self.tail_start)[:, None, None]

    @property
    def pool_lengths(self) -> Tensor:
        """Entries of each segment of the pool, int64 ``[B, L, K]``."""
        return entries_of(self.offsets, self.group)

    def positions(self, seen: Tensor) -> Tensor:
        """Return true positions of the entries, ascending, -1 where a head has fewer; int64 ``[B, L, K, P]``.

        Args:
            seen: real tokens seen of each row, int64 ``[B]``.
        """
        lengths = self.lengths
        if self.evicts:
            held = self.slot_positions.long().transpose(0, 1)
            last = torch.iinfo(torch.int64).max
            held = torch.where(held < 0, last, held).sort(-1).values[..., : int(lengths.max())]
            return torch.where(held == last, -1, held)
        line, in_pool = torch.arange(int(lengths.max()), device=lengths.device), self.pool_lengths[..., None]
        slot = (self.offsets[:, :-1, None] + line).clamp(max=self.pool_positions.shape[1] - 1)
        of_pool = self.pool_positions.gather(1, slot.flatten(1).long()).view(*lengths.shape, -1)
        before = (seen - (self.used - self.tail_start))[:, None, None, None]  # positions that are not in the tail
        of_tail = torch.where(line < lengths[..., None], line - in_pool + before, -1)
        return torch.where(line < in_pool, of_pool, of_tail)


def _without_spare_slots(prompt: PrefillBuffers) -> PrefillBuffers:
    """Return packed buffers whose pool has as many slots as the longest row needs."""
    held = max(2, int(prompt.offsets[:, -1].max()))
    return prompt._replace(
        pool_k=prompt.pool_k[:, :held].clone(),
        pool_v=prompt.pool_v[:, :held].clone(),
        slots=prompt.slots[:, :, :held].clone(),
        slot_stats=prompt.slot_stats[:, :, :held].clone(),
    )


def _rounded_up(slots: int) -> int:
    return -(-slots // TAIL_STEP) * TAIL_STEP
