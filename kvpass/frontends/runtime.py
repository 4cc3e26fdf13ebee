"""What a compiled model carries (rules, captures, fingerprint), and how its decoder reads a prompt or continues."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kvpass.adapt.copied import Adapted
from kvpass.adapt.positions import check_rows_stay
from kvpass.adapt.tensor_parallel import check_divided
from kvpass.cache.buffer_reuse import BufferReuse
from kvpass.cache.cache import CompressedCache
from kvpass.cache.fingerprint import ModelFingerprint
from kvpass.cache.prompt_record import PromptRecord
from kvpass.compiler.capture import CaptureCache
from kvpass.compiler.step import Call, append, continued, prefill
from kvpass.config import Block
from kvpass.errors import CacheMismatchError
from kvpass.frontends.padding import Padding, first_real_column, read_padding
from kvpass.policies import Policy
from kvpass.policies.rules import THRESHOLDS, Rules


@dataclass(kw_only=True)
class Runtime:
    """Rules and captures of a compiled model.

    ``identity``: fingerprint for its caches. ``adapted``: what was changed in the copy. ``block``: tokens of a block of
    a prompt.
    """

    rules: Rules
    captures: CaptureCache
    identity: ModelFingerprint
    adapted: Adapted
    block: Block = "auto"
    last_prompt: PromptRecord | None = None

    @property
    def rules_now(self) -> Rules:
        """Those of the call that this thread is in, which other threads do not change; else the model's."""
        return next((rules for runtime, rules in _CALLS.get() if runtime is self), self.rules)

    @contextmanager
    def call(self, rules: Rules) -> Iterator[None]:
        """Within it, calls of this thread go by ``rules``."""
        token = _CALLS.set(((self, rules), *_CALLS.get()))
        try:
            yield
        finally:
            _CALLS.reset(token)

    def check_policy(self, policy: Policy) -> None:
        """Raise ValueError for a policy that does not fit the model, or the processes that share it."""
        check_divided(policy, self.adapted.heads)
        self.identity.check_policy(policy)

    def check_cache(self, cache: CompressedCache, rules: Rules) -> None:
        """Raise CacheMismatchError for a cache of another model, or filled under other rules."""
        cache.check_fingerprint(rules.policy, rules.budget, self.identity, rules.entry_format)

    def new_cache(self, rules: Rules | None = None) -> CompressedCache:
        """Return an empty cache, by default under the rules of the call or the model."""
        rules = self.rules_now if rules is None else rules
        cache = CompressedCache(rules.policy, rules.budget, self.identity, self.adapted.heads, rules.entry_format)
        cache.own_budget = rules.own_budget
        return cache

    def describe(self) -> dict[str, str]:
        """Return the settings by name: processes that share the model must have the same."""
        rules, compiler = self.rules_now, self.captures.compiler
        return {
            "policy": rules.policy.spec,
            "budget": str(rules.budget),
            "recompress": rules.recompress,
            "entries": rules.entry_format,
            "backend": compiler.compiler,
            "compile_regions": str(compiler.regions),
            "cuda_graphs": str(compiler.cuda_graphs),
            "prefill_block": str(self.block),
        }

    def __deepcopy__(self, memo: dict[int, Any]) -> Runtime:
        """Return the runtime of a copied model, without captures: those read the original's weights."""
        compiler = replace(self.captures.compiler, records=[], reuse=BufferReuse())
        captures = CaptureCache(compiler, self.captures.further)
        return replace(self, captures=captures, identity=copy.deepcopy(self.identity, memo), last_prompt=None)


_CALLS: ContextVar[tuple[tuple[Runtime, Rules], ...]] = ContextVar("calls of generate and compress", default=())


def decoder_of(model: Any, ids: Tensor, positions: Tensor, logits_to_keep: int) -> Callable[[Call], Tensor]:
    """Return a function that captures the decoder of a compiled model if needed, and runs it for a call."""
    runtime: Runtime = model._kvpass
    own: Any = type(model).__bases__[1]  # the class of the user's model
    forward = types.MethodType(own.forward, model)
    return lambda call: runtime.captures.run(call, forward, ids, positions, logits_to_keep, runtime.identity.hooks)


def read_prompt(
    model: Any,
    cache: CompressedCache,
    text: Tensor,
    attention_mask: Tensor | None,
    position_ids: Tensor | None,
    logits_to_keep: int,
) -> Tensor:
    """Fill a cache with ids ``[B, N]``, or embeddings ``[B, N, D]``, whose ids it then does not know."""
    text = text.clone(memory_format=torch.contiguous_format)
    start = first_real_column(attention_mask, *text.shape[:2])
    columns = torch.arange(text.shape[1], device=text.device)
    positions = _positions(position_ids, (columns - start.to(text.device)[:, None]).clamp(min=0))
    if position_ids is not None:
        _check_ascending(positions, start)
    run, ids = decoder_of(model, text, positions, logits_to_keep), text if text.ndim == 2 else None
    return prefill(cache, start, text.shape[1], run, cache.block or model._kvpass.block, ids)


def continue_cache(
    model: Any,
    cache: CompressedCache,
    input_ids: Tensor,
    attention_mask: Tensor | None,
    position_ids: Tensor | None,
    logits_to_keep: int,
) -> tuple[CompressedCache, Tensor]:
    """Append ids ``[B, T]`` to a filled cache or a copy; return that and the logits."""
    runtime: Runtime = model._kvpass
    b, t = input_ids.shape
    cache = continued(cache, b, input_ids.device)
    if runtime.adapted.longrope_limit is not None:
        check_rows_stay(runtime.adapted.longrope_limit, cache, t)
    padding = None
    if attention_mask is not None:
        if attention_mask.ndim != 2 or tuple(attention_mask.shape) != (b, cache.columns + t):
            raise CacheMismatchError(
                f"attention_mask of shape {list(attention_mask.shape)}: must be [{b}, {cache.columns + t}], "
                "tokens in the cache and new ones"
            )
        if t > 1 or attention_mask.device.type == "cpu":
            padding = read_padding(attention_mask, cache)
    ids = input_ids.clone(memory_format=torch.contiguous_format)
    if padding is not None:
        logits, record = _append_padded(model, cache, ids, position_ids, logits_to_keep, padding)
    else:
        columns = torch.arange(cache.columns, cache.columns + t, device=ids.device)
        positions = _positions(position_ids, columns - cache.start[:, None])
        decoder = decoder_of(model, ids, positions, logits_to_keep)
        logits, record = append(cache, t, decoder, THRESHOLDS[runtime.rules.recompress], ids)
    if record is not None:
        runtime.last_prompt = record
    return cache, logits


def _append_padded(
    model: Any, cache: CompressedCache, ids: Tensor, given: Tensor | None, logits_to_keep: int, padding: Padding
) -> tuple[Tensor, PromptRecord | None]:
    """Append the real tokens of each row, in one call for all rows with as many, and pad the shorter rows anew.

    Returns:
        logits of the given columns; those of padding are the ones of the last real token before, or else of the first.
        And the new record, if all rows were compressed in one call.
    """
    real = padding.real
    within = (real.cumsum(1) - 1).clamp(min=0)  # number of the real token whose logits a column gets
    positions = _positions(given, within + (cache.columns - padding.taken - cache.start)[:, None])
    wanted = within[:, -logits_to_keep:]
    logits, record = ids.new_empty(0), None
    parts: list[CompressedCache] = []
    members: list[Tensor] = []
    for taken, tokens, rows in padding.groups():
        part = cache.clone()
        part.batch_select_indices(rows)
        if taken:
            part.crop(-taken)
        own_ids, own_positions = (x[rows][real[rows]].view(-1, tokens) for x in (ids, positions))
        first = int(wanted[rows].min())
        decoder = decoder_of(model, own_ids, own_positions, tokens - first if logits_to_keep else 0)
        found, record = append(part, tokens, decoder, THRESHOLDS[model._kvpass.rules.recompress])
        if not parts:
            logits = found.new_empty(*wanted.shape, found.shape[2])
        logits[rows] = found.gather(1, (wanted[rows] - first)[..., None].expand(-1, -1, found.shape[2]))
        parts.append(part)
        members.append(rows)
    cache.take_over(parts, torch.cat(members).argsort(), padding.mask, ids)
    if cache.drafts is not None:
        with model._kvpass.call(cache.drafts.rules):
            _append_padded(model, cache.drafts.compressed, ids, given, 1, padding)
        cache.drafts.agreed = 0
    return logits, record if len(parts) == 1 else None


def _positions(given: Tensor | None, computed: Tensor) -> Tensor:
    if given is None:
        return computed.contiguous()
    if given.ndim != 2 or given.shape[1] != computed.shape[1] or given.shape[0] not in (1, computed.shape[0]):
        axes = "; those of models that read images (M-RoPE) have several axes and are not supported" * (given.ndim == 3)
        raise ValueError(f"position_ids of shape {list(given.shape)}: must be {list(computed.shape)}{axes}")
    return given.expand(computed.shape[0], -1).clone(memory_format=torch.contiguous_format)


def _check_ascending(positions: Tensor, start: Tensor) -> None:
    """Check that positions ``[B, N]`` ascend by one from each row's first real column."""
    columns = torch.arange(1, positions.shape[1], device=positions.device)
    wrong = (positions.diff(dim=1) != 1) & (columns > start.to(positions.device)[:, None])
    if bool(wrong.any()):
        row, column = (int(place) for place in wrong.nonzero()[0])
        raise ValueError(
            f"position_ids: row {row} goes from {int(positions[row, column])} to {int(positions[row, column + 1])}; "
            "positions of a prompt must ascend by one, packed sequences are not supported: give each its own row"
        )
