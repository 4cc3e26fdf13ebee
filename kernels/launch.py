"""Block configurations of Triton kernels, and the launcher that looks one up.

The contract of a kernel file (prefill_attention.py is an example):

* kernels take every block size as a ``tl.constexpr`` argument, named as in the ``blocks`` of their configs;
* ``configs.json`` pins one :class:`triton.Config` for each case (a kernel, with what its registers and shared memory
  depend on) and architecture. A launcher names the case and passes it to :func:`launch`, perhaps with the
  ``config: triton.Config | None = None`` that it takes itself: a given one is used as it is (tests do so). Nothing is
  measured at run time, and a case holds dtypes and head dims, never batch or prompt length: all rows and all machines
  of an architecture round alike, and so keep the same entries;
* a launcher raises ValueError, before anything is written, where a shape, dtype, stride or device does not fit;
* no launcher reads a tensor's value on the host, so that ``tests/kernels/test_compile_ahead.py`` can call it without a
  device and compile what it would launch.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor

TABLE = Path(__file__).with_name("configs.json")  # the table of configs; it says itself where its figures come from


def parsed(text: str) -> triton.Config:
    """Return the config of a text such as ``BLOCK_S=64 warps=4 stages=2 registers=128``.

    registers: most of a thread, so that more programs fit on a multiprocessor; without it, what the kernel would take.
    """
    blocks = {name: int(number) for name, _, number in (part.partition("=") for part in text.split())}
    warps, stages, registers = blocks.pop("warps"), blocks.pop("stages"), blocks.pop("registers", None)
    return triton.Config(blocks, num_warps=warps, num_stages=stages, maxnreg=registers)


@functools.cache
def table() -> dict[str, dict[int, triton.Config]]:
    """Return the config of each case and architecture (80 is compute capability 8.0)."""
    cases = json.loads(TABLE.read_text(encoding="utf-8"))["cases"]
    return {case: {int(arch): parsed(text) for arch, text in of_archs.items()} for case, of_archs in cases.items()}


def pinned(case: str, architecture: int) -> triton.Config:
    """Return a case's config for an architecture: its own, else that of the nearest lower one, else of the lowest."""
    configs = table()[case]
    return configs[max((known for known in configs if known <= architecture), default=min(configs))]


@functools.cache
def architecture_of(device: torch.device) -> int:
    """Return 90 for compute capability 9.0, and so on; 0 for what is no CUDA device (Triton's interpreter)."""
    if device.type != "cuda":
        return 0
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def kind(dtype: torch.dtype) -> str:
    """Return the part of a case that stands for the dtype: dots of fp32 run on other units than those of 16 bits."""
    return "float" if dtype == torch.float32 else "half"


def blocks(size: int, block: str, programs: int) -> Callable[[Mapping[str, int]], tuple[int, int]]:
    """Return a grid: as many blocks as ``size`` needs, the argument ``block`` being the size of one, x ``programs``."""
    return lambda arguments: (triton.cdiv(size, arguments[block]), programs)


def strides(dims: str, **tensors: Tensor) -> dict[str, int]:
    """Return the arguments ``stride_<tensor><dim>``, given a letter for each of the first dims."""
    return {f"stride_{name}{dim}": x.stride(i) for name, x in tensors.items() for i, dim in enumerate(dims)}


def launch(
    kernel: Any, grid: Any, arguments: Mapping[str, Any], case: str, config: triton.Config | None = None
) -> None:
    """Run a kernel on its tensors' device, with a config or the one that the table pins for the case.

    ``grid``: a tuple, or a function from the dict of all arguments to a tuple. ``arguments``: all except the blocks.
    """
    tensor = next(value for value in arguments.values() if isinstance(value, Tensor))
    config = config or pinned(case, architecture_of(tensor.device))
    with torch.cuda.device_of(tensor):  # Triton launches on the current device
        kernel[grid](**arguments, **config.all_kwargs())
