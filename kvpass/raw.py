"""The raw backend: ``torch.compile(module, backend="kvpass", options={...})`` for a decoder of any make.

The module knows no cache. It takes its positions as an input, or counts them from the first column: then they are found
in the graph and go on from the tokens seen, and rows must not be padded. A session holds the cache between its calls::

    options = {"policy": "lava", "budget": 256}
    compiled = torch.compile(module, backend="kvpass", options=options, fullgraph=True)
    with torch.no_grad(), kvpass.session() as session:
        logits = compiled(prompt_ids, positions)       # prefill: the prompt is compressed into session.cache
        logits = compiled(next_id, next_position)      # decode against it

Use ``fullgraph=True``: without it Dynamo may give up on a call and run it in eager mode, uncompressed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._guards import TracingContext, tracing
from torch.fx import GraphModule

from kvpass.backend import Phase, PhaseCompiler, bind_cache, check_compiler
from kvpass.cache import CompressedCache
from kvpass.config import Budget
from kvpass.errors import CacheMismatchError
from kvpass.graphs.bind_state import example_value, size_reader
from kvpass.graphs.offset_positions import counts_positions
from kvpass.graphs.rewrite_attention import find_sites
from kvpass.padding import first_real_column
from kvpass.policies import resolve, resolve_budget

_SESSION: ContextVar[Session | None] = ContextVar("kvpass_session", default=None)


@dataclass(eq=False)
class Session:
    """One sequence (or batch) being decoded through the raw backend.

    Attributes:
        attention_mask: ``[B, N]`` of the prompt, zeros before its real tokens; None when nothing is padded.
        cache: the compressed cache; None before the prompt was prefilled.
    """

    attention_mask: Tensor | None = None
    cache: CompressedCache | None = None


@contextmanager
def session(attention_mask: Tensor | None = None) -> Iterator[Session]:
    """Calls of raw-backend modules inside prefill into, then decode against, one cache of their own.

    Raises:
        RuntimeError: on leaving, when no compiled module ran: Dynamo may have fallen back to eager mode.
    """
    opened = Session(attention_mask)
    token = _SESSION.set(opened)
    try:
        yield opened
    finally:
        _SESSION.reset(token)
    if opened.cache is None:
        raise RuntimeError("no module compiled with backend='kvpass' ran in this session: nothing was compressed")


def kvpass_backend(
    gm: GraphModule, example_inputs: list[Any], *, options: Mapping[str, Any] | None = None
) -> Callable[..., Any]:
    """Dynamo backend registered as ``"kvpass"``.

    Args:
        options: ``policy``, ``budget``, ``compiler`` (``"inductor"`` or ``"eager"``) and options of the policy.
    Raises:
        UnsupportedAttentionError: an attention call is not understood (Dynamo wraps it in BackendCompilerFailed).
    """
    given = dict(options or {})
    policy = resolve(given.pop("policy", "lava"), **{k: v for k, v in given.items() if k not in ("budget", "compiler")})
    compiler = check_compiler("compiler", given.get("compiler", "inductor"))
    module = RawModule(
        captured=gm,
        example_inputs=example_inputs,
        budget=resolve_budget(policy, given.get("budget")),
        compiler=PhaseCompiler(policy=policy, compiler=compiler),
        context=TracingContext.get(),
    )
    return module.__call__


class RawModule:
    """One captured graph, compiled per phase when a session first needs it."""

    def __init__(
        self,
        captured: GraphModule,
        example_inputs: list[Any],
        budget: Budget | None,
        compiler: PhaseCompiler,
        context: TracingContext,
    ) -> None:
        self.captured = compiler.canonicalize(captured)
        self.counts_positions = counts_positions(self.captured.gm)
        self.example_inputs = example_inputs
        self.budget = budget
        self.compiler = compiler
        self.context = context
        self.callables: dict[Phase, Callable[..., Any]] = {}
        rows, _, tokens, _ = example_value(find_sites(self.captured.gm)[0].q).shape
        self.rows, self.tokens = size_reader(captured, rows), size_reader(captured, tokens)

    def __call__(self, *inputs: Any) -> Any:
        active = _SESSION.get()
        if active is None:
            raise RuntimeError('a module compiled with backend="kvpass" runs inside `with kvpass.session():`')
        if torch.is_grad_enabled():
            raise RuntimeError("kvpass has no backward pass: call the module under torch.no_grad()")
        rows, tokens = self.rows(inputs), self.tokens(inputs)
        if active.cache is None:
            cache = CompressedCache(self.compiler.policy, self.budget)
            cache.begin_prefill(self._start(active.attention_mask, rows, tokens), tokens)
            result = self._run("prefill", cache, inputs)
            cache.finish_prefill()
            active.cache = cache
            return result
        cache = active.cache
        if rows != cache.batch_size:
            raise CacheMismatchError(f"the call has {rows} rows, the session's cache {cache.batch_size}")
        cache.ensure_room(tokens)
        result = self._run("decode" if tokens == 1 else "extend", cache, inputs)
        cache.advance(tokens)
        return result

    def _start(self, attention_mask: Tensor | None, rows: int, tokens: int) -> Tensor:
        start = first_real_column(attention_mask, rows, tokens)
        if self.counts_positions and bool(start.any()):
            raise ValueError(
                "attention_mask pads rows on the left, but the decoder counts its own positions from the first column: "
                "prefill prompts of one length, or pass positions in"
            )
        return start

    def _run(self, phase: Phase, cache: CompressedCache, inputs: tuple[Any, ...]) -> Any:
        with bind_cache(cache):
            if phase not in self.callables:
                with tracing(self.context):
                    self.callables[phase] = self.compiler.compile(self.captured, self.example_inputs, phase)
            return self.callables[phase](*inputs)
