"""Exact answers: tokens are drafted on a compressed cache and verified against the full one.

The rule is that of VeriCache (arXiv:2605.17613): a token of the compressed cache counts if the full cache gives it too,
else the full cache's own comes next. Accepted tokens get the keys and values of the full cache in both.
transformers verifies (``generate`` with drafts); this module drafts.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor
from transformers.generation.candidate_generator import CandidateGenerator

from kvpass.cache.cache import CompressedCache
from kvpass.cache.prompt_record import Acceptance
from kvpass.policies.rules import Rules

DraftTokens = int | Literal["auto"]
"""Tokens drafted at a time; "auto": twice as many after a draft that was accepted whole, else as many as were."""

_FIRST, _LEAST, _MOST = 8, 2, 32


@dataclass(eq=False)
class CompressedDrafts(CandidateGenerator):
    """Drafts tokens for one call of ``generate`` on the full cache.

    Args:
        model: what ``kvpass.compile`` returned. rules: of the compressed cache. full, compressed: the caches, with the
            same text. tokens: drafted at a time.
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
        self._agreed = self.full.appended
        self._draft: list[int] = []

    def begin(self, ids: Tensor, processor: Any, config: Any) -> CompressedDrafts:
        """Take the ids ``[1, T]`` of the call, its processor of logits and its configuration."""
        known = self.full.ids is not None or self.full.is_empty
        self._unknown = 0 if known else self.full.columns  # tokens of the cache that are not among the ids
        self._processor, self._samples, self._length = processor, bool(config.do_sample), config.max_length
        ends = config._eos_token_tensor
        self._ends = set() if ends is None else set(ends.tolist())
        return self

    def get_candidates(  # type: ignore[override]  # without logits where nothing was sampled, as their own
        self, input_ids: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Return the ids ``[1, T]`` and a draft behind them, and the logits it was sampled from, if it was.

        Before the prompt is read there is no draft: it would be part of the prompt, and of what scores its entries.
        """
        if self.full.columns - self._unknown < input_ids.shape[1] - 1:
            return input_ids, None
        self.synchronise()
        found: list[Tensor] = []
        ids = input_ids
        room = self._length - ids.shape[1] - 1  # the verification adds one
        while len(found) < min(self._next, room):
            with self.model._kvpass.call(self.rules):
                logits = self.model(ids[:, -1:], past_key_values=self.compressed).logits[:, -1]
            scores = self._processor(ids, logits.float())
            best = scores.softmax(-1).multinomial(1) if self._samples else scores.argmax(-1, keepdim=True)
            found.append(scores)
            ids = torch.cat([ids, best], 1)
            if int(best) in self._ends:
                break
        self._draft = ids[0, input_ids.shape[1] :].tolist()
        return ids, torch.stack(found, 1) if self._samples and found else None

    def update_candidate_strategy(self, input_ids: Tensor, scores: Tensor, num_matches: int) -> None:
        """Note how many tokens of the draft are in the text: also the one that ends it, unlike ``num_matches``."""
        if not self._draft:
            return
        given = input_ids[0, -num_matches - 1 :].tolist()
        agree = [ours == theirs for ours, theirs in zip(self._draft, given, strict=False)]
        accepted = len(list(itertools.takewhile(bool, agree)))
        self.drafted.append(len(self._draft))
        self.accepted.append(accepted)
        if self.tokens == "auto":
            self._next = min(2 * self._next, _MOST) if accepted == len(self._draft) else max(accepted, _LEAST)

    def synchronise(self) -> None:
        """Let the compressed cache hold the tokens that the full one holds, with its keys and values.

        Raises:
            ValueError: the call had padding among its new tokens.
        """
        if not self.full.is_left_padded:
            raise ValueError("exact=True with padding behind the prompt is not supported: leave the padding out")
        self.compressed.follow(self.full, self._agreed)
        self._agreed = self.full.appended

    @property
    def acceptance(self) -> Acceptance:
        """What was accepted so far."""
        return Acceptance(tuple(self.drafted), tuple(self.accepted))
