"""Runs batches of prompts: compress, feed the rest, answer, report what was kept.

What several prompts share of what is compressed is compressed once. The number of rows of a batch does not change
during a run, so that nothing is compiled twice: missing rows are filled with copies whose answers are dropped. Rows of
a batch do not influence each other (contract 4).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase, StoppingCriteriaList

from kvpass.cache.cache import CompressedCache
from kvpass.config import BudgetLike
from kvpass.eval.prompt import Prompt, pad
from kvpass.policies import Policy, PolicyName
from kvpass.transformers_compat import CACHE

Item = TypeVar("Item")

MOST_ROWS = 32
"""Rows that conditions of the same prompts have together, at most."""


@dataclass(frozen=True, kw_only=True)
class Kept:
    """What compression left of one row, right after the compressed part was read.

    Entries are per KV head per layer, on average (weighed by bytes where layers differ), window included; bytes are of
    all layers. Where all layers slide nothing is evicted: no bytes, every entry kept, fraction 1, no attention mass.
    """

    compressed_tokens: int
    budget_entries: int
    budget_bytes: int
    kept_entries: float
    kept_fraction: float
    kept_bytes: int
    full_bytes: int  # of a full cache of the same layers
    cache_bytes: float  # what the storages of the batch occupy, spare slots and tail included, divided by its rows
    attention_mass: float | None
    """Share of the attention of the policy's window (of the last token if it has none) that the kept entries hold: mean
    over layers and heads, window included."""


@dataclass
class Totals:
    """Sums over a run: rows compressed, and rows with nothing to compress; bytes of entries right after the prompts.

    ``cache_bytes_peak``: the largest cache of a batch, generated tokens, spare slots and indices included.
    """

    prompts_compressed: int = 0
    prompts_not_compressed: int = 0
    entry_bytes_kept: int = 0
    entry_bytes_full: int = 0
    cache_bytes_peak: int = 0

    def add(self, kept: Sequence[Kept], cache: CompressedCache) -> None:
        """Count prompts that were compressed, and the cache as it is now."""
        self.prompts_compressed += len(kept)
        self.entry_bytes_kept += sum(row.kept_bytes for row in kept)
        self.entry_bytes_full += sum(row.full_bytes for row in kept)
        self.cache_bytes_peak = max(self.cache_bytes_peak, cache.nbytes)

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, with ``kept_fraction``: kept over all bytes of entries; None when nothing was compressed."""
        fraction = self.entry_bytes_kept / self.entry_bytes_full if self.entry_bytes_full else 1.0
        return {**asdict(self), "kept_fraction": fraction if self.prompts_compressed else None}


@dataclass(frozen=True)
class Batch:
    """Prompts that are answered together, by index, each under a condition, by number.

    The rows of the cache have read the heads, and are more than prompts where copies fill them. Prompts without a head
    or a rest are read whole: without a cache.
    """

    indices: list[int]
    conditions: list[int]
    cache: CompressedCache | None = None
    kept: list[Kept] = field(default_factory=list)  # one a prompt, none without a cache


Conditions = Sequence[tuple[Policy | PolicyName, BudgetLike]]
"""Policies and their budgets, under each of which all prompts are answered; one at least."""


@dataclass(frozen=True, kw_only=True)
class Runner:
    """Runs prompts through one model from ``kvpass.compile``, ``batch`` rows at once."""

    model: Any
    tokenizer: PreTrainedTokenizerBase
    batch: int = 1
    totals: Totals = field(default_factory=Totals)

    def batches(self, prompts: Sequence[Prompt], kinds: Sequence[Any], conditions: Conditions) -> Iterator[Batch]:
        """All prompts, first those of :meth:`compressed`, then those that are read whole, longest first.

        A prompt without a head has nothing to compress, and everything is kept of it. Prompts of one batch have equal
        ``kinds``, which are sortable.
        """
        yield from self.compressed(prompts, kinds, conditions)
        whole = [index for index, prompt in enumerate(prompts) if not (prompt.head and prompt.rest)]
        whole.sort(key=lambda index: -len(prompts[index]))
        kinds = [(bool(prompt.head), kind) for prompt, kind in zip(prompts, kinds, strict=True)]
        for number, condition in enumerate(conditions):
            for _, indices in rounds([whole], kinds, self.batch):
                self.model.set_policy(*(condition if prompts[indices[0]].head else ("full", None)))
                yield Batch(indices, [number] * len(indices))
            self.model.set_policy(*condition)

    def compressed(self, prompts: Sequence[Prompt], kinds: Sequence[Any], conditions: Conditions) -> Iterator[Batch]:
        """Read each head once, longest first, then continue with prompts whose rests are equally long.

        Conditions that only append while decoding are rows of one batch: a step reads the weights once for all of them.
        A prompt without a head or a rest is passed over. Let go of a batch's cache before asking for the next batch.
        """
        sharing: dict[tuple[int, ...], list[int]] = {}
        for index, prompt in enumerate(prompts):
            if prompt.head and prompt.rest:
                sharing.setdefault(prompt.head, []).append(index)
        kinds = [(len(prompt.rest), kind) for prompt, kind in zip(prompts, kinds, strict=True)]
        size = min(self.batch, max(1, len(sharing)))
        for heads in chunks(sorted(sharing, key=len, reverse=True), size):
            ids, mask = (x.to(self.model.device) for x in pad(filled(heads, size), "left", self._padding))
            turns = list(rounds([sharing[head] for head in heads], kinds, size))
            for numbers, cache, kept in self._caches(conditions, ids, mask):
                self.totals.add([row for of_condition in kept for row in of_condition[: len(heads)]], cache)
                for turn, (rows, indices) in enumerate(turns, 1):
                    joined = [place * size + row for place in range(len(numbers)) for row in rows]
                    picked = pick_rows(cache, filled(joined, cache.batch_size), last=turn == len(turns))
                    of_rows = [of_condition[row] for of_condition in kept for row in rows]
                    yield Batch(indices * len(numbers), [number for number in numbers for _ in rows], picked, of_rows)
                    del picked
                del cache

    def _caches(
        self, conditions: Conditions, ids: Tensor, mask: Tensor
    ) -> Iterator[tuple[list[int], CompressedCache, list[list[Kept]]]]:
        """Read prompts once; yield caches of their rows under some conditions, by number, and what each of them kept.

        The model has the first of these conditions. Let go of a cache before asking for the next.
        """
        read = [
            (number, cache, self.kept(cache))
            for number, cache in enumerate(each_cache(self.model, conditions, ids, mask))
        ]
        read.sort(key=lambda one: -one[1].nbytes)  # rows have room for the longest of their batch
        appending = [one for one in read if not _evicts(one[1])]
        batches = [[one] for one in read if _evicts(one[1])] + list(chunks(appending, max(1, MOST_ROWS // len(ids))))
        del read, appending
        while batches:
            numbers, caches, kept = map(list, zip(*batches.pop(0), strict=True))
            self.model.set_policy(*conditions[numbers[0]])
            cache = caches[0] if len(caches) == 1 else as_rows(caches)
            del caches
            yield numbers, cache, kept
            del cache

    def greedy(
        self, prompts: Sequence[Prompt], limits: Sequence[int], stops: Collection[int], conditions: Conditions
    ) -> Iterator[list[tuple[int, int, list[int], Kept]]]:
        """Greedy answers to all prompts, under each condition.

        Args:
            limits: most tokens of each answer. stops: token ids that end an answer.
        Yields:
            number of a condition, index of a prompt, tokens of its answer (the one that ends it included) and what was
            kept, some at a time.
        """
        settings: dict[str, Any] = {
            "do_sample": False,
            "repetition_penalty": 1.0,
            "eos_token_id": sorted(stops) or None,
        }
        for batch in self.batches(prompts, [0] * len(prompts), conditions):
            some = [prompts[index] for index in batch.indices]
            answers = self.generate(some, batch.cache, max_new_tokens=max(limits), **settings)
            kept = batch.kept or self.kept()
            rows = list(zip(batch.conditions, batch.indices, answers, kept, strict=True))
            del batch  # its cache, before the next one is filled
            yield [(number, index, ended(tokens[: limits[index]], stops), kept) for number, index, tokens, kept in rows]

    def generate(
        self,
        prompts: Sequence[Prompt],
        cache: CompressedCache | None,
        *,
        stopping: Callable[[int, int], StoppingCriteriaList] | None = None,
        **settings: Any,
    ) -> list[list[int]]:
        """Token ids that follow the prompts of a batch, padded on the right.

        Args:
            stopping: makes stopping criteria from the number of columns before the answers, and of rows.
            settings: of transformers' ``generate``.
        """
        rows, beams = list(prompts), int(settings.get("num_beams") or 1)
        if cache is not None:
            rows = filled(rows, cache.batch_size)
            if beams > 1:  # the search has that many rows from the first step on
                repeated = torch.arange(len(rows)).repeat_interleave(beams).tolist()
                cache = pick_rows(cache, repeated, last=not cache.reusable)
        columns = 0 if cache is None else cache.columns + len(rows[0].rest)
        ids, mask = pad([prompt.ids for prompt in rows], "left", self._padding, columns)
        output = self.model.generate(
            input_ids=ids.to(self.model.device),
            attention_mask=mask.to(self.model.device),
            past_key_values=cache,
            stopping_criteria=None if stopping is None else stopping(ids.shape[1], ids.shape[0]),
            pad_token_id=self._padding,
            use_cache=True,
            return_dict_in_generate=True,
            **settings,
        )
        if rows[0].head:
            self.totals.add(self.kept() if cache is None else [], output[CACHE])
        else:
            self.totals.prompts_not_compressed += len(rows)
        return [tokens[ids.shape[1] :] for tokens in output.sequences[: len(prompts)].tolist()]

    def kept(self, cache: CompressedCache | None = None) -> list[Kept]:
        """What the prompt of a cache kept, by default the latest prompt of the model, row by row."""
        report = self.model.report(cache)
        tokens = report.prompt_lengths.tolist()
        token_bytes = report.bytes_full // sum(tokens)
        kept_bytes = report.bytes_kept.sum((1, 2)).tolist()
        masses = report.attention_mass.flatten(1).nanmean(1).tolist() if report.layer_ids else [None] * len(tokens)
        return [
            Kept(
                compressed_tokens=length,
                budget_entries=budget,
                budget_bytes=budget * token_bytes,
                kept_entries=size / token_bytes if token_bytes else float(length),
                kept_fraction=size / (token_bytes * length) if token_bytes else 1.0,
                kept_bytes=size,
                full_bytes=token_bytes * length,
                cache_bytes=report.prompt.nbytes / len(tokens),
                attention_mass=mass,
            )
            for length, budget, size, mass in zip(
                tokens, report.prompt.entries.tolist(), kept_bytes, masses, strict=True
            )
        ]

    @property
    def _padding(self) -> int:
        return int(self.tokenizer.pad_token_id or 0)


def each_cache(model: Any, conditions: Conditions, *prompt: Tensor) -> Iterator[CompressedCache]:
    """Read a prompt once, and yield its cache under each condition, which the model has until the next one.

    Let go of a cache before asking for the next.
    """
    if len(conditions) == 1:  # processes that share a model can compress for one only
        model.set_policy(*conditions[0])
        yield model(*prompt, logits_to_keep=1).past_key_values
        return
    caches = model.compress_each(*prompt, conditions=conditions)
    for condition in conditions:
        model.set_policy(*condition)
        yield caches.pop(0)


def _evicts(cache: CompressedCache) -> bool:
    return any(layers.evicts for layers in cache.state.full_layers)


def as_rows(caches: Sequence[CompressedCache]) -> CompressedCache:
    """One cache of the rows of caches of the same prompts, whose policies only append while decoding.

    It is continued under the policy and budget of the first one, which decide nothing any more.
    """
    first, states = caches[0], [cache.state for cache in caches]
    rows, mask = torch.arange(first.batch_size * len(caches)), first.attention_mask.repeat(len(caches), 1)
    whole = replace(first.state, ids=None if first.ids is None else first.ids.repeat(len(caches), 1))
    first.state = whole.joined(states, rows, mask, mask[:, :0])
    return first


def ended(tokens: list[int], stops: Collection[int]) -> list[int]:
    """Up to the token that ends an answer; what follows fills the batch."""
    return tokens[: next((end for end, token in enumerate(tokens, 1) if token in stops), len(tokens))]


def pick_rows(cache: CompressedCache, rows: Sequence[int], *, last: bool) -> CompressedCache:
    """A cache of these rows, in this order; after the ``last`` use of the cache that may be itself."""
    if list(rows) == list(range(cache.batch_size)):
        cache.reusable = not last
        return cache
    picked = cache if last else cache.clone()
    picked.reusable = False
    picked.batch_select_indices(torch.tensor(rows, device=cache.device))
    return picked


def chunks(items: Sequence[Item], size: int) -> Iterator[list[Item]]:
    return (list(items[begin : begin + size]) for begin in range(0, len(items), size))


def filled(items: Sequence[Item], size: int) -> list[Item]:
    """The items, the last one again and again up to ``size``."""
    return [*items, *[items[-1]] * (size - len(items))]


def rounds(sharing: Sequence[Sequence[int]], kinds: Sequence[Any], size: int) -> Iterator[tuple[list[int], list[int]]]:
    """Up to ``size`` prompts of one kind at a time: the rows of a cache that they continue, and their indices.

    ``sharing``: indices of the prompts that continue each row. ``kinds``: of every prompt, to be sorted by.
    """
    pairs = [(row, index) for row, indices in enumerate(sharing) for index in indices]
    pairs.sort(key=lambda pair: kinds[pair[1]])
    for _, group in itertools.groupby(pairs, lambda pair: kinds[pair[1]]):
        for batch in chunks(list(group), size):
            yield [row for row, _ in batch], [index for _, index in batch]
