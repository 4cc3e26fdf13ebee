"""Addresses within a block: one request's pool and tails, over all layers.

vLLM sees L pages ``[K, slots, 2 * D]`` side by side. kvpass uses the same memory as two arrays of entries ``[R, D]``,
all keys and then all values, ``R = L * K * slots``: first the pool, which all layers share, then a tail for each layer
and KV head.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class BlockLayout:
    """Sizes of a block.

    Attributes:
        layers, kv_heads, head_dim: of the model. pool: entries that all layers share. tail: slots of each KV head for
            the window and for appended tokens.
    """

    layers: int
    kv_heads: int
    head_dim: int
    pool: int
    tail: int

    @property
    def slots(self) -> int:
        """Entries per layer and KV head that vLLM reserves: the pool in equal parts, rounded up, and the tail."""
        return -(-self.pool // (self.layers * self.kv_heads)) + self.tail

    @property
    def rows(self) -> int:
        """Entries of a block."""
        return self.layers * self.kv_heads * self.slots

    def blocks(self, page: Tensor, site: int) -> tuple[Tensor, Tensor]:
        """Return the keys and the values of all blocks, each ``[blocks, R, D]``: views of vLLM's memory.

        Args:
            page: the cache of layer ``site`` as vLLM hands it out, ``[blocks, K, slots, 2 * D]``.
        Raises:
            ValueError: the pages of all layers do not lie side by side in layer order.
        """
        width = 2 * self.head_dim
        size = self.kv_heads * self.slots * width
        shape = (page.shape[0], self.kv_heads, self.slots, width)
        stride = (self.layers * size, self.slots * width, width, 1)
        if page.shape != shape or page.stride() != stride or page.storage_offset() != site * size:
            raise ValueError(
                f"the cache of layer {site} has shape {tuple(page.shape)}, strides {page.stride()} and offset "
                f"{page.storage_offset()}: expected {shape}, {stride} and {site * size}"
            )
        block, dim = self.layers * size, self.head_dim
        keys, values = (
            torch.as_strided(page, (page.shape[0], self.rows, dim), (block, dim, 1), first)
            for first in (0, self.rows * dim)
        )
        return keys, values

    def parts(self, entries: Tensor) -> tuple[Tensor, Tensor]:
        """Return pools ``[n, E, D]`` and tails ``[L, n, K, C, D]`` of the keys or values ``[n, R, D]`` of blocks."""
        end = self.pool + self.layers * self.kv_heads * self.tail
        tails = entries[:, self.pool : end].unflatten(1, (self.layers, self.kv_heads, self.tail))
        return entries[:, : self.pool], tails.transpose(0, 1)
