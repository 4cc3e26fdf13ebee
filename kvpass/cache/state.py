"""The kept entries of a batch of sequences: pools and tails, rings of sliding-window layers, recurrent states.

Legend: B batch, N prompt columns, L layers, K KV heads, P entries of the longest head.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvpass.cache.buffer_reuse import NO_REUSE, BufferReuse
from kvpass.cache.cache_file import CacheMetadata, check_tensors
from kvpass.cache.layers import FullAttentionLayers
from kvpass.cache.part import CachePart, RecurrentState, SlidingWindowLayers
from kvpass.cache.prompt_record import LayersRecord, PromptRecord, scatter_to_layers
from kvpass.cache.recompression import Recompression, without
from kvpass.cache.shared_heads import divided, of_part, record_of_all
from kvpass.config import Budget, EntryFormat, Layout
from kvpass.errors import CacheMismatchError
from kvpass.operands import RingBuffers
from kvpass.ops.recompress import NOT_DUE
from kvpass.policies.base import Policy
from kvpass.ranks import ONE_PROCESS, Ranks

EMPTY_LAYOUT = Layout((), ())


@dataclass(eq=False, kw_only=True)
class KVState:
    """Entries of all layers, and what counts them. With the first four alone it is empty.

    All padding of a row is held on the left; where calls had padding behind the prompt, ``padded`` says where.
    """

    policy: Policy
    budget: Budget | None  # None only for a policy that needs none
    ranks: Ranks = ONE_PROCESS  # processes that share the heads; the entries are of the heads of this one
    entry_format: EntryFormat = "model"
    layout: Layout = EMPTY_LAYOUT  # of the parts
    parts: Sequence[CachePart] = ()  # full-attention layers, sliding-window layers, recurrent states
    budgets: Sequence[int] = ()  # of each row, in entries
    start: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64, device="cpu"))  # first real column
    ids: Tensor | None = None  # of the text, padding included, int32 [B, text_columns]; None where they are not known
    protected: Tensor | None = None  # prompt tokens kept in any case, bool [B, n] by true position; None: none
    ahead: Tensor | None = None  # of positions of later tokens before their numbers, int64 [B]; None: of text
    columns: int = 0  # tokens seen, padding included
    forgotten: frozenset[int] = frozenset()  # true positions whose entries were removed, of every row
    prompt_columns: int = 0
    appended: int = 0  # after the prompt was compressed, or after the last call with padding
    padded: Tensor | None = None  # mask of the first n columns of the text, int64 [B, n]
    seen: Tensor = field(
        default_factory=lambda: torch.zeros((), dtype=torch.int64, device="cpu")
    )  # columns, for graphs
    reuse: BufferReuse = NO_REUSE  # where memory of growth and of copies comes from

    # -- decode and extend ------------------------------------------------------------------------------------------

    def ensure_room(self, tokens: int, expected: int = 0) -> None:
        """Grow the tails to hold ``tokens`` more; if more columns are expected in all, for these."""
        for part in self.parts:
            part.ensure_room(tokens, expected - self.text_columns, self.reuse)

    def cached_state(
        self, layout: Layout, dtype: torch.dtype, recompressions: Sequence[Recompression] = ()
    ) -> dict[str, Tensor]:
        """Return the buffers of decode and extend graphs, which write tails and rings in place.

        ``seen`` int64 ``[]`` counts the columns before the new tokens, ``first`` int64 ``[B]`` is the first real one.

        Args:
            layout, dtype: of the keys and values in the graph. recompressions: that an extend graph scores.
        Raises:
            CacheMismatchError: the cache has others.
        """
        floats = [ring.buffers.ring_k for ring in self.sliding_layers]
        if self.entry_format == "model":
            floats += [store.buffers.tail_k for store in self.full_layers]
        for keys in floats:
            if keys.dtype != dtype:
                raise CacheMismatchError(
                    f"a cache of {keys.dtype} was handed to a model of {dtype}: prefill the prompt again"
                )
        self.check_layout(layout)
        state = named(layout, [part.cached_state for part in self.parts])
        state |= named(layout, [turn.buffers._asdict() for turn in recompressions])  # of the first parts
        return {**state, "seen": self.seen, "first": self.start}

    def check_layout(self, layout: Layout) -> None:
        """Raise CacheMismatchError if a graph has another layout."""
        if layout != self.layout:
            raise CacheMismatchError(f"a cache of layout {self.layout} was handed to a model of layout {layout}")

    def advance(self, tokens: int, ids: Tensor | None = None) -> None:
        """Count tokens whose rows a graph has written; ``ids`` are theirs, ``[B, tokens]``."""
        self.ids = None if self.ids is None or ids is None else torch.cat([self.ids, ids.int()], 1)
        self.columns += tokens
        self.appended += tokens
        self.seen.add_(tokens)
        for part in self.parts:
            part.advance(tokens)

    def crop(self, tokens: int) -> None:
        """Take back ``tokens`` of those appended; a failure leaves counters that contradict each other."""
        self.appended -= tokens
        self.columns -= tokens
        self.seen.sub_(tokens)
        self.ids = None if self.ids is None else self.ids[:, : self.text_columns]
        for part in self.parts:
            part.crop(tokens)

    @property
    def overwrites(self) -> bool:
        """Whether decoding overwrites entries, so that an interrupted call cannot be rolled back."""
        return any(part.overwrites for part in self.parts)

    @property
    def only_appends(self) -> bool:
        """Whether appended tokens can be taken back: no call overwrites entries or the state of a recurrent layer."""
        return not self.overwrites and not self.states

    def begin_recompression(self, tokens: int, threshold: float) -> Sequence[Recompression]:
        """Prepare recompression of rows that exceed ``threshold`` budgets after ``tokens`` more, which have room.

        Returns:
            one for each of ``full_layers``, whose scores the extend graph must then compute; none without such a row.
        """
        stores = self.full_layers
        if threshold == float("inf") or self.budget is None or not stores or stores[0].evicts:
            return ()
        heads = sum(store.geometry.layers * store.geometry.kv_heads for store in stores)
        entries = torch.stack([store.lengths.sum((1, 2)) for store in stores]).sum(0) + tokens * heads
        entries = self.ranks.gather(entries[None], 0).sum(0).cpu()
        budgets = torch.tensor(self.budgets, device="cpu")
        due = entries > budgets * (heads * self.ranks.size * threshold)
        if not bool(due.any()):
            return ()
        tail = stores[0].used + tokens - stores[0].buffers.tail_start.cpu()  # shorter after tokens were forgotten
        window = torch.where(due, torch.minimum(budgets.clamp(max=self.policy.window), tail), NOT_DUE)
        return [Recompression(store, window) for store in stores]

    def recompress(self, recompressions: Sequence[Recompression]) -> PromptRecord | None:
        """Compress rows over the threshold to their budget, by the recompression scores.

        Args:
            recompressions: of :meth:`begin_recompression`.
        Returns:
            the new record if all rows were compressed, else None.
        """
        budgets = torch.tensor(self.budgets, device=self.device)
        window, seen = recompressions[0].buffers.recompress_window, self.columns - self.start
        done = [turn.finish(budgets - window, seen, self.protected) for turn in recompressions]
        self.parts = [*(store for store, _ in done), *self.parts[len(done) :]]
        self.appended = 0
        if not all(turn.every_row for turn in recompressions):
            return None
        return self.record(budgets, window, [record for _, record in done])

    def record(self, entries: Tensor, window: Tensor, full_layers: Sequence[LayersRecord]) -> PromptRecord:
        """Return the record of what was kept, of all heads where several processes share them.

        Args:
            entries, window: of each row, int64 ``[B]``. full_layers: records of the stores.
        """
        record = PromptRecord(
            policy=self.policy,
            budget=self.budget,
            start=self.start.clone(),  # the record outlives the cache
            columns=self.columns,
            entries=entries,
            window=window,
            full_layers=tuple(full_layers),
            sliding_layers=tuple(ring.group for ring in self.sliding_layers),
            nbytes=self.nbytes,
            ring_nbytes=sum(ring.nbytes for ring in self.sliding_layers),
            state_nbytes=sum(state.nbytes for state in self.states),
            entry_format=self.entry_format,
            protected=0 if self.protected is None else int(self.protected.sum()),
        )
        return record_of_all(record, self.ranks, self.device) if self.ranks.several else record

    @torch.inference_mode(False)
    def without(self, positions: Set[int]) -> KVState:
        """Return a state without the entries at these true positions of each row, of which no ring holds one."""
        gone = torch.zeros(self.columns, dtype=torch.bool, device=self.device)
        gone[[*positions]] = True
        stores = [without(store, gone, self.columns - self.start) for store in self.full_layers]
        of_text, real = gone[self.text_positions], self.attention_mask
        left = ~(of_text[(real.cumsum(1) - 1).clamp(min=0)] & (real > 0))  # columns of the text that stay
        ids = None if self.ids is None else self.ids[left].view(len(left), -1)
        padded = None if self.padded is None else real[left].view(len(left), -1)
        return replace(
            self,
            parts=[*stores, *self.parts[len(stores) :]],
            forgotten=self.forgotten | positions,
            ids=ids,
            padded=padded,
            prompt_columns=min(self.prompt_columns, int(left[0].sum())),
            appended=0,
        )

    # -- what a user reads ------------------------------------------------------------------------------------------

    @property
    def text_columns(self) -> int:
        """Columns of the text as it is now, without those of forgotten tokens."""
        return self.columns - len(self.forgotten)

    @property
    def next_positions(self) -> Tensor:
        """Position of the next token of each row, int64 ``[B]``: those seen, and what images are ahead of these."""
        seen = self.columns - self.start
        return seen if self.ahead is None else seen + self.ahead

    @property
    def text_positions(self) -> list[int]:
        """True positions of the tokens of the text, of a row without padding."""
        return [position for position in range(self.columns) if position not in self.forgotten]

    @property
    def nbytes(self) -> int:
        """Bytes of the storages: spare slots, tail capacity, rings, states, positions, ids, all tables."""
        tables = [x for x in (self.start, self.ids, self.protected, self.ahead) if x is not None]
        return sum(part.nbytes for part in self.parts) + sum(x.untyped_storage().nbytes() for x in tables)

    @property
    def full_layers(self) -> list[FullAttentionLayers]:
        """The layers that share the budget, a group for each KV geometry."""
        return [part for part in self.parts if isinstance(part, FullAttentionLayers)]

    @property
    def sliding_layers(self) -> list[SlidingWindowLayers]:
        return [part for part in self.parts if isinstance(part, SlidingWindowLayers)]

    @property
    def states(self) -> list[RecurrentState]:
        return [part for part in self.parts if isinstance(part, RecurrentState)]

    @property
    def device(self) -> torch.device:
        return self.start.device

    @property
    def lengths(self) -> Tensor:
        """Entries, all included; int64 ``[B, L, K]``; a head that a layer of another geometry lacks has 0."""
        lengths = [store.lengths for store in self.full_layers]
        return scatter_to_layers(self.layout.pools, lengths, 0, (len(self.start), 0, 0))

    @property
    def positions(self) -> Tensor:
        """True positions of the entries, ascending, -1 where a head has fewer; int64 ``[B, L, K, P]``."""
        positions = [store.positions(self.columns - self.start) for store in self.full_layers]
        return scatter_to_layers(self.layout.pools, positions, -1, (len(self.start), 0, 0, 0))

    @property
    def attention_mask(self) -> Tensor:
        """1 for columns seen so far that are real tokens, 0 for padding, as calls gave it; int64 ``[B, columns]``."""
        if self.padded is not None:
            return pad(self.padded, (0, self.text_columns - self.padded.shape[1]), value=1)
        return (torch.arange(self.text_columns, device=self.device) >= self.start[:, None]).long()

    # -- rows, copies and files -------------------------------------------------------------------------------------

    @property
    def _of_tokens(self) -> dict[str, Tensor | None]:
        """What may be known of the tokens of each row, by name."""
        return {name: getattr(self, name) for name in ("ids", "padded", "protected", "ahead")}

    @torch.inference_mode(False)
    def clone(self) -> KVState:
        """Return an independent copy; buffers that no call writes are shared."""
        return replace(
            self, parts=[part.clone(self.reuse) for part in self.parts], seen=self.reuse.copy("seen", self.seen)
        )

    @torch.inference_mode(False)
    def to(self, device: torch.device) -> KVState:
        parts = [part.to(device) for part in self.parts]
        start, seen = self.start.to(device), self.seen.to(device)
        tables = {name: None if x is None else x.to(device) for name, x in self._of_tokens.items()}
        return replace(self, parts=parts, start=start, seen=seen, **tables)  # type: ignore[arg-type]

    @torch.inference_mode(False)
    def with_rows(self, index: Tensor) -> KVState:
        """Return a state whose row i is row ``index[i]`` of this one."""
        if index.numel() == 0:
            raise ValueError("no row of the cache is selected: select at least one, or reset the cache")
        index = index.clone().to(self.device)
        tables = {name: None if x is None else x[index] for name, x in self._of_tokens.items()}
        budgets = [self.budgets[row] for row in index.tolist()]
        parts = [part.with_rows(index) for part in self.parts]
        return replace(self, parts=parts, start=self.start[index], budgets=budgets, **tables)  # type: ignore[arg-type]

    @torch.inference_mode(False)
    def joined(self, states: Sequence[KVState], order: Tensor, mask: Tensor, ids: Tensor) -> KVState:
        """Return the rows of states that were rows of this one; padding is added before the shorter ones.

        A row's padding does not change what it computes (contract 4).

        Args:
            order: place of each row among those of all states, int64 ``[B]``. mask: of the text from now on, int64.
            ids: of the new columns ``[B, T]``.
        """
        columns = mask.shape[1] + self.columns - self.text_columns
        shifts = [columns - state.columns for state in states]
        same_layers = zip(*(state.parts for state in states), strict=True)
        budgets = [budget for state in states for budget in state.budgets]
        return replace(
            self,
            parts=[type(same[0]).joined(same, shifts, order) for same in same_layers],
            start=torch.cat([state.start + shift for state, shift in zip(states, shifts, strict=True)])[order],
            columns=columns,
            appended=0,
            seen=torch.tensor(columns, dtype=torch.int64, device=self.device),
            budgets=[budgets[row] for row in order.tolist()],
            padded=mask,
            ids=None if self.ids is None else torch.cat([self.ids, ids.int()], 1),
        )

    @property
    def saved(self) -> dict[str, Tensor]:
        """What a file holds, by name."""
        masks = {"mask": self.padded, "protected": self.protected}
        of_bytes = {name: None if x is None else x.byte() for name, x in masks.items()}
        tables = {"start": self.start, "ids": self.ids, "ahead": self.ahead, **of_bytes}
        parts = named(self.layout, [part.saved for part in self.parts])
        return parts | {name: x for name, x in tables.items() if x is not None}

    def restored(self, metadata: CacheMetadata, tensors: Mapping[str, Tensor]) -> KVState:
        """Return what a file holds, or the part of the heads of this process, under the conditions of this state.

        Raises:
            ValueError: metadata and tensors do not match.
        """
        check_tensors(metadata, self.policy, tensors)
        layout = metadata.layout
        if self.ranks.several:
            tensors, layout = divided(tensors, layout, self.ranks)
        of_parts = iter([of_part(tensors, name) for name in layout.names])
        conditions = self.policy, self.ranks, self.entry_format
        return replace(
            self,
            layout=layout,
            parts=[
                *(FullAttentionLayers(group, next(of_parts), *conditions) for group in layout.pools),
                *(SlidingWindowLayers(group, RingBuffers(**next(of_parts))) for group in layout.rings),
                *(RecurrentState(shape, **next(of_parts)) for shape in layout.states),
            ],
            start=tensors["start"],
            ids=tensors.get("ids"),
            padded=(tensors["mask"] == 1).long() if "mask" in tensors else None,
            protected=tensors["protected"] == 1 if "protected" in tensors else None,
            ahead=tensors.get("ahead"),
            budgets=metadata.entries,
            columns=metadata.columns,
            prompt_columns=metadata.columns,
            forgotten=frozenset(metadata.forgotten),
            seen=torch.tensor(metadata.columns, dtype=torch.int64, device="cpu"),
        )


def named(layout: Layout, tensors: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return tensors of the first parts, by their names with that of the part before, such as ``store0_pool_k``."""
    parts = zip(layout.names, tensors, strict=False)
    return {f"{part}_{name}": x for part, by_name in parts for name, x in by_name.items()}
