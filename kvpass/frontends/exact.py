"""Exact answers: tokens are drafted on a compressed cache and verified against the full one.

The loop is that of ``generate`` of transformers on the full cache, which chooses every token from the full cache's
logits. This module computes these logits for several tokens at a time: it drafts them on the compressed cache, gives
the draft to the full cache in one call, and keeps the logits for as long as the tokens chosen are those of the draft
(the rule of VeriCache, arXiv:2605.17613). Accepted tokens get the keys and values of the full cache in both.

Legend: B rows, T tokens of a text, M of a draft.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import StoppingCriteriaList

from kvpass.cache.cache import CompressedCache
from kvpass.cache.prompt_record import Acceptance
from kvpass.errors import CacheMismatchError
from kvpass.frontends.arguments import check_drafts, check_one_process, drafts_asked, said
from kvpass.frontends.forward import check_cache, take_cache
from kvpass.policies.options import check_int
from kvpass.policies.rules import Rules
from kvpass.transformers_compat import CACHE

DraftTokens = int | Literal["auto"]
"""Tokens drafted at a time; "auto": twice as many after a draft that was accepted whole, else as many as were."""

_FIRST, _LEAST, _MOST = 8, 2, 32


_NOT_EXACT = {
    "num_beams": "beams change their order after every token, so no draft would be verified; use one beam",
    "guidance_scale": "it reads each token into a second cache, and would read drafts too",
}
"""Arguments of ``generate`` that ``exact=True`` does not support, with a reason for each."""


@contextmanager
def full_cache_on_device() -> Iterator[None]:
    """Say what to do where there is no memory for the full cache beside the compressed one."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        error.add_note(
            "The full cache, which exact answers need, is on the device while the text is read. Where there is no room "
            "for it, compress the text on another device with keep_full=True, save both caches, and load the full one "
            "with mapped=True: see docs/exact.md."
        )
        raise


def generate_exactly(model: Any, rules: Rules, kwargs: dict[str, Any], tokens: DraftTokens) -> Any:
    """Generate on the full cache, with drafts from the compressed one.

    Args:
        model: what ``kvpass.compile`` returned. rules: of the compressed cache. kwargs: arguments of ``generate`` by
            name. tokens: drafted at a time.
    """
    runtime = model._kvpass
    check_one_process(runtime.captures.compiler.ranks, "exact=True")
    rows = _check_exact(kwargs, tokens, kwargs["generation_config"], model.generation_config)
    check_drafts("exact", rules, recurrent=runtime.adapted.recurrent is not None)
    compressed: CompressedCache | None = take_cache(kwargs)
    check_cache(compressed)
    if compressed is None or compressed.is_empty:
        compressed, full = runtime.new_cache(rules), runtime.new_cache(rules.keeping_all)
        full.fills = (compressed,)
    else:
        runtime.check_cache(compressed, rules)
        rows //= compressed.batch_size
        if rows <= 1 and compressed.reusable:
            compressed = compressed.clone()
        full = _full_of(compressed)
        if rows > 1:
            compressed, full = compressed.repeated(rows), full.repeated(rows)
    drafts = full.drafts = CompressedDrafts(model, rules, full, compressed, tokens)
    try:
        with runtime.call(rules.keeping_all), full_cache_on_device():
            output = model._generate(rules.keeping_all, {**kwargs, "cache": full})
    finally:
        full.drafts, full.fills = None, ()
    drafts.synchronise()
    compressed.full = full
    if compressed.record is not None:
        compressed.record = runtime.last_prompt = replace(compressed.record, accepted=drafts.acceptance)
    if hasattr(output, CACHE):
        output[CACHE] = compressed
    return output


def _check_exact(kwargs: Mapping[str, Any], tokens: object, *configs: Any) -> int:
    """Check a call of ``generate`` with ``exact=True``; return the rows of the answer."""
    if tokens != "auto":
        check_int("draft_tokens", tokens, 1)
    asked = drafts_asked(kwargs, *configs)
    if asked is not None:
        raise ValueError(f"exact=True and {asked!r} are two kinds of drafts: give one of them")
    if kwargs.get("inputs_embeds") is not None:
        raise ValueError("exact=True with inputs_embeds is not supported: pass input_ids")
    for name, reason in _NOT_EXACT.items():
        value = said(name, kwargs, *configs)
        if value not in (None, 1):
            raise ValueError(f"exact=True with {name}={value!r} is not supported: {reason}")
    ids = kwargs.get("input_ids", kwargs.get("inputs"))
    rows = len(ids) if isinstance(ids, Tensor) and ids.ndim else 1
    return rows * (said("num_return_sequences", kwargs, *configs) or 1)


def _full_of(cache: CompressedCache) -> CompressedCache:
    """Return the full cache of the text that a compressed one holds."""
    if cache.full is None:
        raise CacheMismatchError(
            f"exact=True needs the full cache of the text beside {cache!r}: compress it with keep_full=True, or give "
            "the whole text and no cache"
        )
    if cache.full.columns != cache.columns or cache.full.batch_size != cache.batch_size:
        raise CacheMismatchError(
            f"cache.full holds {cache.full.columns} tokens, and the cache {cache.columns}: a call without exact=True "
            "continued only one of them; prefill the text again"
        )
    ids, full_ids = cache.ids, cache.full.ids
    if ids is not None and full_ids is not None and not torch.equal(ids, full_ids):
        raise CacheMismatchError("cache.full holds another text than the cache: give it the full cache of the same one")
    return cache.full


@dataclass(eq=False)
class CompressedDrafts:
    """Drafts and verifies tokens for one call of ``generate`` on the full cache.

    A token is accepted when it is that of every row. A row that would have accepted more drafts what it knows already.

    Args:
        model, rules, tokens: as in :func:`generate_exactly`. full, compressed: the caches, with the same text.
    Attributes:
        agreed: appended tokens of the compressed cache that have the full cache's keys and values.
    """

    model: Any
    rules: Rules
    full: CompressedCache
    compressed: CompressedCache
    tokens: DraftTokens
    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._next = _FIRST if self.tokens == "auto" else self.tokens
        self.agreed = self.full.appended
        self._text: Tensor | None = None  # all ids, from when a token was chosen until the next logits are asked for
        self._draft = self._known = torch.empty(0, 0, dtype=torch.int64, device="cpu")
        self._logits = torch.empty(0, device="cpu")
        self._used, self._agrees = 1, False  # logits given of those verified; whether the last token is of the draft

    def begin(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Take the arguments of the loop; return them with stopping criteria that also say what was chosen."""
        config = arguments["generation_config"]
        self._processor, self._samples = arguments["logits_processor"], bool(config.do_sample)
        self._length, self._ends, self._pad = config.max_length, config._eos_token_tensor, config._pad_token_tensor
        return {**arguments, "stopping_criteria": _Observed(arguments["stopping_criteria"], self)}

    def observe(self, text: Tensor, ended: Tensor) -> None:
        """Note the ids ``[B, T]`` with the tokens just chosen, and which rows have ended, bool ``[B]``."""
        place, self._text, self._ended = self._used - 1, text, ended
        self._agrees = place < self._draft.shape[1] and torch.equal(self._draft[:, place], text[:, -1])
        if self._agrees:
            self.accepted[-1] += 1

    @property
    def is_next(self) -> bool:
        """Whether the next call on the full cache is for the token behind those chosen."""
        return self._text is not None

    def next_logits(self) -> Tensor:
        """Return the full cache's logits behind the text, ``[B, 1, vocabulary]``."""
        text, self._text = self._text, None
        assert text is not None
        if not self._agrees:
            self.synchronise()
            self._adapt()
            self._draft = self._drafted(text)
            tokens = torch.cat([text[:, -1:], self._draft], 1)
            self._logits = self.model(tokens, past_key_values=self.full).logits
            self._used = 0
            if len(text) > 1:
                self._known = self._checked(text)
            if self._draft.shape[1]:
                self.drafted.append(self._draft.shape[1])
                self.accepted.append(0)
        self._used += 1
        return self._logits[:, self._used - 1, None]

    def _adapt(self) -> None:
        if self.tokens == "auto" and self.drafted:
            drafted, accepted = self.drafted[-1], self.accepted[-1]
            self._next = min(2 * self._next, _MOST) if accepted == drafted else max(accepted, _LEAST)

    def _drafted(self, text: Tensor) -> Tensor:
        """Return a draft ``[B, M]`` behind the text; where tokens are known, those."""
        known, ids, ended = self._known[:, self._used :], text, self._ended
        with self._same_random_numbers():
            for place in range(min(self._next, self._length - text.shape[1] - 1)):  # the verification adds one
                with self.model._kvpass.call(self.rules):
                    logits = self.model(ids[:, -1:], past_key_values=self.compressed).logits[:, -1]
                best = self._chosen(ids, logits, ended)
                if place < known.shape[1]:
                    best = torch.where(ended | (known[:, place] < 0), best, known[:, place])
                ids = torch.cat([ids, best[:, None]], 1)
                if self._ends is not None:
                    ended = ended | torch.isin(best, self._ends)
                    if bool(ended.all()):
                        break
        return ids[:, text.shape[1] :]

    def _checked(self, text: Tensor) -> Tensor:
        """Return the full cache's tokens ``[B, M + 1]`` behind the text, -1 after the first that is not the draft's."""
        ids, held = torch.cat([text, self._draft], 1), text.shape[1]
        with self._same_random_numbers():
            found = [
                self._chosen(ids[:, : held + place], self._logits[:, place], self._ended)
                for place in range(self._logits.shape[1])
            ]
        known = torch.stack(found, 1)
        differs = (known[:, :-1] != self._draft).cumsum(1) > 0
        known[:, 1:][differs] = -1
        return known

    def _chosen(self, ids: Tensor, logits: Tensor, ended: Tensor) -> Tensor:
        """Choose a token for each row from the logits ``[B, vocabulary]`` behind the ids, as transformers does."""
        scores = self._processor(ids, logits.float())
        best = scores.softmax(-1).multinomial(1)[:, 0] if self._samples else scores.argmax(-1)
        return best if self._ends is None else torch.where(ended, self._pad, best)

    def _same_random_numbers(self) -> Any:
        """Within it, random numbers are those that transformers draws next; so a sampled draft often agrees."""
        device = self.full.device
        return torch.random.fork_rng([device] if device.type == "cuda" else [])

    def synchronise(self) -> None:
        """Let both caches hold the tokens that were given to the full one, with its keys and values."""
        self.full.crop(self._used - self._draft.shape[1] - 1)
        self.compressed.follow(self.full, self.agreed)
        self.agreed = self.full.appended

    @property
    def acceptance(self) -> Acceptance:
        """What was accepted so far."""
        return Acceptance(tuple(self.drafted), tuple(self.accepted))


class _Observed(StoppingCriteriaList):
    """Stopping criteria that tell the drafts what was chosen."""

    def __init__(self, criteria: StoppingCriteriaList, drafts: CompressedDrafts) -> None:
        super().__init__(criteria)
        self._drafts, self._ended = drafts, torch.tensor(False, device="cpu")

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        found = super().__call__(input_ids, scores, **kwargs)
        self._ended = found | self._ended
        self._drafts.observe(input_ids, self._ended)
        return found
