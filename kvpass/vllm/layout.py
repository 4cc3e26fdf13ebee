"""Addresses of blocks: each holds one request's pool and tails, over all layers.

vLLM sees L pages ``[K, slots, width]`` side by side. kvpass uses the same memory as two arrays of entries ``[R, D]``,
all keys and then all values, ``R = L * K * slots``: first the pool, which all layers share, then a tail for each layer
and KV head. Where entries are codes, the scales of all blocks come first, fp32 ``[blocks, 2, R]``, then the codes of
all blocks: codes and scales lie equally far apart, counted in entries, as kernels need it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvpass.config import SCALE_BYTES, EntryFormat
from kvpass.operands import BITS


@dataclass(frozen=True)
class BlockLayout:
    """Sizes of a block.

    Attributes:
        layers, kv_heads, head_dim: of the model. pool: entries that all layers share. tail: slots of each KV head for
            the window and for appended tokens. entry_format: of both.
    """

    layers: int
    kv_heads: int
    head_dim: int
    pool: int
    tail: int
    entry_format: EntryFormat = "model"

    @property
    def coded(self) -> bool:
        """Whether entries are codes, of which a page of vLLM has the bytes; else it has numbers."""
        return self.entry_format != "model"

    @property
    def columns(self) -> int:
        """Numbers of a key or value, or bytes of its codes."""
        return self.head_dim * BITS[self.entry_format] // 8 if self.coded else self.head_dim

    @property
    def width(self) -> int:
        """Numbers that vLLM reserves for a key and its value, or bytes of their codes and scales."""
        return 2 * (self.columns + (SCALE_BYTES if self.coded else 0))

    @property
    def shortest(self) -> int:
        """Tokens of the shortest prompt that is compressed; a shorter one is appended to an empty cache.

        A token that is appended attends its own codes, and a prompt does not; of one number in the model's dtype both
        are the same, and then vLLM can replay its CUDA graph of a decode step for a prompt of one token.
        """
        return 1 if self.coded else 2

    @property
    def slots(self) -> int:
        """Entries per layer and KV head that vLLM reserves: the pool in equal parts, rounded up, and the tail."""
        return -(-self.pool // (self.layers * self.kv_heads)) + self.tail

    @property
    def rows(self) -> int:
        """Entries of a block."""
        return self.layers * self.kv_heads * self.slots

    def blocks(self, page: Tensor, site: int) -> tuple[Tensor, ...]:
        """Return keys and values of all blocks, each ``[blocks, R, D]``: views of vLLM's memory; of codes scales too.

        Args:
            page: the cache of layer ``site`` as vLLM hands it out, ``[blocks, K, slots, width]``.
        Raises:
            ValueError: the pages of all layers do not lie side by side in layer order.
        """
        blocks, rows, width, columns = page.shape[0], self.rows, self.width, self.columns
        size = self.kv_heads * self.slots * width
        shape = (blocks, self.kv_heads, self.slots, width)
        stride = (self.layers * size, self.slots * width, width, 1)
        if page.shape != shape or page.stride() != stride or page.storage_offset() != site * size:
            raise ValueError(
                f"the cache of layer {site} has shape {tuple(page.shape)}, strides {page.stride()} and offset "
                f"{page.storage_offset()}: expected {shape}, {stride} and {site * size}"
            )
        before = blocks * self.layers * size - 2 * blocks * rows * columns  # bytes of scales, if there are any
        shape = (blocks, 2, rows, columns)
        keys, values = torch.as_strided(page, shape, (2 * rows * columns, rows * columns, columns, 1), before).unbind(1)
        if not self.coded:
            return keys, values
        scales = torch.as_strided(page, (before,), (1,), 0).view(torch.float32).view(blocks, 2, rows)
        return keys, values, scales[:, 0], scales[:, 1]

    def buffers(self, page: Tensor, site: int) -> dict[str, Tensor]:
        """Return pools and tails of all blocks by their names in :class:`kvpass.operands.AppendBuffers`."""
        found = {}
        for name, entries in zip(("k", "v", "k_scale", "v_scale"), self.blocks(page, site), strict=False):
            found[f"pool_{name}"], found[f"tail_{name}"] = self.parts(entries)
        return found

    def parts(self, entries: Tensor) -> tuple[Tensor, Tensor]:
        """Return pools ``[n, E, D]`` and tails ``[L, n, K, C, D]`` of entries ``[n, R, D]`` of blocks, or of scales."""
        end = self.pool + self.layers * self.kv_heads * self.tail
        tails = entries[:, self.pool : end].unflatten(1, (self.layers, self.kv_heads, self.tail))
        return entries[:, : self.pool], tails.transpose(0, 1)
