"""The raw backend: ``torch.compile(module, backend="kvpass", options={...})`` for any decoder.

The module has no cache. It takes its positions as an input, or counts them from the first column: then they are
found in the graph and continue from the tokens seen, and rows must not be padded. A session holds the cache between its
calls::

    options = {"policy": "lava", "budget": 256}
    compiled = torch.compile(module, backend="kvpass", options=options, fullgraph=True, dynamic=True)
    with torch.no_grad(), kvpass.session() as session:
        logits = compiled(prompt_ids, positions)       # prefill: the prompt is compressed into session.cache
        logits = compiled(next_id, next_position)      # decode against it

Use ``fullgraph=True``: without it Dynamo may give up on a call and run it in eager mode, uncompressed. And use
``dynamic=True``: a graph must hold for prompts of any length; one for a single length raises. A batch size is captured
when a session first has it, for several tokens; the same capture serves one token. Dynamo keeps eight captures
of a function; more batch sizes need a larger ``torch._dynamo.config.recompile_limit``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.utils.weak import WeakTensorKeyDictionary

from kvpass import block_sparse
from kvpass.cache.cache import CompressedCache
from kvpass.cache.fingerprint import GraphFingerprint
from kvpass.compiler.backend import Capture, PhaseCompiler
from kvpass.compiler.blocks import check_block
from kvpass.compiler.capture import check_length
from kvpass.compiler.parts import REGIONS
from kvpass.compiler.step import append, continued, prefill
from kvpass.config import COMPILERS, Block, Budget, one_of
from kvpass.errors import CacheMismatchError
from kvpass.frontends.padding import first_real_column
from kvpass.graphs.bind_state import backend_mode, placeholders, size_reader
from kvpass.graphs.canonical import find_sites
from kvpass.graphs.fx_utils import dim_of, is_integral, is_module_tensor, module_tensor, recorded, shape_of, source_of
from kvpass.graphs.verify.length_guards import fixed_length, longest_length
from kvpass.graphs.verify.offset_positions import counts_positions
from kvpass.graphs.verify.same_capture import is_same_decoder, value_of
from kvpass.graphs.verify.self_check import check_reduced_inputs_pass
from kvpass.graphs.verify.tables import table_end
from kvpass.policies import Policy, check_registered, resolve, resolve_budget
from kvpass.torch_compat import eval_frame

_SESSION: ContextVar[Session | None] = ContextVar("kvpass_session", default=None)


@dataclass(eq=False)
class Session:
    """One sequence (or batch) being decoded through the raw backend.

    Attributes:
        attention_mask: ``[B, N]`` of the prompt, zeros before its real tokens; None when nothing is padded.
        cache: the compressed cache; None before the prompt was prefilled. Of a reusable one the session reads a copy.
        expected: columns that the cache will hold at most, as far as known: its tail is reserved for them.
        calls: how many calls of a compiled module ended. One that torch ran eagerly is not among them: compare this
            with your own count where the stance of torch.compiler may change inside the session.
    """

    attention_mask: Tensor | None = None
    cache: CompressedCache | None = None
    expected: int = 0
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
        options: ``policy``, ``budget``, ``compiler`` (``"inductor"`` or ``"eager"``), ``cuda_graphs``,
            ``compile_regions``, ``prefill`` and ``prefill_block`` as ``kvpass.compile`` has them, and the policy's own.
    Raises:
        UnsupportedAttentionError: an attention call is not understood (Dynamo wraps it in BackendCompilerFailed).
        ValueError: the capture is for one length of several tokens, for some lengths, or for as many rows as tokens.
    """
    given = dict(options or {})
    budget, cuda_graphs = given.pop("budget", None), given.pop("cuda_graphs", True)
    compiler = one_of("compiler", given.pop("compiler", "inductor"), COMPILERS)
    regions = one_of("compile_regions", given.pop("compile_regions", "auto"), REGIONS)
    block = check_block(given.pop("prefill_block", "auto"))
    prefill = block_sparse.resolve(given.pop("prefill", "full"))
    policy = check_registered(resolve(given.pop("policy", "lava"), **given))
    if policy.replays_prompt:
        raise ValueError(f"policy={policy.name!r} replays token ids behind a prompt, which only kvpass.compile knows")
    resolved = resolve_budget(policy, budget)
    _join_equal_lengths(gm)
    _check_sizes(gm)
    phases = PhaseCompiler(compiler=compiler, regions=regions, cuda_graphs=cuda_graphs, prefill=prefill)
    weights = (module_tensor(node) for node in gm.graph.nodes if is_module_tensor(node))
    first = next((weight for weight in weights if weight is not None), torch.empty(0, device="cpu"))
    captures = _CAPTURES.setdefault(first, [])
    module = RawModule(phases.canonicalize(gm, example_inputs), policy, resolved, block, captures)
    module.decoder.admit_one_token()
    return module.__call__


_CAPTURES: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""Captures of several tokens, by the first weight of their modules."""


def _join_equal_lengths(gm: GraphModule) -> None:
    """Let one symbol be all lengths of inputs that are equal in the call that is captured; Dynamo guards that they are.

    Dynamo does so itself, but not where it has seen other lengths of the same code, nor under ``mark_dynamic`` and
    ``use_duck_shape = False``. Positions with a length of their own would not be taken for those of the tokens.
    """
    known: dict[int, torch.SymInt] = {}
    for value in (recorded(node) for node in placeholders(gm) if not is_module_tensor(node)):
        for size in (value.shape[1:] or value.shape) if isinstance(value, Tensor) else ():  # the first are rows
            if isinstance(size, torch.SymInt):
                bool(known.setdefault(size.node.hint, size) == size)


def _check_sizes(gm: GraphModule) -> None:
    """Refuse a capture in which one symbol is rows and tokens: Dynamo takes equal sizes of a first call for one.

    And one for a single length, which passes would refuse for what follows from that.
    """
    inputs = [node for node in placeholders(gm) if not is_module_tensor(node)]
    lengths = {shape[1] for node in inputs if _is_whole(node) and (shape := shape_of(node)) and len(shape) == 2}
    length = lengths.pop() if len(lengths) == 1 else None
    if isinstance(length, int) and length > 1:
        shapes = backend_mode().shape_env
        raise fixed_length(length, [] if shapes is None else shapes.guards)
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


def _check_new(texts: Sequence[Tensor], prompt: Sequence[Tensor], cache: CompressedCache) -> None:
    """Raise CacheMismatchError if the inputs of a call begin with all those of the prompt."""
    if prompt and all(torch.equal(new[..., : old.shape[-1]], old) for new, old in zip(texts, prompt, strict=True)):
        raise CacheMismatchError(
            f"the call begins with all {prompt[0].shape[-1]} tokens of the prompt that {cache!r} holds already, and "
            "would append them a second time: call the module with the tokens that come next, as kvpass.generate does, "
            "or begin again in another session"
        )


class RawModule:
    """One captured decoder, called on the cache of the session it is in.

    Args:
        block: tokens of a block of a prompt. captures: those of several tokens of the same module. This one is added,
            if it is one.
    """

    def __init__(
        self, decoder: Capture, policy: Policy, budget: Budget | None, block: Block, captures: list[RawModule]
    ) -> None:
        self.captures, self.block = captures, block
        self.decoder, self.policy, self.budget = decoder, policy, budget
        self.options = (
            policy.spec,
            budget,
            decoder.compiler.compiler,
            decoder.compiler.cuda_graphs,
            decoder.compiler.prefill,
        )
        graph = self.graph = decoder.gm
        check_reduced_inputs_pass(graph)
        self.counts_positions = counts_positions(graph)
        sites = find_sites(graph)
        self.paths = tuple(site.module_path for site in sites)
        query = recorded(sites[0].q)
        tokens: int | torch.SymInt = query.shape[2]
        self.captured_tokens = dim_of(tokens)
        # before the batch is a number, so that branches on rows x tokens are seen
        ends = (longest_length(graph, tokens), table_end(graph))
        self.longest = min((end for end in ends if end is not None), default=None)
        self.device = query.device
        self.rows = int(query.shape[0])  # guards a symbolic batch: the state that enters the graph is of this size
        self.tokens = size_reader(graph, self.captured_tokens)
        self.sources = [source_of(node) for node in placeholders(graph)]
        self.texts = [  # inputs with a whole number for each token
            place
            for place, node in enumerate(placeholders(graph))
            if _is_whole(node) and not is_module_tensor(node) and (shape_of(node) or (0,))[-1] == self.captured_tokens
        ]
        self.same: set[RawModule] = set()
        if self.captured_tokens != 1:
            captures.append(self)

    def __call__(self, *inputs: Any) -> Any:
        active = _SESSION.get()
        if active is None:
            raise RuntimeError('a module compiled with backend="kvpass" runs inside `with kvpass.session():`')
        if torch.is_grad_enabled():
            raise RuntimeError("kvpass has no backward pass: call the module under torch.no_grad()")
        with torch.inference_mode(False), torch.no_grad():
            return self._call(active, inputs)

    def _call(self, active: Session, inputs: tuple[Any, ...]) -> Any:
        tokens, owner = self.tokens(inputs), GraphFingerprint.of(inputs, self.paths)
        if active.cache is None:
            module, inputs = self._for_prompt(None, inputs)
            prompt = module, [inputs[place].clone() for place in module.texts]
            cache, longest = CompressedCache(self.policy, self.budget, owner), module.longest
            check_length(longest, 0, tokens)
            cache.expected = active.expected
            start = module._start(active.attention_mask, tokens)
            result = prefill(cache, start, tokens, lambda call: module.decoder(call, *inputs), block=self.block)
            cache.begun_by = prompt
        else:
            self._check_owner(active.cache, owner)
            cache = continued(active.cache, self.rows, self.device)
            begun_by, prompt = cache.begun_by
            module, inputs = self._for_prompt(begun_by, inputs)
            if tokens >= cache.columns:
                _check_new([inputs[place] for place in module.texts], prompt, cache)
            longest = min((known for known in (cache.longest, self.longest) if known is not None), default=None)
            check_length(longest, cache.state.columns, tokens)
            result, _ = append(cache, tokens, lambda call: module.decoder(call, *inputs))
        cache.longest = longest
        active.cache = cache
        active.calls += 1
        return result

    def _for_prompt(self, begun_by: RawModule | None, inputs: tuple[Any, ...]) -> tuple[RawModule, tuple[Any, ...]]:
        """The capture of several tokens that serves a call, and its inputs, in place of those of this capture.

        Dynamo captures a module again where arguments are parts of longer tensors, which changes nothing, and where an
        attribute has changed, as a first position. So both run once on the inputs, beside each other.

        Args:
            begun_by: the capture of the prompt; None when it is prefilled now.
        """
        if begun_by is self or (begun_by is None and self.captured_tokens != 1):
            return self, inputs
        given = {source.name: value for source, value in zip(self.sources, inputs, strict=True)}
        for other in [*reversed(self.captures)] if begun_by is None else [begun_by]:
            found = tuple(value_of(source, given) for source in other.sources)
            alike = (other.rows, *other.options) == (self.rows, *self.options)
            alike = alike and all(value is not None for value in found)
            if alike and other not in self.same:
                for lookup in other.decoder.lookups:
                    lookup.check(found)
                if is_same_decoder(self.graph, inputs, other.graph, found):
                    self.same.add(other)
            if other in self.same:
                return other, found
        if begun_by is None:
            raise CacheMismatchError("the module was captured for one token alone: prefill a prompt of several first")
        raise CacheMismatchError(
            "the module was captured again, and gives something else than what was captured for the prompt: an "
            "attribute may have changed, as a first position, or an argument that is a number. Pass the positions in"
        )

    def _check_owner(self, cache: CompressedCache, owner: GraphFingerprint) -> None:
        try:
            cache.check_fingerprint(self.policy, self.budget, owner)
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
