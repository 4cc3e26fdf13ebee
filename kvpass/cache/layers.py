"""Pool and tails of the layers of one KV geometry: where the entries that a policy keeps live.

Legend: B batch, N prompt columns, L layers of this geometry, K KV heads, D head dim, E pool slots, C tail capacity.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence, Set
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvpass.cache.metadata import StoreFacts
from kvpass.cache.prompt_record import StoreRecord
from kvpass.config import LayerGroup
from kvpass.ops.cuda import index_pool
from kvpass.ops.evict import SLOT_POSITION, first_slots
from kvpass.ops.reference import MASS, MEMORY, OWNER, PLACE, POSITION
from kvpass.ops.slots import EMPTY
from kvpass.policies.base import Policy

TAIL_STEP = 64
"""Tails have room for a multiple of so many slots, beside the prompt's own."""
MOST_SPARE = 1024
"""A tail grows by half, so that there are few lengths for which a decode step is captured, or by so many slots."""

PREFILL_DYNAMIC = {"pool_k": {1}, "pool_v": {1}, "slots": {2}, "slot_traces": {2}, "tail_k": {3}, "tail_v": {3}}
CACHED_DYNAMIC = {
    **{"pool_k": {1}, "pool_v": {1}, "tail_k": {3}, "tail_v": {3}},
    **{"table": {4}, "memory": {4}, "tiles": {1}, "turn_scores": {3}, "turn_masses": {3}},
}
"""Dimensions of the state that change from prompt to prompt: graphs treat them as symbols and do not recompile."""


def dynamic_dims(state: Mapping[str, Tensor], phase: str) -> dict[str, Set[int]]:
    """Those dimensions in a graph of ``phase``, by names of the state with a prefix each."""
    table = PREFILL_DYNAMIC if phase == "prefill" else CACHED_DYNAMIC
    return {name: table.get(name.split("_", 1)[-1], set()) for name in state}


class Store:
    """Entries of the layers ``group.layers`` for one batch of sequences.

    Made when a prompt begins, written by the prefill graph, then read and appended to by decode and extend graphs.

    Args:
        group: the layers and their geometry. policy: decides what is kept.
    Attributes:
        used: tail slots in use.
    """

    ROW_DIM: ClassVar = {
        "pool_k": 0,
        "pool_v": 0,
        "pool_positions": 0,
        "offsets": 0,
        "tail_k": 1,
        "tail_v": 1,
        "tail_start": 0,
    }
    """Tensors of a filled store and the dimension of each that counts rows of the batch."""
    ROW_DIM_EVICTING: ClassVar = {"table": 2, "memory": 2, "quota": 1, "next_position": 0}
    """The same for policies that evict while decoding, in addition."""

    pool_k: Tensor
    pool_v: Tensor
    pool_positions: Tensor
    offsets: Tensor
    tail_k: Tensor
    tail_v: Tensor
    tail_start: Tensor
    tail_used: Tensor
    table: Tensor
    memory: Tensor
    quota: Tensor
    next_position: Tensor
    tiles: Tensor
    tile_offsets: Tensor

    def __init__(self, group: LayerGroup, policy: Policy) -> None:
        self.group = group
        self.geometry = group.geometry
        self.policy = policy
        self.evicts = policy.decode_rule() is not None
        self.used = 0
        self._tail_bound = 0
        self._prefill: dict[str, Tensor] = {}

    @property
    def row_dim(self) -> dict[str, int]:
        """Dimension that counts rows of the batch, by name of the tensor."""
        return {**self.ROW_DIM, **(self.ROW_DIM_EVICTING if self.evicts else {})}

    # -- prefill ----------------------------------------------------------------------------------------------------

    @property
    def prefill_state(self) -> dict[str, Tensor]:
        """The buffers the prefill graph writes."""
        return self._prefill

    def begin_prefill(
        self, budgets: Sequence[int], start: Tensor, columns: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Allocate the buffers of a prompt.

        Args:
            budgets: entries per KV head per layer of each row, window included.
            start: first real column of each row, int64 ``[B]`` on the CPU. columns: N.
        """
        self._columns = columns
        self._start = start
        b, n, g, window = start.numel(), columns, self.geometry, self.policy.window
        entries = [max(budget - window, 0) for budget in budgets]
        bound = g.layers * g.kv_heads * max(n - window, 0) + g.layers
        slots = max(2, min(self.policy.capacity(max(entries), g.layers, g.kv_heads), bound))
        tail = min(window, n) + TAIL_STEP

        def empty(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self._prefill = {
            "pool_k": empty(b, slots, g.key_dim),
            "pool_v": empty(b, slots, g.value_dim),
            "slots": torch.full((4, b, slots), -1, dtype=torch.int32, device=device),
            "slot_traces": zeros(2, b, slots),
            "ledger": zeros(b, g.layers, dtype=torch.float64),
            "window_traces": zeros(2, b, g.layers, g.kv_heads, max(window, 1)),
            "tail_k": empty(g.layers, b, g.kv_heads, tail, g.key_dim),
            "tail_v": empty(g.layers, b, g.kv_heads, tail, g.value_dim),
            "offsets": empty(b, g.layers * g.kv_heads + 1, dtype=torch.int32),
            "entries": torch.tensor(entries, dtype=torch.int64, device=device),
        }

    def finish_prefill(self) -> StoreRecord:
        """Take over what the prefill graph left and drop the tables only the cascade needed."""
        state, g, n = self._prefill, self.geometry, self._columns
        self._prefill = {}
        window = min(self.policy.window, n)
        device = state["pool_k"].device
        self.pool_k, self.pool_v, self.offsets = state["pool_k"], state["pool_v"], state["offsets"]
        self.tail_k, self.tail_v = state["tail_k"], state["tail_v"]
        self.pool_positions = state["slots"][POSITION].clone()
        self.tail_start = (self._start - (n - window)).clamp(min=0).to(device)
        self.tail_used = torch.tensor(window, dtype=torch.int64, device=device)
        self.used = window
        owner = state["slots"][OWNER].long()
        heads = g.layers * g.kv_heads
        mass = torch.zeros(owner.shape[0], heads + 1, dtype=torch.float32, device=device)
        mass.scatter_add_(1, torch.where(owner < 0, heads, owner), state["slot_traces"][MASS])
        if self.evicts:
            self._begin_evicting(state)
        self._index_pool()
        del self._start
        return StoreRecord(
            group=self.group,
            kept=self.pool_lengths,
            mass=mass[:, :heads].view(-1, g.layers, g.kv_heads) + state["window_traces"][MASS].sum(-1),
            weights=state["ledger"],
            positions=self.pool_positions,
            offsets=self.offsets,
        )

    def _index_pool(self) -> None:
        """Tables by which the kernels divide the pool among programs; the CPU and ``attend_evict`` need none."""
        if self.offsets.is_cuda and not self.evicts:
            self.tiles, self.tile_offsets = index_pool(self.offsets, self.geometry.kv_heads, self.pool_k.shape[1])

    @property
    def _tables(self) -> list[str]:
        """Names of what :meth:`_index_pool` made."""
        return [name for name in ("tiles", "tile_offsets") if hasattr(self, name)]

    def _begin_evicting(self, state: dict[str, Tensor]) -> None:
        """Tables for a policy that evicts while decoding: who sits where, and how many entries each head may hold."""
        columns = self._columns
        first = self._start.to(self.offsets.device)
        rule = self.policy.decode_rule()
        assert rule is not None
        self.table, self.memory = first_slots(
            self.offsets,
            state["slots"][[POSITION, PLACE]],
            state["slot_traces"][MEMORY],
            state["window_traces"][MEMORY],
            self.pool_v,
            self.tail_v,
            first,
            columns,
            min(self.policy.window, columns),
        )
        kept = self.pool_lengths.transpose(0, 1)
        available = (columns - first - self.policy.window).clamp(min=0)
        self.quota = torch.stack([self.policy.decode_quota(layer, state["entries"], available) for layer in kept])
        self.next_position = columns - first
        occupied = (self.table[SLOT_POSITION] >= 0).sum(-1)
        needed = torch.maximum(self.quota + rule.window, occupied) + 1 - kept
        self._tail_bound = max(int(needed.max()), 1)

    # -- decode and extend ------------------------------------------------------------------------------------------

    @property
    def cached_state(self) -> dict[str, Tensor]:
        """The buffers decode and extend graphs read, the tail being appended to in place."""
        names = ["pool_k", "pool_v", "offsets", "tail_k", "tail_v"]
        names += ["table", "memory", "quota", "next_position"] if self.evicts else ["tail_start", "tail_used"]
        names += self._tables
        return {name: getattr(self, name) for name in names}

    def ensure_room(self, tokens: int) -> None:
        """Grow the tail, by half or more, so that ``tokens`` more fit."""
        old_capacity = self.tail_k.shape[3]
        needed = min(self.used + tokens, self._tail_bound) if self.evicts else self.used + tokens
        if needed <= old_capacity:
            return
        capacity = max(needed, old_capacity + min(old_capacity // 2, MOST_SPARE))
        capacity = -(-capacity // TAIL_STEP) * TAIL_STEP
        grown: dict[str, Tensor] = {}
        if self.evicts:
            capacity = min(capacity, self._tail_bound)
            extra = (0, capacity - old_capacity)
            grown = {"table": pad(self.table, extra, value=EMPTY), "memory": pad(self.memory, extra)}
        for name in ("tail_k", "tail_v"):
            old: Tensor = getattr(self, name)
            grown[name] = old.new_empty(*old.shape[:3], capacity, old.shape[4])
            grown[name][:, :, :, :old_capacity] = old
        vars(self).update(grown)  # all or none: memory may run out on the way

    def advance(self, tokens: int) -> None:
        """Count tokens whose rows a graph has appended to the tail."""
        self.used += tokens
        self.tail_used.add_(tokens)
        if self.evicts:
            self.next_position.add_(tokens)

    def clone(self) -> Store:
        """An independent copy; what no call ever writes is shared."""
        twin = copy.copy(self)
        written = {"tail_k", "tail_v", "tail_used"}
        if self.evicts:
            written |= {"pool_k", "pool_v", "table", "memory", "next_position"}
        for name in written:
            setattr(twin, name, getattr(self, name).clone())
        return twin

    def with_rows(self, index: Tensor) -> Store:
        """A store whose row i is row ``index[i]`` of this one."""
        tensors: dict[str, Tensor] = {name: getattr(self, name) for name in self.row_dim}
        picked = {name: x.index_select(self.row_dim[name], index.to(x.device)) for name, x in tensors.items()}
        return self.holding(picked, self.used)

    def holding(self, tensors: Mapping[str, Tensor], used: int) -> Store:
        """A store of the same layers that holds other entries.

        Args:
            tensors: one for each name in ``row_dim``. used: tail slots in use.
        """
        twin = copy.copy(self)
        twin.used = used
        vars(twin).update(tensors)
        twin.tail_used = torch.tensor(used, dtype=torch.int64, device=twin.offsets.device)
        twin._index_pool()
        return twin

    # -- files and devices ------------------------------------------------------------------------------------------

    @property
    def facts(self) -> StoreFacts:
        """What :meth:`restore` needs beside the tensors."""
        return StoreFacts(used=self.used, tail_bound=self._tail_bound)

    def compact_tensors(self) -> dict[str, Tensor]:
        """Everything the store holds, without the capacity nobody uses, zeros in every slot without an entry."""
        tensors = {name: getattr(self, name) for name in self.row_dim}
        count = self.offsets[:, -1].long()
        held = max(2, int(count.max()))
        spare = torch.arange(held, device=count.device) >= count[:, None]
        for name in ("pool_k", "pool_v"):
            tensors[name] = tensors[name][:, :held].masked_fill(spare[..., None], 0)
        tensors["pool_positions"] = tensors["pool_positions"][:, :held].masked_fill(spare, EMPTY)
        if self.evicts:
            dead = self.table[SLOT_POSITION, ..., -self.tail_k.shape[3] :] < 0
        else:
            tensors |= {name: tensors[name][:, :, :, : self.used] for name in ("tail_k", "tail_v")}
            dead = (torch.arange(self.used, device=count.device) < self.tail_start[:, None])[None, :, None]
        for name in ("tail_k", "tail_v"):
            tensors[name] = tensors[name].masked_fill(dead[..., None], 0)
        return tensors

    @classmethod
    def restore(cls, group: LayerGroup, policy: Policy, tensors: Mapping[str, Tensor], facts: StoreFacts) -> Store:
        """The store whose :meth:`compact_tensors` and :attr:`facts` these are; nothing is checked."""
        store = cls(group, policy)
        store._tail_bound = facts.tail_bound
        return store.holding(tensors, facts.used)

    def to(self, device: torch.device) -> Store:
        """A copy on another device."""
        twin = copy.copy(self)
        for name in (*self.row_dim, "tail_used"):
            setattr(twin, name, getattr(self, name).to(device, copy=True))
        for name in self._tables:
            delattr(twin, name)
        twin._index_pool()
        return twin

    # -- what a user reads ------------------------------------------------------------------------------------------

    @property
    def rows(self) -> int:
        """B."""
        return self.offsets.shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes the storages occupy: spare slots, tail capacity, positions and all tables included."""
        names = (*self.row_dim, *self._tables)
        return sum(getattr(self, name).untyped_storage().nbytes() for name in names)

    @property
    def lengths(self) -> Tensor:
        """Entries held per row, layer and KV head, window and appended tokens included; int64 ``[B, L, K]``."""
        if self.evicts:
            return (self.table[SLOT_POSITION] >= 0).sum(-1).transpose(0, 1)
        return self.pool_lengths + (self.used - self.tail_start)[:, None, None]

    @property
    def pool_lengths(self) -> Tensor:
        """Entries of each segment of the pool, int64 ``[B, L, K]``."""
        g = self.geometry
        return self.offsets.diff(dim=1).long().view(-1, g.layers, g.kv_heads)

    def positions(self, seen: Tensor) -> Tensor:
        """True positions of the entries, ascending, -1 where a head has fewer; int64 ``[B, L, K, P]``.

        Args:
            seen: real tokens seen of each row, int64 ``[B]``.
        """
        lengths = self.lengths
        if self.evicts:
            held = self.table[SLOT_POSITION].long().transpose(0, 1)
            last = torch.iinfo(torch.int64).max
            held = torch.where(held < 0, last, held).sort(-1).values[..., : int(lengths.max())]
            return torch.where(held == last, -1, held)
        pool_lengths = self.pool_lengths
        result = lengths.new_full((*lengths.shape, int(lengths.max())), -1)
        heads = self.geometry.kv_heads
        for row in range(lengths.shape[0]):
            tail = torch.arange(int(self.tail_start[row]), self.used, device=result.device) + (seen[row] - self.used)
            for head in range(self.geometry.layers * heads):
                layer, kv_head = divmod(head, heads)
                begin = int(self.offsets[row, head])
                count = int(pool_lengths[row, layer, kv_head])
                result[row, layer, kv_head, :count] = self.pool_positions[row, begin : begin + count]
                result[row, layer, kv_head, count : count + tail.numel()] = tail
        return result
