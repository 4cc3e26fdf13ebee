"""The Dynamo backend: passes over the captured graph, then Inductor (or nothing, for debugging).

One capture serves phases that differ only in the rewrite: *prefill* (empty cache), *extend* (several tokens against a
cache) and *decode* (one token). The compiled callable takes the state of the cache as extra inputs; which cache is
decided per call through :func:`bind_call`, so calls on different caches never mix.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch._inductor import config as inductor_config
from torch._inductor.compile_fx import compile_fx
from torch.fx import GraphModule

from kvpass.cache.cache import CompressedCache
from kvpass.cache.layers import dynamic_dims
from kvpass.compiler.cuda_graphs import CudaRecorder, GraphedStep
from kvpass.config import Layout
from kvpass.graphs.bind_state import (
    add_state_placeholders,
    backend_mode,
    copy_graph,
    example_value,
    held_by_module,
    size_reader,
)
from kvpass.graphs.decompose_linear import decompose_linear_pass
from kvpass.graphs.find.alibi import fold_alibi_pass
from kvpass.graphs.find.eager import find_eager_attention_pass
from kvpass.graphs.find.flash import find_flash_attention_pass
from kvpass.graphs.find.flex import find_flex_attention_pass
from kvpass.graphs.find.repeat_kv import strip_repeat_kv_pass
from kvpass.graphs.find.sdpa import find_attention_pass
from kvpass.graphs.fx_utils import dim_of
from kvpass.graphs.late_guards import compile_guarded
from kvpass.graphs.one_token import one_token_inputs, one_token_pass
from kvpass.graphs.passes import PassRecord, run_passes
from kvpass.graphs.rewrite_attention import (
    check_sites_pass,
    find_sites,
    layout_of,
    rewrite_cached_pass,
    rewrite_evicting_pass,
    rewrite_prefill_pass,
)
from kvpass.graphs.specialize_attributes import specialize_attributes_pass
from kvpass.graphs.verify.input_lookups import input_lookups
from kvpass.graphs.verify.no_raw_attention import check_no_raw_attention_pass
from kvpass.graphs.verify.offset_positions import offset_positions_pass
from kvpass.graphs.verify.own_state import check_own_state_pass
from kvpass.graphs.verify.self_check import self_check_pass

MAX_CAPTURED_TOKENS = 8
"""Longest extension captured as a CUDA graph: drafts to verify, not the text of a turn."""

Phase = Literal["prefill", "extend", "decode"]
Compiler = Literal["inductor", "eager"]

COMPILERS: tuple[Compiler, ...] = ("inductor", "eager")

CANONICAL_PASSES = (
    specialize_attributes_pass,
    check_own_state_pass,
    find_attention_pass,
    find_flash_attention_pass,
    find_flex_attention_pass,
    find_eager_attention_pass,
    strip_repeat_kv_pass,
    fold_alibi_pass,
    check_no_raw_attention_pass,
    self_check_pass,
)
"""Every door ends in the canonical site; see ``graphs/passes.py``."""

INDUCTOR_CONFIG = {"triton.decompose_sort_ops": True} if hasattr(inductor_config.triton, "decompose_sort_ops") else {}
"""Sorting (in MoE routers) with 16-bit indices would compile short and long prompts separately."""


@dataclass
class Call:
    """What a graph is called for; an ``observed`` extension also collects what the turn's queries see.

    Attributes:
        one_token_prompt: the prompt of a prefill is one token.
        has_begun: the graph of the call was started. Without that the decoder answered by itself, without the cache.
    """

    cache: CompressedCache
    phase: Phase
    observed: bool = False
    one_token_prompt: bool = False
    has_begun: bool = False

    def begin(self) -> None:
        """Note that the graph starts; what it interrupts from here on may have overwritten entries of the cache."""
        if self.has_begun:
            raise RuntimeError("two graphs ran in one call: a graph break cuts the decoder in two")
        self.has_begun = True
        self.cache.interrupted = self.phase != "prefill" and self.cache.overwrites

    def check_begun(self) -> None:
        """Raise RuntimeError when no captured graph ran: then nothing was written to the cache."""
        if not self.has_begun:
            raise RuntimeError(
                "the captured graph did not run, so the cache was not used and is unchanged: torch.compile is disabled "
                "(TORCH_COMPILE_DISABLE, torch._dynamo.config.disable), or torch.compiler.set_stance has it run "
                "eagerly; call the model outside of that"
            )


_CALL: ContextVar[Call] = ContextVar("kvpass_call")


def check_compiler(option: str, name: str) -> Compiler:
    """The compiler of that name, given by the user as ``option``.

    Raises:
        ValueError: there is none.
    """
    for known in COMPILERS:
        if name == known:
            return known
    raise ValueError(f"{option}={name!r}: must be one of {', '.join(COMPILERS)}")


@contextmanager
def bind_call(call: Call) -> Iterator[None]:
    """Graphs called inside run the phase of ``call`` on its cache."""
    token = _CALL.set(call)
    try:
        yield
    finally:
        _CALL.reset(token)


def bound_call() -> Call:
    """The call of the innermost :func:`bind_call`."""
    return _CALL.get()


@dataclass(frozen=True, kw_only=True)
class CompileRecord:
    """One compiled graph: spec of its policy, phase, batch size, sites, layout of entries, seconds, what passes did."""

    policy: str
    phase: Phase
    batch: int
    sites: int
    layout: Layout
    seconds: float
    compiler: Compiler
    passes: Sequence[PassRecord]


@dataclass(frozen=True)
class CanonicalGraph:
    """A captured graph with canonical sites, and what the passes that found them did."""

    gm: GraphModule
    passes: Sequence[PassRecord]


@dataclass(frozen=True, kw_only=True)
class PhaseCompiler:
    """Turns a captured graph into a callable of one phase that reads and writes the bound cache.

    Attributes:
        compiler: ``"inductor"``, or ``"eager"`` to run the rewritten graph as it is.
        layers: attention layers the model is known to have; None when unknown.
        cuda_graphs: on CUDA, capture decode steps (and extensions of up to 8 tokens) once and replay them.
        records: one entry per compiled graph, appended here.
    """

    compiler: Compiler
    layers: int | None = None
    cuda_graphs: bool = True
    records: list[CompileRecord] = field(default_factory=list)

    def canonicalize(self, captured: GraphModule) -> CanonicalGraph:
        """A copy of a Dynamo graph whose attention calls are canonical sites, all of them understood.

        Raises:
            UnsupportedAttentionError: an attention call is not.
        """
        gm = copy_graph(captured)
        passes = (*CANONICAL_PASSES, partial(check_sites_pass, expected=self.layers))
        return CanonicalGraph(gm, run_passes(gm, passes, label=f"capture.{len(self.records)}"))

    def compile(self, captured: CanonicalGraph, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Rewrite a copy of the graph for the bound call and compile it, in the Dynamo trace that captured it.

        Args:
            inputs: of the captured graph, fake; the state of the cache follows them.
        """
        began = time.perf_counter()
        call = bound_call()
        cache, phase, policy = call.cache, call.phase, call.cache.policy
        gm = copy_graph(captured.gm)
        layout, dtype, device = layout_of(gm)

        def state_of(cache: CompressedCache) -> dict[str, Tensor]:
            if phase == "prefill":
                return cache.prefill_state(layout, dtype, device)
            return cache.cached_state(layout, dtype)

        state = state_of(cache)
        fake_mode = backend_mode()
        nodes, fakes = add_state_placeholders(gm, state, dynamic_dims(state, phase), fake_mode)
        if phase == "prefill":
            rewrite = partial(rewrite_prefill_pass, state=nodes, layout=layout, policy=policy.spec)
        else:
            impl = "native" if self.compiler == "inductor" else "reference"
            cached = rewrite_cached_pass if policy.decode_rule() is None else rewrite_evicting_pass
            rewrite = partial(cached, state=nodes, layout=layout, impl=impl, policy=policy.spec)
        decompose = [decompose_linear_pass] if phase == "decode" and self.compiler == "inductor" else []
        offset = [] if phase == "prefill" else [partial(offset_positions_pass, seen=nodes["seen"])]
        tokens = dim_of(example_value(find_sites(captured.gm)[0].q).shape[2])
        if (phase == "decode" or call.one_token_prompt) and not isinstance(tokens, int):
            inputs = one_token_inputs(inputs, tokens, fake_mode)
            offset.append(partial(one_token_pass, inputs=[*inputs, *fakes], mode=fake_mode))
        rewritten = run_passes(gm, [*offset, *decompose, rewrite], label=f"{phase}.{len(self.records)}")
        compiled: Callable[..., Any] = gm.forward
        if self.compiler == "inductor":
            examples = [*inputs, *fakes]
            compiled = compile_guarded(
                partial(compile_fx, gm, examples, config_patches=INDUCTOR_CONFIG), examples, fake_mode.shape_env
            )
        self.records.append(
            CompileRecord(
                policy=policy.spec,
                phase=phase,
                batch=cache.batch_size,
                sites=rewritten[-1].sites,
                layout=layout,
                seconds=time.perf_counter() - began,
                compiler=self.compiler,
                passes=(*captured.passes, *rewritten),
            )
        )
        lookups = input_lookups(captured.gm) if device.type == "cpu" else ()
        repeated = phase != "prefill" and not call.observed
        if device.type == "cuda" and repeated and self.cuda_graphs and self.compiler == "inductor":
            return self._graphed(captured, compiled, state_of, device)

        def run(*inputs: Any) -> Any:
            call = bound_call()
            state = state_of(call.cache).values()
            for lookup in lookups:
                lookup.check(inputs)
            call.begin()
            return compiled(*inputs, *state)

        return run

    @staticmethod
    def _graphed(
        captured: CanonicalGraph,
        compiled: Callable[..., Any],
        state_of: Callable[[CompressedCache], dict[str, Tensor]],
        device: torch.device,
    ) -> Callable[..., Any]:
        step = GraphedStep(compiled, CudaRecorder(device), device, held_by_module(captured.gm))
        tokens = size_reader(captured.gm, example_value(find_sites(captured.gm)[0].q).shape[2])

        def run(*inputs: Any) -> Any:
            call = bound_call()
            state = list(state_of(call.cache).values())
            call.begin()
            if tokens(inputs) > MAX_CAPTURED_TOKENS:
                return compiled(*inputs, *state)
            return step(inputs, state)

        return run
