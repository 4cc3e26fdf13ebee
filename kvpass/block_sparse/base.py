"""Base class of block-sparse prompt attention: which blocks of keys each block of queries attends to."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch

from kvpass.operands import Attention, BlockSelection
from kvpass.policies.base import Policy, short_text
from kvpass.policies.options import check_int, check_options, option

FULL_QUERIES = 128
"""Last queries of a prompt that attend to all keys, at least: policies score by them, and the answer begins there."""


@dataclass(frozen=True, kw_only=True)
class BlockSparse(ABC):
    """Rule that decides which part of a prompt's attention is computed.

    A subclass defines :meth:`select`. The first block of keys, the diagonal and the last queries are always computed.

    Args:
        dense_layers: first layers of the model that attend to everything.
    """

    name: ClassVar[str]
    block: ClassVar[int]
    """Tokens of a block of queries, and of one of keys: a multiple of 64."""

    dense_layers: int = option(0, check_int, 0)

    def __post_init__(self) -> None:
        check_options(self)

    @abstractmethod
    def select(self, call: Attention) -> BlockSelection:
        """Return what to compute of the attention of prompts of one length, without padding.

        What is above the diagonal does not count. Logit soft-capping may be left out of the estimate.
        """

    def columns(self, tokens: int) -> int:
        """Return how many single columns of so many tokens are selected at most."""
        return 0

    def selected(self, call: Attention, queries: int) -> BlockSelection:
        """Return :meth:`select` with what is always computed; ``queries``: how many of the last attend to all keys."""
        blocks, columns = self.select(call)
        count, n = blocks.shape[-1], call.q.shape[2]
        blocks = blocks | torch.eye(count, dtype=torch.bool, device=blocks.device)
        blocks[..., 0] = True
        blocks[:, :, max(n - max(queries, FULL_QUERIES), 0) // self.block :] = True
        return BlockSelection(blocks.tril_(), columns)

    def check_policy(self, policy: Policy) -> None:
        """Raise ValueError for a policy that reads the attention of all queries of a prompt, or may read it."""
        own = any(not type(part).__module__.startswith("kvpass.policies.") for part in policy.parts)
        if "column_sum" in policy.inputs or (own and policy.queries_read is None):
            raise ValueError(
                f"prefill={self.name!r} with policy {policy.name!r}: it may read the attention of all queries, "
                "and only the last ones attend to everything; take prefill='full', or a policy without the inputs "
                "'queries' and 'column_sum'"
            )

    @cached_property
    def text(self) -> str:
        """The name, and the options that differ from their defaults; ``from_text`` reads it."""
        return short_text(self)
