"""What the Triton launchers share: a block configuration, and the choice of one.

The contract of a kernel file (prefill_attention.py is an example):

* kernels take every block size as a ``tl.constexpr`` argument, named as in the ``blocks`` of their configs;
* a small tuple of :class:`KernelConfig` per kernel; a launcher takes ``config: KernelConfig | None = None`` and hands
  it to :func:`launch` with the configs that suit the shape: a config given is used as it is (the pinned mode of
  tests), else the interpreter takes the first one, and CUDA the fastest by ``triton.autotune``, timed once per key and
  dtype and remembered on disk. Keys hold head dims and the like, never batch or prompt length: all rows round alike;
* no launcher reads a value of its tensors on the host, so that ``tests/kernels/test_compile_ahead.py`` can call it
  without a device and compile what it would launch.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor
from triton.runtime.jit import JITFunction


@dataclass(frozen=True)
class KernelConfig:
    """Block sizes (in the order and under the names of the kernel's arguments), warps and pipeline stages.

    Attributes:
        least_arch: compute capability (80, 90...) from which on the registers suffice.
    """

    blocks: tuple[tuple[str, int], ...]
    num_warps: int
    num_stages: int
    least_arch: int = 80

    @classmethod
    def of(cls, num_warps: int, num_stages: int, *, least_arch: int = 80, **blocks: int) -> KernelConfig:
        return cls(tuple(blocks.items()), num_warps, num_stages, least_arch)

    def __getitem__(self, block: str) -> int:
        return dict(self.blocks)[block]

    def __str__(self) -> str:
        return " ".join([*(f"{n}={s}" for n, s in self.blocks), f"warps={self.num_warps} stages={self.num_stages}"])


_TUNING = threading.Lock()
"""Triton's tuner keeps the arguments of a call on itself."""


def is_interpreted(kernel: Any) -> bool:
    """Whether the kernel was decorated under ``TRITON_INTERPRET=1``."""
    return not isinstance(kernel, JITFunction)


@functools.cache
def _suited(configs: tuple[KernelConfig, ...], device: torch.device) -> tuple[KernelConfig, ...]:
    """The configs that the registers of the device suffice for, the last one if there is none; asked once."""
    major, minor = torch.cuda.get_device_capability(device)
    return tuple(config for config in configs if config.least_arch <= 10 * major + minor) or configs[-1:]


@functools.cache
def _tuned(kernel: Any, configs: tuple[KernelConfig, ...], key: tuple[str, ...]) -> Any:
    choices = [
        triton.Config(dict(config.blocks), num_warps=config.num_warps, num_stages=config.num_stages)
        for config in configs
    ]
    return triton.autotune(configs=choices, key=list(key), cache_results=True)(kernel)


def launch(
    kernel: Any,
    grid: Any,
    arguments: Mapping[str, Any],
    configs: tuple[KernelConfig, ...],
    key: tuple[str, ...] = (),
    config: KernelConfig | None = None,
) -> None:
    """Run a kernel with the given config, or with the best of ``configs``, where its tensors are.

    Args:
        grid: a tuple, or a function from the dict of all arguments (blocks included) to a tuple.
        arguments: every argument but the blocks. The kernel must be safe to run twice: tuning does.
        key: the arguments whose values decide which config is fastest.
    """
    tensor = next(value for value in arguments.values() if isinstance(value, Tensor))
    if config is None:
        configs = configs[:1] if is_interpreted(kernel) else _suited(configs, tensor.device)
        config = configs[0] if len(configs) == 1 else None
    with torch.cuda.device_of(tensor):  # Triton launches on the current device
        if config is None:
            with _TUNING:
                _tuned(kernel, configs, key)[grid](**arguments)
        else:
            options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
            kernel[grid](**arguments, **dict(config.blocks), **options)
