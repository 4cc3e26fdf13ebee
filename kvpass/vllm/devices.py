"""What differs between devices: whose operators run."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from kvpass.kernels import cpu
from kvpass.operands import AppendBuffers, Attention
from kvpass.ops import reference
from kvpass.vllm import versions


class Operators(NamedTuple):
    """What runs on a device.

    Attributes:
        ops: what compresses a prompt. attend_prompt: writes the attention of the last T tokens of a prompt of N to a
            tensor ``[T, H, D]``, and returns what ``score_layer`` needs of it. attend_blocks: attends blocks, which
            have a row_index, as :func:`kvpass.kernels.cpu.attend_cache`.
    """

    ops: ModuleType
    attend_prompt: Callable[[Attention, Tensor], Tensor | None]
    attend_blocks: Callable[[Attention, AppendBuffers, int], Tensor]


def on_cuda() -> Operators:
    """Return those of :mod:`kvpass.ops.cuda`. **In vLLM they have not run on a GPU yet**, only in the interpreter."""
    from kvpass.ops import cuda  # needs Triton

    def attend_prompt(call: Attention, out: Tensor) -> Tensor:
        attended, lse = cuda.attend_prompt(call, torch.zeros(1, dtype=torch.int64, device="cpu"))
        out.copy_(attended[0].transpose(0, 1))
        return lse

    return Operators(cuda, attend_prompt, cuda.attend_cache)


def operators(device: torch.device) -> Operators:
    """Return what runs on a device; on a CPU vLLM's kernel reads prompts, and a C++ kernel decodes."""
    return Operators(reference, versions.attend_prompt, cpu.attend_cache) if device.type == "cpu" else on_cuda()
