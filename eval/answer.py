"""Greedy answers from a compressed cache, many rows at once, in either scope, with what the cache kept.

The number of rows a batch has never changes during a run, so that nothing is compiled twice: missing rows are filled
with copies whose answers are dropped. Rows of a batch do not influence each other (contract 4).

Legend: B batch, T tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from kvpass.cache.cache import CompressedCache
from kvpass.eval.prompt import Prompt, by_head, chunks, pad, rounds

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Request:
    """A prompt whose rest is the question, and the most tokens its answer may have."""

    prompt: Prompt
    max_new_tokens: int


@dataclass(frozen=True, kw_only=True)
class Kept:
    """What compression left of one row, right after the compressed part was read.

    Attributes:
        tokens: length of the compressed part. budget_entries: per KV head per layer, window included; budget_bytes: of
            all layers together.
        bytes: of the kept entries. entries: kept ones per KV head per layer, on average (weighed by bytes where layers
            differ). fraction: of the bytes a full cache of the same layers holds. Where all layers slide nothing is
            under the budget, so that nothing is evicted: no bytes, every entry kept, fraction 1.
        cache_bytes: what the storages of the batch occupy, spare slots and tail included, divided by its rows.
    """

    tokens: int
    budget_entries: int
    budget_bytes: int
    entries: float
    bytes: int
    fraction: float
    cache_bytes: float


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Text and number of generated tokens (the one that ends the answer included), and what was kept for it."""

    text: str
    tokens: int
    kept: Kept


@dataclass(frozen=True, kw_only=True)
class Answerer:
    """Answers requests with one compiled model.

    Args:
        model: from ``kvpass.compile``. stops: token ids that end an answer. batch: rows of a batch.
        hold: scope ``prompt`` compresses all but the last ``hold`` tokens and feeds these afterwards, so that the first
            generated token sees the compressed cache; with 0 it does not.

    Raises:
        ValueError: batch or hold out of range.
    """

    model: Any
    tokenizer: PreTrainedTokenizerBase
    stops: frozenset[int]
    batch: int = 1
    hold: int = 1

    def __post_init__(self) -> None:
        if self.batch < 1:
            raise ValueError(f"batch={self.batch}: must be >= 1")
        if self.hold < 0:
            raise ValueError(f"hold={self.hold}: must be >= 0")

    def answers(self, requests: Sequence[Request], scope: str) -> Iterator[list[tuple[int, Answer]]]:
        """Answer all requests, in an order that wastes little padding; what several share is compressed once.

        Args:
            scope: ``"prompt"`` (the question is compressed with the context) or ``"context"`` (it comes after).
        Yields:
            index of the request and its answer, for some requests at a time.
        """
        prompts = [request.prompt.scoped(scope, self.hold) for request in requests]
        lengths = [len(prompt.rest) for prompt in prompts]
        sharing = by_head(prompts)
        size = min(self.batch, len(sharing))
        for heads in chunks(sorted(sharing, key=len), size):
            ids, mask = pad(_filled(heads, size, heads[-1]), "left", 0)
            ids, mask = ids.to(self.model.device), mask.to(self.model.device)
            read = self.model(ids, attention_mask=mask, logits_to_keep=1)
            kept = self._kept()
            turns = list(rounds([sharing[head] for head in heads], lengths, size))
            for turn, (rows, asked) in enumerate(turns, 1):
                rows = _filled(rows, size, rows[-1])
                fed = torch.tensor([prompts[index].rest for index in _filled(asked, size, asked[-1])])
                logits, cache = read.logits[rows], pick_rows(read.past_key_values, rows, last=turn == len(turns))
                if fed.numel():
                    out = self.model(fed.to(ids.device), past_key_values=cache, logits_to_keep=1)
                    logits, cache = out.logits, out.past_key_values
                yield self._generate(logits, cache, _filled(asked, size, None), requests, [kept[row] for row in rows])

    def _generate(
        self,
        logits: Tensor,
        cache: CompressedCache,
        rows: Sequence[int | None],
        requests: Sequence[Request],
        kept: Sequence[Kept],
    ) -> list[tuple[int, Answer]]:
        """Greedy decoding from the logits of the last position, fp ``[B, 1, vocabulary]``.

        Args:
            rows: index of the request of each row, None for a row that only fills the batch.
        """
        limits = [0 if index is None else requests[index].max_new_tokens for index in rows]
        said: list[list[int]] = [[] for _ in rows]
        while True:
            token = logits[:, -1].argmax(-1, keepdim=True)
            for row, number in enumerate(token[:, 0].tolist()):
                if len(said[row]) < limits[row]:
                    said[row].append(number)
                    if number in self.stops:
                        limits[row] = len(said[row])
            if all(len(tokens) == limit for tokens, limit in zip(said, limits, strict=True)):
                break
            out = self.model(token, past_key_values=cache, logits_to_keep=1)
            logits, cache = out.logits, out.past_key_values
        return [
            (index, Answer(text=self._decode(said[row]), tokens=len(said[row]), kept=kept[row]))
            for row, index in enumerate(rows)
            if index is not None
        ]

    def _decode(self, tokens: list[int]) -> str:
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True))

    def _kept(self) -> list[Kept]:
        report = self.model.report()
        tokens = report.prompt_lengths.tolist()
        token_bytes = report.bytes_full // sum(tokens)
        kept_bytes = report.bytes_kept.sum((1, 2)).tolist()
        return [
            Kept(
                tokens=length,
                budget_entries=budget,
                budget_bytes=budget * token_bytes,
                entries=size / token_bytes if token_bytes else float(length),
                bytes=size,
                fraction=size / (token_bytes * length) if token_bytes else 1.0,
                cache_bytes=report.prompt.nbytes / len(tokens),
            )
            for length, budget, size in zip(tokens, report.prompt.entries.tolist(), kept_bytes, strict=True)
        ]


def pick_rows(cache: CompressedCache, rows: Sequence[int], *, last: bool) -> CompressedCache:
    """A cache of these rows, in this order, some perhaps several times.

    Args:
        last: the cache is not needed afterwards, and may be what is returned. Else it stays as it is.
    """
    if list(rows) == list(range(cache.batch_size)):
        cache.reusable = not last
        return cache
    picked = cache if last else cache.clone()
    picked.reusable = False
    picked.batch_select_indices(torch.tensor(rows, device=cache.device))
    return picked


def _filled(items: Sequence[T], size: int, filler: T) -> list[T]:
    return [*items, *[filler] * (size - len(items))]
