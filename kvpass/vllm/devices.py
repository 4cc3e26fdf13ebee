"""What differs between devices: whose operators run, and the tables by which programs of a GPU find their work."""

from __future__ import annotations

from types import ModuleType
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from kvpass.kernels import cpu
from kvpass.operands import AppendBuffers, Attention
from kvpass.ops import cuda, reference
from kvpass.vllm import versions
from kvpass.vllm.layout import BlockLayout


class Limits(NamedTuple):
    """Of an engine: most rows of a step, most tokens of a row, and whether decode steps are CUDA graphs."""

    rows: int
    tokens: int
    graphs: bool = False


class OnCPU:
    """vLLM's kernel for prompts, the eager operators to compress them, and the C++ kernel to decode."""

    ops: ClassVar[ModuleType] = reference

    def __init__(self, layout: BlockLayout, blocks: int, limits: Limits, device: torch.device) -> None:
        """Make tables for this number of blocks of an engine."""

    def enter(self, block: int, offsets: Tensor) -> None:
        """Note the segments of the pool of a block, int32 ``[P]``."""

    def empty(self, blocks: Tensor) -> None:
        """Note that the pools of some blocks are empty, int64 on the device."""

    def pool_tables(self, offsets: Tensor) -> tuple[Tensor, ...]:
        """Return what :class:`kvpass.operands.AppendBuffers` needs beside the buffers, for one packed pool."""
        return ()

    def attend_prompt(self, call: Attention, out: Tensor) -> Tensor | None:
        """Write the attention of one whole prompt to ``out`` ``[N, H, D]``; return what ``score_layer`` needs of it."""
        versions.attend_prompt(call, out)
        return None

    def attend_blocks(self, call: Attention, held: AppendBuffers, layer: int) -> Tensor:
        """Attend a cache with a row_index, as :func:`kvpass.kernels.cpu.attend_cache`."""
        return cpu.attend_cache(call, held, layer)


class OnCUDA(OnCPU):
    """The operators of :mod:`kvpass.ops.cuda`; tables of tiles for each block, written when a prompt has been read.

    A decode step reads no value of the device on the host: how many tiles the fullest layer of a block has is read
    once, when its prompt has been read. Where steps are CUDA graphs, there are programs for the most that a block can
    have, since a graph is replayed with other blocks. **It has not run on a GPU yet**, only in Triton's interpreter.
    """

    ops: ClassVar[ModuleType] = cuda

    def __init__(self, layout: BlockLayout, blocks: int, limits: Limits, device: torch.device) -> None:
        self._kv_heads, self._pool, self._graphs = layout.kv_heads, layout.pool, limits.graphs
        self._most_entries = min(layout.pool, layout.kv_heads * limits.tokens)
        self._nothing = torch.zeros(1, layout.layers * layout.kv_heads + 1, dtype=torch.int32, device=device)
        self._tiles, self._tile_offsets = self._index(self._nothing.expand(blocks, -1))
        self._arrivals = torch.zeros(limits.rows * layout.kv_heads, dtype=torch.int32, device=device)
        self._most: dict[int, int] = {}

    def _index(self, offsets: Tensor) -> tuple[Tensor, Tensor]:
        tiles, tile_offsets, _ = cuda.index_pool(offsets, self._kv_heads, self._pool, self._most_entries)
        return tiles, tile_offsets

    def enter(self, block: int, offsets: Tensor) -> None:
        self._tiles[block : block + 1], self._tile_offsets[block : block + 1] = self._index(offsets[None])
        self._most[block] = int(self._tile_offsets[block, :, -1].max())

    def empty(self, blocks: Tensor) -> None:
        self._tiles[blocks], self._tile_offsets[blocks] = self._index(self._nothing)

    def pool_tables(self, offsets: Tensor) -> tuple[Tensor, ...]:
        return cuda.index_pool(offsets[None], self._kv_heads, self._pool)

    def attend_prompt(self, call: Attention, out: Tensor) -> Tensor | None:
        attended, lse = cuda.attend_prompt(call, torch.zeros(1, dtype=torch.int64, device="cpu"))
        out.copy_(attended[0].transpose(0, 1))
        return lse

    def attend_blocks(self, call: Attention, held: AppendBuffers, layer: int) -> Tensor:
        arrivals = self._arrivals[: call.q.shape[0] * self._kv_heads]
        tiles = self._tiles if self._graphs else self._tiles[:, :, : max([1, *self._most.values()])]
        held = held._replace(tiles=tiles, tile_offsets=self._tile_offsets, arrivals=arrivals)
        return cuda.attend_cache(call, held, layer)


def operators(device: torch.device) -> type[OnCPU]:
    """Return the operators of a device."""
    return OnCPU if device.type == "cpu" else OnCUDA
