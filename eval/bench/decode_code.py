"""Triton code of a decode step for CUDA, from a machine without it: which launches a step makes.

The decoder is traced with fake tensors on a CUDA device that does not exist, and Inductor generates code for the
properties of an H100; nothing is compiled by Triton and nothing runs. Use a process of its own: a build of torch
without CUDA is told of a device, for good.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig

from kvpass.compiler.backend import PhaseCompiler
from kvpass.compiler.capture import Capture
from kvpass.compiler.transactions import Call
from kvpass.config import Layout
from kvpass.frontends.attention import ATTENTION_NAME
from kvpass.graphs import passes
from kvpass.graphs.verify.self_check import self_check_pass
from kvpass.operands import BUFFERS, AppendBuffers
from kvpass.policies import Policy
from kvpass.torch_compat import (
    BackendCompilerFailed,
    CppCodeCache,
    FakeTensor,
    FakeTensorMode,
    ShapeEnv,
    inductor_config,
    maybe_mark_dynamic,
)

LAYERS = 3
"""Layers of the decoder that is compiled: what comes before the first and after the last attention differs, what comes
between two is alike but for the embedding, which the first adds."""
ATTENTION_LAUNCHES = 1
"""Of ``kvpass::attend_cache`` for one token: the program that arrives last merges."""

_H100 = SimpleNamespace(
    name="NVIDIA H100", gcnArchName="", multi_processor_count=132, major=9, minor=0, regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048, max_threads_per_block=1024, warp_size=32, total_memory=80 << 30,
    shared_memory_per_block_optin=232448, shared_memory_per_multiprocessor=233472, L2_cache_size=50 << 20,
)  # fmt: skip
_CUDA = torch.device("cuda", 0)
_NO_DEVICE = """
#include <c10/core/impl/FakeGuardImpl.h>
static c10::impl::FakeGuardImpl<c10::DeviceType::CUDA> guard;
static c10::impl::DeviceGuardImplRegistrar registered(c10::DeviceType::CUDA, &guard);
"""
"""Indexing asks for the current device, which torch without CUDA does not know."""

_LAUNCH = re.compile(r"^\s+(?:(triton_\w+)\.run|(extern_kernels\.\w+)|buf\d+ = (torch\.ops\.[\w.]+))\((.*)$", re.M)
_ATTEND = "torch.ops.kvpass.attend_cache.default"


@dataclass(frozen=True)
class DecodeCode:
    """Generated code of a decode step of ``LAYERS`` layers.

    Attributes:
        source: Python and Triton code.
    """

    source: str

    @property
    def launched(self) -> list[tuple[str, str]]:
        """Kernels and operators in the order in which a step calls them, with the text of their arguments."""
        return [(kernel or extern or op, given) for kernel, extern, op, given in _LAUNCH.findall(self.source)]

    @property
    def layer(self) -> list[str]:
        """Kernels and operators of one layer: what follows an attention operator, up to the next one."""
        names = [name for name, _ in self.launched]
        sites = [place for place, name in enumerate(names) if name == _ATTEND]
        return names[sites[1] + 1 : sites[2] + 1]

    @property
    def launches_per_layer(self) -> int:
        return len(self.layer) - 1 + ATTENTION_LAUNCHES

    def launches(self, layers: int) -> int:
        """Launches of a step of so many layers."""
        counted = len(self.launched) + LAYERS * (ATTENTION_LAUNCHES - 1)
        return counted + (layers - LAYERS) * self.launches_per_layer

    @property
    def cache_arguments(self) -> set[str]:
        """Names of the cache's buffers in the code, which attention operators are given."""
        return {name for op, given in self.launched if op == _ATTEND for name in re.findall(r"\barg\d+_\d+\b", given)}


class _Generated(Exception):
    """Raised where generated code would be compiled."""


@dataclass(frozen=True)
class _FakeCache:
    """What compiling reads of a cache.

    Attributes:
        entries: of the budget, per KV head per layer.
    """

    policy: Policy
    batch_size: int
    entries: int
    mode: FakeTensorMode
    ranks: None = None

    def cached_state(self, layout: Layout, dtype: torch.dtype) -> dict[str, Tensor]:
        state: dict[str, Tensor] = {}
        with self.mode:
            for index, group in enumerate(layout.pools):
                g, b = group.geometry, self.batch_size
                segments = g.layers * g.kv_heads
                sizes = {
                    **{"B": b, "E": max(self.entries - self.policy.window, 2) * segments, "D": g.key_dim},
                    **{"V": g.value_dim, "L": g.layers, "K": g.kv_heads, "C": self.policy.window + 64},
                    **{"P": segments + 1, "X": 16 * g.kv_heads * b, "Y": g.kv_heads * b + 1, "A": g.kv_heads * b},
                }
                for name in AppendBuffers._fields:
                    buffer = BUFFERS[name]
                    if buffer.saved in ("scaled", "grouped"):  # only where entries are in fewer bits
                        continue
                    shape, kind = buffer.shape(sizes), buffer.dtype or dtype
                    state[f"store{index}_{name}"] = torch.empty(shape, dtype=kind, device=_CUDA)
            state["seen"] = torch.empty((), dtype=torch.int64, device=_CUDA)
            state["first"] = torch.empty(self.batch_size, dtype=torch.int64, device=_CUDA)
        return state


def decode_code(config: PretrainedConfig, policy: Policy, entries: int, batch: int = 1) -> DecodeCode:
    """Generate the code of a decode step in bf16.

    Args:
        config: of the decoder; its number of layers is not used. policy: one that appends while decoding. entries: of
            the budget, per KV head per layer.
    """
    if not torch.backends.cuda.is_built():
        ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"), ctypes.RTLD_GLOBAL)  # for its symbols
        CppCodeCache.load(_NO_DEVICE)
    config = type(config).from_dict({**config.to_dict(), "num_hidden_layers": LAYERS})
    config._attn_implementation = ATTENTION_NAME
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
    _move(model, mode)
    compiler = PhaseCompiler(compiler="inductor", layers=LAYERS, regions=False, cuda_graphs=False)
    call = Call(_FakeCache(policy, batch, entries, mode), "decode")  # type: ignore[arg-type]
    found: list[str] = []

    def generate(gm: Any, inputs: list[Any]) -> Any:
        decoder = Capture(gm, inputs, compiler)
        with _generating(found):
            return decoder.runner(call)

    def step(input_ids: Tensor, position_ids: Tensor) -> Tensor:
        logits: Tensor = model(input_ids=input_ids, position_ids=position_ids, use_cache=False).logits
        return logits

    with mode:
        ids, positions = (torch.empty(batch, 16, dtype=torch.int64, device=_CUDA) for _ in range(2))
    for tensor in (ids, positions):
        maybe_mark_dynamic(tensor, 1)
    try:
        with torch.no_grad(), _without_values():
            torch.compile(step, backend=generate, fullgraph=True, dynamic=False)(ids, positions)
    except BackendCompilerFailed:
        if not found:
            raise
    return DecodeCode(found[0])


def _move(model: nn.Module, mode: FakeTensorMode) -> None:
    """Put fake tensors on the device in the place of parameters and buffers."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                fake = FakeTensor(mode, parameter.detach(), _CUDA)
                module._parameters[name] = nn.Parameter(fake, requires_grad=False)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = FakeTensor(mode, buffer, _CUDA)


@contextmanager
def _without_values() -> Iterator[None]:
    """Leave out the checks that run examples: fake tensors have no values."""
    kept = tuple(known for known in passes.CANONICAL_PASSES if known is not self_check_pass)
    with mock.patch.object(passes, "CANONICAL_PASSES", kept):
        yield


@contextmanager
def _generating(found: list[str]) -> Iterator[None]:
    """Let Inductor believe in an H100, and hand over its code instead of compiling it."""
    from torch._inductor.fx_passes import joint_graph, post_grad
    from torch._inductor.graph import GraphLowering
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    joint_graph.lazy_init(_CUDA)  # these trace examples of their patterns: on the CPU while there is no CUDA
    post_grad.lazy_init()

    def generated(graph: GraphLowering) -> None:
        found.append(graph.codegen()[0].value)
        raise _Generated

    state = torch.zeros(16, dtype=torch.uint8)
    target = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
        get_current_device=lambda: 0,
        utils=SimpleNamespace(get_device_properties=lambda index: {"max_shared_mem": 232448}),
    )
    cuda: dict[str, Any] = {
        "is_available": lambda: True, "_lazy_init": lambda: None, "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_properties": lambda *device: _H100, "_get_device_properties": lambda index: _H100,
        "get_device_capability": lambda *device: (9, 0), "get_rng_state": lambda *device: state,
        "set_rng_state": lambda *given: None, "_exchange_device": lambda index: 0,
        "_maybe_exchange_device": lambda index: 0,
    }  # fmt: skip
    with ExitStack() as stack:
        for name, value in cuda.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, value, create=True))
        stack.enter_context(mock.patch("torch._subclasses.fake_tensor.init_gpu_context", lambda device: None))
        stack.enter_context(mock.patch("torch._inductor.scheduler.has_triton", lambda: True))
        stack.enter_context(mock.patch.object(GraphLowering, "compile_to_module", generated))
        stack.enter_context(inductor_config.patch(fx_graph_cache=False))
        driver.set_active(target)
        yield
