"""Prompts: where the context ends and the question begins, as text and as token ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from kvpass.eval.options import names

Scope = Literal["prompt", "context"]
Truncation = Literal["left", "middle"]


def parse_scopes(text: str) -> tuple[str, ...]:
    """Read scopes such as ``prompt,context``; ``ValueError`` if there is none, or an unknown one."""
    scopes = tuple(dict.fromkeys(names(text)))
    if not scopes or not {*scopes} <= {*get_args(Scope)}:
        raise ValueError(f"scope={text!r}: must be one of {', '.join(get_args(Scope))}, or both")
    return scopes


SEPARATOR = "<|kvpass:ask|>"
"""Stands between context and question in the text of a request. It is removed before a text is tokenised."""


@dataclass(frozen=True)
class Prompt:
    """Token ids of a prompt; the last ``num_uncompressed_tokens`` (all, if more) are fed after compression."""

    ids: tuple[int, ...]
    num_uncompressed_tokens: int
    cut_tokens: int = field(default=0, compare=False)

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def head(self) -> tuple[int, ...]:
        """The tokens that are compressed."""
        return self.ids[: max(len(self.ids) - self.num_uncompressed_tokens, 0)]

    @property
    def rest(self) -> tuple[int, ...]:
        """The tokens that are fed after compression."""
        return self.ids[len(self.head) :]

    def scoped(self, scope: str, num_uncompressed_tokens: int) -> Prompt:
        """Itself for scope ``context``; for ``prompt`` with that number of tokens behind the border."""
        return self if scope == "context" else replace(self, num_uncompressed_tokens=num_uncompressed_tokens)

    def cut(self, limit: int, truncation: Truncation) -> Prompt:
        """Cut to the last ``limit`` tokens, or to the first ``limit // 2`` and the last, those of the head first."""
        if len(self) <= limit:
            return self
        first = limit // 2 if truncation == "middle" else 0
        last = len(self) - (limit - first)
        head = min(len(self.head), first) + max(len(self.head) - last, 0)
        return Prompt(self.ids[:first] + self.ids[last:], limit - head, cut_tokens=last - first)


def tokenize(tokenizer: PreTrainedTokenizerBase, before: str, after: str, *, special: bool) -> Prompt:
    """Tokenise two texts in one piece; the head is ``before``, without a token that is across the border.

    Args:
        special: put the tokenizer's special tokens in front; those it puts behind are left out.
    Raises:
        ValueError: a slow tokenizer.
    """
    if not tokenizer.is_fast:
        raise ValueError(f"tokenizer of type {type(tokenizer).__name__}: must be a fast one, which knows offsets")
    encoded = tokenizer(before + after, add_special_tokens=special, return_offsets_mapping=True, verbose=False)
    ids, ends = list(encoded["input_ids"]), [end for _, end in encoded["offset_mapping"]]
    while len(ids) > 1 and ends[-1] == 0:
        ids.pop(), ends.pop()
    return Prompt(tuple(ids), sum(end > len(before) for end in ends))


def pad(
    rows: Sequence[Sequence[int]], side: Literal["left", "right"], token: int, columns: int = 0
) -> tuple[Tensor, Tensor]:
    """Pad to the longest row, at least ``columns``: ids and mask (1: real), int64 ``[rows, tokens]``, on the CPU."""
    columns = max(columns, *map(len, rows))
    ids = torch.full((len(rows), columns), token, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, tokens in enumerate(rows):
        real = slice(columns - len(tokens), columns) if side == "left" else slice(0, len(tokens))
        ids[row, real] = torch.tensor(tokens, dtype=torch.int64)
        mask[row, real] = 1
    return ids, mask


def without_separator(text: str) -> str:
    """The text as a model sees it that compresses the whole prompt."""
    return text.replace(SEPARATOR, "")


def split_at_separator(text: str) -> tuple[str, str]:
    """Context and question of a request with scope ``"context"``; ``ValueError`` where one of the two is missing.

    The last separator counts; those before it, in few-shot examples, are removed.
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
