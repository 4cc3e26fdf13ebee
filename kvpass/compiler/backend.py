"""The Dynamo backend: passes over the captured graph, then Inductor (or nothing, for debugging).

One capture is rewritten for several phases: *prefill* (empty cache), *extend* (several tokens against a cache) and
*decode* (one token). The compiled graph takes the state of the call's cache as extra inputs, so calls on different
caches never mix.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from kvpass.cache.cache import CompressedCache
from kvpass.compiler.cuda_graphs import CudaRecorder, GraphedStep
from kvpass.compiler.parts import FEW_LAYERS, Regions, compile_parts
from kvpass.compiler.transactions import Call, Phase
from kvpass.config import Layout
from kvpass.graphs.bind_state import (
    add_state_placeholders,
    backend_mode,
    copy_graph,
    held_by_module,
    size_reader,
)
from kvpass.graphs.late_guards import compile_guarded
from kvpass.graphs.one_token import one_token_inputs, one_token_pass
from kvpass.graphs.passes import PassRecord, capture_passes, phase_passes, run_passes
from kvpass.graphs.rewrite_attention import batch_and_tokens, layout_of
from kvpass.graphs.split import CannotSplitError
from kvpass.graphs.verify.input_lookups import input_lookups
from kvpass.operands import dynamic_dims
from kvpass.progress import working
from kvpass.torch_compat import compile_fx, compiled_for_any_length, inductor_config

MAX_CAPTURED_TOKENS = 8
"""Longest extension captured as a CUDA graph: draft tokens to verify, not a longer text."""

Compiler = Literal["inductor", "eager"]
Runner = Callable[..., Any]
"""``run(call, *inputs)``: runs the compiled graph of a phase on the cache of the call."""

COMPILERS: tuple[Compiler, ...] = ("inductor", "eager")

COLD_SECONDS_PER_OP = 3
"""Seconds of compilation per attention op, measured on models of 6 to 16 layers, two cores, nothing cached: an
estimate that is shown, no limit."""

MOST_PARTS = 4
"""Distinct parts of most decoders."""

INDUCTOR_CONFIG = {"triton.decompose_sort_ops": True} if hasattr(inductor_config.triton, "decompose_sort_ops") else {}
"""Otherwise sorting with 16-bit indices (in MoE routers) would compile short and long prompts separately."""


def check_compiler(option: str, name: str) -> Compiler:
    """Return the compiler of that name, given by the user as ``option``.

    Raises:
        ValueError: there is none.
    """
    for known in COMPILERS:
        if name == known:
            return known
    raise ValueError(f"{option}={name!r}: must be one of {', '.join(COMPILERS)}")


@dataclass(frozen=True, kw_only=True)
class CompileRecord:
    """One compiled graph.

    Attributes:
        policy: its spec. sites: attention ops. parts: how many were compiled that are called in turn; 1: the whole
            graph. whole_because: why not in parts; "" where that was not tried. seconds: of passes and compilation.
    """

    policy: str
    phase: Phase
    batch: int
    sites: int
    layout: Layout
    parts: int
    whole_because: str
    seconds: float
    compiler: Compiler
    passes: Sequence[PassRecord]

    @property
    def shape(self) -> str:
        """``"3 parts"``, or ``"one graph"`` and why."""
        if self.parts > 1:
            return f"{self.parts} parts"
        return f"one graph, since {self.whole_because}" if self.whole_because else "one graph"


@dataclass(frozen=True)
class CanonicalGraph:
    """A captured graph with ``kvpass::site`` nodes, and the records of the passes that made them."""

    gm: GraphModule
    passes: Sequence[PassRecord]


@dataclass(frozen=True, kw_only=True)
class PhaseCompiler:
    """Compiles a captured graph for one phase, to use the cache of a call.

    Attributes:
        compiler: ``"inductor"``, or ``"eager"`` to run the rewritten graph as it is.
        layers: attention layers the model is known to have; None when unknown.
        regions: compile each distinct part between attention ops once; "auto": where that pays.
        cuda_graphs: on CUDA, capture decode steps (and extensions of up to 8 tokens) once and replay them.
        records: one entry per compiled graph, appended here.
    """

    compiler: Compiler
    layers: int | None = None
    regions: Regions = "auto"
    cuda_graphs: bool = True
    records: list[CompileRecord] = field(default_factory=list)

    def canonicalize(self, captured: GraphModule) -> CanonicalGraph:
        """Return a copy of a Dynamo graph in which every attention call is a ``kvpass::site``.

        Raises:
            UnsupportedAttentionError: an attention call is unsupported.
        """
        gm = copy_graph(captured)
        return CanonicalGraph(gm, run_passes(gm, capture_passes(self.layers), label=f"capture.{len(self.records):02d}"))

    def _pays(self, phase: Phase, sites: int, device: torch.device) -> bool:
        """Whether to compile in parts by default."""
        many = phase != "decode" or device.type == "cuda" or sites > FEW_LAYERS
        return self.compiler == "inductor" and many

    def _seconds(self, phase: Phase, sites: int) -> float:
        """Of the last compilation of this phase here; before one, what small models took on two cores.

        Args:
            sites: attention ops that are compiled.
        """
        last = next((record.seconds for record in reversed(self.records) if record.phase == phase), None)
        return COLD_SECONDS_PER_OP * sites if last is None else last

    def compile(self, captured: CanonicalGraph, inputs: Sequence[Any], call: Call) -> Runner:
        """Rewrite a copy of the graph for calls like ``call`` and compile it.

        Must run in the Dynamo trace that captured the graph.

        Args:
            inputs: of the captured graph, fake; the state of the cache follows them.
        """
        began = time.perf_counter()
        cache, phase, policy = call.cache, call.phase, call.cache.policy
        gm = copy_graph(captured.gm)
        layout, dtype, device = layout_of(gm)

        def state_of(cache: CompressedCache) -> dict[str, Tensor]:
            if phase == "prefill":
                return cache.prefill_state(layout, dtype, device)
            return cache.cached_state(layout, dtype)

        state = state_of(cache)
        fake_mode = backend_mode()
        nodes, fakes = add_state_placeholders(gm, state, dynamic_dims(state), fake_mode)
        tokens = batch_and_tokens(captured.gm)[1]
        one_token = None
        if (phase == "decode" or call.one_token_prompt) and not isinstance(tokens, int):
            inputs = one_token_inputs(inputs, tokens, fake_mode)
            one_token = partial(one_token_pass, inputs=[*inputs, *fakes], mode=fake_mode)
        passes = phase_passes(phase, nodes, layout, policy, one_token, cpp=self.compiler == "inductor")
        rewritten = run_passes(gm, passes, label=f"{phase}.{len(self.records):02d}")
        sites = rewritten[-1].sites
        in_parts = self.regions is True or (self.regions == "auto" and self._pays(phase, sites, device))
        seconds = self._seconds(phase, MOST_PARTS if in_parts else sites)
        notice = f"compiling {phase}, batch size {cache.batch_size} (up to about {seconds:.0f} s)"
        with working(notice) if self.compiler == "inductor" else nullcontext(), compiled_for_any_length():
            compiled, parts, whole_because = self._compiled(gm, [*inputs, *fakes], fake_mode.shape_env, in_parts)
        self.records.append(
            CompileRecord(
                policy=policy.spec,
                phase=phase,
                batch=cache.batch_size,
                sites=sites,
                layout=layout,
                parts=parts,
                whole_because=whole_because,
                seconds=time.perf_counter() - began,
                compiler=self.compiler,
                passes=(*captured.passes, *rewritten),
            )
        )
        lookups = input_lookups(captured.gm) if device.type == "cpu" else ()
        repeated = phase != "prefill" and not call.observed
        if device.type == "cuda" and repeated and self.cuda_graphs and self.compiler == "inductor":
            return self._graphed(captured, compiled, state_of, device)

        def run(call: Call, *inputs: Any) -> Any:
            state = state_of(call.cache).values()
            for lookup in lookups:
                lookup.check(inputs)
            call.begin()
            return compiled(*inputs, *state)

        return run

    def _compiled(
        self, gm: GraphModule, examples: Sequence[Any], shapes: ShapeEnv | None, in_parts: bool
    ) -> tuple[Callable[..., Any], int, str]:
        """Return a graph in compiled code, in how many parts, and why it is whole where it should be in parts."""

        def compile_one(part: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
            if self.compiler == "eager":
                return part.forward
            return compile_guarded(partial(compile_fx, part, inputs, config_patches=INDUCTOR_CONFIG), inputs, shapes)

        if not in_parts:
            return compile_one(gm, examples), 1, ""
        try:
            return *compile_parts(gm, examples, compile_one), ""
        except CannotSplitError as reason:
            return compile_one(gm, examples), 1, str(reason)

    @staticmethod
    def _graphed(
        captured: CanonicalGraph,
        compiled: Callable[..., Any],
        state_of: Callable[[CompressedCache], dict[str, Tensor]],
        device: torch.device,
    ) -> Runner:
        step = GraphedStep(compiled, CudaRecorder(device), device, held_by_module(captured.gm))
        tokens = size_reader(captured.gm, batch_and_tokens(captured.gm)[1])

        def run(call: Call, *inputs: Any) -> Any:
            state = list(state_of(call.cache).values())
            call.begin()
            if tokens(inputs) > MAX_CAPTURED_TOKENS:
                return compiled(*inputs, *state)
            return step(inputs, state)

        return run
