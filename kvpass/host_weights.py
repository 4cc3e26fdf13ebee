"""Weights that stay on the host, and their copies on the device that computes.

A captured decoder reads such a weight through ``kvpass::to_device``. A pass takes these calls out of the graph
(``graphs/host_weights.py``); then :class:`HostCopies` copies the weights of one layer while the one before computes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

ALIGNMENT = 256
"""Bytes on which copies begin, as memory that torch allocates does."""


@torch.library.custom_op("kvpass::to_device", mutates_args=())
def to_device(weight: Tensor, device: torch.device) -> Tensor:
    """Return a contiguous copy of a weight on a device."""
    return weight.to(device, copy=True, memory_format=torch.contiguous_format)


@to_device.register_fake
def _on_device(weight: Tensor, device: torch.device) -> Tensor:
    return torch.empty(weight.shape, dtype=weight.dtype, device=device)


TO_DEVICE = torch.ops.kvpass.to_device.default


def room_of(weights: Iterable[Tensor]) -> int:
    """Return the bytes that copies of these weights take."""
    return sum(math.ceil(weight.numel() * weight.itemsize / ALIGNMENT) * ALIGNMENT for weight in weights)


class HostCopies:
    """Copies of one group of weights after the other, for one call of a decoder.

    Two buffers are written in turn, so at most two groups are on the device. On CUDA a stream of its own copies a group
    while the kernels that read the one before run.

    Args:
        device: of the copies. rooms: bytes of each group, in the order in which they are copied.
    """

    def __init__(self, device: torch.device, rooms: Sequence[int]) -> None:
        self._buffers = [
            torch.empty(max(rooms[turn::2], default=0), dtype=torch.uint8, device=device) for turn in range(2)
        ]
        self._device, self._turn = device, 0
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)
            self._read = torch.cuda.current_stream(device).record_event()

    def next(self, weights: Sequence[Tensor]) -> list[Tensor]:
        """Return contiguous copies of the next group. What reads the group before has been launched already."""
        buffer, begin, copies = self._buffers[self._turn], 0, list[Tensor]()
        self._turn = 1 - self._turn
        for weight in weights:
            size = weight.numel() * weight.itemsize
            copies.append(buffer[begin : begin + size].view(weight.dtype).view(weight.shape))
            begin += room_of([weight])
        if self._device.type != "cuda":
            self._fill(copies, weights)
            return copies
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_event(self._read)  # until the kernels have run that read what was in this buffer
        self._read = current.record_event()
        with torch.cuda.stream(self._stream):
            self._fill(copies, weights)
        current.wait_stream(self._stream)
        return copies

    @staticmethod
    def _fill(copies: Sequence[Tensor], weights: Sequence[Tensor]) -> None:
        for copy, weight in zip(copies, weights, strict=True):
            copy.copy_(weight, non_blocking=True)
