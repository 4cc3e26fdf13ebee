"""Private names of torch that kvpass uses, each imported in one place: what another version of torch may move."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import sympy  # type: ignore[import-untyped]
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._dynamo.guards import dict_version
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor
from torch._dispatch.python import enable_python_dispatcher
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
from torch._dynamo.source import GlobalSource, LocalSource, TensorProperty, TensorPropertySource, is_from_source
from torch._dynamo.symbolic_convert import TensorifyState
from torch._dynamo.symbolic_convert import tls as dynamo_thread_locals
from torch._dynamo.variables import ConstantVariable
from torch._dynamo.variables.base import AttributeMutationNew, ValueMutationNew, VariableTracker
from torch._dynamo.variables.tensor import SymNodeVariable, TensorVariable
from torch._guards import ChainedSource, Guard, ShapeGuard, Source, TracingContext, tracing
from torch._inductor import config as inductor_config
from torch._inductor import exc as inductor_exc
from torch._inductor.codecache import CppCodeCache
from torch._inductor.codegen.simd import SIMDScheduling
from torch._inductor.compile_fx import compile_fx
from torch._inductor.inductor_prims import force_stride_order
from torch._logging import trace_structured
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.fx._lazy_graph_module import _LazyGraphModule as LazyGraphModule  # its code is written when it is first run
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.symbol import SymT, symbol_is_type
from torch.utils._sympy.value_ranges import ValueRanges

REPEATS_LAYERS = torch.__version__ >= "2.13"
"""Whether Dynamo can trace one of several equal layers and repeat its graph for the others."""
if REPEATS_LAYERS:
    from torch._dynamo.variables import invoke_subgraph


def sizes_of_inputs(shapes: ShapeEnv) -> dict[sympy.Symbol, list[TensorPropertySource]]:
    """Symbols of a capture, with the sizes and strides of inputs that they are."""
    found = {
        symbol: [source for source in sources if isinstance(source, TensorPropertySource)]
        for symbol, sources in shapes.var_to_sources.items()
    }
    return {symbol: sources for symbol, sources in found.items() if sources}


def process_group(name: Any) -> dist.ProcessGroup:
    return _resolve_process_group(name)


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


def wrapped_tensors(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the tensors that a tensor subclass wraps, and those that they wrap; none of a plain tensor."""
    if is_traceable_wrapper_subclass(tensor):
        for name in tensor.__tensor_flatten__()[0]:
            yield getattr(tensor, name)
            yield from wrapped_tensors(getattr(tensor, name))


def storage_users(tensor: Tensor) -> int:
    """Count what refers to the storage of a tensor, from Python or not; the number for one tensor is a constant."""
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


@contextmanager
def repeated_where(are_alike: Callable[[Collection[Any], Collection[Guard]], bool]) -> Iterator[None]:
    """Let Dynamo repeat the graph of a layer for those alone that are alike, in place of its guards on the layer.

    Args:
        are_alike: of the traced layer and another one (or of another argument of both), and the guards on the former.
    """
    fits = invoke_subgraph.is_reusable

    def guarded(tx: Any, condition: Any, arguments: Any, traced: Any) -> bool:
        # are_alike compares all that the guards ask for; to copy them for each layer is an eighth of a capture
        left_out: dict[str, Any] = {"guards": []}
        if not tx.output.side_effects.mutated_sources:  # of which none may be among the sources that were traced
            left_out["traced_sources"] = type(condition.traced_sources)()
        if not fits(tx, replace(condition, **left_out), arguments, traced):
            return False
        scope = {"G": tx.output.root_tx.f_globals, "L": tx.output.root_tx.f_locals}
        replaced = invoke_subgraph.build_source_replacement(traced.arg_sources, arguments.arg_sources)
        return all(
            are_alike(
                [source.get_value(scope, {}, {}) for source in sources],
                [guard for guard in tx.output.guards if is_from_source(guard.originating_source, sources[0])],
            )
            for sources in replaced.items()
        )

    with mock.patch.object(invoke_subgraph, "is_reusable", guarded):
        yield
