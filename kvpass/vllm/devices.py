"""What differs between devices: whose operators run, and the tables by which programs of a GPU find their work."""

from __future__ import annotations

from types import ModuleType
from typing import ClassVar

import torch
from torch import Tensor

from kvpass.kernels import cpu
from kvpass.operands import Attention, Blocks
from kvpass.ops import cuda, reference


class OnCPU:
    """The eager operators, and the C++ kernel to decode."""

    ops: ClassVar[ModuleType] = reference

    def __init__(self, layers: int, kv_heads: int, pool: int, rows: int) -> None:
        """Args: layers, kv_heads and pool as in the layout of a block; rows: most that decode in a step."""

    def cover(self, blocks: int, device: torch.device) -> None:
        """Make tables for this number of blocks."""

    def enter(self, block: int, offsets: Tensor) -> None:
        """Note the segments of the pool of a block, int32 ``[P]``."""

    def pool_tables(self, offsets: Tensor) -> tuple[Tensor, ...]:
        """Return what :class:`kvpass.operands.AppendBuffers` needs beside the buffers, for one packed pool."""
        return ()

    def attend_blocks(self, call: Attention, held: Blocks, layer: int) -> Tensor:
        """See :func:`kvpass.kernels.cpu.attend_blocks`."""
        return cpu.attend_blocks(call, held, layer)


class OnCUDA(OnCPU):
    """The operators of :mod:`kvpass.ops.cuda`; tables of tiles for each block, written when a prompt has been read.

    A decode step reads no value of the device on the host: how many tiles the fullest layer of a block has is read
    once, when its prompt has been read. **It has not run on a GPU yet**, only in Triton's interpreter.
    """

    ops: ClassVar[ModuleType] = cuda

    def __init__(self, layers: int, kv_heads: int, pool: int, rows: int) -> None:
        self._sizes = layers, kv_heads, pool, rows
        self._tables: tuple[Tensor, Tensor, Tensor] | None = None
        self._most: dict[int, int] = {}

    def cover(self, blocks: int, device: torch.device) -> None:
        layers, kv_heads, pool, rows = self._sizes
        self._tables = cuda.index_blocks(blocks, layers, kv_heads, pool, rows, device)

    def enter(self, block: int, offsets: Tensor) -> None:
        assert self._tables is not None
        tiles, tile_offsets, _ = self._tables
        cuda.index_block(tiles, tile_offsets, block, offsets, self._sizes[2])
        self._most[block] = int(tile_offsets[block, :, -1].max())

    def pool_tables(self, offsets: Tensor) -> tuple[Tensor, ...]:
        return cuda.index_pool(offsets[None], self._sizes[1], self._sizes[2])

    def attend_blocks(self, call: Attention, held: Blocks, layer: int) -> Tensor:
        assert self._tables is not None
        tiles, tile_offsets, arrivals = self._tables
        arrivals = arrivals[: call.q.shape[0] * self._sizes[1]]
        held = held._replace(tiles=tiles, tile_offsets=tile_offsets, arrivals=arrivals)
        return cuda.attend_blocks(call, held, layer, max(1, *self._most.values()))


def operators(device: torch.device) -> type[OnCPU]:
    """Return the operators of a device."""
    return OnCPU if device.type == "cpu" else OnCUDA
