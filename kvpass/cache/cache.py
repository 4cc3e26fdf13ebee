"""The compressed cache: stores of kept KV entries, ring buffers of sliding-window layers, states of recurrent layers.

Legend: B batch, N prompt columns, L layers, K KV heads, P entries of the longest head.
"""

from __future__ import annotations

import copy
import json
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import Cache

from kvpass.cache.buffer_reuse import NO_REUSE, BufferReuse
from kvpass.cache.copying import forbid_pickling
from kvpass.cache.fingerprint import Fingerprint, ModelFingerprint, reference
from kvpass.cache.layers import FullAttentionLayers
from kvpass.cache.metadata import CacheMetadata, check_tensors
from kvpass.cache.part import CachePart, PromptFacts, RecurrentState, SlidingWindowLayers
from kvpass.cache.prompt_record import LayersRecord, PromptRecord, layer_ids, scatter_to_layers
from kvpass.cache.recompression import Recompression
from kvpass.cache.serialization import write_cache_file
from kvpass.cache.shared_heads import divided, joined, layout_of_all, of_part, record_of_all
from kvpass.config import Block, Budget, EntryFormat, Layout, PoolFacts
from kvpass.errors import CacheMismatchError
from kvpass.ops.recompress import NOT_DUE
from kvpass.policies.base import Policy
from kvpass.ranks import ONE_PROCESS, Ranks
from kvpass.version import __version__

_ELSEWHERE = (
    "a CompressedCache was given to an uncompiled model: only the kvpass model that filled it can go on with it; give "
    "the whole text and no cache to the uncompiled one"
)

_NO_LAYERS = (
    "a CompressedCache of kvpass has no list of layers with keys and values, since heads keep different numbers of "
    "compressed entries: read cache.positions, cache.lengths, cache.nbytes, cache.get_seq_length() and cache.batch_size"
)


class _NoLayers(list[Any]):
    """The empty list that transformers finds in ``layers``; reading a layer of it says what to read instead."""

    def __getitem__(self, layer: Any) -> Any:
        raise CacheMismatchError(_NO_LAYERS)


class CompressedCache(Cache):
    """A compressed KV cache with the interface of a ``transformers`` cache.

    Made by a model that ``kvpass.compile`` returned; returned in ``output.past_key_values``.

    Args:
        policy: decides what is kept. budget: how much; None only for a policy that needs none.
        owner: fingerprint of the model that fills the cache. ranks: processes that share its heads; the cache is of
            those of this process. entry_format: how kept entries are held, as ``entries`` of ``kvpass.compile``.
    Attributes:
        columns: tokens seen, padding included. appended: how many of them after the prompt was compressed, or after the
            last call with padding: :meth:`crop` can take these back.
        start: first real column of each row, int64 ``[B]``.
        ids: token ids of the columns, padding included, int32 ``[B, columns]``; None in a raw session, or from a file
            without them.
        longest: most tokens that the captures which filled it hold for; None when any number.
        own_budget: its budget was given for it alone: calls continue it whatever the budget of the model is.
        begun_by: the capture of a raw module that prefilled it, and the inputs of the prompt by token.
        reusable: calls continue on a copy and do not change this cache.
        expected: columns that the cache will hold at most, as far as known: the tails are reserved for them.
        reuse: where its memory comes from.
        answer_end: last token of each row of the answer that ``generate`` last gave from a copy of this cache.
        block: tokens of a block in which its prompt is prefilled; None: those of the model.
        interrupted: a call failed after it began to overwrite entries; the cache can only be reset.
        fills: further caches that its prompt fills.
        assists: it holds the drafts of an ``assistant_model``. transformers takes back a token before them too, and
            gives it again; :meth:`crop` then leaves one of the prompt where it is.
        parts: full_layers, sliding_layers and states.
    """

    def __init__(
        self,
        policy: Policy,
        budget: Budget | None,
        owner: Fingerprint,
        ranks: Ranks = ONE_PROCESS,
        entry_format: EntryFormat = "model",
    ) -> None:
        super().__init__(layers=_NoLayers())
        self._identity: Callable[[], ModelFingerprint | None] = (
            weakref.ref(owner) if isinstance(owner, ModelFingerprint) else lambda: None
        )
        self._owner = reference(owner)
        self._filled_by = owner.state
        self.policy = policy
        self.budget = budget
        self.ranks = ranks
        self.entry_format: EntryFormat = entry_format
        self.own_budget = False
        self.block: Block | None = None
        self.expected = 0
        self.reuse = NO_REUSE
        self.fills: Sequence[CompressedCache] = ()
        self.assists = False
        self._forget()

    def _forget(self) -> None:
        self.layout: Layout | None = None
        self.parts: list[CachePart] = []
        self._recompressions: list[Recompression] = []
        self.columns = 0
        self.appended = 0
        self.longest: int | None = None
        self.begun_by: Any = None
        self.start = torch.empty(0, dtype=torch.int64, device="cpu")
        self.ids: Tensor | None = None
        self.reusable = False
        self.answer_end: list[int] | None = None
        self.interrupted = False
        self.record: PromptRecord | None = None
        self._padded: Tensor | None = None  # mask of the first columns, where calls had padding behind the prompt

    # -- prefill ----------------------------------------------------------------------------------------------------

    def begin_prefill(self, start: Tensor, columns: int, ids: Tensor | None = None) -> None:
        """Clear the cache for a prompt of ``columns`` columns and these ids, with real tokens from ``start``."""
        self._forget()
        self.start = start
        self.ids = None if ids is None else ids.int()
        self._prompt_columns = columns

    def prefill_state(
        self, layout: Layout, dtype: torch.dtype, device: torch.device, reuse: BufferReuse, pools: Sequence[PoolFacts]
    ) -> dict[str, Tensor]:
        """Return the buffers that the prefill graph writes, on first use from ``reuse``.

        ``start`` and ``first`` int64 ``[B]`` are the first real columns, on the CPU and on the device.

        Args:
            pools: what the graph says of each pool of the layout.
        Raises:
            ValueError: the budget cannot hold window + 1 entries of some row.
            CacheMismatchError: the graph has another layout.
        """
        if self.layout is None:
            self.reuse = reuse
            self._allocate(layout, dtype, device, pools)
        self._check_layout(layout)
        first = self.start.to(device, non_blocking=True)
        return {**self._named([part.prefill_state for part in self.parts]), "start": self.start, "first": first}

    def _allocate(self, layout: Layout, dtype: torch.dtype, device: torch.device, pools: Sequence[PoolFacts]) -> None:
        for group in layout.pools:
            group.geometry.check_format(self.entry_format, device)
        n, window = self._prompt_columns, self.policy.window
        lengths = [n - column for column in self.start.tolist()]
        self._budgets = lengths
        if self.budget is not None and layout.pools:
            token_bytes = layout.token_bytes(self.entry_format) * self.ranks.size
            self._budgets = [self.budget.check(length, window, token_bytes) for length in lengths]
        prompt = PromptFacts(self.start, n, self._budgets, dtype, device, self.expected - n, self.reuse)
        stores = [FullAttentionLayers(group, self.policy, self.ranks, self.entry_format) for group in layout.pools]
        for store, facts in zip(stores, pools, strict=True):
            store.begin_prefill(prompt, facts)
        rings = [SlidingWindowLayers.empty(group, prompt) for group in layout.rings]
        self.parts = [*stores, *rings, *(RecurrentState.empty(shape, prompt) for shape in layout.states)]
        self._device = device
        self.layout = layout

    def finish_prefill(self) -> None:
        """Store the results of the prefill graph."""
        n = self._prompt_columns
        window = min(self.policy.window, n)
        kept = [part.finish_prefill() for part in self.parts]
        stores = tuple(record for record in kept if record is not None)
        self._seen_columns = self.reuse.empty("seen", (), torch.int64, self._device).fill_(n)
        start = self.reuse.empty("start", self.start.shape, torch.int64, self._device)
        self.start, self.columns = start.copy_(self.start), n
        held = window - (self.start - (n - window)).clamp(min=0)
        self.record = self._record(torch.tensor(self._budgets, device="cpu"), held, stores)

    # -- decode and extend ------------------------------------------------------------------------------------------

    def ensure_room(self, tokens: int) -> None:
        """Grow the tails to hold ``tokens`` more."""
        for part in self.parts:
            part.ensure_room(tokens, self.expected - self.columns)

    def cached_state(self, layout: Layout, dtype: torch.dtype) -> dict[str, Tensor]:
        """Return the buffers of decode and extend graphs, which write tails and rings in place.

        ``seen`` int64 ``[]`` counts the columns before the new tokens, ``first`` int64 ``[B]`` is the first real one.

        Args:
            layout, dtype: of the keys and values in the graph.
        Raises:
            CacheMismatchError: the cache has others.
        """
        in_floats = [ring.ring_k for ring in self.sliding_layers]
        if self.entry_format == "model":
            in_floats += [store.tail_k for store in self.full_layers]
        for held in in_floats:
            if held.dtype != dtype:
                raise CacheMismatchError(
                    f"{self!r} of {held.dtype} was handed to a model of {dtype}: prefill the prompt again"
                )
        self._check_layout(layout)
        state = self._named([part.cached_state for part in self.parts])
        state |= self._named([turn.buffers._asdict() for turn in self._recompressions])  # of the first parts
        return {**state, "seen": self._seen_columns, "first": self.start}

    def advance(self, tokens: int, ids: Tensor | None = None) -> None:
        """Count tokens whose rows a graph has written; ``ids`` are theirs, ``[B, tokens]``."""
        self.ids = None if self.ids is None or ids is None else torch.cat([self.ids, ids.int()], 1)
        self.columns += tokens
        self.appended += tokens
        self._seen_columns.add_(tokens)
        for part in self.parts:
            part.advance(tokens)

    @property
    def overwrites(self) -> bool:
        """Whether decoding overwrites entries, so that an interrupted call cannot be rolled back."""
        return any(part.overwrites for part in self.parts)

    @property
    def only_appends(self) -> bool:
        """Whether appended tokens can be taken back: no call overwrites entries or the state of a recurrent layer."""
        return not self.overwrites and not self.states

    def begin_recompression(self, tokens: int, threshold: float) -> bool:
        """Prepare recompression of rows that will exceed ``threshold`` budgets after ``tokens`` more.

        Call it when there is room for these tokens, and call :meth:`end_recompression` afterwards.

        Returns:
            whether there is such a row; the extend graph must then compute recompression scores.
        """
        if threshold == float("inf") or self.budget is None or not self.full_layers or self.full_layers[0].evicts:
            return False
        heads = sum(store.geometry.layers * store.geometry.kv_heads for store in self.full_layers)
        held = torch.stack([store.lengths.sum((1, 2)) for store in self.full_layers]).sum(0) + tokens * heads
        held = self.ranks.gather(held[None], 0).sum(0).cpu()
        budgets = torch.tensor(self._budgets, device="cpu")
        due = held > budgets * (heads * self.ranks.size * threshold)
        if not bool(due.any()):
            return False
        window = torch.where(due, budgets.clamp(max=self.policy.window), NOT_DUE)
        self._recompressions = [Recompression(store, window) for store in self.full_layers]
        self._every_row_due = bool(due.all())
        return True

    def end_recompression(self) -> None:
        """Discard what :meth:`begin_recompression` prepared."""
        self._recompressions = []

    def recompress(self) -> PromptRecord | None:
        """Compress rows over the threshold to their budget, by the recompression scores.

        Returns:
            if all rows were compressed, the new record, which the cache keeps; else None.
        """
        budgets = torch.tensor(self._budgets, device=self._device)
        window = budgets.clamp(max=self.policy.window)
        seen = self.columns - self.start
        done = [turn.finish(budgets - window, seen) for turn in self._recompressions]
        self.parts = [*(store for store, _ in done), *self.parts[len(done) :]]
        self.appended = 0
        if not self._every_row_due:
            return None
        self.record = self._record(budgets, window, tuple(record for _, record in done))
        return self.record

    def _record(self, entries: Tensor, window: Tensor, full_layers: tuple[LayersRecord, ...]) -> PromptRecord:
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
            full_layers=full_layers,
            sliding_layers=tuple(ring.group for ring in self.sliding_layers),
            nbytes=self.nbytes,
            ring_nbytes=sum(ring.nbytes for ring in self.sliding_layers),
            state_nbytes=sum(state.nbytes for state in self.states),
            entry_format=self.entry_format,
        )
        return record_of_all(record, self.ranks, self._device) if self.ranks.several else record

    def _named(self, tensors: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Return tensors of the first parts, by their names with that of the part before, such as ``store0_pool_k``."""
        assert self.layout is not None
        parts = zip(self.layout.names, tensors, strict=False)
        return {f"{part}_{name}": x for part, own in parts for name, x in own.items()}

    def _check_layout(self, layout: Layout) -> None:
        if layout != self.layout:
            raise CacheMismatchError(f"{self!r} of layout {self.layout} was handed to a model of layout {layout}")

    # -- what a user reads ------------------------------------------------------------------------------------------

    def check_fingerprint(
        self, policy: Policy, budget: Budget | None, owner: Fingerprint, entry_format: EntryFormat = "model"
    ) -> None:
        """Check that the cache was filled by this model in its present state.

        Raises:
            CacheMismatchError: another model filled it, or this one before it changed; the message says which.
        """
        filled, asked = self._owner(), reference(owner)()
        if not (filled == asked if isinstance(asked, tuple) else filled is asked):
            raise CacheMismatchError(
                "the cache was filled by another model, with weights of its own: continue it with that model, or "
                "prefill the prompt again"
            )
        differs = ""
        if self.policy != policy:
            ours, theirs = _name_and_differences(self.policy, policy), _name_and_differences(policy, self.policy)
            differs = f"policy {ours}, the model {theirs}: give the model the cache's policy (model.set_policy)"
        elif self.budget != budget and not self.own_budget:
            differs = f"budget {self.budget}, the model {budget}: give the model the cache's budget (model.set_budget)"
        elif (ours := self.entry_format) != entry_format:
            differs = f"entries={ours!r}, the model {entry_format!r}: compile the model with the cache's entries"
        if differs:
            raise CacheMismatchError(f"the cache has {differs}, or prefill the prompt again")
        self._check_state(owner)

    def recheck_fingerprint(self) -> None:
        """Like :meth:`check_fingerprint`, for a new capture, when modules of the model may have been replaced."""
        identity = self._identity()
        if identity is not None:
            identity.look_again()
            self._check_state(identity)

    def _check_state(self, owner: Fingerprint) -> None:
        if self.is_empty:
            self._filled_by = owner.state
        elif self._filled_by != owner.state:
            raise CacheMismatchError(
                f"{self!r} was filled by another state of this model: its weights were written to or replaced since, "
                "or other adapters are active; prefill the prompt again"
            )

    @property
    def nbytes(self) -> int:
        """Bytes of the cache's storages: spare slots, tail capacity, rings, states, positions, ids, all tables."""
        if self.is_empty:
            return 0
        held = (self.start,) if self.ids is None else (self.start, self.ids)
        return sum(part.nbytes for part in self.parts) + sum(x.untyped_storage().nbytes() for x in held)

    @property
    def full_layers(self) -> list[FullAttentionLayers]:
        """The layers that share the budget, a group for each KV geometry."""
        return [part for part in self.parts if isinstance(part, FullAttentionLayers)]

    @property
    def sliding_layers(self) -> list[SlidingWindowLayers]:
        """The layers with a sliding window."""
        return [part for part in self.parts if isinstance(part, SlidingWindowLayers)]

    @property
    def states(self) -> list[RecurrentState]:
        """The states of recurrent layers."""
        return [part for part in self.parts if isinstance(part, RecurrentState)]

    @property
    def device(self) -> torch.device:
        """Device of the entries."""
        self._known_layout()
        return self._device

    @property
    def layer_ids(self) -> tuple[int, ...]:
        """Layers that share the budget, as ascending indices among all attention ops of the model."""
        return layer_ids([store.group for store in self.full_layers])

    @property
    def lengths(self) -> Tensor:
        """Entries held per row, layer and KV head, window and appended tokens included; int64 ``[B, L, K]``.

        Layers are in the order of ``layer_ids``; a head that a layer of another geometry lacks has 0.
        """
        pools = self._known_layout().pools
        return scatter_to_layers(pools, [store.lengths for store in self.full_layers], 0, (self.batch_size, 0, 0))

    @property
    def positions(self) -> Tensor:
        """True positions of the entries, ascending, -1 where a head has fewer; int64 ``[B, L, K, P]``."""
        pools = self._known_layout().pools
        seen = self.columns - self.start
        return scatter_to_layers(
            pools, [store.positions(seen) for store in self.full_layers], -1, (self.batch_size, 0, 0, 0)
        )

    @property
    def prompt_ids(self) -> Tensor | None:
        """Of ``ids`` those of the prompt; of a loaded cache, all that were saved."""
        return None if self.ids is None else self.ids[:, : self._prompt_columns]

    @property
    def attention_mask(self) -> Tensor:
        """1 for columns seen so far that are real tokens, 0 for padding, as calls gave it; int64 ``[B, columns]``.

        A file holds no padding behind the prompt: after loading, all padding of a row is on the left.
        """
        if self._padded is not None:
            return pad(self._padded, (0, self.columns - self._padded.shape[1]), value=1)
        return (torch.arange(self.columns, device=self.start.device) >= self.start[:, None]).long()

    @property
    def is_left_padded(self) -> bool:
        """Whether no call after the prompt had padding."""
        return self._padded is None

    @torch.inference_mode(False)
    def clone(self) -> CompressedCache:
        """Return an independent copy, not reusable; buffers that no call writes are shared."""
        twin = copy.copy(self)
        twin.reusable = False
        twin.parts = [part.clone() for part in self.parts]
        twin._seen_columns = self.reuse.copy("seen", self._seen_columns)
        return twin

    def take_memory_from(self, reuse: BufferReuse) -> None:
        """Take the memory of growth and of copies from there."""
        self.reuse = reuse
        for part in self.parts:
            part.reuse = reuse

    def repeated(self, repeats: int) -> CompressedCache:
        """Return a copy, not reusable, with every row ``repeats`` times, copies next to each other."""
        twin = self.clone()
        twin.batch_repeat_interleave(repeats)
        return twin

    @torch.inference_mode(False)
    def to(self, device: torch.device | str) -> CompressedCache:
        """Return the cache if it is on ``device``, else a copy there with the same ``reusable``."""
        target = torch.device(device)
        self._known_layout()
        if target.type == self._device.type and target.index in (None, self._device.index):
            return self
        twin = copy.copy(self)
        twin.parts = [part.to(target) for part in self.parts]
        for name in ("start", "_seen_columns"):
            setattr(twin, name, getattr(self, name).to(target))
        twin.ids = None if self.ids is None else self.ids.to(target)
        twin._padded = None if self._padded is None else self._padded.to(target)
        twin._device = twin.start.device
        return twin

    # -- what `generate` uses ----------------------------------------------------------------------------------------

    @property
    def is_empty(self) -> bool:
        return self.columns == 0

    @property
    def batch_size(self) -> int:
        return self.start.numel()

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the tokens seen, padding included as in transformers; not the kept entries."""
        return self.columns

    def get_max_length(self, layer_idx: int | None = 0) -> int:
        return -1

    get_max_cache_shape = get_max_length

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Raise: only a model that builds a mask for its cache calls this, and kvpass models build none."""
        raise CacheMismatchError(_ELSEWHERE)

    @property
    def is_compileable(self) -> bool:
        """False: kvpass has compiled the model itself, so ``generate`` must not compile it."""
        return False

    @property
    def is_initialized(self) -> bool:
        return not self.is_empty

    @property
    def is_sliding(self) -> list[bool]:
        return [False] * len(self)

    @property
    def is_linear(self) -> list[bool]:
        """One False even if empty: ``generate`` gives the whole text at every step if all are linear."""
        return [False] * max(len(self), 1)

    def __len__(self) -> int:
        groups = () if self.layout is None else (*self.layout.pools, *self.layout.rings)
        return sum(group.geometry.layers for group in groups)

    def _no_layers(self, *_: Any) -> Any:
        """Raise: entries are not held layer by layer, the cache grows as needed and has the rows of its prompt."""
        raise CacheMismatchError(_NO_LAYERS)

    __getitem__ = __iter__ = _no_layers
    max_cache_len = max_batch_size = property(_no_layers)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Replace row i by row ``beam_idx[i]`` (beam search)."""
        self._pick_rows(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows ``indices``."""
        self._pick_rows(torch.arange(self.batch_size, device=indices.device)[indices])

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row ``repeats`` times, copies next to each other."""
        self._pick_rows(torch.arange(self.batch_size, device="cpu").repeat_interleave(repeats))

    def crop(self, tokens: int) -> None:
        """Take back tokens that were appended after the prompt, as drafts that were not accepted.

        Args:
            tokens: how many, negative or 0; or a positive number, as before transformers 5.17: how many to keep.
        Raises:
            ValueError: they are not all appended, or are no more there: layers with a sliding window or a policy that
                evicts while decoding have overwritten older entries for them, recurrent layers hold one state only.
        """
        if not self.only_appends:
            raise ValueError(
                f"{self!r} cannot be cropped, as drafts (assistant_model, prompt_lookup_num_tokens) need it: layers "
                "with a sliding window and policies that evict while decoding overwrite older entries, and a "
                "recurrent layer holds the state after the last token, not those before; use no drafts"
            )
        taken = -tokens if tokens <= 0 else max(self.columns - tokens, 0)
        if self.assists:
            taken = min(taken, self.appended)
        if taken > self.appended:
            raise ValueError(
                f"{taken} tokens cannot be taken back: {self.appended} were appended after the prompt, or after "
                "the last call with padding"
            )
        self.appended -= taken
        self.columns -= taken
        self._seen_columns.sub_(taken)
        self.ids = None if self.ids is None else self.ids[:, : self.columns]
        for part in self.parts:
            part.crop(taken)

    @property
    def is_croppable(self) -> bool:
        """True: :meth:`crop` says why where it is not."""
        return True

    def update(self, *args: Any, **kwargs: Any) -> Any:
        """Raise: only an uncompiled model calls this."""
        raise CacheMismatchError(_ELSEWHERE)

    # -- files ------------------------------------------------------------------------------------------------------

    def save(self, path: str | Path, *, notes: Mapping[str, Any] | None = None) -> None:
        """Write the cache to a file that :func:`kvpass.load_cache` reads; an existing file is replaced.

        Slots without an entry are not written. The file contains its checksum and the fingerprint of the model that
        filled the cache, so that it loads for no other model. It is written next to ``path`` and then renamed, so a
        reader sees the old file or the new one. Only its owner can read a new file; a replaced one keeps its
        permissions. The next save in the folder removes what a killed process left. Where several processes share the
        heads, all must call it; the first one writes one file, which loads on any number of processes. The file holds
        the token ids: whoever can read it can read the text.

        Args:
            notes: metadata of the caller, stored in the file; anything JSON can represent.
        Raises:
            ValueError: the cache is empty, a call on it was interrupted, or the model that filled it is gone, was
                compiled by the raw backend; or JSON cannot represent the notes.
            CacheMismatchError: the weights or adapters of the model have changed since it filled the cache.
            OSError: the file cannot be written, for instance because the disk is full; an old file is unchanged.
        """
        layout = self._known_layout()
        if self.interrupted:
            raise ValueError(f"{self!r} cannot be saved: a call on it was interrupted; reset it")
        identity = self._identity()
        if identity is None:
            raise ValueError(f"{self!r} cannot be saved: the model that filled it is gone, or never was a kvpass model")
        self.recheck_fingerprint()  # what is written is the fingerprint of the model as it is now
        tensors = {**self._named([part.saved for part in self.parts]), "start": self.start}
        if self.ids is not None:
            tensors["ids"] = self.ids
        metadata = CacheMetadata(
            kvpass_version=__version__,
            model=identity.describe(),
            policy=self.policy.spec,
            budget=self.budget,
            layout=layout,
            columns=self.columns,
            entries=tuple(self._budgets),
            reusable=self.reusable,
            notes=dict(notes or {}),
            entry_format=self.entry_format,
            own_budget=self.own_budget,
        )
        if not self.ranks.several:
            write_cache_file(path, tensors, asdict(metadata))
            return
        parts = self.ranks.gather_to_first({name: x.cpu() for name, x in tensors.items()})

        def write() -> None:
            whole = replace(metadata, layout=layout_of_all(layout, len(parts)))
            write_cache_file(path, joined(parts, layout), asdict(whole))

        self.ranks.first_does(write)

    @classmethod
    def restore(
        cls,
        policy: Policy,
        identity: ModelFingerprint,
        metadata: CacheMetadata,
        tensors: Mapping[str, Tensor],
        ranks: Ranks = ONE_PROCESS,
    ) -> CompressedCache:
        """Return the cache from what :meth:`save` wrote, or the part of its heads; everything is on the CPU.

        Raises:
            ValueError: metadata and tensors do not match.
        """
        check_tensors(metadata, policy, tensors)
        cache, layout = cls(policy, metadata.budget, identity, ranks, metadata.entry_format), metadata.layout
        if ranks.several:
            tensors, layout = divided(tensors, layout, ranks)
        cache.layout = layout

        held = (of_part(tensors, part) for part in layout.names)
        stores = [FullAttentionLayers(group, policy, ranks, cache.entry_format) for group in layout.pools]
        cache.parts = [
            *(store.holding(next(held)) for store in stores),
            *(SlidingWindowLayers(group, **next(held)) for group in layout.rings),
            *(RecurrentState(shape, **next(held)) for shape in layout.states),
        ]
        cache.start = tensors["start"]
        cache._device = cache.start.device
        cache._budgets = list(metadata.entries)
        cache.ids = tensors.get("ids")
        cache.columns = cache._prompt_columns = metadata.columns
        cache._seen_columns = torch.tensor(metadata.columns, dtype=torch.int64, device="cpu")
        cache.reusable = metadata.reusable
        cache.own_budget = metadata.own_budget
        return cache

    def __reduce_ex__(self, protocol: Any) -> Any:
        return forbid_pickling(self, "a CompressedCache cannot be pickled: use cache.save and kvpass.load_cache")

    def __repr__(self) -> str:
        return (
            f"CompressedCache(policy={self.policy.name!r}, budget={self.budget}, tokens={self.columns}, "
            f"batch={self.batch_size}, nbytes={self.nbytes}, reusable={self.reusable})"
        )

    def reset(self) -> None:
        """Remove all entries; the cache can be filled again."""
        self.expected = 0
        self._forget()

    @torch.inference_mode(False)
    def _pick_rows(self, index: Tensor) -> None:
        index = index.clone().to(self.start.device)
        picked = {
            "parts": [part.with_rows(index) for part in self.parts],
            "start": self.start[index],
            "ids": None if self.ids is None else self.ids[index],
            "_budgets": [self._budgets[row] for row in index.tolist()],
            "_padded": None if self._padded is None else self._padded[index],
        }
        vars(self).update(picked)  # all or none, since an allocation may fail

    @torch.inference_mode(False)
    def take_over(self, parts: Sequence[CompressedCache], order: Tensor, mask: Tensor, ids: Tensor) -> None:
        """Become the rows of ``parts``, which were rows of this cache; padding is added before the shorter ones.

        A row's padding does not change what it computes (contract 4).

        Args:
            order: place of each row among those of all parts, int64 ``[B]``. mask: int64 ``[B, columns]`` from now on.
            ids: of the new columns ``[B, T]``.
        """
        columns = mask.shape[1]
        shifts = [columns - part.columns for part in parts]
        same_layers = zip(*(part.parts for part in parts), strict=True)
        budgets = [budget for part in parts for budget in part._budgets]
        joined = {
            "parts": [type(same[0]).joined(same, shifts, order) for same in same_layers],
            "start": torch.cat([part.start + shift for part, shift in zip(parts, shifts, strict=True)])[order],
            "columns": columns,
            "appended": 0,
            "_seen_columns": torch.tensor(columns, dtype=torch.int64, device=self._device),
            "_budgets": [budgets[row] for row in order.tolist()],
            "_padded": mask,
            "ids": None if self.ids is None else torch.cat([self.ids, ids.int()], 1),
            "record": parts[0].record if len(parts) == 1 else self.record,
        }
        vars(self).update(joined)  # all or none, since an allocation may fail

    def _known_layout(self) -> Layout:
        if self.layout is None or self.is_empty:
            raise ValueError("the cache is empty: no prompt has been prefilled into it")
        return self.layout


def _name_and_differences(policy: Policy, other: Policy) -> str:
    """Return the name of a policy, with the options that differ where ``other`` has the same name."""
    if policy.name != other.name:
        return repr(policy.name)
    theirs = json.loads(other.spec)
    options = [(name, value) for name, value in sorted(json.loads(policy.spec).items()) if theirs[name] != value]
    return f"{policy.name!r} with " + ", ".join(f"{name}={value!r}" for name, value in options)
