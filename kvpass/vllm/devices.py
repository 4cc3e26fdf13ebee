"""What differs between devices: whose operators run, and the counters that kernels of a GPU need."""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from kvpass.kernels import cpu
from kvpass.operands import BUFFERS, AppendBuffers, Attention
from kvpass.ops import reference
from kvpass.vllm import versions


class OnCPU:
    """vLLM's kernel for prompts, the eager operators to compress them, and the C++ kernel to decode."""

    ops: ModuleType = reference

    def __init__(self, rows: int, kv_heads: int, device: torch.device) -> None:
        """Args: rows: most of a step."""

    def arrivals(self, rows: int) -> Tensor | None:
        """Return the counters of :class:`kvpass.operands.AppendBuffers` for a call of so many rows."""
        return None

    def attend_prompt(self, call: Attention, out: Tensor) -> Tensor | None:
        """Write the attention of the last T tokens of a prompt of N to ``out`` ``[T, H, D]``.

        Returns:
            what ``score_layer`` needs of it.
        """
        versions.attend_prompt(call, out)
        return None

    def attend_blocks(self, call: Attention, held: AppendBuffers, layer: int) -> Tensor:
        """Attend blocks, which have a row_index, as :func:`kvpass.kernels.cpu.attend_cache`."""
        return cpu.attend_cache(call, held, layer)


class OnCUDA(OnCPU):
    """The operators of :mod:`kvpass.ops.cuda`. **It has not run on a GPU yet**, only in Triton's interpreter."""

    def __init__(self, rows: int, kv_heads: int, device: torch.device) -> None:
        from kvpass.ops import cuda  # needs Triton

        self.ops = cuda
        self._arrivals, self._kv_heads = BUFFERS["arrivals"].new({"A": rows * kv_heads}, device), kv_heads

    def arrivals(self, rows: int) -> Tensor | None:
        return self._arrivals[: rows * self._kv_heads]

    def attend_prompt(self, call: Attention, out: Tensor) -> Tensor | None:
        attended, lse = self.ops.attend_prompt(call, torch.zeros(1, dtype=torch.int64, device="cpu"))
        out.copy_(attended[0].transpose(0, 1))
        return lse

    def attend_blocks(self, call: Attention, held: AppendBuffers, layer: int) -> Tensor:
        return self.ops.attend_cache(call, held, layer)


def operators(device: torch.device) -> type[OnCPU]:
    """Return the operators of a device."""
    return OnCPU if device.type == "cpu" else OnCUDA
