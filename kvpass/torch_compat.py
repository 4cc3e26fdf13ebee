"""Private names of torch that kvpass uses, each imported in one place: what another version of torch may move."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from typing import Any
from unittest import mock

import sympy  # type: ignore[import-untyped]
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _len_torch_dispatch_stack, _len_torch_function_stack
from torch._C._dynamo.guards import GlobalStateGuard, dict_version
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo import config as dynamo_config
from torch._dynamo import disable as dynamo_disable
from torch._dynamo import eval_frame, maybe_mark_dynamic
from torch._dynamo.convert_frame import compile_lock
from torch._dynamo.exc import (
    BackendCompilerFailed,
    TensorifyScalarRestartAnalysis,
    TorchRuntimeError,
    Unsupported,
    UserError,
)
from torch._dynamo.source import (
    GlobalSource,
    LocalSource,
    TensorProperty,
    TensorPropertySource,
    UnspecializedNNModuleSource,
)
from torch._dynamo.symbolic_convert import TensorifyState
from torch._dynamo.symbolic_convert import tls as dynamo_thread_locals
from torch._dynamo.variables.base import AttributeMutationNew, ValueMutationNew, VariableTracker
from torch._dynamo.variables.tensor import SymNodeVariable, TensorVariable
from torch._guards import ChainedSource, ShapeGuard, Source, TracingContext, tracing
from torch._inductor import codecache, cpp_builder
from torch._inductor import config as inductor_config
from torch._inductor import exc as inductor_exc
from torch._inductor.codecache import CppCodeCache
from torch._inductor.codegen.simd import SIMDScheduling
from torch._inductor.compile_fx import compile_fx
from torch._inductor.cpu_vec_isa import VecISA, _get_isa_dry_compile_fingerprint, valid_vec_isa_list
from torch._inductor.inductor_prims import force_stride_order
from torch._inductor.output_code import CompiledFxGraph
from torch._logging import trace_structured
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.symbol import SymT, symbol_is_type
from torch.utils._sympy.value_ranges import ValueRanges

from kvpass.remembered import keep, recall, remembered

LazyGraphModule = _LazyGraphModule
"""A graph whose code is written when it is first run: most copies of a decoder never are."""


def set_symbol_bounds(shapes: ShapeEnv, symbol: sympy.Symbol, bounds: ValueRanges) -> None:
    """Let a symbol be within other bounds."""
    shapes.var_to_range[symbol] = bounds


def sizes_of_inputs(shapes: ShapeEnv) -> dict[sympy.Symbol, list[TensorPropertySource]]:
    """Symbols of a capture, with the sizes and strides of inputs that they are."""
    found = {
        symbol: [source for source in sources if isinstance(source, TensorPropertySource)]
        for symbol, sources in shapes.var_to_sources.items()
    }
    return {symbol: sources for symbol, sources in found.items() if sources}


def process_group(name: Any) -> dist.ProcessGroup:
    """Return the process group of that name."""
    return _resolve_process_group(name)


def dynamo_settings() -> tuple[Any, ...]:
    """Settings of the process by which Dynamo may run a function eagerly, or with another backend."""
    return eval_frame._stance, dynamo_config.disable


def dynamo_runs() -> bool:
    """Whether Dynamo captures what is compiled, and no setting of the process has it do something else."""
    return eval_frame._stance == type(eval_frame._stance)() and not dynamo_config.disable


def modes_are_active() -> bool:
    """Whether a mode of torch functions or of dispatch sees the operators of a call."""
    return bool(_len_torch_function_stack() or _len_torch_dispatch_stack())


def changed_objects() -> Iterator[tuple[VariableTracker, Mapping[str, VariableTracker]]]:
    """Yield what the traced call changes and did not make, with the attributes that it stores there. In the trace."""
    translator = getattr(dynamo_thread_locals, "current_tx", None)
    if translator is None:
        return
    effects = translator.output.side_effects
    for variable in list(effects.id_to_variable.values()):
        made_in_call = isinstance(variable.mutation_type, AttributeMutationNew | ValueMutationNew)
        if effects.is_modified(variable) and not made_in_call:
            yield variable, effects.store_attr_mutations.get(variable, {})


def traced_effects() -> bool:
    """Whether the traced call leaves objects changed that it did not make. To be called in the trace."""
    return any(not _restores(variable, stored) for variable, stored in changed_objects())


def _restores(variable: VariableTracker, stored: Mapping[str, VariableTracker]) -> bool:
    """Whether what a call stores in an object is there already, as after transformers has set and reset a variable."""
    changed = getattr(variable, "value", None)
    return bool(stored) and all(
        value.is_python_constant() and getattr(changed, name, variable) is value.as_python_constant()
        for name, value in stored.items()
    )


@contextmanager
def compiled_for_any_length() -> Iterator[None]:
    """Let Inductor index with 64 bits where a size is a symbol.

    It would take 32 bits where those do for the sizes of the first call, under a guard that they always do: an 8B model
    would be compiled again beyond 149,796 tokens. Kernels over prompts wait for memory, not for their indices.
    """
    fits = SIMDScheduling.can_use_32bit_indexing

    def for_every_size(numel: sympy.Expr, buffers: Iterable[Any]) -> bool:
        buffers = list(buffers)
        sizes = [numel, *(buffer.get_layout().storage_size() for buffer in buffers if buffer.has_tensor_output())]
        return not any(sympy.sympify(size).free_symbols for size in sizes) and fits(numel, buffers)

    with mock.patch.object(SIMDScheduling, "can_use_32bit_indexing", staticmethod(for_every_size)):
        yield


@contextmanager
def known_cpp_compiler() -> Iterator[None]:
    """Let Inductor compile for the CPU, or load without a C++ compiler what an earlier process has compiled.

    Inductor asks the compiler for its version before it looks into its cache. Where there is none, it gets what the
    compiler answered in an earlier process, and ``InvalidCxxCompiler`` for what it must compile.
    """
    search, known = inductor_config.cpp.cxx, None
    with compile_lock:
        try:
            name = cpp_builder.get_cpp_compiler()
        except inductor_exc.InvalidCxxCompiler:
            known = recall("cpp_compiler", [search])
        else:
            answers = [name, cpp_builder.get_compiler_version_info(name)]
            if recall("cpp_compiler", [search]) != answers:
                keep("cpp_compiler", [search], answers)
        with nullcontext() if known is None else _answers_of_compiler(*known), _loaded_without_headers():
            _find_vector_instructions()
            _find_system()
            yield


@contextmanager
def _answers_of_compiler(name: str, version: str) -> Iterator[None]:
    """Let Inductor take what another compiler of that name has compiled, and compile nothing."""

    def build(builder: cpp_builder.CppBuilder) -> None:
        raise inductor_exc.InvalidCxxCompiler

    with (
        mock.patch.object(cpp_builder, "cpp_compiler_search", lambda search: name),
        mock.patch.object(cpp_builder, "get_compiler_version_info", lambda name: version),
        mock.patch.object(cpp_builder.CppBuilder, "build", build),
        inductor_config.patch(compile_threads=1),  # in processes of its own it would compile as ever
    ):
        yield


@contextmanager
def _loaded_without_headers() -> Iterator[None]:
    """Let Inductor load what is compiled already without having the compiler read the headers for it.

    The setting for that, ``cpp_cache_precompile_headers``, is part of the command by whose digest the object is found.
    """
    load = CompiledFxGraph.after_deserialization

    def loaded(*given: Any, **named: Any) -> Any:
        with mock.patch.object(codecache, "_precompile_header", lambda *given, **named: ""):
            return load(*given, **named)

    with mock.patch.object(CompiledFxGraph, "after_deserialization", loaded):
        yield


def _find_system() -> None:
    """Let Inductor find its name for this machine; without a GPU, Triton is no part of it and is not read."""
    unread = mock.patch.object(codecache, "triton_key", lambda: None, create=True)  # before 2.13 it had no such name
    with nullcontext() if torch.cuda.is_available() else unread:
        codecache.CacheBase.get_system()


def _find_vector_instructions() -> None:
    """Let Inductor find which vector instructions the compiler and the processor have, or know it from before.

    It would start a process for each, which loads torch: a second of every start. To be called with ``compile_lock``.
    """
    check = VecISA.check_build

    def check_build(isa: VecISA, code: str) -> bool:
        given = code, _get_isa_dry_compile_fingerprint(isa.build_arch_flags())
        return bool(remembered("vector_instructions", given, lambda: check(isa, code) or None))

    with mock.patch.object(VecISA, "check_build", check_build), suppress(inductor_exc.InvalidCxxCompiler):
        valid_vec_isa_list()


def storage_users(tensor: Tensor) -> int:
    """Count what refers to the storage of a tensor, from Python or not; the number for one tensor is a constant."""
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
