"""lm-evaluation-harness backend: ``lm_eval --model kvpass`` scores and generates with a compressed cache.

What differs from the harness's own Hugging Face model:

* The last ``hold`` tokens of a prompt (or, with ``scope="context"``, the question after the separator) are fed after
  the tokens before them have been prefilled and compressed. So the first generated token, and the first token of a
  continuation whose likelihood is asked, are computed against the compressed cache. A model that merely compresses
  after its prefill would score continuations with the uncompressed cache.
* What several requests share of what is compressed is prefilled and compressed once, whatever the batch size.
* Weights, tokenizer, policy, budget, scope and code are part of the keys of ``--use_cache``.

A batch size is compiled on first use; the last batch of a run may be a smaller one.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
import json
import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, get_args

import torch
import transformers
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import postprocess_generated_text
from lm_eval.models.utils_hf import stop_sequences_criteria
from torch import Tensor
from tqdm import tqdm

import kvpass
from kvpass.compiler.backend import Compiler, check_compiler
from kvpass.eval.answer import pick_rows
from kvpass.eval.harness.arguments import check_hold, generation_settings, refuse_unsupported, take_policy_options
from kvpass.eval.harness.key import fingerprint, library_versions, prefix_keys
from kvpass.eval.harness.measured import Measured
from kvpass.eval.harness.prompt import SEPARATOR, split_at_separator, without_separator
from kvpass.eval.prompt import Prompt, Scope, Truncation, by_head, chunks, pad, rounds, tokenize
from kvpass.policies import Policy, resolve, resolve_budget
from kvpass.policies.options import check_choice

_log = logging.getLogger("kvpass")

Answer = tuple[float, bool]
Asked = dict[Prompt, dict[tuple[int, ...], list[int]]]
"""Of every context, the continuations without their last token, and the indices of the requests that share them."""

_ELSEWHERE = {"tokenizer", "device", "max_batch_size"}
"""Arguments that the key of stored answers has in another form, or that decide no answer."""


class KVPassLM(HFLM):
    """The model ``"kvpass"`` of lm-evaluation-harness.

    Args:
        pretrained: name or path of a causal language model, or a model already loaded.
        policy: name of a policy (or a policy value); ``"full"`` or ``"none"`` keeps everything: the baseline.
        budget: as in :func:`kvpass.compile`.
        scope: ``"prompt"`` compresses the whole prompt but the last ``hold`` tokens, the question among them
            (question-aware); ``"context"`` what stands before the separator
            :data:`~kvpass.eval.harness.prompt.SEPARATOR` in the request (question-agnostic). With scope ``"prompt"``
            the separator is removed and means nothing.
        hold: 1 unless given, and only for scope ``"prompt"``. 0 generates the first token from the uncompressed
            prompt, as papers do; likelihoods need at least 1.
        compiler: ``"inductor"`` or ``"eager"``.
        truncation: which tokens go when a prompt is longer than ``max_length`` minus what is generated or scored: those
            on the ``"left"``, as in the harness, or in the ``"middle"``, as in LongBench.
        arguments: those of the harness's Hugging Face model, and options of the policy.
    Raises:
        ValueError: an argument is unknown, out of range, or not supported.
    """

    def __init__(
        self,
        pretrained: str | transformers.PreTrainedModel,
        *,
        policy: str | Policy | None = "full",
        budget: int | float | str | None = None,
        scope: Scope = "prompt",
        hold: int | None = None,
        compiler: Compiler = "inductor",
        truncation: Truncation = "left",
        batch_size: int | str | None = 1,
        **arguments: Any,
    ) -> None:
        if policy is None or policy == "none":
            policy = "full"
        if batch_size is None:
            batch_size = 1
        check_choice("scope", scope, get_args(Scope))
        check_choice("truncation", truncation, get_args(Truncation))
        self._scope: Scope = scope
        self._truncation: Truncation = truncation
        self._hold = check_hold(hold, scope)
        self._compiler = check_compiler("compiler", compiler)
        own, harness = (inspect.signature(cls.__init__).parameters for cls in (KVPassLM, HFLM))
        options = take_policy_options(policy, arguments, own=own.keys(), harness=harness.keys() - {"self", "kwargs"})
        refuse_unsupported(arguments, batch_size)
        if policy != "cake" or {"tau1", "tau2"} & options.keys():  # else kvpass.compile looks its temperatures up
            resolve_budget(resolve(policy, **options), budget)
        self._arguments = {name: value for name, value in arguments.items() if name not in _ELSEWHERE}
        super().__init__(pretrained, batch_size=batch_size, **arguments)
        self._original: Any = self.model
        self._model = kvpass.compile(self._original, policy=policy, budget=budget, backend=self._compiler, **options)
        self._policy: Policy = self._model.policy
        self._budget: kvpass.Budget | None = self._model.budget
        self._rows = int(batch_size)
        self._measured = Measured()

    # -- likelihood -------------------------------------------------------------------------------------------------

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[Answer]:
        """Log-likelihood of continuations, all computed against the compressed cache of their context."""
        if self._hold == 0:
            raise ValueError("hold=0: the first token of a continuation would not feel the compression; give hold >= 1")
        return super().loglikelihood(requests, disable_tqdm=disable_tqdm)

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Likelihood of whole documents, which have no context that could be compressed: only with policy ``full``.

        Raises:
            ValueError: any other policy.
        """
        if self._policy.name != "full":
            raise ValueError(
                f"loglikelihood_rolling with policy {self._policy.name!r}: a document scored from its first token on "
                "has no context to compress; use policy=full, or a task that scores continuations of a context"
            )
        return super().loglikelihood_rolling(requests, disable_tqdm=disable_tqdm)

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        if SEPARATOR in continuation:
            raise ValueError(f"{SEPARATOR!r} stands in the continuation {continuation!r}: it belongs into the context")
        return super()._encode_pair(without_separator(context), continuation)

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[tuple[str, str] | None, list[int], list[int]]],
        disable_tqdm: bool = False,
        override_bs: int | None = None,
    ) -> list[Answer]:
        """Score continuations; ``override_bs`` is left to ``batch_size``."""
        asked: Asked = defaultdict(lambda: defaultdict(list))
        for index, (texts, context, continuation) in enumerate(requests):
            if not 1 <= len(continuation) <= self.max_length:
                raise ValueError(
                    f"continuation of {len(continuation)} tokens in {texts!r}: must be 1 to {self.max_length}"
                )
            text = texts[0].rstrip() if texts else ""  # trailing spaces have become part of the continuation
            held = self._held(text) if text else len(context)  # else a window of a rolling likelihood, or only <bos>
            prompt = self._fitted(Prompt(tuple(context), held), self.max_length + 1 - len(continuation))
            asked[prompt][tuple(continuation[:-1])].append(index)
        self._check_budget(asked)
        answers: list[Answer | None] = [None] * len(requests)
        progress = self._progress(len(requests), "loglikelihood", disable_tqdm)

        def score(logits: Tensor, indices: Iterable[int]) -> None:
            """Logits fp ``[length of the continuations, vocabulary]`` of requests that differ in their last token."""
            log_probs = torch.log_softmax(logits, -1, dtype=self.softmax_dtype)
            greedy = log_probs.argmax(-1)
            for index in indices:
                texts, _, continuation = requests[index]
                target = torch.tensor(continuation, device=logits.device)
                found = log_probs.gather(1, target[:, None])
                answers[index] = answer = (float(found.sum()), bool((greedy == target).all()))
                if texts is not None:
                    self.cache_hook.add_partial("loglikelihood", texts, answer)
                progress.update(1)

        prompts = list(asked)
        for cache, indices in self._compressed(prompts, [len(prompt.rest) for prompt in prompts]):
            self._score_compressed(cache, [prompts[index] for index in indices], asked, score)
            del cache  # before the next one is filled
        whole = [(prompt, fed) for prompt in asked if not prompt.head for fed in asked[prompt]]
        whole.sort(key=lambda item: -len(item[0]) - len(item[1]))
        for pairs in chunks(whole, self._rows):
            self._score_whole(pairs, asked, score)
        progress.close()
        assert None not in answers
        return answers  # type: ignore[return-value]

    def _score_compressed(
        self,
        cache: kvpass.CompressedCache,
        batch: Sequence[Prompt],
        asked: Asked,
        score: Callable[[Tensor, Iterable[int]], None],
    ) -> None:
        """Feed what is held but its last token, then every continuation."""
        held = torch.tensor([prompt.rest for prompt in batch], device=self.device)
        if held.shape[1] > 1:
            cache = self.model(held[:, :-1], past_key_values=cache, logits_to_keep=1).past_key_values
        cache.reusable = True
        for turn in itertools.zip_longest(*(asked[prompt].items() for prompt in batch), fillvalue=((), ())):
            rows = [(prompt.ids[-1], *fed) for prompt, (fed, _) in zip(batch, turn, strict=True)]
            ids, _ = pad(rows, "right", self.tokenizer.pad_token_id)
            logits = self.model(ids.to(self.device), past_key_values=cache).logits
            for row, (fed, indices) in zip(logits, turn, strict=True):
                score(row[: len(fed) + 1], indices)

    def _score_whole(
        self,
        pairs: Sequence[tuple[Prompt, tuple[int, ...]]],
        asked: Asked,
        score: Callable[[Tensor, Iterable[int]], None],
    ) -> None:
        """Contexts too short to be compressed: one pass over context and continuation with everything kept."""
        self._measured.prompts_not_compressed += len(pairs)
        ids, mask = pad([prompt.ids + fed for prompt, fed in pairs], "left", self.tokenizer.pad_token_id)
        logits = self._full_model(ids.to(self.device), mask, use_cache=False).logits
        for row, (prompt, fed) in zip(logits, pairs, strict=True):
            score(row[-len(fed) - 1 :], asked[prompt][fed])

    # -- generation -------------------------------------------------------------------------------------------------

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Generate after prompts, until a stop sequence or ``max_gen_toks``."""
        prompts: list[Prompt] = []
        kinds: list[tuple[str, bool, int]] = []
        settings: dict[str, dict[str, Any]] = {}
        end = None if self.eot_token_id is None else self.tok_decode(self.eot_token_id, skip_special_tokens=False)
        for text, given in (request.args for request in requests):
            kwargs = generation_settings(given, end, self.max_gen_toks, self.max_length)
            ids = self.tok_encode(without_separator(text)) or [self.prefix_token_id]
            prompt = self._fitted(Prompt(tuple(ids), self._held(text)), self.max_length - kwargs["max_gen_toks"])
            name = json.dumps(kwargs, sort_keys=True, default=repr)
            settings[name] = kwargs
            prompts.append(prompt)
            kinds.append((name, bool(prompt.head), len(prompt.rest) if prompt.head else 0))
        self._check_budget(prompts)
        texts: list[str] = [""] * len(requests)
        progress = self._progress(len(requests), "generate_until", disable_tqdm)

        def answer(indices: Sequence[int], cache: kvpass.CompressedCache | None) -> None:
            found = self._generate([prompts[index] for index in indices], settings[kinds[indices[0]][0]], cache)
            for index, text in zip(indices, found, strict=True):
                texts[index] = text
                self.cache_hook.add_partial("generate_until", requests[index].args, text)
                progress.update(1)

        for cache, indices in self._compressed(prompts, kinds):
            answer(indices, cache)
            del cache  # before the next one is filled
        alone = [index for index, prompt in enumerate(prompts) if not (prompt.head and prompt.rest)]
        alone.sort(key=lambda index: -len(prompts[index]))
        for _, indices in rounds([alone], kinds, self._rows):
            answer(indices, None)
        progress.close()
        return texts

    def _generate(
        self, batch: Sequence[Prompt], settings: dict[str, Any], cache: kvpass.CompressedCache | None
    ) -> list[str]:
        """What follows prompts whose heads the cache has read; without a cache they are read whole."""
        kwargs = dict(settings)
        until, new_tokens = kwargs.pop("until"), kwargs.pop("max_gen_toks")
        if not kwargs["do_sample"]:
            kwargs.pop("temperature", None)
        beams = int(kwargs.get("num_beams") or 1)
        if cache is not None and beams > 1:  # the search has that many rows from the first step on
            cache = pick_rows(cache, [row for row in range(len(batch)) for _ in range(beams)], last=not cache.reusable)
        columns = 0 if cache is None else cache.columns + len(batch[0].rest)
        ids, mask = pad([prompt.ids for prompt in batch], "left", self.tokenizer.pad_token_id, columns)
        output = (self.model if batch[0].head else self._full_model).generate(
            input_ids=ids.to(self.device),
            attention_mask=mask.to(self.device),
            past_key_values=cache,
            max_new_tokens=new_tokens,
            stopping_criteria=stop_sequences_criteria(self.tokenizer, until, ids.shape[1], ids.shape[0]),
            pad_token_id=self.tokenizer.pad_token_id,
            use_cache=True,
            return_dict_in_generate=True,
            **kwargs,
        )
        if not batch[0].head:
            self._measured.prompts_not_compressed += len(batch)
        else:
            if cache is None:
                self._measured.add(self.model.report())
            self._measured.cache_bytes_peak = max(self._measured.cache_bytes_peak, output.past_key_values.nbytes)
        return [self._text(tokens[ids.shape[1] :], until) for tokens in output.sequences.tolist()]

    def _text(self, tokens: list[int], until: list[str]) -> str:
        """The answer: what follows the end of thinking, up to a stop sequence."""
        end = self.think_end_token
        if isinstance(end, int) and end in tokens:
            tokens = tokens[len(tokens) - tokens[::-1].index(end) :]
        text = self.tok_decode(tokens)
        if isinstance(end, int):
            text = text.lstrip()
        return postprocess_generated_text(text, until, end if isinstance(end, str) else None)

    def _progress(self, total: int, kind: str, disabled: bool) -> Any:
        return tqdm(total=total, disable=disabled or self.rank != 0, desc=f"Running {kind} requests")

    # -- prompts ----------------------------------------------------------------------------------------------------

    def _held(self, text: str) -> int:
        """Tokens at the end of a prompt that are fed after compression; the separator takes no part in its ids."""
        if self._scope == "prompt":
            return self._hold
        return tokenize(self.tokenizer, *split_at_separator(text), special=False).held

    def _fitted(self, prompt: Prompt, room: int) -> Prompt:
        """The prompt, cut to ``room`` tokens.

        Raises:
            ValueError: what is fed after compression leaves no room for a token before it.
        """
        if len(prompt) <= room:
            return prompt
        cut = prompt.cut(room, self._truncation).scoped(self._scope, prompt.held)
        if not cut.head and self._policy.name != "full":
            raise ValueError(
                f"{prompt.held} tokens are fed after compression, but only {room} tokens of the prompt fit into "
                "max_length beside what is generated or scored"
            )
        self._measured.requests_truncated += 1
        if self._measured.requests_truncated == 1:
            facts = (len(prompt), room, self._truncation, self.max_length)
            _log.warning("a prompt of %d tokens was cut to %d (truncation=%s); max_length is %d", *facts)
        return cut

    def _check_budget(self, prompts: Iterable[Prompt]) -> None:
        """Refuse, before anything is computed, a fraction that leaves too little of the shortest prompt."""
        if self._budget is not None and self._budget.kind == "fraction":
            for length in sorted({len(prompt.head) for prompt in prompts if prompt.head}):
                self._budget.check(length, self._policy.window, token_bytes=1)

    def _compressed(
        self, prompts: Sequence[Prompt], kinds: Sequence[Any]
    ) -> Iterator[tuple[kvpass.CompressedCache, list[int]]]:
        """Compress each head once, longest first, then continue with prompts of one kind, a batch at a time.

        A prompt without a head, or with nothing behind it, is passed over.

        Yields:
            indices of prompts, and a cache whose rows have read their heads.
        """
        sharing = {head: [i for i in indices if prompts[i].rest] for head, indices in by_head(prompts).items() if head}
        for heads in chunks(sorted(filter(sharing.get, sharing), key=len, reverse=True), self._rows):
            ids, mask = pad(heads, "left", self.tokenizer.pad_token_id)
            cache = self.model.compress(ids.to(self.device), mask)
            self._measured.add(self.model.report())
            turns = list(rounds([sharing[head] for head in heads], kinds, self._rows))
            for turn, (rows, indices) in enumerate(turns, 1):
                yield pick_rows(cache, rows, last=turn == len(turns)), indices
            del cache

    @functools.cached_property
    def _full_model(self) -> Any:
        """A model that keeps everything, for prompts in which there is nothing to compress."""
        if self._policy.name == "full":
            return self.model
        return kvpass.compile(self._original, policy="full", backend=self._compiler)

    # -- what the harness records -----------------------------------------------------------------------------------

    def _settings(self) -> dict[str, Any]:
        """Settings of compression that an answer depends on."""
        return {
            "policy": self._policy.name,
            "policy_options": dataclasses.asdict(self._policy),
            "budget": None if self._budget is None else str(self._budget),
            "scope": self._scope,
            "hold": self._hold if self._scope == "prompt" else "question",
            "truncation": self._truncation,
            "compiler": self._compiler,
        }

    def get_model_info(self) -> dict[str, Any]:
        """The harness's own facts and, under ``"kvpass"``, settings, versions and what was measured in this run."""
        own = {**self._settings(), **library_versions(), **self._measured.to_dict()}
        return {**super().get_model_info(), "kvpass": own}

    @functools.cached_property
    def fingerprint(self) -> str:
        """Hash of all an answer depends on beside the request: what the harness leaves out of its cache's keys."""
        settings = {**self._settings(), **self._arguments, "max_length": self.max_length}
        return fingerprint(self.model, self.tokenizer, settings)

    def set_cache_hook(self, cache_hook: Any) -> None:
        """Take the harness's request cache, after making its keys differ between models and settings.

        Raises:
            ValueError: a version of lm_eval with another kind of cache.
        """
        if cache_hook.dbdict is not None:
            prefix_keys(cache_hook.dbdict, self.fingerprint)
        super().set_cache_hook(cache_hook)
