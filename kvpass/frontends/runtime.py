"""What a compiled model carries: conditions, captures, fingerprint."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextvars import ContextVar, copy_context
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from kvpass.adapt.copied import Adapted
from kvpass.adapt.tensor_parallel import check_divided
from kvpass.cache.buffer_reuse import BufferReuse
from kvpass.cache.cache import CompressedCache
from kvpass.cache.fingerprint import ModelFingerprint
from kvpass.cache.prompt_record import PromptRecord
from kvpass.compiler.capture import CaptureCache
from kvpass.config import Block
from kvpass.policies import Policy
from kvpass.policies.conditions import Conditions

R = TypeVar("R")


@dataclass(kw_only=True)
class Runtime:
    """Conditions and captures of a compiled model."""

    conditions: Conditions
    captures: CaptureCache
    identity: ModelFingerprint  # for its caches
    adapted: Adapted  # what was changed in the copy
    block: Block = "auto"  # tokens of a block of a prompt
    last_prompt: PromptRecord | None = None

    @property
    def conditions_now(self) -> Conditions:
        """Those of the call that this thread is in, which other threads do not change; else the model's."""
        return next((conditions for runtime, conditions, *_ in _CALLS.get() if runtime is self), self.conditions)

    @property
    def block_now(self) -> Block:
        """That of the call that this thread is in, if it has one of its own; else the model's."""
        return next((block for runtime, _, block, _ in _CALLS.get() if runtime is self and block), self.block)

    def take_images(self) -> Any:
        """Return once the images of the call that this thread is in, and the rows of the text they were given with."""
        pending: list[Any] = next((images for runtime, *_, images in _CALLS.get() if runtime is self), [])
        return pending.pop() if pending else None

    @property
    def positions_in_keys(self) -> bool:
        """Whether keys hold the numbers of their columns (ALiBi), as far as the decoder is captured."""
        passes = (one for record in self.captures.compiler.records for one in record.passes)
        return any(one.name == "fold_alibi" and one.sites for one in passes)

    @property
    def in_call(self) -> bool:
        """Whether this thread is in a call of ``generate`` or ``compress``."""
        return any(runtime is self for runtime, *_ in _CALLS.get())

    def call(self, conditions: Conditions, action: Callable[[], R], block: Block | None = None, images: Any = ()) -> R:
        """Return what ``action`` returns; in it, calls of this thread go by ``conditions``, prompts are read in blocks.

        An interrupt leaves nothing of this behind: Python itself ends the context, no line of ours.
        """
        context = copy_context()
        context.run(_CALLS.set, ((self, conditions, block, [*images]), *_CALLS.get()))
        return context.run(action)

    def check_policy(self, policy: Policy) -> None:
        """Raise ValueError for a policy that does not fit the model, or the processes that share it."""
        check_divided(policy, self.adapted.heads)
        if (prefill := self.captures.compiler.prefill) is not None:
            prefill.check_policy(policy)
        self.identity.check_policy(policy)

    def check_cache(self, cache: CompressedCache, conditions: Conditions) -> None:
        """Raise CacheMismatchError for a cache of another model, or filled under other conditions."""
        cache.check_fingerprint(conditions.policy, conditions.budget, self.identity, conditions.entry_format)

    def new_cache(self, conditions: Conditions | None = None) -> CompressedCache:
        """Return an empty cache, by default under the conditions of the call or the model."""
        conditions = self.conditions_now if conditions is None else conditions
        cache = CompressedCache(
            conditions.policy, conditions.budget, self.identity, self.adapted.heads, conditions.entry_format
        )
        cache.own_budget = conditions.own_budget
        return cache

    def describe(self) -> dict[str, str]:
        """Return the settings by name: processes that share the model must have the same."""
        conditions, compiler = self.conditions_now, self.captures.compiler
        return {
            "policy": conditions.policy.spec,
            "budget": str(conditions.budget),
            "recompress": conditions.recompress,
            "entries": conditions.entry_format,
            "backend": compiler.compiler,
            "compile_regions": str(compiler.regions),
            "cuda_graphs": str(compiler.cuda_graphs),
            "prefill": "full" if compiler.prefill is None else compiler.prefill.text,
            "prefill_block": str(self.block),
        }

    def __deepcopy__(self, memo: dict[int, Any]) -> Runtime:
        """Return the runtime of a copied model, without captures: those read the original's weights."""
        compiler = replace(self.captures.compiler, records=[], readers=[], reuse=BufferReuse())
        identity = copy.deepcopy(self.identity, memo)
        captures = CaptureCache(compiler, identity, self.captures.further)
        return replace(self, captures=captures, identity=identity, last_prompt=None)


_Calls = tuple[tuple[Runtime, Conditions, Block | None, list[Any]], ...]
_CALLS: ContextVar[_Calls] = ContextVar("calls of generate and compress", default=())
