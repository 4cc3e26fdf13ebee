"""Block configurations of Triton kernels, and the launcher that chooses one.

The contract of a kernel file (prefill_attention.py is an example):

* kernels take every block size as a ``tl.constexpr`` argument, named as in the ``blocks`` of their configs;
* each kernel has a small tuple of :class:`KernelConfig`. A launcher takes ``config: KernelConfig | None = None`` and
  passes it to :func:`launch` with the configs that suit the shape. A given config is used as it is (tests pin it this
  way). Otherwise the interpreter takes the first one, and CUDA the fastest by ``triton.autotune``, timed once per key
  and dtype and cached on disk. Keys hold head dims and the like, never batch or prompt length, so that all rows round
  alike;
* no launcher reads a tensor's value on the host, so that ``tests/kernels/test_compile_ahead.py`` can call it without a
  device and compile what it would launch.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping
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
        least_arch: lowest compute capability (80, 90...) with enough registers.
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
"""One call tunes at a time: Triton's autotuner stores the call's arguments as its attributes."""


def is_interpreted(kernel: Any) -> bool:
    """Return whether the kernel was decorated under ``TRITON_INTERPRET=1``."""
    return not isinstance(kernel, JITFunction)


@functools.cache
def _suited(configs: tuple[KernelConfig, ...], device: torch.device) -> tuple[KernelConfig, ...]:
    """Return the configs that fit the device's registers, else the last one; cached."""
    major, minor = torch.cuda.get_device_capability(device)
    return tuple(config for config in configs if config.least_arch <= 10 * major + minor) or configs[-1:]


@functools.cache
def _tuned(kernel: Any, configs: tuple[KernelConfig, ...], key: tuple[str, ...]) -> Any:
    choices = [
        triton.Config(dict(config.blocks), num_warps=config.num_warps, num_stages=config.num_stages)
        for config in configs
    ]
    return triton.autotune(configs=choices, key=list(key), cache_results=True)(kernel)


def blocks(size: int, block: str, programs: int) -> Callable[[Mapping[str, int]], tuple[int, int]]:
    """Return a grid: as many blocks as ``size`` needs, the argument ``block`` being the size of one, x ``programs``."""
    return lambda arguments: (triton.cdiv(size, arguments[block]), programs)


def strides(dims: str, **tensors: Tensor) -> dict[str, int]:
    """Return the arguments ``stride_<tensor><dim>``, given a letter for each of the first dims."""
    return {f"stride_{name}{dim}": x.stride(i) for name, x in tensors.items() for i, dim in enumerate(dims)}


def launch(
    kernel: Any,
    grid: Any,
    arguments: Mapping[str, Any],
    configs: tuple[KernelConfig, ...],
    key: tuple[str, ...] = (),
    config: KernelConfig | None = None,
) -> None:
    """Run a kernel on its tensors' device, with the given config or the best of ``configs``.

    Args:
        grid: a tuple, or a function from the dict of all arguments (blocks included) to a tuple.
        arguments: all arguments except the blocks. The kernel must be safe to run twice, since tuning repeats it.
        key: names of the arguments whose values decide which config is fastest.
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
