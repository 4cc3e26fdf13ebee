"""XAttention: blocks whose antidiagonals hold most of the attention."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kvpass.block_sparse.base import BlockSparse
from kvpass.operands import Attention, BlockSelection
from kvpass.policies.options import check_choice, check_float, option

GROUPS_AT_A_TIME = 256
"""Groups of queries whose attention is estimated at a time: the estimate of a whole prompt may not fit in memory."""


@dataclass(frozen=True, kw_only=True)
class XAttention(BlockSparse):
    """Compute the blocks whose estimated attention sums to a share of the whole (Xu et al. 2025, arXiv 2503.16428).

    Groups of ``stride`` queries and keys have as their logit the sum of the products along the antidiagonal,
    ``sum_s q[i S + S - 1 - s] . k[j S + s] / S`` (section 2.1, algorithm 1): each token takes part once. The softmax
    over groups, summed over a block of 128 x 128, estimates what the block holds. Each block of queries takes the
    fewest blocks of keys that hold ``threshold`` of its sum (section 2.2), the largest first.

    Departure: the threshold is one for all heads. The paper also searches one for each head of a model.

    Args:
        threshold: share of the estimated attention, 0.9 in the paper.
        stride: of the antidiagonals; the estimate takes the ``stride``-th part of the products of logits.
    """

    name = "xattention"
    block = 128

    threshold: float = option(0.9, check_float, 0.0, 1.0, open_low=True)
    stride: int = option(16, check_choice, (4, 8, 16, 32, 64))

    def select(self, call: Attention) -> BlockSelection:
        mass = self._mass(call)
        blocks = torch.zeros_like(mass, dtype=torch.bool)
        always = torch.eye(mass.shape[-1], dtype=torch.bool, device=mass.device)
        always[:, 0] = True
        largest, order = mass.masked_fill(always, float("inf")).sort(dim=-1, descending=True, stable=True)
        ordered = mass.gather(-1, order)
        before = ordered.cumsum(-1) - ordered  # what the blocks in front hold
        needed = (before < self.threshold * mass.sum(-1, keepdim=True)) | largest.isinf()
        blocks.scatter_(-1, order, needed)
        return BlockSelection(blocks, blocks.new_empty((*blocks.shape[:2], 0), dtype=torch.int32))

    def _mass(self, call: Attention) -> Tensor:
        """Estimated attention of each block of queries to each of keys, fp32 ``[B, H, blocks, blocks]``."""
        q, k, stride = call.q, call.k, self.stride
        n = q.shape[2]
        missing = -n % self.block
        q, k = F.pad(q, (0, 0, 0, missing)), F.pad(k, (0, 0, 0, missing))
        queries = q.unflatten(2, (-1, stride)).flip(3).flatten(3)  # [B, H, groups, stride * D]
        keys = k.unflatten(2, (-1, stride)).flatten(3)
        in_block, blocks, groups = self.block // stride, (n + missing) // self.block, -(-n // stride)
        mass = queries.new_zeros(*q.shape[:2], blocks, blocks, dtype=torch.float32)
        column = torch.arange(queries.shape[2], device=q.device)
        for first in range(0, queries.shape[2], GROUPS_AT_A_TIME):
            end = min(first + GROUPS_AT_A_TIME, queries.shape[2])
            of_kv_heads = queries[:, :, first:end].unflatten(1, (k.shape[1], -1)).flatten(2, 3)
            products = (of_kv_heads @ keys[:, :, :end].mT).unflatten(2, (-1, end - first)).flatten(1, 2)
            logits = products.float() * (call.scale / stride)
            logits.masked_fill_(column[:end] > column[first:end, None], float("-inf"))
            weights = logits.softmax(-1).masked_fill_(column[first:end, None] >= groups, 0.0)
            sums = weights.unflatten(-1, (-1, in_block)).sum(-1).unflatten(2, (-1, in_block)).sum(3)
            mass[:, :, first // in_block : end // in_block, : end // in_block] = sums
        return mass
