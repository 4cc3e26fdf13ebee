"""The Dynamo backend: passes over the captured graph, then Inductor (or nothing, for debugging).

One capture is rewritten for several phases: *prefill* (empty cache), *extend* (several tokens against a cache) and
*decode* (one token). The compiled graph takes the state of the call's cache as extra inputs, so calls on different
caches never mix.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch.fx import GraphModule
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from kvpass.block_sparse import BlockSparse
from kvpass.cache.buffer_reuse import NO_REUSE, BufferReuse
from kvpass.compiler.blocks import SplitDecoder, tokens_of
from kvpass.compiler.cuda_graphs import CudaRecorder, GraphedStep
from kvpass.compiler.parts import FEW_LAYERS, CompileOne, Regions, compile_distinct, compile_guarded, compile_parts
from kvpass.compiler.prompt import Fill, PromptReader
from kvpass.compiler.step import Call, Phase
from kvpass.config import Compiler, EntryFormat, Layout
from kvpass.graphs.bind_state import (
    add_state_placeholders,
    backend_mode,
    copy_graph,
    fake_inputs,
    held_by_module,
    placeholders,
    size_reader,
)
from kvpass.graphs.canonical import batch_and_tokens, find_sites, layout_of
from kvpass.graphs.fx_utils import recorded
from kvpass.graphs.inline_layers import distinct_layers, inline_layers_pass
from kvpass.graphs.one_token import admit_one_token, one_token_inputs, one_token_pass, several_tokens
from kvpass.graphs.passes import (
    FINDING_PASSES,
    PassRecord,
    capture_passes,
    dump_graph,
    part_passes,
    prompt_passes,
    run_passes,
    step_passes,
)
from kvpass.graphs.rewrite_attention import rewrite_cached_pass
from kvpass.graphs.split import CannotSplitError
from kvpass.graphs.split_layers import split_at_attention, split_layers
from kvpass.graphs.verify.tables import input_lookups
from kvpass.operands import dynamic_dims
from kvpass.policies.base import Policy
from kvpass.progress import working
from kvpass.ranks import ONE_PROCESS, Ranks, run_on_all_ranks
from kvpass.torch_compat import (
    TracingContext,
    compile_fx,
    compile_lock,
    compiled_for_any_length,
    inductor_config,
    tracing,
)

MAX_CAPTURED_TOKENS = 8
"""Longest extension captured as a CUDA graph: draft tokens to verify, not a longer text."""

Runner = Callable[..., Any]
"""``run(call, *inputs)``: runs the compiled graph of a phase on the cache of the call."""

COLD_SECONDS_PER_OP = 3
"""Seconds of compilation per attention op, measured on models of 6 to 16 layers, two cores, nothing cached: an
estimate that is shown, no limit."""

MOST_PARTS = 4
"""Distinct parts of most decoders."""

INDUCTOR_CONFIG = {"triton.decompose_sort_ops": True} if hasattr(inductor_config.triton, "decompose_sort_ops") else {}
"""Otherwise sorting with 16-bit indices (in MoE routers) would compile short and long prompts separately."""
ONE_ROW_CONFIG = {**INDUCTOR_CONFIG, "coordinate_descent_tuning": True, "combo_kernels": True}
"""Of a decode step of one row on CUDA. With the first, Inductor writes products of a vector and a matrix itself, and
norms and activations into them; with the second, the products for q, k and v are one launch, as is RoPE of q and k: 8
launches a layer of llama instead of 13."""


def rows_text(rows: int) -> str:
    """Return for how many rows a graph is compiled that a call of so many needs: "1 row", or "2 or more rows"."""
    return "1 row" if rows == 1 else "2 or more rows"


@dataclass(frozen=True, kw_only=True)
class CompileRecord:
    """One compiled graph.

    Attributes:
        policy: its spec. batch: rows of the call that needed it; a graph for several serves any number of them, if the
            model allows it. sites: attention ops. parts: how many were compiled that are called in turn; 1: the whole
            graph. not_in_blocks: why prompts run over all tokens at once; "" where they run in blocks. seconds: of
            passes and compilation.
    """

    policy: str
    phase: Phase
    batch: int
    sites: int
    layout: Layout
    parts: int
    not_in_blocks: str
    seconds: float
    compiler: Compiler
    passes: Sequence[PassRecord]

    @property
    def shape(self) -> str:
        """``"3 parts"`` or ``"one graph"``, and why no blocks."""
        shape = f"{self.parts} parts" if self.parts > 1 else "one graph"
        return shape + (f", no blocks, since {self.not_in_blocks}" if self.not_in_blocks else "")


@dataclass(frozen=True)
class _CompiledPhase:
    """A compiled phase: what runs it, in how many parts, records of passes, and why a prompt is not in blocks."""

    run: Runner
    parts: int
    passes: Sequence[PassRecord]
    not_in_blocks: str = ""


@dataclass(frozen=True, kw_only=True)
class PhaseCompiler:
    """Compiles a captured graph for one phase, to use the cache of a call.

    Attributes:
        compiler: ``"inductor"``, or ``"eager"`` to run the rewritten graph as it is.
        layers: attention layers the model is known to have; None when unknown.
        regions: compile each distinct part of what continues a cache once, as always of a prompt; "auto": where that
            pays.
        cuda_graphs: on CUDA, capture decode steps (and extensions of up to 8 tokens) once and replay them.
        prefill: what selects blocks of a prompt's attention; None: all of it is computed.
        records: one entry per compiled graph, appended here. readers: what reads prompts, the newest last; Dynamo keeps
            this object for good, so they are held by their captures alone.
        reuse: memory of caches that decode in captured steps.
        ranks: processes that share the weights, and compile what this one compiles.
    """

    compiler: Compiler
    layers: int | None = None
    regions: Regions = "auto"
    cuda_graphs: bool = True
    prefill: BlockSparse | None = None
    records: list[CompileRecord] = field(default_factory=list)
    readers: list[ReferenceType[PromptReader]] = field(default_factory=list)
    reuse: BufferReuse = field(default_factory=BufferReuse)
    ranks: Ranks = ONE_PROCESS

    def captures_steps(self, device: torch.device) -> bool:
        """Whether decode steps on the device are captured as CUDA graphs."""
        return device.type == "cuda" and self.cuda_graphs and self.compiler == "inductor"

    def memory(self, device: torch.device) -> BufferReuse:
        """Return where caches on the device take their memory from: recycled only for captured steps."""
        return self.reuse if self.captures_steps(device) else NO_REUSE

    def canonicalize(self, gm: GraphModule, example_inputs: Sequence[Any]) -> Capture:
        """Return the capture of a graph; called as Dynamo's backend, while its trace is open."""
        gm, inputs, label = copy_graph(gm), fake_inputs(gm, example_inputs), f"capture.{len(self.records):02d}"
        inline = partial(inline_layers_pass, inputs=inputs, mode=backend_mode(), known={})
        distinct = distinct_layers(gm)
        if distinct is not None:
            run_passes(distinct.gm, [inline, *FINDING_PASSES], label=f"{label}.distinct")
        passes = run_passes(gm, capture_passes(inline, self.layers, distinct), label=label)
        return Capture(gm, passes, inputs, self)

    def compile(self, captured: Capture, call: Call) -> Runner:
        """Compile a copy of the graph for calls like ``call``, in the trace that captured it."""
        began, cache, phase = time.perf_counter(), call.cache, call.phase
        is_prompt = phase == "prefill"
        names_policy = not is_prompt and (call.recompresses or cache.policy.decode_rule() is not None)
        kind = (phase, call.logits, None if is_prompt else cache.entry_format)
        made = None if names_policy else captured.shared.get(kind)
        if made is None:
            made = (self._prefill if is_prompt else self._rewritten)(captured, call)
        if not names_policy:
            captured.shared[kind] = made
        self.records.append(
            CompileRecord(
                policy=cache.policy.spec,
                phase=phase,
                batch=cache.batch_size,
                sites=len(find_sites(captured.gm)),
                layout=layout_of(captured.gm)[0],
                parts=made.parts,
                not_in_blocks=made.not_in_blocks,
                seconds=time.perf_counter() - began,
                compiler=self.compiler,
                passes=(*captured.passes, *made.passes),
            )
        )
        return made.run

    def _shown(self, call: Call, sites: int) -> AbstractContextManager[None]:
        """Show that a phase is being compiled, and about how long that takes: as long as the last time here."""
        if self.compiler == "eager":
            return nullcontext()
        known = (record.seconds for record in reversed(self.records) if record.phase == call.phase)
        seconds = next(known, COLD_SECONDS_PER_OP * sites)
        return working(f"compiling {call.phase} of {rows_text(call.cache.batch_size)} (up to about {seconds:.0f} s)")

    def _prefill(self, captured: Capture, call: Call) -> _CompiledPhase:
        """Split a captured graph into layers and compile their parts."""
        began, label = time.perf_counter(), f"prefill.{len(self.records):02d}"
        unsplit, mode = copy_graph(captured.gm), backend_mode()
        layout, _, device = layout_of(unsplit)
        seen = torch.zeros((), dtype=torch.int64, device=device)
        nodes, fakes = add_state_placeholders(unsplit, {"seen": seen}, {}, mode)
        passes = run_passes(unsplit, prompt_passes(nodes["seen"], call.logits), label=label)
        gm = copy_graph(unsplit)
        try:
            split = split_layers(gm, placeholders(gm)[-1])
        except CannotSplitError as reason:  # it has changed the copy
            gm, split = unsplit, split_at_attention(unsplit, str(reason))
        seconds = time.perf_counter() - began
        passes.append(PassRecord(name="split_layers", sites=len(split.layers), seconds=seconds, op_diff=""))
        for index, part in enumerate({part.key: part for part in split.parts}.values()):
            passes += run_passes(part.gm, part_passes(), label=f"{label}.part_{index}")
            dump_graph(f"{label}.part_{index}", part.gm)
        with self._shown(call, MOST_PARTS), compiled_for_any_length():
            examples = [*captured.inputs, *fakes, *map(recorded, split.added)]
            functions = compile_distinct(gm, split.parts, examples, self._compile_one(mode.shape_env))
        impl = "cpp" if self.compiler == "inductor" else "eager"
        decoder = SplitDecoder(gm, layout, split, functions, captured.lookups, impl)
        read = PromptReader(decoder, label, self.prefill)
        self.readers.append(ref(read))

        def run(call: Call, *inputs: Any) -> Any:
            facts = layout, decoder.dtype, device, self.memory(device), decoder.pools
            fills = []
            for cache in (call.cache, *call.cache.fills):
                assert cache.prefill is not None
                fills.append(Fill(cache.prefill.policy, cache.prefill.buffers(*facts)))
            decoder.check(inputs)
            call.begin()
            block = tokens_of(call.block, call.cache.batch_size, device)
            return read(fills, inputs, block, call)

        return _CompiledPhase(run, len(functions), passes, split.not_in_blocks)

    def _rewritten(self, captured: Capture, call: Call) -> _CompiledPhase:
        """Compile a graph that takes the state of the call's cache as inputs, whole or in parts."""
        gm, inputs, records = self._rewrite(captured, call)
        compiled, parts = self._compile_step(gm, inputs, call, len(find_sites(captured.gm)))
        (layout, dtype, device), tokens, step = layout_of(captured.gm), batch_and_tokens(captured.gm)[1], None
        count = size_reader(captured.gm, tokens)
        if not call.recompresses and self.captures_steps(device):
            step = GraphedStep(compiled, CudaRecorder(device), device, held_by_module(captured.gm))

        def run(call: Call, *inputs: Any) -> Any:
            state = list(call.cache.state.cached_state(layout, dtype, call.recompressions).values())
            for lookup in captured.lookups:
                lookup.check(inputs)
            call.begin()
            if step is None or count(inputs) > MAX_CAPTURED_TOKENS:
                return compiled(*inputs, *state)
            return step(inputs, state)

        return _CompiledPhase(run, parts, records)

    def _rewrite(self, captured: Capture, call: Call) -> tuple[GraphModule, list[Any], list[PassRecord]]:
        """Return a copy of a graph that takes the state of the call's cache as further inputs, and fake inputs."""
        phase, cache, impl = call.phase, call.cache, "cpp" if self.compiler == "inductor" else "eager"
        gm, mode, one_token = copy_graph(captured.gm), backend_mode(), None
        layout, dtype, _ = layout_of(gm)
        state = cache.state.cached_state(layout, dtype, call.recompressions)
        nodes, fakes = add_state_placeholders(gm, state, dynamic_dims(state, cache.batch_size), mode)
        inputs, tokens = [*captured.inputs, *fakes], batch_and_tokens(captured.gm)[1]
        if phase == "decode" and not isinstance(tokens, int):
            inputs = [*one_token_inputs(captured.inputs, tokens, mode), *fakes]
            one_token = partial(one_token_pass, inputs=inputs, mode=mode)
        rewrite = partial(
            rewrite_cached_pass, state=nodes, layout=layout, policy=cache.policy, impl=impl, ranks=cache.ranks
        )
        decomposes = phase == "decode" and impl == "cpp"
        passes = step_passes(nodes["seen"], call.logits, rewrite, one_token, decomposes=decomposes)
        return gm, inputs, run_passes(gm, passes, label=f"{phase}.{len(self.records):02d}")

    def _compile_step(
        self, gm: GraphModule, inputs: Sequence[Any], call: Call, sites: int
    ) -> tuple[Callable[..., Any], int]:
        """Return a rewritten graph, compiled, and in how many parts."""
        decodes, is_cuda = call.phase == "decode", call.cache.device.type == "cuda"
        pays = self.compiler == "inductor" and (not decodes or is_cuda or sites > FEW_LAYERS)
        in_parts = self.regions is True or (self.regions == "auto" and pays)
        one_row = decodes and is_cuda and call.cache.batch_size == 1
        compile_one = self._compile_one(backend_mode().shape_env, ONE_ROW_CONFIG if one_row else INDUCTOR_CONFIG)
        with self._shown(call, MOST_PARTS if in_parts else sites), compiled_for_any_length():
            return compile_parts(gm, inputs, compile_one) if in_parts else (compile_one(gm, inputs), 1)

    def _compile_one(self, shapes: ShapeEnv | None, config: Mapping[str, Any] = INDUCTOR_CONFIG) -> CompileOne:
        def compile_one(part: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
            if self.compiler == "eager":
                return part.forward
            return compile_guarded(partial(compile_fx, part, inputs, config_patches=dict(config)), inputs, shapes)

        return compile_one


class Capture:
    """A captured graph with ``kvpass::site`` nodes; the phases of every policy are compiled when first needed.

    Args:
        gm: made in the trace in which this must be made too. passes: records of the passes that made it. inputs: of the
            graph, fake.
    Attributes:
        lookups: of its inputs in tables, which each call checks. shared: compiled phases of which no policy is part.
    """

    def __init__(
        self, gm: GraphModule, passes: Sequence[PassRecord], inputs: Sequence[Any], compiler: PhaseCompiler
    ) -> None:
        self.gm, self.passes, self.inputs, self.compiler = gm, passes, inputs, compiler
        self.lookups = input_lookups(gm) if layout_of(gm)[2].type == "cpu" else ()
        self.shared: dict[Hashable, _CompiledPhase] = {}
        self._context = TracingContext.get()
        shapes = backend_mode().shape_env
        assert shapes is not None
        self._shapes = shapes
        self._tokens = batch_and_tokens(gm)[1]
        self._runners: dict[tuple[type[Policy], str, tuple[EntryFormat, bool], Phase, bool, int], Runner] = {}

    def admit_one_token(self) -> None:
        """Let Dynamo call this capture with one token too. To be called last in its trace."""
        if not isinstance(self._tokens, int):
            admit_one_token(self._shapes, self._tokens)

    def __call__(self, call: Call, *inputs: Any) -> Any:
        """Run a call; a prefill fills all caches at once."""
        run, ranks = self.runner(call, self.compiler.ranks), self.compiler.ranks
        for cache in call.cache.fills if call.phase == "prefill" else ():
            self.runner(replace(call, cache=cache), ranks)  # the report of each policy names what it ran
        return run(call, *inputs)

    def runner(self, call: Call, ranks: Ranks = ONE_PROCESS) -> Runner:
        """What runs calls like this one, compiled when there is none yet; ``ranks``: processes that now need it too."""
        policy, protects = call.cache.policy, call.phase != "prefill" and call.cache.state.protected is not None
        # a policy may be defined again by the same name; of a full cache, entries are no codes; slots that may be
        # evicted have one more number in a cache with protected tokens
        of_cache = call.cache.entry_format, protects and policy.decode_rule() is not None
        key = type(policy), policy.spec, of_cache, call.phase, call.recompresses, call.logits
        if key in self._runners:
            return self._runners[key]

        def make() -> Runner:
            with tracing(self._context), several_tokens(self._shapes, self._tokens, max(2, call.logits + 1)):
                return self.compiler.compile(self, call)

        with compile_lock, no_garbage_collection():
            if key not in self._runners:
                self._runners[key] = run_on_all_ranks(ranks, f"compiling {call.phase}", make)
        return self._runners[key]


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Search for no reference cycles inside, in any thread: a capture makes millions of objects, and most stay."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
