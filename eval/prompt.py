"""Prompts as token ids: what is compressed, what is fed afterwards, and how several share a batch.

Legend: B batch, T tokens.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

Item = TypeVar("Item")

Scope = Literal["prompt", "context"]
Truncation = Literal["left", "middle"]


@dataclass(frozen=True)
class Prompt:
    """Token ids of one prompt.

    Attributes:
        ids: all of them. held: how many at the end are fed after compression; ``len(ids)`` or more leave nothing that
            is compressed.
    """

    ids: tuple[int, ...]
    held: int

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def head(self) -> tuple[int, ...]:
        """The tokens that are compressed."""
        return self.ids[: max(len(self.ids) - self.held, 0)]

    @property
    def rest(self) -> tuple[int, ...]:
        """The tokens that are fed after compression."""
        return self.ids[len(self.head) :]

    def scoped(self, scope: str, hold: int) -> Prompt:
        """Itself for scope ``context``; for ``prompt`` with another border: only the last ``hold`` tokens are held."""
        return self if scope == "context" else replace(self, held=hold)

    def cut(self, limit: int, truncation: Truncation) -> Prompt:
        """At most ``limit`` tokens: the last ones, or, as in LongBench, the first ``limit // 2`` and the last.

        What remains of the head is the new head.
        """
        if len(self) <= limit:
            return self
        first = limit // 2 if truncation == "middle" else 0
        last = len(self) - (limit - first)
        head = min(len(self.head), first) + max(len(self.head) - last, 0)
        return Prompt(self.ids[:first] + self.ids[last:], limit - head)


def tokenize(tokenizer: PreTrainedTokenizerBase, before: str, after: str, *, special: bool) -> Prompt:
    """Two texts tokenised in one piece; the head is ``before``, and a token across the border is not in it.

    Args:
        special: put the tokenizer's special tokens in front; those it puts behind are left out.
    Raises:
        ValueError: a slow tokenizer.
    """
    if not tokenizer.is_fast:
        raise ValueError(f"tokenizer of type {type(tokenizer).__name__}: must be a fast one, which knows offsets")
    found = tokenizer(before + after, add_special_tokens=special, return_offsets_mapping=True, verbose=False)
    ids, ends = list(found["input_ids"]), [end for _, end in found["offset_mapping"]]
    while len(ids) > 1 and ends[-1] == 0:
        ids.pop(), ends.pop()
    return Prompt(tuple(ids), sum(end > len(before) for end in ends))


def pad(
    rows: Sequence[Sequence[int]], side: Literal["left", "right"], token: int, columns: int = 0
) -> tuple[Tensor, Tensor]:
    """Rows of one length: that of the longest, and at least ``columns``.

    Returns:
        ids and mask (1 = real token), both int64 ``[B, T]`` on the CPU.
    """
    columns = max(columns, *map(len, rows))
    ids = torch.full((len(rows), columns), token, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, tokens in enumerate(rows):
        real = slice(columns - len(tokens), columns) if side == "left" else slice(0, len(tokens))
        ids[row, real] = torch.tensor(tokens, dtype=torch.int64)
        mask[row, real] = 1
    return ids, mask


def chunks(items: Sequence[Item], size: int) -> Iterator[list[Item]]:
    """Up to ``size`` neighbours at a time."""
    for begin in range(0, len(items), size):
        yield list(items[begin : begin + size])


def by_head(prompts: Sequence[Prompt]) -> dict[tuple[int, ...], list[int]]:
    """Of every head, which may be empty, the indices of the prompts that share it."""
    found: dict[tuple[int, ...], list[int]] = {}
    for index, prompt in enumerate(prompts):
        found.setdefault(prompt.head, []).append(index)
    return found


def rounds(sharing: Sequence[Sequence[int]], kinds: Sequence[Any], size: int) -> Iterator[tuple[list[int], list[int]]]:
    """Up to ``size`` prompts of one kind at a time.

    Args:
        sharing: indices of the prompts that continue each row of a cache. kinds: of every prompt, to be sorted by.
    Yields:
        of each prompt, the row that it continues and its index.
    """
    pairs = [(row, index) for row, indices in enumerate(sharing) for index in indices]
    pairs.sort(key=lambda pair: kinds[pair[1]])
    for _, group in itertools.groupby(pairs, lambda pair: kinds[pair[1]]):
        for batch in chunks(list(group), size):
            yield [row for row, _ in batch], [index for _, index in batch]
