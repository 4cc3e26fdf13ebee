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
captured and compiled when a session first has it, twice: for one token and for several. Dynamo keeps eight captures
of a function; more than four batch sizes need a larger ``torch._dynamo.config.recompile_limit``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch import Tensor
from torch._dynamo import eval_frame
from torch.fx import GraphModule, Node

from kvpass.cache.cache import CompressedCache
from kvpass.cache.fingerprint import GraphIdentity
from kvpass.compiler.backend import PhaseCompiler, check_compiler
from kvpass.compiler.capture import Capture
from kvpass.compiler.transactions import append, continued, prefill
from kvpass.config import Budget
from kvpass.errors import CacheMismatchError
from kvpass.frontends.padding import first_real_column
from kvpass.graphs.bind_state import backend_mode, example_value, placeholders, size_reader
from kvpass.graphs.fx_utils import Dim, dim_of, is_integral, is_module_tensor, recorded, shape_of
from kvpass.graphs.rewrite_attention import find_sites
from kvpass.graphs.verify.length_guards import check_length, fixed_length, longest_length
from kvpass.graphs.verify.offset_positions import counts_positions
from kvpass.graphs.verify.table_ends import table_end
from kvpass.graphs.verify.token_mixing import check_reduced_positions_pass
from kvpass.policies import Policy, check_registered, resolve, resolve_budget

_SESSION: ContextVar[Session | None] = ContextVar("kvpass_session", default=None)


@dataclass(eq=False)
class Session:
    """One sequence (or batch) being decoded through the raw backend.

    Attributes:
        attention_mask: ``[B, N]`` of the prompt, zeros before its real tokens; None when nothing is padded.
        cache: the compressed cache; None before the prompt was prefilled. Of a reusable one the session reads a copy.
        calls: how many calls of a compiled module ended. One that torch ran eagerly is not among them: compare this
            with your own count where the stance of torch.compiler may change inside the session.
    """

    attention_mask: Tensor | None = None
    cache: CompressedCache | None = None
    calls: int = 0


@contextmanager
def session(attention_mask: Tensor | None = None) -> Iterator[Session]:
    """Calls of raw-backend modules inside prefill into, then decode against, one cache of their own.

    Raises:
        RuntimeError: on entering, when ``torch.compiler.set_stance`` may have compiled modules run eagerly; on leaving,
            when no compiled module ran: Dynamo may have fallen back to eager mode.
    """
    if eval_frame._stance != eval_frame.DynamoStance():
        raise RuntimeError(
            f"torch.compiler.set_stance is in force ({eval_frame._stance.stance!r}): compiled modules may run eagerly, "
            "without the cache; open the session under the default stance"
        )
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
        ValueError: the capture is for one length of several tokens, for some lengths, or for as many rows as tokens.
    """
    given = dict(options or {})
    budget, cuda_graphs = given.pop("budget", None), given.pop("cuda_graphs", True)
    compiler = check_compiler("compiler", given.pop("compiler", "inductor"))
    policy = check_registered(resolve(given.pop("policy", "lava"), **given))
    resolved = resolve_budget(policy, budget)
    _check_sizes(gm)
    decoder = Capture(gm, example_inputs, PhaseCompiler(compiler=compiler, cuda_graphs=cuda_graphs))
    return RawModule(decoder, policy, resolved).__call__


def _check_sizes(gm: GraphModule) -> None:
    """Refuse a capture in which one symbol is rows and tokens: Dynamo takes equal sizes of a first call for one.

    And one for a single length, which passes would refuse for what follows from that.
    """
    inputs = [node for node in placeholders(gm) if not is_module_tensor(node)]
    lengths = {shape[1] for node in inputs if _is_whole(node) and (shape := shape_of(node)) and len(shape) == 2}
    if len(lengths) == 1:
        _check_length_varies(*lengths)
    for node in inputs:
        shape = shape_of(node)
        if shape is None or len(shape) < 2 or (len(shape) == 2 and not _is_whole(node)):
            continue  # [T, T] may be a mask
        if isinstance(shape[0], sympy.Expr) and shape[0] == shape[1]:
            raise ValueError(
                f"{node.name} has as many rows as tokens in the call that is captured, and Dynamo takes both for one "
                "size: let the first call have other sizes, or set torch.fx.experimental._config.use_duck_shape = False"
            )


def _is_whole(node: Node) -> bool:
    return is_integral(node) and recorded(node).dtype != torch.bool


def _check_length_varies(length: Dim) -> None:
    if isinstance(length, int) and length > 1:
        shapes = backend_mode().shape_env
        raise fixed_length(length, [] if shapes is None else shapes.guards)


class RawModule:
    """One captured decoder, called on the cache of the session it is in."""

    def __init__(self, decoder: Capture, policy: Policy, budget: Budget | None) -> None:
        self.decoder, self.policy, self.budget = decoder, policy, budget
        graph = decoder.graph.gm
        check_reduced_positions_pass(graph)
        self.counts_positions = counts_positions(graph)
        sites = find_sites(graph)
        self.paths = tuple(site.module_path for site in sites)
        query = example_value(sites[0].q)
        tokens: int | torch.SymInt = query.shape[2]
        _check_length_varies(dim_of(tokens))
        # before the batch is a number, so that branches on rows x tokens are seen
        ends = (longest_length(graph, tokens), table_end(graph))
        self.longest = min((end for end in ends if end is not None), default=None)
        self.device = query.device
        self.rows = int(query.shape[0])  # guards a symbolic batch: the state that enters the graph is of this size
        self.tokens = size_reader(graph, tokens)

    def __call__(self, *inputs: Any) -> Any:
        active = _SESSION.get()
        if active is None:
            raise RuntimeError('a module compiled with backend="kvpass" runs inside `with kvpass.session():`')
        if torch.is_grad_enabled():
            raise RuntimeError("kvpass has no backward pass: call the module under torch.no_grad()")
        with torch.inference_mode(False), torch.no_grad():
            return self._call(active, inputs)

    def _call(self, active: Session, inputs: tuple[Any, ...]) -> Any:
        tokens, owner = self.tokens(inputs), GraphIdentity.of(inputs, self.paths)
        if active.cache is None:
            cache, longest = CompressedCache(self.policy, self.budget, owner), self.longest
            check_length(longest, 0, tokens)
            start = self._start(active.attention_mask, tokens)
            result = prefill(cache, start, tokens, lambda call: self.decoder(call, *inputs))
        else:
            self._check_owner(active.cache, owner)
            cache = continued(active.cache, self.rows, self.device)
            # a capture of a single token shows no end
            longest = min((known for known in (cache.longest, self.longest) if known is not None), default=None)
            check_length(longest, cache.columns, tokens)
            result, _ = append(cache, tokens, lambda call: self.decoder(call, *inputs))
        cache.longest = longest
        active.cache = cache
        active.calls += 1
        return result

    def _check_owner(self, cache: CompressedCache, owner: GraphIdentity) -> None:
        try:
            cache.check_owner(self.policy, self.budget, owner)
        except CacheMismatchError as error:
            raise CacheMismatchError(
                f"{error}. In this session another module was called before, or a graph break cuts this one in two "
                "(fullgraph=True says where)"
            ) from None

    def _start(self, attention_mask: Tensor | None, tokens: int) -> Tensor:
        start = first_real_column(attention_mask, self.rows, tokens)
        if self.counts_positions and bool(start.any()):
            raise ValueError(
                "attention_mask pads rows on the left, but the decoder counts its own positions from the first column: "
                "prefill prompts of one length, or pass positions in"
            )
        return start
