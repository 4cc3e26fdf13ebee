"""MInference: the columns and diagonals that the last queries attend to."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kvpass.block_sparse.base import BlockSparse
from kvpass.operands import Attention, BlockSelection
from kvpass.policies.options import check_int, option

FIRST_COLUMNS, NEWEST_DIAGONALS = 30, 100
"""Columns and diagonals that are always taken, in the released code."""


@dataclass(frozen=True, kw_only=True)
class MInference(BlockSparse):
    """Compute the columns and diagonals that the last queries attend to most (Jiang et al. 2024, arXiv 2407.02490).

    The vertical-slash pattern (section 3.2, algorithm 1): the attention of the last queries, summed over each column
    and each diagonal, says for a head which columns are computed one by one, and which diagonals. A block of 64 x 64
    is computed if a diagonal that is taken crosses it.

    Departures: sizes are the same for all heads, those that the released code takes where it has no others. The paper
    searches the pattern and the sizes of each head of a model on a sample, and knows two more patterns. Blocks lie on
    a grid; the released kernel begins them at the diagonals.

    Args:
        vertical_size, slash_size: columns and diagonals of a head. last_q: last queries that are attended in full to
            find them.
    """

    name = "minference"
    block = 64

    vertical_size: int = option(1000, check_int, FIRST_COLUMNS)
    slash_size: int = option(6096, check_int, NEWEST_DIAGONALS)
    last_q: int = option(64, check_int, 1, 4096)

    def columns(self, tokens: int) -> int:
        return min(self.vertical_size, tokens)

    def select(self, call: Attention) -> BlockSelection:
        q, k, n = call.q, call.k, call.q.shape[2]
        rows = min(self.last_q, n)
        of_kv_heads = q[:, :, n - rows :].unflatten(1, (k.shape[1], -1)).flatten(2, 3)
        logits = (of_kv_heads @ k.mT).unflatten(2, (-1, rows)).flatten(1, 2).float() * call.scale  # [B, H, rows, N]
        own = torch.ones(rows, rows, dtype=torch.bool, device=q.device).triu(1)
        logits[..., n - rows :].masked_fill_(own, float("-inf"))
        weights = logits.softmax(-1)
        vertical, slash = weights.sum(2), _sums_of_diagonals(weights)
        vertical[..., :FIRST_COLUMNS] = float("inf")
        slash[..., :NEWEST_DIAGONALS] = float("inf")
        columns = vertical.topk(self.columns(n), -1).indices.sort(-1).values
        taken = slash.topk(min(self.slash_size, n), -1).indices
        return BlockSelection(self._crossed(taken, n), columns.int())

    def _crossed(self, diagonals: Tensor, n: int) -> Tensor:
        """Blocks that diagonals cross, bool ``[B, H, blocks, blocks]``; block (i, j) has those near ``block (i - j)``.

        ``diagonals``: distances of key and query, ``[B, H, S]``.
        """
        count, size = -(-n // self.block), self.block
        marks = diagonals.new_zeros(*diagonals.shape[:2], count * size, dtype=torch.float32).scatter_(
            -1, diagonals, 1.0
        )
        crossed = F.max_pool1d(F.pad(marks, (size - 1, 0)), 2 * size - 1, size) > 0  # by distance of blocks
        block = torch.arange(count, device=diagonals.device)
        return crossed[..., (block[:, None] - block).clamp(min=0)]


def _sums_of_diagonals(weights: Tensor) -> Tensor:
    """Sum attention ``[B, H, R, N]`` of the last R of N queries by distance of query and key, ``[B, H, N]``."""
    *sizes, rows, n = weights.shape
    distance = torch.arange(n - rows, n, device=weights.device)[:, None] - torch.arange(n, device=weights.device)
    later = (distance < 0).expand(*sizes, -1, -1)
    sums = weights.new_zeros(*sizes, n)
    places = distance.clamp(min=0).expand(*sizes, -1, -1).flatten(-2)
    return sums.scatter_add_(-1, places, weights.masked_fill(later, 0.0).flatten(-2))
