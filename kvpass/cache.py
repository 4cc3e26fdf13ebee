"""The compressed cache: a pool of kept prompt entries for all layers, and a dense tail of window and new tokens.

Legend: B batch, N prompt columns, L layers, K KV heads, D head dim, E pool slots, C tail capacity.
"""

from __future__ import annotations

import copy
import weakref
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import Cache

from kvpass.config import Budget, Geometry
from kvpass.errors import CacheMismatchError
from kvpass.evict import EMPTY, SLOT_POSITION, first_slots
from kvpass.policies.base import Policy
from kvpass.prompt_record import PromptRecord
from kvpass.reference import MASS, MEMORY, OWNER, PLACE, POSITION

TAIL_STEP = 64
"""Slots by which the tail grows."""

PREFILL_DYNAMIC = {"pool_k": {1}, "pool_v": {1}, "slots": {2}, "slot_traces": {2}, "tail_k": {3}, "tail_v": {3}}
CACHED_DYNAMIC = {"pool_k": {1}, "pool_v": {1}, "tail_k": {3}, "tail_v": {3}, "table": {4}, "memory": {4}}
"""Dimensions of the state that change from prompt to prompt: graphs treat them as symbols and do not recompile."""


class CompressedCache(Cache):
    """Keys and values that were worth keeping, as a ``transformers`` cache.

    Made by a model that ``kvpass.compile`` returned; comes back in ``output.past_key_values``. Shapes are those of
    ``_ROW_DIM_ALWAYS``; every tensor has one dimension for the batch row, so that rows can be picked and repeated.

    Args:
        policy: decides what is kept. budget: how much; None only for a policy that needs none. weights: a parameter of
            the model that fills the cache, by which it is known again.
    Attributes:
        columns: tokens seen, padding included. reusable: calls continue on a copy and leave this cache as it is.
    """

    layers: list[Any]

    _ROW_DIM_EVICTING: ClassVar = {"table": 2, "memory": 2, "quota": 1, "next_position": 0}
    _ROW_DIM_ALWAYS: ClassVar = {
        "pool_k": 0,
        "pool_v": 0,
        "pool_positions": 0,
        "offsets": 0,
        "tail_k": 1,
        "tail_v": 1,
        "tail_start": 0,
        "start": 0,
    }

    def __init__(self, policy: Policy, budget: Budget | None, weights: Tensor | None = None) -> None:
        super().__init__(layers=[])
        self._weights = None if weights is None else weakref.ref(weights)
        self.policy = policy
        self._evicts = policy.decode_rule() is not None
        self.budget = budget
        self.geometry: Geometry | None = None
        self.columns = 0
        self.used = 0
        self.reusable = False
        self.record: PromptRecord | None = None
        self._prefill: dict[str, Tensor] = {}
        self.start = torch.empty(0, dtype=torch.int64)

    @property
    def _row_dim(self) -> dict[str, int]:
        return {**self._ROW_DIM_ALWAYS, **(self._ROW_DIM_EVICTING if self._evicts else {})}

    # -- prefill ----------------------------------------------------------------------------------------------------

    def begin_prefill(self, start: Tensor, columns: int, extra: int = 0) -> None:
        """Forget everything and expect a prompt of ``columns`` columns whose real tokens begin at ``start``.

        The first ``extra`` columns are padding the caller added and are not counted as seen.
        """
        self.reset()
        self.start = start
        self._prompt_columns = columns
        self._extra = extra

    def prefill_state(self, geometry: Geometry, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
        """The buffers the prefill graph writes, allocated on first use.

        Raises:
            ValueError: the budget cannot hold window + 1 entries of some row.
            CacheMismatchError: a graph of another geometry asks for them.
        """
        if self._prefill and geometry != self.geometry:
            raise CacheMismatchError(f"a cache of {self.geometry} was handed to a model of {geometry}")
        if not self._prefill:
            self._prefill = self._allocate(geometry, dtype, device)
            self.geometry = geometry
        return self._prefill

    def _allocate(self, geometry: Geometry, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
        b, n, g = self.start.numel(), self._prompt_columns, geometry
        window = self.policy.window
        lengths = [n - column for column in self.start.tolist()]
        budgets = lengths if self.budget is None else [self.budget.check(length, window, g) for length in lengths]
        entries = [max(entry - window, 0) for entry in budgets]
        self._budgets = budgets
        bound = g.layers * g.kv_heads * max(n - window, 0) + g.layers
        slots = max(2, min(self.policy.capacity(max(entries), g.layers, g.kv_heads), bound))
        tail = min(window, n) + TAIL_STEP

        def empty(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        return {
            "pool_k": empty(b, slots, g.key_dim),
            "pool_v": empty(b, slots, g.value_dim),
            "slots": torch.full((4, b, slots), -1, dtype=torch.int32, device=device),
            "slot_traces": torch.zeros(2, b, slots, dtype=torch.float32, device=device),
            "ledger": torch.zeros(b, g.layers, dtype=torch.float64, device=device),
            "window_traces": torch.zeros(2, b, g.layers, g.kv_heads, max(window, 1), device=device),
            "tail_k": empty(g.layers, b, g.kv_heads, tail, g.key_dim),
            "tail_v": empty(g.layers, b, g.kv_heads, tail, g.value_dim),
            "offsets": empty(b, g.layers * g.kv_heads + 1, dtype=torch.int32),
            "entries": torch.tensor(entries, dtype=torch.int64, device=device),
            "start": self.start.to(device),
        }

    def finish_prefill(self) -> None:
        """Take over what the prefill graph left and drop the tables only the cascade needed."""
        state, g, n = self._prefill, self._known_geometry(), self._prompt_columns
        self._prefill = {}
        window = min(self.policy.window, n)
        device = state["pool_k"].device
        self.start = state["start"]
        self.pool_k, self.pool_v, self.offsets = state["pool_k"], state["pool_v"], state["offsets"]
        self.tail_k, self.tail_v = state["tail_k"], state["tail_v"]
        self.pool_positions = state["slots"][POSITION].clone()
        self.tail_start = (self.start - (n - window)).clamp(min=0)
        self.tail_used = torch.tensor(window, dtype=torch.int64, device=device)
        self.start = self.start - self._extra
        self.columns, self.used = n - self._extra, window
        owner = state["slots"][OWNER].long()
        heads = g.layers * g.kv_heads
        mass = torch.zeros(owner.shape[0], heads + 1, dtype=torch.float32, device=device)
        mass.scatter_add_(1, torch.where(owner < 0, heads, owner), state["slot_traces"][MASS])
        shape = (-1, g.layers, g.kv_heads)
        if self._evicts:
            self._begin_evicting(state)
        self.record = PromptRecord(
            geometry=g,
            start=self.start,
            columns=self.columns,
            entries=torch.tensor(self._budgets),
            kept=self._pool_lengths,
            window=window - self.tail_start,
            mass=mass[:, :heads].view(shape) + state["window_traces"][MASS].sum(-1),
            weights=state["ledger"],
            positions=self.pool_positions,
            offsets=self.offsets,
            nbytes=self.nbytes,
        )

    def _begin_evicting(self, state: dict[str, Tensor]) -> None:
        """Tables for a policy that evicts while decoding: who sits where, and how many entries each head may hold."""
        columns = self._prompt_columns
        first = self.start + self._extra
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
        kept = self._pool_lengths.transpose(0, 1)
        available = (columns - first - self.policy.window).clamp(min=0)
        self.quota = torch.stack([self.policy.decode_quota(layer, state["entries"], available) for layer in kept])
        self.next_position = self.columns - self.start
        occupied = (self.table[SLOT_POSITION] >= 0).sum(-1)
        needed = torch.maximum(self.quota + rule.window, occupied) + 1 - kept
        self._tail_bound = max(int(needed.max()), 1)

    # -- decode and extend ------------------------------------------------------------------------------------------

    def ensure_room(self, tokens: int) -> None:
        """Grow the tail, a bucket at a time, so that ``tokens`` more fit."""
        old_capacity = self.tail_k.shape[3]
        needed = min(self.used + tokens, self._tail_bound) if self._evicts else self.used + tokens
        if needed <= old_capacity:
            return
        capacity = -(-needed // TAIL_STEP) * TAIL_STEP
        if self._evicts:
            capacity = min(capacity, self._tail_bound)
            extra = (0, capacity - old_capacity)
            self.table, self.memory = pad(self.table, extra, value=EMPTY), pad(self.memory, extra)
        for name in ("tail_k", "tail_v"):
            old: Tensor = getattr(self, name)
            grown = old.new_empty(*old.shape[:3], capacity, old.shape[4])
            grown[:, :, :, :old_capacity] = old
            setattr(self, name, grown)

    def cached_state(self, geometry: Geometry) -> dict[str, Tensor]:
        """The buffers decode and extend graphs read, the tail being appended to in place.

        Raises:
            CacheMismatchError: the graph's model has another geometry than the one that filled the cache.
        """
        if geometry != self.geometry:
            raise CacheMismatchError(f"{self!r} of {self.geometry} was handed to a model of {geometry}")
        names = ["pool_k", "pool_v", "offsets", "tail_k", "tail_v"]
        names += ["table", "memory", "quota", "next_position"] if self._evicts else ["tail_start", "tail_used"]
        return {name: getattr(self, name) for name in names}

    def advance(self, tokens: int) -> None:
        """Count tokens whose rows a graph has appended to the tail."""
        self.used += tokens
        self.columns += tokens
        self.tail_used.add_(tokens)
        if self._evicts:
            self.next_position.add_(tokens)

    # -- what a user reads ------------------------------------------------------------------------------------------

    def belongs_to(self, policy: Policy, budget: Budget | None, weights: Tensor) -> bool:
        """Whether a model with these settings and this parameter filled the cache."""
        made = None if self._weights is None else self._weights()
        return made is weights and self.policy == policy and self.budget == budget

    @property
    def is_empty(self) -> bool:
        return self.columns == 0

    @property
    def batch_size(self) -> int:
        return self.start.numel()

    @property
    def nbytes(self) -> int:
        """Bytes the cache's storages occupy, spare slots, tail capacity, positions and offsets included."""
        if self.is_empty:
            return 0
        return sum(getattr(self, name).untyped_storage().nbytes() for name in self._row_dim)

    @property
    def lengths(self) -> Tensor:
        """Entries kept per row, layer and KV head, window and appended tokens included; int64 ``[B, L, K]``."""
        self._known_geometry()
        if self._evicts:
            return (self.table[SLOT_POSITION] >= 0).sum(-1).transpose(0, 1)
        return self._pool_lengths + (self.used - self.tail_start)[:, None, None]

    @property
    def _pool_lengths(self) -> Tensor:
        """Entries of each segment of the pool, int64 ``[B, L, K]``."""
        g = self._known_geometry()
        return self.offsets.diff(dim=1).long().view(-1, g.layers, g.kv_heads)

    @property
    def positions(self) -> Tensor:
        """True positions of the kept entries, ascending, -1 where a head has fewer; int64 ``[B, L, K, P]``."""
        g = self._known_geometry()
        lengths = self.lengths
        if self._evicts:
            held = self.table[SLOT_POSITION].long().transpose(0, 1)
            last = torch.iinfo(torch.int64).max
            held = torch.where(held < 0, last, held).sort(-1).values[..., : int(lengths.max())]
            return torch.where(held == last, -1, held)
        pool_lengths = self._pool_lengths
        result = lengths.new_full((*lengths.shape, int(lengths.max())), -1)
        first = self.columns - self.used
        for row in range(self.batch_size):
            tail = torch.arange(int(self.tail_start[row]), self.used, device=result.device)
            tail += first - int(self.start[row])
            for head in range(g.layers * g.kv_heads):
                layer, kv_head = divmod(head, g.kv_heads)
                begin = int(self.offsets[row, head])
                count = int(pool_lengths[row, layer, kv_head])
                result[row, layer, kv_head, :count] = self.pool_positions[row, begin : begin + count]
                result[row, layer, kv_head, count : count + tail.numel()] = tail
        return result

    @property
    def attention_mask(self) -> Tensor:
        """Which columns seen so far are real tokens, int64 ``[B, columns]``."""
        return (torch.arange(self.columns, device=self.start.device) >= self.start[:, None]).long()

    def clone(self) -> CompressedCache:
        """An independent copy, not reusable; what no call ever writes is shared."""
        twin = copy.copy(self)
        twin.reusable = False
        written = {"tail_k", "tail_v", "tail_used"}
        if self._evicts:
            written |= {"pool_k", "pool_v", "table", "memory", "next_position"}
        for name in written:
            setattr(twin, name, getattr(self, name).clone())
        return twin

    # -- the transformers cache interface ---------------------------------------------------------------------------

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens seen, padding columns included as in every transformers cache; never the number of kept entries."""
        return self.columns

    def get_max_length(self, layer_idx: int | None = 0) -> int:
        return -1

    get_max_cache_shape = get_max_length

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self.columns + int(query_length), 0

    @property
    def is_compileable(self) -> bool:
        """False: kvpass has compiled the model itself; ``generate`` must not try to."""
        return False

    @property
    def is_initialized(self) -> bool:
        return not self.is_empty

    @property
    def is_sliding(self) -> list[bool]:
        return [False] * len(self)

    def __len__(self) -> int:
        return 0 if self.geometry is None else self.geometry.layers

    def __repr__(self) -> str:
        return (
            f"CompressedCache(policy={self.policy.name!r}, budget={self.budget}, tokens={self.columns}, "
            f"batch={self.batch_size}, nbytes={self.nbytes})"
        )

    def reset(self) -> None:
        """Forget every entry; the cache can be filled again."""
        for name in (*self._row_dim, "tail_used"):
            self.__dict__.pop(name, None)
        self.start = torch.empty(0, dtype=torch.int64)
        self.columns = self.used = 0
        self.reusable = False
        self.record = None
        self._prefill = {}

    def _pick_rows(self, index: Tensor) -> None:
        for name, dim in self._row_dim.items():
            tensor: Tensor = getattr(self, name)
            setattr(self, name, tensor.index_select(dim, index.to(tensor.device)))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row i becomes what row ``beam_idx[i]`` was (beam search)."""
        self._pick_rows(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows ``indices``."""
        self._pick_rows(torch.arange(self.batch_size, device=indices.device)[indices])

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row ``repeats`` times, neighbours."""
        self._pick_rows(torch.arange(self.batch_size).repeat_interleave(repeats))

    def crop(self, *args: Any, **kwargs: Any) -> None:
        """Not possible: the entries a shorter cache would need may be gone."""
        raise NotImplementedError("a compressed cache cannot be cropped; assisted generation is not supported")

    def update(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError("a CompressedCache is filled by compiled graphs, only in the model that made it")

    def _known_geometry(self) -> Geometry:
        if self.geometry is None:
            raise ValueError("the cache is empty: no prompt has been prefilled into it")
        return self.geometry
