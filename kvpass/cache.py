"""The compressed cache: stores of kept entries, rings of sliding-window layers, and what has been seen.

Legend: B batch, N prompt columns, L layers, K KV heads, P entries of the longest head.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Mapping, Sequence, Set
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import Cache

from kvpass.cache_file import write_cache_file
from kvpass.config import Budget, Geometry, Layout
from kvpass.errors import CacheMismatchError
from kvpass.identity import Identity
from kvpass.policies.base import Policy
from kvpass.prompt_record import PromptRecord
from kvpass.recompress import NOT_DUE
from kvpass.ring import Ring
from kvpass.store import CACHED_DYNAMIC, PREFILL_DYNAMIC, Store
from kvpass.version import __version__


class CompressedCache(Cache):
    """Keys and values that were worth keeping, as a ``transformers`` cache.

    Made by a model that ``kvpass.compile`` returned; comes back in ``output.past_key_values``.

    Args:
        policy: decides what is kept. budget: how much; None only for a policy that needs none.
        identity: the model that fills the cache, by which it is known again; None for one nobody can name.
    Attributes:
        columns: tokens seen, padding included. start: first real column of each row, int64 ``[B]``.
        reusable: calls continue on a copy and leave this cache as it is.
        interrupted: a call that had begun to overwrite entries did not end; the cache can only be reset.
        stores: the layers that share the budget, one store per KV geometry. rings: the layers with a sliding window.
    """

    layers: list[Any]

    def __init__(self, policy: Policy, budget: Budget | None, identity: Identity | None = None) -> None:
        super().__init__(layers=[])
        self._weights = None if identity is None else weakref.ref(identity.weights)
        self._identity = None if identity is None else weakref.ref(identity)
        self.policy = policy
        self.budget = budget
        self._forget()

    def _forget(self) -> None:
        self.layout: Layout | None = None
        self.stores: list[Store] = []
        self.rings: list[Ring] = []
        self.columns = 0
        self.start = torch.empty(0, dtype=torch.int64)
        self.reusable = False
        self.interrupted = False
        self.record: PromptRecord | None = None

    # -- prefill ----------------------------------------------------------------------------------------------------

    def begin_prefill(self, start: Tensor, columns: int, extra: int = 0) -> None:
        """Forget everything and expect a prompt of ``columns`` columns whose real tokens begin at ``start``.

        The first ``extra`` columns are padding the caller added and are not counted as seen.
        """
        self._forget()
        self.start = start
        self._prompt_columns = columns
        self._extra = extra

    def prefill_state(self, layout: Layout, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
        """The buffers the prefill graph writes, allocated on first use.

        Raises:
            ValueError: the budget cannot hold window + 1 entries of some row.
            CacheMismatchError: a graph of another layout asks for them.
        """
        if self.layout is None:
            self._allocate(layout, dtype, device)
        self._check_layout(layout)
        return {**self._state([store.prefill_state for store in self.stores]), "start": self.start}

    def _allocate(self, layout: Layout, dtype: torch.dtype, device: torch.device) -> None:
        n, window = self._prompt_columns, self.policy.window
        lengths = [n - column for column in self.start.tolist()]
        self._budgets = lengths
        if self.budget is not None and layout.pools:
            self._budgets = [self.budget.check(length, window, layout.token_bytes) for length in lengths]
        self.stores = [Store(group, self.policy) for group in layout.pools]
        for store in self.stores:
            store.begin_prefill(self._budgets, self.start, n, dtype, device)
        self.rings = [Ring(group, len(lengths), dtype, device) for group in layout.rings]
        self._device = device
        self.layout = layout

    def finish_prefill(self) -> None:
        """Take over what the prefill graph left."""
        n, extra = self._prompt_columns, self._extra
        window = min(self.policy.window, n)
        stores = tuple(store.finish_prefill() for store in self.stores)
        self._first_column = self.start.to(self._device)
        self._seen_columns = torch.tensor(n, dtype=torch.int64, device=self._device)
        self.start = self._first_column - extra
        self.columns = n - extra
        self.record = PromptRecord(
            start=self.start,
            columns=self.columns,
            entries=torch.tensor(self._budgets),
            window=window - (self._first_column - (n - window)).clamp(min=0),
            stores=stores,
            rings=tuple(ring.group for ring in self.rings),
            nbytes=self.nbytes,
            ring_nbytes=sum(ring.nbytes for ring in self.rings),
        )

    # -- decode and extend ------------------------------------------------------------------------------------------

    def ensure_room(self, tokens: int) -> None:
        """Grow the tails, a bucket at a time, so that ``tokens`` more fit."""
        for store in self.stores:
            store.ensure_room(tokens)

    def cached_state(self, layout: Layout) -> dict[str, Tensor]:
        """The buffers decode and extend graphs read, tails and rings being written in place.

        ``seen`` int64 ``[]`` counts the columns before the new tokens, ``first`` int64 ``[B]`` is the first real one.

        Raises:
            CacheMismatchError: the graph's model has another layout than the one that filled the cache.
        """
        self._check_layout(layout)
        state = self._state([store.cached_state for store in self.stores])
        return {**state, "seen": self._seen_columns, "first": self._first_column}

    def advance(self, tokens: int) -> None:
        """Count tokens whose rows a graph has written."""
        self.columns += tokens
        self._seen_columns.add_(tokens)
        for store in self.stores:
            store.advance(tokens)

    @property
    def overwrites(self) -> bool:
        """Whether decoding overwrites entries, so that an interrupted call cannot be taken back."""
        return bool(self.rings) or any(store.evicts for store in self.stores)

    def begin_turn(self, tokens: int, occasion: float) -> bool:
        """Prepare for compressing rows again that hold more than ``occasion`` budgets after ``tokens`` more.

        To be called when there is room for them, and followed by :meth:`end_turn`.

        Returns:
            whether there is such a row; the extend graph must then observe the turn.
        """
        if self.budget is None or not self.stores or self.stores[0].evicts:
            return False
        heads = sum(store.geometry.layers * store.geometry.kv_heads for store in self.stores)
        held = sum((store.lengths.sum((1, 2)) for store in self.stores), torch.tensor(tokens * heads)).cpu()
        budgets = torch.tensor(self._budgets)
        due = held > budgets * (heads * occasion)
        if not bool(due.any()):
            return False
        window = torch.where(due, budgets.clamp(max=self.policy.window), NOT_DUE)
        for store in self.stores:
            store.begin_turn(window)
        return True

    def end_turn(self) -> None:
        """Forget what :meth:`begin_turn` prepared."""
        for store in self.stores:
            store.end_turn()

    def recompress(self) -> None:
        """Cut the rows that were due to their budget, by what the turn's queries saw; the others stay as they are.

        ``record`` is renewed when all rows were due.
        """
        budgets = torch.tensor(self._budgets, device=self._device)
        window = budgets.clamp(max=self.policy.window)
        seen = self.columns - self.start
        done = [store.recompress(budgets - window, seen) for store in self.stores]
        every_row = all(bool((store.cached_state["turn_window"] != NOT_DUE).all()) for store in self.stores)
        self.stores = [store for store, _ in done]
        if every_row:
            self.record = PromptRecord(
                start=self.start,
                columns=self.columns,
                entries=budgets,
                window=window,
                stores=tuple(record for _, record in done),
                rings=tuple(ring.group for ring in self.rings),
                nbytes=self.nbytes,
                ring_nbytes=sum(ring.nbytes for ring in self.rings),
            )

    def _state(self, stores: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        named = [(f"store{i}", state) for i, state in enumerate(stores)]
        named += [(f"ring{i}", ring.state) for i, ring in enumerate(self.rings)]
        return {f"{prefix}_{name}": tensor for prefix, state in named for name, tensor in state.items()}

    def _check_layout(self, layout: Layout) -> None:
        if layout != self.layout:
            raise CacheMismatchError(f"{self!r} of layout {self.layout} was handed to a model of layout {layout}")

    # -- what a user reads ------------------------------------------------------------------------------------------

    def belongs_to(self, policy: Policy, budget: Budget | None, identity: Identity) -> bool:
        """Whether a model with these settings and the same parameters filled the cache."""
        made = None if self._weights is None else self._weights()
        return made is identity.weights and self.policy == policy and self.budget == budget

    @property
    def is_empty(self) -> bool:
        return self.columns == 0

    @property
    def batch_size(self) -> int:
        return self.start.numel()

    @property
    def geometry(self) -> Geometry:
        """KV geometry of the layers that share the budget.

        Raises:
            ValueError: the cache is empty, or those layers have several geometries or there are none; see ``stores``.
        """
        if len(self.stores) != 1:
            raise ValueError(f"{self!r} has {len(self.stores)} KV geometries; ask each of cache.stores")
        return self.stores[0].geometry

    @property
    def nbytes(self) -> int:
        """Bytes the cache's storages occupy, spare slots, tail capacity, rings, positions and offsets included."""
        if self.is_empty:
            return 0
        starts = (self.start, self._first_column)
        return sum(part.nbytes for part in self._parts) + sum(tensor.untyped_storage().nbytes() for tensor in starts)

    @property
    def _parts(self) -> tuple[Store | Ring, ...]:
        return (*self.stores, *self.rings)

    @property
    def device(self) -> torch.device:
        """Where the entries live."""
        self._known_layout()
        return self._device

    @property
    def layer_ids(self) -> tuple[int, ...]:
        """Index, among all attention sites of the model, of each layer that shares the budget, ascending."""
        return tuple(sorted(layer for store in self.stores for layer in store.group.layers))

    @property
    def lengths(self) -> Tensor:
        """Entries held per row, layer and KV head, window and appended tokens included; int64 ``[B, L, K]``.

        L counts ``layer_ids``; heads that a layer of another geometry does not have hold 0.
        """
        self._known_layout()
        return by_layer([store.group.layers for store in self.stores], [store.lengths for store in self.stores], 0)

    @property
    def positions(self) -> Tensor:
        """True positions of the entries, ascending, -1 where a head has fewer; int64 ``[B, L, K, P]``."""
        self._known_layout()
        seen = self.columns - self.start
        return by_layer(
            [store.group.layers for store in self.stores], [store.positions(seen) for store in self.stores], -1
        )

    @property
    def attention_mask(self) -> Tensor:
        """Which columns seen so far are real tokens, int64 ``[B, columns]``."""
        return (torch.arange(self.columns, device=self.start.device) >= self.start[:, None]).long()

    @torch.inference_mode(False)
    def clone(self) -> CompressedCache:
        """An independent copy, not reusable; what no call ever writes is shared."""
        twin = copy.copy(self)
        twin.reusable = False
        twin.stores = [store.clone() for store in self.stores]
        twin.rings = [ring.clone() for ring in self.rings]
        twin._seen_columns = self._seen_columns.clone()
        return twin

    @torch.inference_mode(False)
    def to(self, device: torch.device | str) -> CompressedCache:
        """The cache itself where it is on ``device``, else a copy there, reusable if this one is."""
        target = torch.device(device)
        self._known_layout()
        if target.type == self._device.type and target.index in (None, self._device.index):
            return self
        twin = copy.copy(self)
        twin.stores = [store.to(target) for store in self.stores]
        twin.rings = [ring.to(target) for ring in self.rings]
        for name in ("start", "_first_column", "_seen_columns"):
            setattr(twin, name, getattr(self, name).to(target))
        twin._device = twin.start.device
        return twin

    # -- files ------------------------------------------------------------------------------------------------------

    def save(self, path: str | Path, *, notes: Mapping[str, Any] | None = None) -> None:
        """Write the cache to a file that :func:`kvpass.load_cache` reads, replacing one that is there.

        Slots that hold no entry are not written. The file states its checksum and describes the model that filled
        the cache, so that no other model can be given it.

        Args:
            notes: what the caller wants to find in the file's metadata again; anything JSON can say.
        Raises:
            ValueError: the cache is empty, or the model that filled it is gone or was compiled by the raw backend.
        """
        layout = self._known_layout()
        identity = None if self._identity is None else self._identity()
        if identity is None:
            raise ValueError(f"{self!r} cannot be saved: the model that filled it is gone, or never was a kvpass model")
        parts = {f"store{i}": store.compact_tensors() for i, store in enumerate(self.stores)}
        parts |= {f"ring{i}": ring.state for i, ring in enumerate(self.rings)}
        tensors = {f"{prefix}_{name}": tensor for prefix, part in parts.items() for name, tensor in part.items()}
        metadata = {
            "kvpass_version": __version__,
            "model": identity.describe(),
            "policy": self.policy.spec,
            "budget": None if self.budget is None else asdict(self.budget),
            "layout": asdict(layout),
            "columns": self.columns,
            "seen_columns": int(self._seen_columns),
            "entries": self._budgets,
            "reusable": self.reusable,
            "stores": [store.facts for store in self.stores],
            "notes": dict(notes or {}),
        }
        write_cache_file(path, {**tensors, "start": self.start, "first_column": self._first_column}, metadata)

    @classmethod
    def restore(
        cls,
        policy: Policy,
        budget: Budget | None,
        identity: Identity,
        metadata: Mapping[str, Any],
        tensors: Mapping[str, Tensor],
    ) -> CompressedCache:
        """The cache whose :meth:`save` wrote these.

        Raises:
            ValueError: they do not fit together.
        """
        cache = cls(policy, budget, identity)
        cache.layout = layout = Layout.from_dict(metadata["layout"])

        def part(prefix: str) -> dict[str, Tensor]:
            return {name[len(prefix) :]: tensor for name, tensor in tensors.items() if name.startswith(prefix)}

        cache.stores = [
            Store.restore(group, policy, part(f"store{i}_"), metadata["stores"][i])
            for i, group in enumerate(layout.pools)
        ]
        cache.rings = [Ring.restore(group, part(f"ring{i}_")) for i, group in enumerate(layout.rings)]
        cache.start, cache._first_column = tensors["start"], tensors["first_column"]
        rows = [part.rows for part in cache._parts]
        if set(rows) != {cache.start.numel()} or cache._first_column.shape != cache.start.shape:
            raise ValueError(f"parts of {rows} rows beside {cache.start.numel()} first columns")
        cache._device = cache.start.device
        cache._budgets = metadata["entries"]
        cache.columns = metadata["columns"]
        cache._seen_columns = torch.tensor(metadata["seen_columns"], dtype=torch.int64, device=cache._device)
        cache.reusable = metadata["reusable"]
        return cache

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
        groups = () if self.layout is None else (*self.layout.pools, *self.layout.rings)
        return sum(group.geometry.layers for group in groups)

    def __repr__(self) -> str:
        return (
            f"CompressedCache(policy={self.policy.name!r}, budget={self.budget}, tokens={self.columns}, "
            f"batch={self.batch_size}, nbytes={self.nbytes})"
        )

    def reset(self) -> None:
        """Forget every entry; the cache can be filled again."""
        self._forget()

    @torch.inference_mode(False)
    def _pick_rows(self, index: Tensor) -> None:
        index = index.clone()
        for part in self._parts:
            part.pick_rows(index)
        index = index.to(self.start.device)
        self.start, self._first_column = self.start[index], self._first_column[index]
        self._budgets = [self._budgets[row] for row in index.tolist()]

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

    def _known_layout(self) -> Layout:
        if self.layout is None or self.is_empty:
            raise ValueError("the cache is empty: no prompt has been prefilled into it")
        return self.layout


def by_layer(layers: Sequence[Sequence[int]], parts: Sequence[Tensor], fill: float) -> Tensor:
    """Tensors ``[B, L_i, ...]`` of several groups of layers as one, layers ascending, smaller ones filled up.

    Raises:
        ValueError: there are none.
    """
    if not parts:
        raise ValueError("no layer shares the budget: all have sliding windows")
    if len(parts) == 1:
        return parts[0]
    sizes = [max(extents) for extents in zip(*(part.shape[2:] for part in parts), strict=True)]
    padded = []
    for part in parts:
        missing = [size - extent for size, extent in zip(sizes, part.shape[2:], strict=True)]
        padded.append(pad(part, [edge for extra in reversed(missing) for edge in (0, extra)], value=fill))
    order = torch.tensor([layer for group in layers for layer in group]).argsort()
    return torch.cat(padded, 1)[:, order.to(parts[0].device)]


def dynamic_dims(state: Mapping[str, Tensor], phase: str) -> dict[str, Set[int]]:
    """Dimensions of the state that a graph of ``phase`` treats as symbols, by name."""
    table = PREFILL_DYNAMIC if phase == "prefill" else CACHED_DYNAMIC
    return {name: table.get(name.split("_", 1)[-1], set()) for name in state}
