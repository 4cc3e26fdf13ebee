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

from kvpass.eval.tasks.base import Encoded

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Request:
    """A prompt and the most tokens its answer may have."""

    prompt: Encoded
    max_new_tokens: int


@dataclass(frozen=True, kw_only=True)
class Kept:
    """What compression left of one row, right after the compressed part was read.

    Attributes:
        tokens: length of the compressed part. budget_entries: per KV head per layer, window included; budget_bytes: of
            all layers together.
        bytes: of the kept entries. entries: kept ones per KV head per layer, on average (weighed by bytes where layers
            differ). fraction: of the bytes a full cache of the same layers holds.
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

    def compressed_tokens(self, prompt: Encoded, scope: str) -> int:
        """Tokens of a prompt that are compressed."""
        return len(prompt.context) if scope == "context" else len(prompt) - self.hold

    def answers(self, requests: Sequence[Request], scope: str) -> Iterator[list[tuple[int, Answer]]]:
        """Answer all requests, in an order that wastes little padding.

        Args:
            scope: ``"prompt"`` (the question is compressed with the context) or ``"context"`` (it comes after).
        Yields:
            index of the request and its answer, for some requests at a time.
        """
        return self._with_context(requests) if scope == "context" else self._with_prompt(requests)

    def _with_prompt(self, requests: Sequence[Request]) -> Iterator[list[tuple[int, Answer]]]:
        order = sorted(range(len(requests)), key=lambda index: len(requests[index].prompt))
        size = min(self.batch, len(order))
        for chunk in _chunks(order, size):
            ids, mask = self._padded([requests[index].prompt.ids for index in chunk], size)
            end = ids.shape[1] - self.hold
            out = self.model(ids[:, :end], attention_mask=mask[:, :end], logits_to_keep=1)
            kept = self._kept()
            if self.hold:
                out = self.model(ids[:, end:], past_key_values=out.past_key_values, logits_to_keep=1)
            yield self._generate(out, _filled(chunk, size, None), requests, kept)

    def _with_context(self, requests: Sequence[Request]) -> Iterator[list[tuple[int, Answer]]]:
        """Every context is compressed once; its questions continue on copies of its cache."""
        questions: dict[tuple[int, ...], list[int]] = {}
        for index, request in enumerate(requests):
            questions.setdefault(request.prompt.context, []).append(index)
        size = min(self.batch, len(questions))
        for chunk in _chunks(sorted(questions, key=len), size):
            ids, mask = self._padded(chunk, size)
            cache = self.model.compress(ids, attention_mask=mask)
            kept = self._kept()
            waiting = _filled([questions[context] for context in chunk], size, [])
            while asked := _round(waiting, requests):
                some = next(index for index in asked if index is not None)
                rows = [requests[some if index is None else index].prompt.question for index in asked]
                out = self.model(torch.tensor(rows, device=ids.device), past_key_values=cache, logits_to_keep=1)
                yield self._generate(out, asked, requests, kept)

    def _generate(
        self, out: Any, rows: Sequence[int | None], requests: Sequence[Request], kept: list[Kept]
    ) -> list[tuple[int, Answer]]:
        """Greedy decoding from the logits of the last position.

        Args:
            rows: index of the request of each row, None for a row that only fills the batch.
        """
        limits = [0 if index is None else requests[index].max_new_tokens for index in rows]
        said: list[list[int]] = [[] for _ in rows]
        while True:
            token = out.logits[:, -1].argmax(-1, keepdim=True)
            for row, number in enumerate(token[:, 0].tolist()):
                if len(said[row]) < limits[row]:
                    said[row].append(number)
                    if number in self.stops:
                        limits[row] = len(said[row])
            if all(len(tokens) == limit for tokens, limit in zip(said, limits, strict=True)):
                break
            out = self.model(token, past_key_values=out.past_key_values, logits_to_keep=1)
        return [
            (index, Answer(text=self._decode(said[row]), tokens=len(said[row]), kept=kept[row]))
            for row, index in enumerate(rows)
            if index is not None
        ]

    def _decode(self, tokens: list[int]) -> str:
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True))

    def _padded(self, rows: Sequence[tuple[int, ...]], size: int) -> tuple[Tensor, Tensor]:
        """Left-padded ids and their mask, int64 ``[size, T]``; the last row is repeated where rows are missing."""
        longest = max(map(len, rows))
        rows = _filled(rows, size, rows[-1])
        ids = torch.tensor([(0,) * (longest - len(row)) + row for row in rows])
        mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
        return ids.to(self.model.device), mask.to(self.model.device)

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
                entries=size / token_bytes,
                bytes=size,
                fraction=size / (token_bytes * length),
                cache_bytes=report.prompt.nbytes / len(tokens),
            )
            for length, budget, size in zip(tokens, report.prompt.entries.tolist(), kept_bytes, strict=True)
        ]


def _chunks(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]


def _filled(items: Sequence[T], size: int, filler: T) -> list[T]:
    return [*items, *[filler] * (size - len(items))]


def _round(waiting: Sequence[list[int]], requests: Sequence[Request]) -> list[int | None]:
    """Take one question, all of one length, from every row that has one; empty when none is left."""
    first = next((row[0] for row in waiting if row), None)
    if first is None:
        return []
    length = len(requests[first].prompt.question)
    taken: list[int | None] = []
    for row in waiting:
        index = next((index for index in row if len(requests[index].prompt.question) == length), None)
        if index is not None:
            row.remove(index)
        taken.append(index)
    return taken
