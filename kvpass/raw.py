"""The raw backend: ``torch.compile(module, backend="kvpass", options={...})`` for a decoder of any make.

The module knows no cache. It takes its positions as an input, or counts them from the first column: then they are found
in the graph and go on from the tokens seen, and rows must not be padded. A session holds the cache between its calls::

    options = {"policy": "lava", "budget": 256}
    compiled = torch.compile(module, backend="kvpass", options=options, fullgraph=True, dynamic=True)
    with torch.no_grad(), kvpass.session() as session:
        logits = compiled(prompt_ids, positions)       # prefill: the prompt is compressed into session.cache
        logits = compiled(next_id, next_position)      # decode against it

Use ``fullgraph=True``: without it Dynamo may give up on a call and run it in eager mode, uncompressed. And use
``dynamic=True``: a graph is to hold for prompts of any length, one made for a single length is refused. A batch size is
captured and compiled when a session first has it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from kvpass.backend import PhaseCompiler, check_compiler
from kvpass.cache import CompressedCache
from kvpass.captured import CapturedDecoder
from kvpass.config import Budget
from kvpass.errors import CacheMismatchError
from kvpass.graphs.bind_state import example_value, size_reader
from kvpass.graphs.offset_positions import counts_positions
from kvpass.graphs.rewrite_attention import find_sites
from kvpass.padding import first_real_column
from kvpass.phases import append, continued, prefill
from kvpass.policies import Policy, check_registered, resolve, resolve_budget

_SESSION: ContextVar[Session | None] = ContextVar("kvpass_session", default=None)


@dataclass(eq=False)
class Session:
    """One sequence (or batch) being decoded through the raw backend.

    Attributes:
        attention_mask: ``[B, N]`` of the prompt, zeros before its real tokens; None when nothing is padded.
        cache: the compressed cache; None before the prompt was prefilled. Of a reusable one the session reads a copy.
    """

    attention_mask: Tensor | None = None
    cache: CompressedCache | None = None
    _owner: Tensor | tuple[str, ...] | None = field(default=None, repr=False)


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
        options: ``policy``, ``budget``, ``compiler`` (``"inductor"`` or ``"eager"``), ``cuda_graphs`` as
            ``kvpass.compile`` has it, and options of the policy.
    Raises:
        UnsupportedAttentionError: an attention call is not understood (Dynamo wraps it in BackendCompilerFailed).
        ValueError: the capture is for one length of several tokens.
    """
    given = dict(options or {})
    budget, cuda_graphs = given.pop("budget", None), given.pop("cuda_graphs", True)
    compiler = check_compiler("compiler", given.pop("compiler", "inductor"))
    policy = check_registered(resolve(given.pop("policy", "lava"), **given))
    resolved = resolve_budget(policy, budget)
    decoder = CapturedDecoder(gm, example_inputs, PhaseCompiler(compiler=compiler, cuda_graphs=cuda_graphs))
    return RawModule(decoder, policy, resolved).__call__


class RawModule:
    """One captured decoder, called on the cache of the session it is in."""

    def __init__(self, decoder: CapturedDecoder, policy: Policy, budget: Budget | None) -> None:
        self.decoder, self.policy, self.budget = decoder, policy, budget
        graph = decoder.graph.gm
        self.counts_positions = counts_positions(graph)
        sites = find_sites(graph)
        self.paths = tuple(site.module_path for site in sites)
        query = example_value(sites[0].q)
        if isinstance(query.shape[2], int) and query.shape[2] > 1:
            raise ValueError(
                f"captured for {query.shape[2]} tokens and no other length: say torch.compile(..., dynamic=True), or "
                "what a decoder computes from its length is a number like any other, and wrong for the next token"
            )
        self.device = query.device
        self.rows = int(query.shape[0])  # guards a symbolic batch: the state that enters the graph is of this size
        self.tokens = size_reader(graph, query.shape[2])

    def __call__(self, *inputs: Any) -> Any:
        active = _SESSION.get()
        if active is None:
            raise RuntimeError('a module compiled with backend="kvpass" runs inside `with kvpass.session():`')
        if torch.is_grad_enabled():
            raise RuntimeError("kvpass has no backward pass: call the module under torch.no_grad()")
        with torch.inference_mode(False), torch.no_grad():
            return self._call(active, inputs)

    def _call(self, active: Session, inputs: tuple[Any, ...]) -> Any:
        tokens, owner = self.tokens(inputs), self._owner(inputs)
        if active.cache is None:
            cache = CompressedCache(self.policy, self.budget)
            start = self._start(active.attention_mask, tokens)
            result = prefill(cache, start, tokens, lambda: self.decoder(*inputs))
        else:
            self._check_owner(active, active.cache, owner)
            cache = continued(active.cache, self.rows, self.device)
            result, _ = append(cache, tokens, lambda: self.decoder(*inputs))
        active.cache, active._owner = cache, owner
        return result

    def _owner(self, inputs: tuple[Any, ...]) -> Tensor | tuple[str, ...]:
        """What calls of this module have in common, whatever graph they run: the first parameter, or else its sites."""
        return next((value for value in inputs if isinstance(value, nn.Parameter)), self.paths)

    def _check_owner(self, active: Session, cache: CompressedCache, owner: Tensor | tuple[str, ...]) -> None:
        known = active._owner
        same = known is None or known is owner or (isinstance(known, tuple) and known == owner)
        if not same or (cache.policy, cache.budget) != (self.policy, self.budget):
            raise CacheMismatchError(
                f"{cache!r} of this session was not filled by this graph's weights, policy and budget: another module "
                "was called, or a graph break cuts this one in two (fullgraph=True says where)"
            )

    def _start(self, attention_mask: Tensor | None, tokens: int) -> Tensor:
        start = first_real_column(attention_mask, self.rows, tokens)
        if self.counts_positions and bool(start.any()):
            raise ValueError(
                "attention_mask pads rows on the left, but the decoder counts its own positions from the first column: "
                "prefill prompts of one length, or pass positions in"
            )
        return start
