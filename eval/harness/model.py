"""lm-evaluation-harness backend: ``lm_eval --model kvpass`` scores and generates with a compressed cache.

``docs/evaluate.md`` says what differs from the harness's own Hugging Face model. One that merely compresses after its
prefill would score continuations with the uncompressed cache.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
import json
import logging
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import transformers
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import postprocess_generated_text
from lm_eval.models.utils_hf import stop_sequences_criteria
from torch import Tensor
from tqdm import tqdm

import kvpass
from kvpass.config import COMPILERS, Compiler, one_of
from kvpass.eval.environment import policy_digest
from kvpass.eval.harness import settings
from kvpass.eval.policy_spec import spec_of_contents
from kvpass.eval.prompt import SEPARATOR, Prompt, Scope, Truncation, pad, split_at_separator, tokenize
from kvpass.eval.prompt import without_separator as plain
from kvpass.eval.runner import Batch, Runner, filled
from kvpass.loading import launched, located
from kvpass.policies import Policy
from kvpass.policies.conditions import read_conditions
from kvpass.policies.options import check_choice, check_int

_log = logging.getLogger("kvpass")

Answer = tuple[float, bool]
Continuations = dict[Prompt, dict[tuple[int, ...], list[int]]]
"""Of every context, the continuations without their last token, and the indices of the requests that share them."""
Pairs = Sequence[tuple[tuple[str, str] | None, list[int], list[int]]]
"""Texts, and tokens of context and continuation, of each request."""

_NOT_IN_KEY = {"tokenizer", "device", "max_batch_size"}
"""Arguments that the key of stored answers has in another form, or that decide no answer."""


class KVPassLM(HFLM):
    """The model ``"kvpass"`` of lm-evaluation-harness.

    Args:
        pretrained: name or path of a causal language model (also one that was fetched), or a model already loaded.
        policy: name of a policy (or a policy value); ``"full"`` or ``"none"`` keeps everything: the baseline.
        budget: as in :func:`kvpass.compile`.
        scope: ``"prompt"`` compresses the whole prompt but its last tokens, the question among them (question-aware);
            ``"context"`` what stands before the separator :data:`~kvpass.eval.prompt.SEPARATOR` in the request
            (question-agnostic). With scope ``"prompt"`` the separator is removed and means nothing.
        num_uncompressed_tokens: 1 unless given, and only for scope ``"prompt"``. 0 generates the first token from the
            uncompressed prompt, as papers do; likelihoods need at least 1.
        compiler: ``"inductor"`` or ``"eager"``.
        truncation: which tokens go when a prompt is longer than ``max_length`` minus what is generated or scored: those
            on the ``"left"``, as in the harness, or in the ``"middle"``, as in LongBench.
        arguments: those of the harness's Hugging Face model; all others are options of the policy.
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
        num_uncompressed_tokens: int | None = None,
        compiler: Compiler = "inductor",
        truncation: Truncation = "left",
        batch_size: int | str | None = 1,
        **arguments: Any,
    ) -> None:
        if policy is None or policy == "none":
            policy = "full"
        batch_size = 1 if batch_size is None else batch_size
        check_choice("scope", scope, Scope)
        check_choice("truncation", truncation, Truncation)
        if num_uncompressed_tokens is not None:
            check_int("num_uncompressed_tokens", num_uncompressed_tokens, 0)
            if scope == "context":
                raise ValueError(
                    f"num_uncompressed_tokens={num_uncompressed_tokens}: scope='context' feeds the question after "
                    "compression; leave it out"
                )
        self._scope: Scope = scope
        self._truncation: Truncation = truncation
        self._num_uncompressed_tokens = 1 if num_uncompressed_tokens is None else num_uncompressed_tokens
        self._compiler = one_of("compiler", compiler, COMPILERS)
        harness = inspect.signature(HFLM.__init__).parameters
        options = {name: arguments.pop(name) for name in [*arguments] if name not in harness}
        settings.refuse_unsupported(arguments, batch_size)
        name = pretrained if isinstance(pretrained, str) else str(pretrained.config.name_or_path)
        conditions = read_conditions(policy, budget, "never", window=None, options=options, model_name=name)
        self._arguments = {name: value for name, value in arguments.items() if name not in _NOT_IN_KEY}
        self._load(pretrained, batch_size=batch_size, **arguments)
        self._policy, self._budget = conditions.policy, conditions.budget
        self._conditions = [(self._policy, self._budget)]
        self._model = kvpass.compile(self.model, policy=self._policy, budget=self._budget, backend=self._compiler)
        self._runner = Runner(model=self._model, tokenizer=self.tokenizer, batch=int(self.batch_size))
        self._totals, self._truncated = self._runner.totals, 0

    def _load(self, pretrained: str | transformers.PreTrainedModel, **arguments: Any) -> None:
        """Load the model, or take it, as the harness's own; processes of ``torchrun`` share it."""
        if launched()[1] > 1 and not torch.accelerator.is_available():
            os.environ["ACCELERATE_USE_CPU"] = "true"  # else accelerate takes every process for the only one
        if isinstance(pretrained, str):
            with located(pretrained) as place:
                super().__init__(place, **arguments)
            self.pretrained = pretrained
            if arguments.get("peft"):
                adapted: Any = self._model
                if adapted.active_peft_config.is_prompt_learning:
                    raise ValueError(f"peft={arguments['peft']!r}: a trained prompt cannot be merged into the weights")
                self._model = adapted.merge_and_unload()
        else:
            super().__init__(pretrained, **arguments)
        accelerator = getattr(self, "accelerator", None)
        if accelerator is not None and self.world_size == 1:  # the harness looks for several GPUs, not processes
            self._rank, self._world_size = accelerator.process_index, accelerator.num_processes

    # -- likelihood -------------------------------------------------------------------------------------------------

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[Answer]:
        """Log-likelihood of continuations, all computed against the compressed cache of their context."""
        if self._num_uncompressed_tokens == 0:
            raise ValueError(
                "num_uncompressed_tokens=0: the first token of a continuation would be scored by the uncompressed "
                "prompt; give at least 1"
            )
        return super().loglikelihood(requests, disable_tqdm=disable_tqdm)

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Likelihood of whole documents; only with policy ``full``, since they have no context."""
        if self._policy.name != "full":
            raise ValueError(
                f"loglikelihood_rolling with policy {self._policy.name!r}: a document scored from its first token on "
                "has no context to compress; use policy=full, or a task that scores continuations of a context"
            )
        return super().loglikelihood_rolling(requests, disable_tqdm=disable_tqdm)

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        if SEPARATOR in continuation:
            raise ValueError(f"{SEPARATOR!r} stands in the continuation {continuation!r}: it belongs into the context")
        return super()._encode_pair(plain(context), continuation)

    def _loglikelihood_tokens(
        self, requests: Pairs, disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[Answer]:
        """Score continuations; ``override_bs`` is left to ``batch_size``."""
        continuations: Continuations = defaultdict(lambda: defaultdict(list))
        for index, (texts, context, continuation) in enumerate(requests):
            if not 1 <= len(continuation) <= self.max_length:
                raise ValueError(
                    f"continuation of {len(continuation)} tokens in {texts!r}: must be 1 to {self.max_length}"
                )
            text = texts[0].rstrip() if texts else ""  # trailing spaces have become part of the continuation
            border = self._uncompressed(text) if text else len(context)  # else a rolling window, or only <bos>
            prompt = self._fitted(Prompt(tuple(context), border), self.max_length + 1 - len(continuation))
            continuations[prompt][tuple(continuation[:-1])].append(index)
        self._check_budget(continuations)
        answers = self._scored_whole(requests, continuations, disable_tqdm)
        progress = self._progress(len(requests) - len(answers), "loglikelihood", disable_tqdm)
        prompts = list(continuations)
        for batch in self._runner.compressed(prompts, [0] * len(prompts), self._conditions):
            some = [prompts[index] for index in batch.indices]
            for logits, indices in self._logits(batch, some, continuations):
                log_probs = torch.log_softmax(logits, -1, dtype=self.softmax_dtype)
                greedy = log_probs.argmax(-1)
                for index in indices:
                    texts, _, continuation = requests[index]
                    target = torch.tensor(continuation, device=logits.device)
                    total = float(log_probs.gather(1, target[:, None]).sum())
                    answers[index] = (total, bool((greedy == target).all()))
                    if texts is not None:
                        self.cache_hook.add_partial("loglikelihood", texts, answers[index])
                    progress.update(1)
            del batch  # its cache, before the next one is filled
        progress.close()
        return [answers[index] for index in range(len(requests))]

    def _scored_whole(self, requests: Pairs, continuations: Continuations, disable_tqdm: bool) -> dict[int, Answer]:
        """Contexts too short to be compressed: the harness's own way, with everything kept."""
        short = {prompt: rows for prompt, rows in continuations.items() if not prompt.head}
        self._totals.prompts_not_compressed += sum(map(len, short.values()))
        whole = {
            index: (requests[index][0], list(prompt.ids), requests[index][2])
            for prompt, rows in short.items()
            for index in itertools.chain.from_iterable(rows.values())
        }
        self.model.set_policy("full")
        answers = super()._loglikelihood_tokens([*whole.values()], disable_tqdm) if whole else []
        self.model.set_policy(self._policy, self._budget)
        return dict(zip(whole, answers, strict=True))

    def _logits(
        self, batch: Batch, prompts: list[Prompt], continuations: Continuations
    ) -> Iterator[tuple[Tensor, list[int]]]:
        """Feed what is not compressed but its last token, then every continuation.

        Yields:
            logits fp ``[length of the continuations, vocabulary]`` of requests that differ in their last token only.
        """
        assert batch.cache is not None
        cache, size = batch.cache.clone(), batch.cache.batch_size
        rest = torch.tensor([prompt.rest for prompt in filled(prompts, size)], device=self.device)
        if rest.shape[1] > 1:
            self.model(rest[:, :-1], past_key_values=cache, logits_to_keep=1)
        for turn in itertools.zip_longest(*(continuations[prompt].items() for prompt in prompts), fillvalue=((), [])):
            rows = [(prompt.ids[-1], *fed) for prompt, (fed, _) in zip(prompts, turn, strict=True)]
            ids, _ = pad(filled(rows, size), "right", self.tokenizer.pad_token_id)
            logits = self.model(ids.to(self.device), past_key_values=cache.clone()).logits
            for row, (fed, indices) in zip(logits, turn, strict=False):
                yield row[: len(fed) + 1], indices

    # -- generation -------------------------------------------------------------------------------------------------

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Generate after prompts, until a stop sequence or ``max_gen_toks``."""
        prompts: list[Prompt] = []
        generations: list[str] = []
        arguments: dict[str, dict[str, Any]] = {}
        end = None if self.eot_token_id is None else self.tok_decode(self.eot_token_id, skip_special_tokens=False)
        for text, requested in (request.args for request in requests):
            kwargs = settings.generation_settings(requested, end, self.max_gen_toks, self.max_length)
            ids = self.tok_encode(plain(text)) or [self.prefix_token_id]
            prompt = Prompt(tuple(ids), self._uncompressed(text))
            prompts.append(self._fitted(prompt, self.max_length - kwargs["max_new_tokens"]))
            generations.append(json.dumps(kwargs, sort_keys=True, default=repr))
            arguments[generations[-1]] = kwargs
        self._check_budget(prompts)
        texts: list[str] = [""] * len(requests)
        progress = self._progress(len(requests), "generate_until", disable_tqdm)
        for batch in self._runner.batches(prompts, generations, self._conditions):
            kwargs = dict(arguments[generations[batch.indices[0]]])
            until = kwargs.pop("until")
            stopping = functools.partial(stop_sequences_criteria, self.tokenizer, until)
            asked = [prompts[index] for index in batch.indices]
            answers = self._runner.generate(asked, batch.cache, stopping=stopping, **kwargs)
            for index, tokens in zip(batch.indices, answers, strict=True):
                texts[index] = text = self._text(tokens, until)
                self.cache_hook.add_partial("generate_until", requests[index].args, text)
                progress.update(1)
            del batch  # its cache, before the next one is filled
        progress.close()
        return texts

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

    def _uncompressed(self, text: str) -> int:
        """Number of tokens at the end of a prompt that are fed after compression."""
        if self._scope == "prompt":
            return self._num_uncompressed_tokens
        return tokenize(self.tokenizer, *split_at_separator(text), special=False).num_uncompressed_tokens

    def _fitted(self, prompt: Prompt, room: int) -> Prompt:
        """The prompt, cut to ``room`` tokens; ``ValueError`` where nothing is left to compress."""
        if len(prompt) <= room:
            return prompt
        fed = prompt.num_uncompressed_tokens
        cut = prompt.cut(room, self._truncation).scoped(self._scope, fed)
        if not cut.head and self._policy.name != "full":
            raise ValueError(
                f"{fed} tokens are fed after compression, but only {room} tokens of the prompt fit into "
                "max_length beside what is generated or scored"
            )
        self._truncated += 1
        if self._truncated == 1:
            _log.warning(
                f"a prompt of {len(prompt)} tokens was cut to {room} (truncation={self._truncation}); "
                f"max_length is {self.max_length}"
            )
        return cut

    def _check_budget(self, prompts: Iterable[Prompt]) -> None:
        """Refuse, before anything is computed, a fraction that leaves too little of the shortest prompt."""
        if self._budget is not None and self._budget.kind == "fraction":
            for length in sorted({len(prompt.head) for prompt in prompts if prompt.head}):
                self._budget.check(length, self._policy.window, token_bytes=1)

    # -- what the harness records -----------------------------------------------------------------------------------

    def _settings(self) -> dict[str, Any]:
        """Settings of compression that an answer depends on."""
        return {
            "policy": self._policy.name,
            "policy_options": dataclasses.asdict(self._policy),
            "budget": None if self._budget is None else str(self._budget),
            "scope": self._scope,
            "num_uncompressed_tokens": self._num_uncompressed_tokens if self._scope == "prompt" else "question",
            "truncation": self._truncation,
            "compiler": self._compiler,
        }

    def get_model_info(self) -> dict[str, Any]:
        """The harness's facts and, under ``"kvpass"``, settings, versions and measurements."""
        measured = {**self._totals.to_dict(), "requests_truncated": self._truncated}
        facts = {**self._settings(), **settings.library_versions(), **measured}
        return {**super().get_model_info(), "kvpass": facts}

    @functools.cached_property
    def fingerprint(self) -> str:
        """Hash of all an answer depends on beside the request."""
        policy = {"policy_options": spec_of_contents(self._policy), "policy_source": policy_digest(self._policy)}
        decisive = {**self._settings(), **policy, **self._arguments, "max_length": self.max_length}
        return settings.fingerprint(self.model, self.tokenizer, decisive)

    def set_cache_hook(self, cache_hook: Any) -> None:
        """Take the harness's request cache, after making its keys differ between models and settings."""
        if cache_hook.dbdict is not None:
            settings.prefix_keys(cache_hook.dbdict, self.fingerprint)
        super().set_cache_hook(cache_hook)
