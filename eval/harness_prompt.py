"""Prompts of the lm-evaluation-harness backend as token ids: what is compressed, what is fed afterwards, padding."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")

Scope = Literal["prompt", "context"]
Truncation = Literal["left", "middle"]

SEPARATOR = "<|kvpass:ask|>"
"""Stands between context and question in the text of a request. It is removed before a text is tokenised."""


@dataclass(frozen=True)
class Prompt:
    """Token ids of one prompt.

    Attributes:
        ids: all of them. held: how many at the end are fed after compression; ``len(ids)`` or more where no token
            comes before them, so that there is nothing to compress.
    """

    ids: tuple[int, ...]
    held: int

    @property
    def compressed(self) -> bool:
        """Whether there is anything to compress."""
        return self.held < len(self.ids)

    @property
    def head(self) -> tuple[int, ...]:
        """The tokens that are prefilled and compressed."""
        return self.ids[: max(len(self.ids) - self.held, 0)]

    @property
    def tail(self) -> tuple[int, ...]:
        """The tokens that are fed after compression."""
        return self.ids[len(self.head) :]

    def cut(self, limit: int, truncation: Truncation) -> Prompt:
        """At most ``limit`` tokens, all held ones among them: the last ones, or the first and the last half.

        Raises:
            ValueError: the held tokens leave no room for a token before them.
        """
        excess = len(self.ids) - limit
        if excess <= 0:
            return self
        if self.held >= limit:
            raise ValueError(
                f"{self.held} tokens are fed after compression, but only {limit} tokens of the prompt fit into "
                "max_length beside what is generated or scored"
            )
        last = limit if truncation == "left" else max(limit - limit // 2, self.held)
        return Prompt(self.ids[: limit - last] + self.ids[len(self.ids) - last :], self.held)


def without_separator(text: str) -> str:
    """The text as a model sees it that compresses the whole prompt."""
    return text.replace(SEPARATOR, "")


def split_at_separator(text: str) -> tuple[str, str]:
    """Context and question of a request with scope ``"context"``.

    The last separator counts; those before it, in few-shot examples, are removed.

    Raises:
        ValueError: no separator, or no question after it.
    """
    context, separator, question = text.rpartition(SEPARATOR)
    start = text if len(text) <= 60 else f"{text[:60]}..."
    if not separator:
        raise ValueError(
            f"scope='context' needs {SEPARATOR!r} between context and question, as the tasks of kvpass have it; "
            f"this prompt has none: {start!r}"
        )
    if not question.strip():
        raise ValueError(f"scope='context': nothing follows {SEPARATOR!r} in the prompt {start!r}")
    return without_separator(context), question


def pad(rows: Sequence[Sequence[int]], side: Literal["left", "right"], token: int) -> tuple[Tensor, Tensor]:
    """Rows of one length.

    Returns:
        ids and mask (1 = real token), both int64 ``[B, T]`` on the CPU.
    """
    columns = max(map(len, rows))
    ids = torch.full((len(rows), columns), token, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, tokens in enumerate(rows):
        real = slice(columns - len(tokens), columns) if side == "left" else slice(0, len(tokens))
        ids[row, real] = torch.tensor(tokens, dtype=torch.int64)
        mask[row, real] = 1
    return ids, mask


def chunks(items: Sequence[T], size: int) -> Iterator[list[T]]:
    """Up to ``size`` neighbours at a time."""
    for begin in range(0, len(items), size):
        yield list(items[begin : begin + size])
