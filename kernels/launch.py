"""What the Triton launchers share: a block configuration, the choice of one, and compilation without a GPU.

The contract of a kernel file (prefill_attention.py is an example):

* kernels take every block size as a ``tl.constexpr`` argument, named as in the ``blocks`` of their configs;
* a small tuple of :class:`KernelConfig` per kernel; a launcher takes ``config: KernelConfig | None = None`` and hands
  it to :func:`launch` with the configs that suit the shape: a config given is used as it is (the pinned mode of
  tests), else the interpreter takes the first one, and CUDA the fastest by ``triton.autotune``, timed once per key and
  dtype and remembered on disk. Keys hold head dims and the like, never batch or prompt length: all rows round alike;
* ``aot_cases() -> list[AotCase]``: one case per kernel, config, dtype and head dim that is shipped. It touches no
  device, and works only where Triton does not interpret (run it in a subprocess without ``TRITON_INTERPRET``).
"""

from __future__ import annotations

import functools
import os
import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

_USAGE = re.compile(r"REG:(\d+) STACK:(\d+)")


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


@dataclass(frozen=True)
class AotCase:
    """One specialisation of a kernel.

    Attributes:
        name: for the table, for instance ``"prefill fp16 D=128"``.
        kernel: the ``@triton.jit`` function.
        signature: argument -> ``"*fp16"``, ``"i32"``, ``"fp32"``...; a suffix ``":16"`` promises divisibility by 16, as
            the JIT finds it for most pointers and strides. Every argument that is not in ``constexprs`` nor a block.
        constexprs: argument -> value (None for an optional pointer not given).
        config: adds the blocks, warps and stages.
    """

    name: str
    kernel: Any
    signature: Mapping[str, str]
    constexprs: Mapping[str, Any]
    config: KernelConfig


@dataclass(frozen=True)
class CompiledInfo:
    """What one specialisation needs: shared memory per block in bytes, registers and spilled bytes per thread."""

    shared_bytes: int
    registers: int
    spilled_bytes: int


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
            _tuned(kernel, configs, key)[grid](**arguments)
        else:
            options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
            kernel[grid](**arguments, **dict(config.blocks), **options)


def compile_ahead(case: AotCase, arch: int) -> CompiledInfo:
    """Compile for compute capability ``arch`` (80, 90...) with the ptxas that Triton ships; no GPU is needed.

    Spilled bytes are the stack frame, which Triton's kernels use for nothing else.

    Raises:
        RuntimeError: the kernel was decorated for the interpreter, or an argument is missing from the case.
    """
    if is_interpreted(case.kernel):
        raise RuntimeError(f"{case.name}: the kernel is interpreted; unset TRITON_INTERPRET before importing it")
    constexprs = {**case.constexprs, **dict(case.config.blocks)}
    names = list(case.kernel.arg_names)
    given = {*case.signature, *constexprs}
    if given != set(names):
        raise RuntimeError(f"{case.name}: arguments {sorted(given ^ set(names))} are missing or unknown")
    signature, attributes = {}, {}
    for index, name in enumerate(names):
        kind, _, divisor = case.signature.get(name, "constexpr").partition(":")
        signature[name] = kind
        if divisor:
            attributes[(index,)] = [["tt.divisibility", int(divisor)]]
    source = ASTSource(case.kernel, signature, constexprs, attributes)
    options = {"num_warps": case.config.num_warps, "num_stages": case.config.num_stages}
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    with tempfile.TemporaryDirectory() as folder:
        cubin = os.path.join(folder, "kernel.cubin")
        with open(cubin, "wb") as file:
            file.write(compiled.asm["cubin"])
        tool = knobs.nvidia.cuobjdump.path
        usage = subprocess.run([tool, "-res-usage", cubin], check=True, capture_output=True, text=True).stdout
    found = _USAGE.search(usage)
    if found is None:
        raise RuntimeError(f"{case.name}: no register count in the output of {tool}: {usage!r}")
    return CompiledInfo(compiled.metadata.shared, int(found[1]), int(found[2]))
