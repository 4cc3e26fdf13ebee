"""Addresses of blocks: each holds one request's tails and pool, over all layers, in as many units as it needs.

A unit is what vLLM calls a block: L pages ``[K, slots, width]`` side by side. kvpass uses the memory of all units as
two arrays of entries ``[units, R, D]``, all keys and then all values, ``R = L * K * slots``. A block is a run of units:
first a tail for each layer and KV head, then the pool, which all layers share. Blocks whose tails are of one size are
rows of one view. Where entries are codes, their scales come first, fp32 ``[2, units, R]``: codes and scales lie equally
far apart, counted in entries, as kernels need it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from kvpass.config import SCALE_BYTES, EntryFormat
from kvpass.operands import BITS

SLOTS = 8
"""Entries of a unit per layer and KV head."""


class BlockSize(NamedTuple):
    """What one request needs: slots of the tail of each layer and KV head, and entries of the pool."""

    tail: int
    pool: int


@dataclass(frozen=True)
class BlockLayout:
    """Sizes of the largest block."""

    layers: int
    kv_heads: int
    head_dim: int
    pool: int  # entries that all layers share
    tail: int  # slots of each KV head for the window and for appended tokens
    entry_format: EntryFormat = "model"
    window: int = 0  # slots of the tail for it
    one_tail: bool = False  # all blocks have tails of the largest size
    staged: int = 0  # units in which a prompt that is read in chunks waits

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
    def rows(self) -> int:
        """Entries of a unit."""
        return self.layers * self.kv_heads * SLOTS

    @property
    def largest(self) -> BlockSize:
        """What a request needs at most."""
        return BlockSize(self.tail, self.pool)

    @property
    def reserved(self) -> int:
        """Units at the begin that no request gets: vLLM's block 0, and behind it those of prompts that wait.

        Rows that fill a CUDA graph, which has one size of tails, write into a whole block there.
        """
        return (self.units(self.largest) if self.one_tail else 1) + self.staged

    def units_to_stage(self, tokens: int, itemsize: int) -> int:
        """Return the units that have room for keys and values of so many tokens, of numbers of ``itemsize`` bytes."""
        column_bytes = self.columns * (1 if self.coded else itemsize)
        return -(-tokens * self.head_dim * itemsize // (SLOTS * column_bytes))

    def size_of(self, prompt: int, max_tokens: int, document: int = 0) -> BlockSize:
        """Return what a request needs that was admitted.

        Args:
            prompt: its tokens, with those of its document. max_tokens: of its answer, the last of which is never
                appended. document: tokens of the document that it continues.
        """
        appended = max_tokens - 1 + (prompt - document if document else 0)
        step = 1 << max((appended - 1).bit_length() - 2, 3)  # few sizes of tails: one call of a kernel serves one size
        window = max(self.window, 1)  # a prompt of one token is in the tail
        room = min(-(-appended // step) * step, self.tail - window)
        tail = self.tail if self.one_tail else room if document else window + room
        kept = 0 if document else max(2, self.layers * self.kv_heads * (prompt - self.window))
        return BlockSize(tail, min(kept, self.pool))

    def units(self, size: BlockSize) -> int:
        return -(-(self.layers * self.kv_heads * size.tail + size.pool) // self.rows)

    def arrays(self, page: Tensor, site: int) -> tuple[Tensor, ...]:
        """Return keys and values of all units, each ``[units, R, D]``: views of vLLM's memory; of codes scales too.

        Args:
            page: the cache of layer ``site`` as vLLM hands it out, ``[units, K, slots, width]``.
        Raises:
            ValueError: the pages of all layers do not lie side by side in layer order.
        """
        units, width, columns = page.shape[0], self.width, self.columns
        size = self.kv_heads * SLOTS * width
        shape = (units, self.kv_heads, SLOTS, width)
        stride = (self.layers * size, SLOTS * width, width, 1)
        if page.shape != shape or page.stride() != stride or page.storage_offset() != site * size:
            raise ValueError(
                f"the cache of layer {site} has shape {tuple(page.shape)}, strides {page.stride()} and offset "
                f"{page.storage_offset()}: expected {shape}, {stride} and {site * size}"
            )
        entries = units * self.rows
        before = units * self.layers * size - 2 * entries * columns  # bytes of scales, if there are any
        shape = (2, units, self.rows, columns)
        stride = (entries * columns, self.rows * columns, columns, 1)
        found = torch.as_strided(page, shape, stride, before).unbind(0)
        if not self.coded:
            return found
        scales = torch.as_strided(page, (before,), (1,), 0).view(torch.float32).view(2, units, self.rows)
        return *found, *scales.unbind(0)

    def staging(self, page: Tensor, site: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return where keys and values of a prompt wait in layer ``site``, each ``[tokens, K, D]``."""
        keys, values = (
            entries[self.reserved - self.staged : self.reserved].view(-1).view(dtype)
            for entries in self.arrays(page, site)[:2]
        )
        of_token = self.layers * self.kv_heads * self.head_dim
        shape = (self.layers, keys.numel() // of_token, self.kv_heads, self.head_dim)
        rest = slice(shape[1] * of_token)
        return keys[rest].view(shape)[site], values[rest].view(shape)[site]

    def buffers(self, page: Tensor, site: int, tail: int) -> dict[str, Tensor]:
        """Return pools and tails of all blocks by their names in :data:`kvpass.operands.BUFFERS`.

        Row i is the block that begins at unit i, if its tails have ``tail`` slots. So rows overlap, and most of them
        mean nothing.
        """
        found = {}
        for name, entries in zip(("k", "v", "k_scale", "v_scale"), self.arrays(page, site), strict=False):
            found[f"pool_{name}"], found[f"tail_{name}"] = self.parts(entries, tail)
        return found

    def parts(self, entries: Tensor, tail: int) -> tuple[Tensor, Tensor]:
        """Return pools ``[n, E, D]`` and tails ``[L, n, K, C, D]`` of entries ``[units, R, D]``, or of scales.

        n is the number of units at which the largest block with such tails may begin.
        """
        heads, columns = self.layers * self.kv_heads, entries.shape[2:]
        rows, step, last = len(entries) + 1 - self.units(BlockSize(tail, self.pool)), entries.stride(0), columns.numel()
        inner, first = tuple(1 for _ in columns), entries.storage_offset()
        tails = torch.as_strided(
            entries,
            (self.layers, rows, self.kv_heads, tail, *columns),
            (self.kv_heads * tail * last, step, tail * last, last, *inner),
            first,
        )
        pools = torch.as_strided(
            entries, (rows, self.pool, *columns), (step, last, *inner), first + heads * tail * last
        )
        return pools, tails
