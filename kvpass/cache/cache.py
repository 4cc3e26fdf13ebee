"""The compressed cache as transformers and users see it; :class:`kvpass.cache.state.KVState` holds the entries."""

from __future__ import annotations

import copy
import operator
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import Cache

from kvpass.cache.cache_file import CacheMetadata, write_cache_file
from kvpass.cache.copying import forbid_pickling
from kvpass.cache.fingerprint import Fingerprint, ModelFingerprint
from kvpass.cache.prefill import CachePrefill
from kvpass.cache.prompt_record import PromptRecord, layer_ids
from kvpass.cache.shared_heads import joined, layout_of_all
from kvpass.cache.spans import checked_spans, read_spans
from kvpass.cache.state import KVState
from kvpass.config import Budget, EntryFormat, Spans
from kvpass.errors import CacheMismatchError
from kvpass.policies.base import Policy
from kvpass.ranks import ONE_PROCESS, Ranks
from kvpass.version import __version__

_ELSEWHERE = (  # only an uncompiled model appends layer by layer, or builds a mask for its cache
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


def _raising(reason: str) -> Callable[..., Any]:
    """Return a method of a cache that raises CacheMismatchError."""

    def raise_reason(self: CompressedCache, *args: Any, **kwargs: Any) -> Any:
        raise CacheMismatchError(reason)

    return raise_reason


class _Filler:
    """The model that fills a cache, and its state when it did.

    Attributes:
        identity: gives its fingerprint, or None: it is gone, or a module of the raw backend.
    """

    def __init__(self, owner: Fingerprint) -> None:
        self.identity: Callable[[], ModelFingerprint | None] = (
            weakref.ref(owner) if isinstance(owner, ModelFingerprint) else lambda: None
        )
        weights, self._state = owner.weights, owner.state
        self._weights = weakref.ref(weights) if isinstance(weights, Tensor) else lambda: weights

    def check_weights(self, owner: Fingerprint) -> None:
        """Raise CacheMismatchError if another model filled the cache."""
        filled, asked = self._weights(), owner.weights
        if not (filled == asked if isinstance(asked, tuple) else filled is asked):
            raise CacheMismatchError(
                "the cache was filled by another model, with weights of its own: continue it with that model, or "
                "prefill the prompt again"
            )

    def check_state(self, owner: Fingerprint) -> None:
        """Raise CacheMismatchError if the model has changed since."""
        if self._state != owner.state:
            raise CacheMismatchError(
                "the cache was filled by another state of this model: its weights were written to or replaced since, "
                "or other adapters are active; prefill the prompt again"
            )


class CompressedCache(Cache):
    """A compressed KV cache with the interface of a ``transformers`` cache, from a model of ``kvpass.compile``.

    Args:
        policy, budget, ranks, entry_format: as in :class:`KVState`. owner: fingerprint of the model that fills it.
    Attributes:
        state: what the cache holds.
        prefill: while a prompt is read, what it is compressed into.
        record: of what was kept, all heads included; None for a loaded cache.
        longest: most tokens that the captures which filled it hold for; None when any number.
        own_budget: its budget was given for it alone: calls continue it whatever the budget of the model is.
        begun_by: the capture of a raw module that prefilled it, and the inputs of the prompt by token.
        reusable: calls continue on a copy and do not change this cache.
        protect: spans of its prompt that are kept in any case. guide: last tokens of its prompt, which are not kept.
        expected: columns that the cache will hold at most, as far as known: the tails are reserved for them.
        answer_end: last token of each row of the answer that ``generate`` last gave from a copy of this cache.
        interrupted: a call failed after it began to overwrite entries; the cache can only be reset.
        fills: further caches that its prompt fills.
        for_one_call: ``generate`` made it, and nobody has it later unless that call returns it.
        assists: it holds the drafts of an ``assistant_model``. transformers takes back a token before them too, and
            gives it again; :meth:`crop` then leaves one of the prompt where it is.
    """

    is_compileable = False  # kvpass has compiled the model itself, so `generate` must not compile it
    is_croppable = True  # crop says why where it is not

    def __init__(
        self,
        policy: Policy,
        budget: Budget | None,
        owner: Fingerprint,
        ranks: Ranks = ONE_PROCESS,
        entry_format: EntryFormat = "model",
    ) -> None:
        super().__init__(layers=_NoLayers())
        self._filler = _Filler(owner)
        self.policy, self.budget, self.ranks = policy, budget, ranks
        self.entry_format: EntryFormat = entry_format
        self.own_budget = False
        self.fills: Sequence[CompressedCache] = ()
        self.for_one_call = self.assists = False
        self.reset()

    def reset(self) -> None:
        """Remove all entries; the cache can be filled again."""
        self.expected = 0
        self.protect: Spans | None = None
        self.guide = 0
        self.state = KVState(policy=self.policy, budget=self.budget, ranks=self.ranks, entry_format=self.entry_format)
        self.prefill: CachePrefill | None = None
        self.record: PromptRecord | None = None
        self.longest: int | None = None
        self.begun_by: Any = None
        self.reusable = False
        self.answer_end: list[int] | None = None
        self.interrupted = False

    def begin_prefill(self, start: Tensor, columns: int, ids: Tensor | None = None) -> None:
        """Clear the cache for a prompt of ``columns`` columns and these ids, with real tokens from ``start``."""
        expected, guide = self.expected, self.guide
        protected = read_spans(self.protect, start, columns - guide)
        self.reset()
        self.expected, self.state.start = expected, start
        self.state.protected = None if protected is None else pad(protected, (0, guide))
        self.prefill = CachePrefill(self.state, columns, ids, expected, guide)

    def finish_prefill(self) -> None:
        """Store what the program of a prompt left."""
        assert self.prefill is not None
        self.state, self.record = self.prefill.finish()
        self.prefill = None

    # -- what a user reads ------------------------------------------------------------------------------------------

    def check_fingerprint(
        self, policy: Policy, budget: Budget | None, owner: Fingerprint, entry_format: EntryFormat = "model"
    ) -> None:
        """Check that the cache was filled by this model in its present state.

        Raises:
            CacheMismatchError: another model filled it, or this one before it changed; the message says which.
        """
        self._filler.check_weights(owner)
        if self.policy != policy:
            raise _differs(
                f"policy {self.policy.text}", policy.text, "give the model the cache's policy (model.set_policy)"
            )
        if self.budget != budget and not self.own_budget:
            raise _differs(f"budget {self.budget}", budget, "give the model the cache's budget (model.set_budget)")
        if (ours := self.entry_format) != entry_format:
            raise _differs(f"entries={ours!r}", repr(entry_format), "compile the model with the cache's entries")
        self._check_state(owner)

    def check_entries(self) -> None:
        """Raise CacheMismatchError if an interrupted call has overwritten some."""
        if self.interrupted:
            raise CacheMismatchError(f"{self!r}: a call on it was interrupted, its entries are lost; reset it")

    def _check_state(self, owner: Fingerprint) -> None:
        if self.is_empty:
            self._filler = _Filler(owner)
        self._filler.check_state(owner)

    @property
    def _filled(self) -> KVState:
        if self.is_empty:
            raise ValueError("the cache is empty: no prompt has been prefilled into it")
        return self.state

    @property
    def nbytes(self) -> int:
        """Bytes of all storages: spare slots, tail capacity, rings, states, positions, ids, tables."""
        return self.state.nbytes

    @property
    def lengths(self) -> Tensor:
        """Entries of each row, layer that shares the budget and KV head, all included; int64 ``[B, L, K]``."""
        return self._filled.lengths

    @property
    def positions(self) -> Tensor:
        """True positions of the entries, ascending, -1 where a head has fewer than P; int64 ``[B, L, K, P]``."""
        return self._filled.positions

    @property
    def ids(self) -> Tensor | None:
        """Token ids of the columns, padding included, int32 ``[B, columns]``; None where they are not known."""
        return self.state.ids

    @property
    def attention_mask(self) -> Tensor:
        """1 for columns seen so far that are real tokens, 0 for padding, as calls gave it; int64 ``[B, columns]``."""
        return self.state.attention_mask

    @property
    def device(self) -> torch.device:
        """Device of the entries."""
        return self._filled.device

    @property
    def layer_ids(self) -> tuple[int, ...]:
        """Layers that share the budget, as ascending indices among all attention ops of the model."""
        return layer_ids(self.state.layout.pools)

    @property
    def batch_size(self) -> int:
        """Rows."""
        return len(self.state.start)

    @property
    def is_empty(self) -> bool:
        return self.state.columns == 0

    def clone(self) -> CompressedCache:
        """Return an independent copy, not reusable; buffers that no call writes are shared."""
        twin = copy.copy(self)
        twin.reusable, twin.state = False, self.state.clone()
        return twin

    def to(self, device: torch.device | str) -> CompressedCache:
        """Return the cache if it is on ``device``, else a copy there with the same ``reusable``."""
        target, here = torch.device(device), self._filled.device
        if target.type == here.type and target.index in (None, here.index):
            return self
        twin = copy.copy(self)
        twin.state = self.state.to(target)
        return twin

    # -- what `generate` uses ----------------------------------------------------------------------------------------

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the tokens seen and not forgotten, padding included as in transformers; not the kept entries."""
        return self.state.text_columns

    columns = property(get_seq_length)
    forgotten = property(lambda self: len(self.state.forgotten))  # tokens of each row

    def get_max_length(self, layer_idx: int | None = 0) -> int:
        return -1

    get_max_cache_shape = get_max_length
    is_initialized = property(lambda self: not self.is_empty)

    @property
    def is_linear(self) -> list[bool]:
        """One False even if empty: ``generate`` gives the whole text at every step if all are linear."""
        return [False] * max(len(self), 1)

    is_sliding = is_linear

    def __len__(self) -> int:
        layout = self.state.layout
        return sum(group.geometry.layers for group in (*layout.pools, *layout.rings))

    update = get_mask_sizes = _raising(_ELSEWHERE)
    __getitem__ = __iter__ = _raising(_NO_LAYERS)
    max_cache_len = max_batch_size = property(_raising(_NO_LAYERS))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Replace row i by row ``indices[i]``, or keep the rows of a mask.

        Raises:
            ValueError: these are none.
        """
        self.state = self.state.with_rows(torch.arange(self.batch_size, device=indices.device)[indices])

    reorder_cache = batch_select_indices  # type: ignore[assignment]  # the argument has another name

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row ``repeats`` times, copies next to each other."""
        self.state = self.state.with_rows(torch.arange(self.batch_size, device="cpu").repeat_interleave(repeats))

    def crop(self, tokens: int) -> None:
        """Take back tokens that were appended after the prompt, as drafts that were not accepted.

        Args:
            tokens: how many, negative or 0; or a positive number, as before transformers 5.17: how many to keep.
        Raises:
            ValueError: they are not all appended, or are no more there, since layers with a sliding window, recurrent
                layers or a policy that evicts while decoding have overwritten what was before; or no int.
            CacheMismatchError: a call on the cache was interrupted, or a crop, which then leaves wrong counts.
        """
        state = self.state
        try:
            tokens = operator.index(tokens)
        except TypeError:
            raise ValueError(f"crop({tokens!r}): must be an int") from None
        self.check_entries()
        if not state.only_appends:
            raise ValueError(
                f"{self!r} cannot be cropped, as drafts (assistant_model, prompt_lookup_num_tokens) need it: layers "
                "with a sliding window and policies that evict while decoding overwrite older entries, and a "
                "recurrent layer holds the state after the last token, not those before; use no drafts"
            )
        taken = -tokens if tokens <= 0 else max(self.columns - tokens, 0)
        if self.assists:
            taken = min(taken, state.appended)
        if taken > state.appended:
            raise ValueError(
                f"{taken} tokens cannot be taken back: {state.appended} were appended after the prompt, or after "
                "the last call with padding"
            )
        self.interrupted = True
        state.crop(taken)
        self.interrupted = False

    def forget(self, start: int | Sequence[tuple[int, int]], stop: int | None = None) -> None:
        """Remove the entries of some tokens from every layer and head, as of a tool's output that is needed no more.

        The entries that stay keep their positions, and what they know of the tokens. Later tokens come behind all that
        was seen. The text of the cache (:attr:`ids`, :attr:`attention_mask`, :meth:`get_seq_length`, whole texts and
        ``position_ids`` that are given later) is from now on without the tokens.

        Args:
            start, stop: first true position and the one behind the last, of each row; or spans, as pairs of these.
        Raises:
            ValueError: spans are not within the text, overlap or leave nothing; the model has recurrent layers, the
                policy evicts while decoding, or a layer with a sliding window holds one of the tokens.
        """
        state, spans = self._filled, [(start, stop)] if stop is not None else start
        tokens = state.columns - int(state.start.max())
        ordered = checked_spans("forget", spans, tokens)  # type: ignore[arg-type]
        self.check_entries()
        if state.states or any(store.evicts for store in state.full_layers):
            raise ValueError(
                "forget: a recurrent layer holds one state after all tokens, and a policy that evicts while decoding "
                "has chosen by them; read the text again without them"
            )
        held = max((ring.group.sliding_window or 0 for ring in state.sliding_layers), default=0)
        if ordered and held and ordered[-1][1] > tokens - held:
            raise ValueError(
                f"forget: the layers with a sliding window hold the last {held} tokens as they are; tokens of these "
                "can be forgotten when they have left it"
            )
        left = state.without({token for begin, end in ordered for token in range(begin, end)})
        if left.text_columns - int(left.start.max()) < 1:
            raise ValueError("forget: no token of the text is left; reset the cache")
        self.state = left

    # -- files ------------------------------------------------------------------------------------------------------

    def save(self, path: str | Path, *, notes: Mapping[str, Any] | None = None) -> None:
        """Write the cache to a file that :func:`kvpass.load_cache` reads; an existing file is replaced.

        The file contains its checksum and the fingerprint of the model that filled the cache, so that it loads for no
        other model. Readers see the old file or the new one. Only its owner can read a new file; a replaced one keeps
        its permissions. Where several processes share the heads, all must call it; the first writes one file, which
        loads on any number of processes. The file holds the token ids: whoever can read it can read the text.

        Args:
            notes: metadata of the caller, stored in the file; anything JSON can represent.
        Raises:
            ValueError: the cache is empty, a call on it was interrupted, or the model that filled it is gone, was
                compiled by the raw backend; or JSON cannot represent the notes.
            CacheMismatchError: the weights or adapters of the model have changed since it filled the cache.
            OSError: the file cannot be written, for instance because the disk is full; an old file is unchanged.
        """
        state = self._filled
        if self.interrupted:
            raise ValueError(f"{self!r} cannot be saved: a call on it was interrupted; reset it")
        identity = self._filler.identity()
        if identity is None:
            raise ValueError(f"{self!r} cannot be saved: the model that filled it is gone, or never was a kvpass model")
        self._check_state(identity)  # what is written is the fingerprint of the model as it is now
        metadata = CacheMetadata(
            kvpass_version=__version__,
            model=identity.describe(),
            policy=self.policy.spec,
            budget=self.budget,
            layout=layout_of_all(state.layout, self.ranks.size),
            columns=state.columns,
            entries=tuple(state.budgets),
            reusable=self.reusable,
            notes=dict(notes or {}),
            entry_format=self.entry_format,
            own_budget=self.own_budget,
            forgotten=tuple(sorted(state.forgotten)),
        )
        if self.ranks.several:
            parts = self.ranks.gather_to_first({name: x.cpu() for name, x in state.saved.items()})
            self.ranks.first_does(lambda: write_cache_file(path, joined(parts, state.layout), asdict(metadata)))
        else:
            write_cache_file(path, state.saved, asdict(metadata))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return forbid_pickling(self, "a CompressedCache cannot be pickled: use cache.save and kvpass.load_cache")

    def __repr__(self) -> str:
        return (
            f"CompressedCache(policy={self.policy.name!r}, budget={self.budget}, tokens={self.columns}, "
            f"batch={self.batch_size}, nbytes={self.nbytes}, reusable={self.reusable})"
        )


def _differs(ours: str, theirs: object, advice: str) -> CacheMismatchError:
    return CacheMismatchError(f"the cache has {ours}, the model {theirs}: {advice}, or prefill the prompt again")
