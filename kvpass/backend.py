"""The Dynamo backend: passes over the captured graph, then Inductor (or nothing, for debugging).

One capture recipe serves three phases that differ only in the rewrite: *prefill* (empty cache), *extend* (several
tokens against a cache) and *decode* (one token). The compiled callable takes the state of the cache as extra inputs;
which cache is decided per call through :func:`bind_cache`, so calls on different caches never mix.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, cast

from torch import Tensor
from torch._guards import TracingContext
from torch._inductor import config as inductor_config
from torch._inductor.compile_fx import compile_fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule

from kvpass.cache import CACHED_DYNAMIC, PREFILL_DYNAMIC, CompressedCache
from kvpass.config import Geometry
from kvpass.graphs.bind_state import add_state_placeholders, copy_graph
from kvpass.graphs.check_no_raw_attention import check_no_raw_attention_pass
from kvpass.graphs.check_positions import check_positions_pass
from kvpass.graphs.decompose_linear import decompose_linear_pass
from kvpass.graphs.find_attention import find_attention_pass
from kvpass.graphs.passes import PassRecord, run_passes
from kvpass.graphs.rewrite_attention import (
    check_sites_pass,
    geometry_of,
    rewrite_cached_pass,
    rewrite_evicting_pass,
    rewrite_prefill_pass,
)
from kvpass.graphs.strip_repeat_kv import strip_repeat_kv_pass
from kvpass.policies.base import Policy

Phase = Literal["prefill", "extend", "decode"]
Compiler = Literal["inductor", "eager"]

COMPILERS: tuple[Compiler, ...] = ("inductor", "eager")

CANONICAL_PASSES = (find_attention_pass, strip_repeat_kv_pass, check_no_raw_attention_pass, check_positions_pass)
"""Every door ends in the canonical site; see ``graphs/passes.py``."""

INDUCTOR_CONFIG = {"triton.decompose_sort_ops": True} if hasattr(inductor_config.triton, "decompose_sort_ops") else {}
"""Sorting (in MoE routers) with 16-bit indices would compile short and long prompts separately."""

_CACHE: ContextVar[CompressedCache] = ContextVar("kvpass_cache")


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
def bind_cache(cache: CompressedCache) -> Iterator[None]:
    """Graphs called inside read and write ``cache``."""
    token = _CACHE.set(cache)
    try:
        yield
    finally:
        _CACHE.reset(token)


def bound_cache() -> CompressedCache:
    """The cache of the innermost :func:`bind_cache`."""
    return _CACHE.get()


@dataclass(frozen=True, kw_only=True)
class CompileRecord:
    """One compiled graph: its phase, batch size, sites, KV geometry, seconds and what each pass did."""

    phase: Phase
    batch: int
    sites: int
    geometry: Geometry
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
        policy: decides what is kept. compiler: ``"inductor"``, or ``"eager"`` to run the rewritten graph as it is.
        layers: attention layers the model is known to have; None when unknown.
        records: one entry per compiled graph, appended here.
    """

    policy: Policy
    compiler: Compiler
    layers: int | None = None
    records: list[CompileRecord] = field(default_factory=list)

    def canonicalize(self, captured: GraphModule) -> CanonicalGraph:
        """A copy of a Dynamo graph whose attention calls are canonical sites, all of them understood.

        Raises:
            UnsupportedAttentionError: an attention call is not.
        """
        gm = copy_graph(captured)
        passes = (*CANONICAL_PASSES, partial(check_sites_pass, expected=self.layers))
        return CanonicalGraph(gm, run_passes(gm, passes, label=f"capture.{len(self.records)}"))

    def compile(self, captured: CanonicalGraph, example_inputs: Sequence[Any], phase: Phase) -> Callable[..., Any]:
        """Rewrite a copy of the graph for ``phase`` and compile it; called in a Dynamo trace, with a cache bound."""
        began = time.perf_counter()
        cache = bound_cache()
        gm = copy_graph(captured.gm)
        geometry, dtype, device = geometry_of(gm)

        def state_of(cache: CompressedCache) -> dict[str, Tensor]:
            if phase == "prefill":
                return cache.prefill_state(geometry, dtype, device)
            return cache.cached_state(geometry)

        dynamic = PREFILL_DYNAMIC if phase == "prefill" else CACHED_DYNAMIC
        nodes, fakes = add_state_placeholders(gm, state_of(cache), dynamic, _fake_mode())
        if phase == "prefill":
            rewrite = partial(rewrite_prefill_pass, state=nodes, policy=self.policy.spec)
        elif self.policy.decode_rule() is not None:
            rewrite = partial(rewrite_evicting_pass, state=nodes, policy=self.policy.spec)
        else:
            impl = "native" if self.compiler == "inductor" else "reference"
            rewrite = partial(rewrite_cached_pass, state=nodes, impl=impl)
        decompose = [decompose_linear_pass] if phase == "decode" and self.compiler == "inductor" else []
        rewritten = run_passes(gm, [*decompose, rewrite], label=f"{phase}.{len(self.records)}")
        compiled: Callable[..., Any] = gm.forward
        if self.compiler == "inductor":
            compiled = cast(
                Callable[..., Any], compile_fx(gm, [*example_inputs, *fakes], config_patches=INDUCTOR_CONFIG)
            )
        self.records.append(
            CompileRecord(
                phase=phase,
                batch=cache.batch_size,
                sites=rewritten[-1].sites,
                geometry=geometry,
                seconds=time.perf_counter() - began,
                compiler=self.compiler,
                passes=(*captured.passes, *rewritten),
            )
        )
        return lambda *inputs: compiled(*inputs, *state_of(bound_cache()).values())


def _fake_mode() -> FakeTensorMode:
    context = TracingContext.try_get()
    if context is None or context.fake_mode is None:
        raise RuntimeError("the kvpass backend must be called by torch.compile, inside a Dynamo trace")
    return context.fake_mode
