"""The model ``kvpass.compile`` returns: the user's own class with our ``forward``."""

from __future__ import annotations

import copy
import functools
import logging
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import Cache, GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from kvpass.adapt.copied import Adapted
from kvpass.adapt.positions import check_rows_stay
from kvpass.adapt.tensor_parallel import check_divided
from kvpass.cache.buffer_reuse import BufferReuse
from kvpass.cache.cache import CompressedCache
from kvpass.cache.copying import forbid_pickling
from kvpass.cache.fingerprint import ModelFingerprint
from kvpass.cache.prompt_record import PromptRecord
from kvpass.compiler.blocks import check_block
from kvpass.compiler.capture import CaptureCache
from kvpass.compiler.step import Call, append, continued, prefill
from kvpass.config import Block, Budget, BudgetLike
from kvpass.errors import CacheMismatchError
from kvpass.frontends.arguments import (
    cache_argument,
    check_cache,
    check_drafts,
    check_embeds,
    check_exact,
    check_forward,
    check_generate,
    check_generate_mask,
    check_ids,
    check_one_process,
    drafts_asked,
    full_of,
    said,
    unsupported_argument,
)
from kvpass.frontends.exact import CompressedDrafts, DraftTokens
from kvpass.frontends.padding import Padding, first_real_column, read_padding
from kvpass.frontends.whole_text import by_name, has_new_ids, new_ids_only, with_text_of_cache
from kvpass.policies import POLICIES, Policy, PolicyName, resolve_budget
from kvpass.policies.options import check_int
from kvpass.policies.rules import THRESHOLDS, Rules, read_rules
from kvpass.ranks import digest, run_on_all_ranks
from kvpass.report import Report
from kvpass.torch_compat import dynamo_disable
from kvpass.transformers_compat import CACHE, HAS_ALLOCATORS, NEXT_LENGTH, SAYS_NEXT_LENGTH


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


if TYPE_CHECKING:

    class _Base(PreTrainedModel, GenerationMixin):
        __getattr__: None  # type: ignore[assignment,misc]  # torch's would admit every attribute

else:
    _Base = object


class CompressedModel(_Base):
    """Base class before the model's own class, so that ``isinstance`` and ``generate`` work as before.

    To type checkers it is a model of transformers with the methods below. Modules of its own class are unknown to them:
    use the original model, which shares the parameters.
    """

    _kvpass: Runtime

    @dynamo_disable  # the decoder is compiled inside, also if the user wraps the model in torch.compile
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        *,
        cache: Cache | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int = 0,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast | tuple[Any, ...]:
        """Prefill a prompt and compress it, or continue on a compressed cache.

        Args:
            input_ids: int64 ``[B, T]``. With an empty cache (or none) this is the prompt; padding only on the left.
            attention_mask: ``[B, tokens seen + T]``. Zeros of a prompt only before its first real token; among new
                tokens of a filled cache anywhere: they are not stored. Zeros for the last tokens appended to a row take
                these back. Of a mask on CUDA for one new token only the shape is read, to avoid host synchronisation.
            position_ids: true positions ``[B, T]``; by default counted from the first real token. Those of a prompt
                must ascend by one: a row is one sequence.
            past_key_values: a :class:`CompressedCache` of this model; None or an empty one for a new prompt. One of one
                row serves any B: each row continues a copy, which is returned.
            inputs_embeds: a prompt ``[B, T, D]`` in place of ``input_ids``, as the model's forward takes it; not with
                a filled cache, nor with policies that replay ids.
            cache: the same as ``past_key_values``, by the name that transformers gives it from 5.24 on.
            logits_to_keep: compute logits of only this many last positions; 0 = all.
        Returns:
            fp logits ``[B, T or logits_to_keep, vocabulary]`` and the cache (None with ``use_cache=False``); with
            ``return_dict=False`` a tuple of those that are not None.
        Raises:
            ValueError: an argument is unsupported, or does not fit the cache, which is then unchanged.
        """
        cache = cache_argument({"past_key_values": past_key_values, "cache": cache})
        runtime = self._kvpass

        def checked() -> Tensor:
            check_forward(kwargs)
            begun = isinstance(cache, CompressedCache) and not cache.is_empty
            if inputs_embeds is not None:
                check_embeds(inputs_embeds, input_ids, self, runtime.rules_now.policy, begun=begun)
                text = inputs_embeds
            elif input_ids is None:
                raise ValueError("input_ids=None: a kvpass model takes token ids, or inputs_embeds")
            else:
                check_ids(input_ids, self.device)
                text = input_ids
            if not isinstance(logits_to_keep, int) or logits_to_keep < 0:
                raise ValueError(f"logits_to_keep={logits_to_keep!r}: must be an int >= 0")
            check_cache(cache)
            if self.training:
                raise ValueError("the model is in training mode; call model.eval() first")
            if text.shape[1] > 1:  # walks over all modules, too slow for each decode step
                runtime.identity.look_again()
            if isinstance(cache, CompressedCache):
                rules = runtime.rules_now
                cache.check_fingerprint(rules.policy, rules.budget, runtime.identity, rules.entry_format)
            return text

        def facts(_: Tensor) -> dict[str, str]:
            tensors = {
                "input_ids": input_ids,
                "inputs_embeds": inputs_embeds,
                "attention_mask": attention_mask,
                "position_ids": position_ids,
            }
            seen = cache.columns if isinstance(cache, CompressedCache) else 0
            return {
                **{name: digest(x) for name, x in tensors.items()},
                "logits_to_keep": str(logits_to_keep),
                "tokens in the cache": str(seen),
                **runtime.describe(),
            }

        one_token = isinstance(input_ids, Tensor) and input_ids.ndim == 2 and input_ids.shape[1] == 1
        ranks = runtime.captures.compiler.ranks
        text = checked() if one_token else run_on_all_ranks(ranks, "a call of the model", checked, facts)
        with torch.inference_mode(False), torch.no_grad():
            assert cache is None or isinstance(cache, CompressedCache)
            if cache is not None and cache.drafts is not None and cache.drafts.is_next:
                logits = cache.drafts.next_logits()
            elif cache is not None and not cache.is_empty:
                cache, logits = _continue(self, cache, text, attention_mask, position_ids, logits_to_keep)
            else:
                cache = _new_cache(runtime) if cache is None else cache
                logits = _prefill(self, cache, text, attention_mask, position_ids, logits_to_keep)
                runtime.last_prompt = cache.record
        held: dict[str, Any] = {CACHE: None if use_cache is False else cache}
        output = CausalLMOutputWithPast(logits=logits, **held)
        return output.to_tuple() if return_dict is False else output

    def generate(
        self,
        inputs: Tensor | None = None,
        generation_config: Any = None,
        *args: Any,
        budget: BudgetLike = None,
        exact: bool = False,
        draft_tokens: DraftTokens = "auto",
        **kwargs: Any,
    ) -> Any:
        """``generate`` of transformers; with a filled cache, the ids can be only the new tokens.

        So a question can be asked about a compressed context: ``model.generate(question_ids, past_key_values=cache)``.
        Logits processors then read the whole text, the cache's and the new ids. Lengths and the caller's stopping
        criteria count the new ids, which are also what is returned and streamed.
        Ids longer than what the cache has seen are the whole sequence, as in transformers, unless an attention mask
        over cache and ids says otherwise. The last token of an answer is not in the cache: begin the next call with it.
        A cache of one row serves several rows of ids, beams and ``num_return_sequences``: each row continues a copy.
        A reusable cache (see :meth:`compress`) is not changed; a call that begins with the last token of the answer
        before, which is not in such a cache, gets a ``UserWarning``; so does one whose new ids are the cache's prompt.

        ``budget`` is that of this call, by default the model's. A filled cache keeps its own. What another thread sets
        meanwhile (:meth:`set_budget`, :meth:`set_policy`) does not change a call that has begun.

        ``prefill_chunk_size`` is taken as ``prefill_block`` of this call: what is kept is that of the whole prompt.

        ``exact=True`` gives the answer of the full cache: ``draft_tokens`` tokens at a time ("auto": as many as are
        being accepted) are drafted on the compressed cache and verified against the full one, in one call of the model.
        Greedy answers are those of ``policy="full"``, sampled ones those that it samples with the same seed. Several
        rows go on by the tokens that all of them accept. Both caches are held: one prompt fills them, or the given
        cache has its full one (:meth:`compress` with ``keep_full``). The cache in the output is the compressed one,
        with the full one in ``cache.full``; :meth:`report` says what was accepted.

        Raises:
            ValueError: drafts (``exact``, ``assistant_model``, ``prompt_lookup_num_tokens``) with a policy that evicts
                while decoding, with recompression, recurrent layers or layers with a sliding window; ``exact`` with
                beams, guidance, several processes, or a cache without its full one; a cache of another kind, given or
                asked for by ``cache_implementation`` (one that the checkpoint configures is replaced by ours); or the
                configuration has ``use_cache=False`` and the call does not set it.
            CacheMismatchError: the cache is not of this model and its policy, or has another budget.
        """
        theirs: Callable[..., Any] = super().generate  # type: ignore[misc]
        rules = self._kvpass.rules_now.with_budget(budget)
        given = by_name(theirs, inputs, generation_config, *args, **kwargs)
        if draft_tokens != "auto" and not exact:
            raise ValueError(f"draft_tokens={draft_tokens!r} goes with exact=True")
        with self._kvpass.call(rules):
            if exact:
                return self._generate_exactly(theirs, rules, given, draft_tokens)
            return self._generate(theirs, rules, given)

    def _generate_exactly(
        self, theirs: Callable[..., Any], rules: Rules, kwargs: dict[str, Any], tokens: DraftTokens
    ) -> Any:
        """Call ``generate`` of transformers on the full cache, with drafts from the compressed one."""
        runtime = self._kvpass
        check_one_process(runtime.captures.compiler.ranks, "exact=True")
        rows = check_exact(kwargs, kwargs["generation_config"] or self.generation_config, tokens)
        check_drafts("exact", rules, recurrent=runtime.adapted.recurrent is not None)
        compressed: CompressedCache | None = cache_argument(kwargs)
        check_cache(compressed)
        if compressed is None or compressed.is_empty:
            compressed, full = _new_cache(runtime, rules), _new_cache(runtime, rules.keeping_all)
            full.fills = (compressed,)
        else:
            compressed.check_fingerprint(rules.policy, rules.budget, runtime.identity, rules.entry_format)
            full, rows = full_of(compressed), rows // compressed.batch_size
            if rows > 1:
                compressed, full = compressed.repeated(rows), full.repeated(rows)
            elif compressed.reusable:
                compressed, full = compressed.clone(), full.clone()
        drafts = full.drafts = CompressedDrafts(self, rules, full, compressed, tokens)
        kwargs.pop("past_key_values", None)
        try:
            with runtime.call(rules.keeping_all):
                output = self._generate(theirs, rules.keeping_all, {**kwargs, "cache": full})
        finally:
            full.drafts, full.fills = None, ()
        drafts.synchronise()
        compressed.full = full
        if compressed.record is not None:
            compressed.record = runtime.last_prompt = replace(compressed.record, accepted=drafts.acceptance)
        if hasattr(output, CACHE):
            output[CACHE] = compressed
        return output

    def _generate(self, theirs: Callable[..., Any], rules: Rules, kwargs: dict[str, Any]) -> Any:
        """Call ``generate`` of transformers with these arguments, by name, under the rules of the call."""
        inputs, generation_config = kwargs.pop("inputs"), kwargs.pop("generation_config")
        cache: CompressedCache | None = cache_argument(kwargs)
        kwargs.pop("cache" if CACHE == "past_key_values" else "past_key_values", None)
        kwargs[CACHE] = cache
        check_generate(kwargs, generation_config, self.generation_config)
        if cache is not None and rules.own_budget and cache.budget != rules.budget:
            raise CacheMismatchError(
                f"generate(budget=...) is {rules.budget}, but the cache has {cache.budget} and keeps it: leave it out"
            )
        begun = cache is not None and not cache.is_empty
        asked = drafts_asked(kwargs, generation_config or self.generation_config)
        if asked is not None:
            check_drafts(asked, rules, recurrent=self._kvpass.adapted.recurrent is not None)
        generation_config, block = self._take_chunk_size(generation_config, kwargs)
        kwargs["disable_compile"] = True  # with a static cache, transformers would compile our forward
        ids, text = kwargs.get("input_ids", inputs), kwargs.get("inputs_embeds")
        if text is not None:
            check_embeds(text, None, self, rules.policy, begun=begun)
            ids = None  # beside embeddings they are only returned
        elif ids is not None:
            check_ids(ids)
            text = ids
        if text is not None:
            seen = 0 if cache is None else cache.columns
            check_generate_mask(
                kwargs.get("attention_mask"), text, seen, kwargs, generation_config, self.generation_config
            )
        by_default = text is not None and _cache_is_default(kwargs, generation_config, self.generation_config)
        if cache is None and (by_default or block is not None):
            cache = kwargs[CACHE] = _new_cache(self._kvpass, rules)
        if cache is not None and block is not None:
            cache.block = block
        arguments, held = {"inputs": inputs, "generation_config": generation_config, **kwargs}, 0
        if cache is not None and text is not None:
            tokens, configs = text.shape[1], (generation_config, self.generation_config)
            continues = ids is not None and has_new_ids(cache, ids, kwargs.get("attention_mask"))
            most = _new_tokens(tokens, kwargs, *configs)
            for one in (cache, *cache.fills):
                one.expected = (cache.columns if continues else 0) + tokens + most - 1  # the last one is not appended
            if continues:
                assert ids is not None
                arguments, held = with_text_of_cache(cache, ids, arguments, configs)
        output = theirs(**arguments)
        if not begun and cache is not None and cache.record is not None:
            self._kvpass.last_prompt = cache.record  # not that of a negative prompt, which is read later
        if held:
            output = new_ids_only(output, held)
        if cache is not None and cache.reusable:
            cache.answer_end = getattr(output, "sequences", output)[:, -1].tolist()
        return output

    def _expand_inputs_for_generation(self, expand_size: int = 1, *args: Any, **kwargs: Any) -> Any:
        """Repeat the rows for beams or several answers, as transformers does; those of a filled cache too.

        Forward repeats a cache of one row itself.
        """
        cache, rows = kwargs.get(CACHE), len(kwargs["input_ids"])
        if expand_size > 1 and isinstance(cache, CompressedCache) and cache.batch_size == rows > 1:
            kwargs[CACHE] = cache.repeated(expand_size)
        return super()._expand_inputs_for_generation(expand_size, *args, **kwargs)  # type: ignore[misc]

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> Any:
        """Return a manager of transformers' continuous batching, with the arguments of transformers.

        Each request holds one block: ``budget`` entries per KV head and layer, and room for ``max_new_tokens``.

        Raises:
            ValueError: the model, its policy, its budget or a setting is unsupported; or the version of transformers.
        """
        return _continuous_batching().manager(self, *args, **kwargs)

    def generate_batch(self, inputs: list[list[int]], *args: Any, **kwargs: Any) -> Any:
        """Answer prompts of any lengths with continuous batching, as :meth:`init_continuous_batching`.

        Tokens are those of ``generate`` for each prompt alone.
        """
        check_prompt = _continuous_batching().check_prompt
        for ids in inputs:
            check_prompt(self, ids)
        return super().generate_batch(inputs, *args, **kwargs)

    def _sample(self, input_ids: Any, *args: Any, **kwargs: Any) -> Any:
        """Choose token after token, as transformers does; with drafts if the answer is to be exact."""
        cache = kwargs.get(CACHE)
        if isinstance(cache, CompressedCache) and cache.drafts is not None:
            kwargs = cache.drafts.begin(kwargs)
        return super()._sample(input_ids, *args, **kwargs)  # type: ignore[misc]

    def _get_candidate_generator(self, *args: Any, **kwargs: Any) -> Any:
        """Return who drafts tokens, as transformers does, but the first draft, made before the prompt, is dropped.

        It would be part of the prompt, and of what scores its entries.
        """
        generator: Any = super()._get_candidate_generator(*args, **kwargs)  # type: ignore[misc]
        draft = generator.get_candidates

        def dropped(input_ids: Tensor, *rest: Any, **more: Any) -> tuple[Tensor, None]:
            draft(input_ids, *rest, **more)
            generator.get_candidates = draft
            return input_ids, None

        generator.get_candidates = dropped
        return generator

    def _take_chunk_size(self, config: Any, kwargs: dict[str, Any]) -> tuple[Any, Block | None]:
        """Take ``prefill_chunk_size`` out of the arguments of ``generate``; return the configuration without it too."""
        tokens = kwargs.pop("prefill_chunk_size", getattr(config, "prefill_chunk_size", None))
        if tokens is None:
            return config, None
        block = self._checked_block(tokens, "prefill_chunk_size")
        if getattr(config, "prefill_chunk_size", None) is not None:
            config = copy.deepcopy(config)
            config.prefill_chunk_size = None
        return config, block

    def prepare_inputs_for_generation(
        self, *args: Any, inputs_embeds: Tensor | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        """Prepare as transformers does, but ask for the logits of the last position only.

        The empty cache that ``generate`` makes by default is replaced by ours: for a static one, which some checkpoints
        configure, transformers would drop the padding from the mask. A model that prepares its own arguments mostly
        cannot be compiled. Then the prompt alone is run, since its error names the reason, and "argument not supported"
        would not.
        """
        if inputs_embeds is not None:  # a named argument: generate looks whether there is one
            kwargs["inputs_embeds"] = inputs_embeds
        cache = kwargs.get(CACHE)
        if not isinstance(cache, CompressedCache | None):
            cache = kwargs[CACHE] = _new_cache(self._kvpass)
        limit = self._kvpass.adapted.longrope_limit
        if limit is not None and cache is not None and not cache.is_empty:
            check_rows_stay(limit, cache, 1)  # transformers may drop the cache there
        first = kwargs.get("is_first_iteration") and SAYS_NEXT_LENGTH
        if first and cache is not None and 0 < cache.columns < args[0].shape[1]:
            kwargs[NEXT_LENGTH] = args[0].shape[1] - cache.columns  # with drafts, transformers gives all ids
        prepared = super().prepare_inputs_for_generation(*args, **kwargs)  # type: ignore[misc]
        prepared.pop("tokenizer", None)  # of stop strings, which generate reads itself
        if kwargs.get("is_first_iteration") and unsupported_argument(prepared) is not None:
            self.forward(prepared["input_ids"], inputs_embeds=prepared.get("inputs_embeds"))
        prepared.setdefault("logits_to_keep", 1)
        if cache is not None and not cache.is_left_padded:
            prepared.pop("position_ids", None)  # transformers counts on from a padded column
        return prepared

    def compress(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        *,
        inputs_embeds: Tensor | None = None,
        reusable: bool = True,
        keep_full: bool = False,
        budget: BudgetLike = None,
    ) -> CompressedCache:
        """Compress a context before the question is known (question-agnostic scope).

        The logger ``kvpass`` says once if the policy scores by what the end of a text asks.

        Args:
            input_ids: the context, int64 ``[B, N]``. attention_mask: ``[B, N]`` when rows are left-padded.
            inputs_embeds: the context as embeddings ``[B, N, D]``, in place of ``input_ids``.
            reusable: True: each later call continues from a copy, so you can ask any number of independent questions.
                False: later calls continue the cache itself, as in a conversation.
            keep_full: also keep the full cache, in ``cache.full``, for ``generate(..., exact=True)``.
            budget: of this context alone, by default the model's. Calls continue the cache whatever the model's is.
        """
        runtime = self._kvpass
        rules = runtime.rules_now.with_budget(budget)
        filled = cache = _new_cache(runtime, rules)
        if keep_full:
            check_one_process(runtime.captures.compiler.ranks, "keep_full=True")
            filled = cache.full = _new_cache(runtime, rules.keeping_all)
            filled.fills = (cache,)
        with runtime.call(rules.keeping_all if keep_full else rules):
            self.forward(
                input_ids, attention_mask, past_key_values=filled, inputs_embeds=inputs_embeds, logits_to_keep=1
            )
        filled.fills, runtime.last_prompt = (), cache.record
        cache.reusable = reusable
        if self.policy.needs_question:
            _warn_of_question(self.policy.name)
        return cache

    def compress_each(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        *,
        conditions: Iterable[tuple[PolicyName | Policy, BudgetLike]],
        reusable: bool = True,
    ) -> list[CompressedCache]:
        """Compress a context under several policies and budgets, and read it once.

        Each cache is what :meth:`compress` returns under its condition. To continue it, give the model its condition:
        ``model.set_policy(cache.policy, cache.budget)``. All caches are held at once. Policies that replay the same
        tokens share the replay. A decoder that is not split into layers (the report says why), and a prompt of one
        token, are read once for each condition.

        Args:
            input_ids, attention_mask, reusable: as in :meth:`compress`. conditions: pairs of a policy and its budget.
        Returns:
            one cache for each condition. The conditions of the model do not change, and there is nothing to report.
        Raises:
            ValueError: no condition, or one is out of range; several processes share the model; or as for a call.
        """
        runtime = self._kvpass
        check_one_process(runtime.captures.compiler.ranks, "compress_each")
        rules = [self._read_rules(policy, budget) for policy, budget in conditions]
        if not rules:
            raise ValueError("conditions=[]: name at least one, a pair of a policy and its budget")
        kept = [_new_cache(runtime, own) for own in rules]
        kept[0].fills = kept[1:]
        with runtime.call(rules[0]):
            self.forward(input_ids, attention_mask, past_key_values=kept[0], logits_to_keep=1)
        kept[0].fills, runtime.last_prompt = (), None
        for cache in kept:
            cache.reusable = reusable
        return kept

    def warmup(self, batch_sizes: Iterable[int] = (1,), *, prompt_tokens: int = 64, turns: bool = False) -> None:
        """Capture and compile now what ``generate`` would on its first call of one row, and of several (2 serves any).

        Args:
            prompt_tokens: length of the made-up prompts, at least 2; what is compiled serves any length.
            turns: also what a call of several tokens on a filled cache needs, as in a second turn.
        Raises:
            ValueError: a number is too small, or as for a call of the model.
        """
        check_int("prompt_tokens", prompt_tokens, 2)
        before = self._kvpass.last_prompt
        for rows in batch_sizes:
            check_int("batch_sizes", rows, 1)
            token, cache = torch.zeros(rows, 1, dtype=torch.int64, device=self.device), None
            for tokens in (prompt_tokens, 2, 1) if turns else (prompt_tokens, 1):
                out = self.forward(token.expand(-1, tokens), past_key_values=cache, logits_to_keep=1)
                assert isinstance(out, CausalLMOutputWithPast)
                cache = out[CACHE]
        self._kvpass.last_prompt = before

    def __reduce_ex__(self, protocol: Any) -> Any:
        return forbid_pickling(
            self,
            f"a compiled {type(self).__name__} cannot be pickled, it holds captured graphs and compiled code: save the "
            "original model, and call kvpass.compile again after it is loaded",
        )

    @property
    def device(self) -> torch.device:
        """The device on which the model computes; weights may stay on the host."""
        return self._kvpass.adapted.device or super().device

    @property
    def policy(self) -> Policy:
        """The policy that decides which entries are kept."""
        return self._kvpass.rules.policy

    @property
    def budget(self) -> Budget | None:
        """How much of each prompt is kept; None for a policy that keeps everything."""
        return self._kvpass.rules.budget

    @property
    def prefill_block(self) -> Block:
        """Tokens of a block of later prompts, as ``kvpass.compile`` takes it; can be set, nothing is compiled again."""
        return self._kvpass.block

    @prefill_block.setter
    def prefill_block(self, block: Block) -> None:
        self._kvpass.block = self._checked_block(block, "prefill_block")

    def _checked_block(self, block: object, name: str) -> Block:
        return check_block(block, self._kvpass.captures.compiler.regions, name)

    def set_budget(self, budget: BudgetLike) -> None:
        """Set the budget of later prompts; compiled graphs stay valid, since they do not depend on it.

        Earlier caches keep their budget: calls with them raise until it is set again, but for those of a call with a
        budget of its own. A ``generate`` that runs in another thread is not changed. The report of the last prompt is
        discarded.

        Raises:
            ValueError: unreadable, below window + 1, missing, or given to a policy that has none; nothing changed.
        """
        rules = self._kvpass.rules
        self._kvpass.rules = replace(rules, budget=resolve_budget(rules.policy, budget))
        self._kvpass.last_prompt = None

    def set_policy(
        self,
        policy: PolicyName | Policy,
        budget: BudgetLike = None,
        *,
        window: int | None = None,
        **policy_options: Any,
    ) -> None:
        """Set policy and budget of later prompts, with the arguments of ``kvpass.compile``.

        The decoder is not captured again. Graphs of which a policy is part (those that evict while decoding or
        recompress) are compiled on its first use; the others serve all policies. For earlier caches and the report, see
        :meth:`set_budget`.

        Raises:
            ValueError: an argument is out of range, or the policy does not support the model's ``recompress``; nothing
                changed.
        """
        self._kvpass.rules = self._read_rules(policy, budget, window=window, **policy_options)
        self._kvpass.last_prompt = None

    def _read_rules(
        self, policy: str | Policy, budget: BudgetLike, *, window: int | None = None, **options: Any
    ) -> Rules:
        """Return the rules of a policy and budget for this model, which does not change."""
        rules = read_rules(
            policy,
            budget,
            self._kvpass.rules.recompress,
            window=window,
            options=options,
            model_name=str(self.config.name_or_path),
            entries=self._kvpass.rules.entry_format,
        )
        check_divided(rules.policy, self._kvpass.adapted.heads)
        self._kvpass.identity.check_policy(rules.policy)
        return rules

    def report(self, cache: CompressedCache | None = None) -> Report:
        """Return what the last prompt kept, or that of a cache, and what was compiled for its policy.

        Raises:
            ValueError: no prompt has been prefilled yet, or none since policy or budget were set; or the cache has
                another policy or budget than the model, or was loaded from a file, which holds no record.
        """
        runtime = self._kvpass
        if cache is not None:
            rules = runtime.rules
            cache.check_fingerprint(rules.policy, rules.budget, runtime.identity, rules.entry_format)
            if cache.record is None:
                raise ValueError(f"nothing to report: {cache!r} is empty or was loaded from a file")
        prompt = runtime.last_prompt if cache is None else cache.record
        if prompt is None:
            raise ValueError("nothing to report: this model has prefilled no prompt yet with its policy and budget")
        adapted = runtime.adapted
        return Report(
            prompt=prompt,
            ranks=adapted.heads,
            attention=adapted.attention,
            on_host=adapted.on_host,
            expanded=adapted.expanded,
            compiled=tuple(
                record for record in runtime.captures.compiler.records if record.policy == prompt.policy.spec
            ),
        )


def _cache_is_default(kwargs: Mapping[str, Any], *configs: Any) -> bool:
    """Whether neither a call of ``generate`` nor a configuration says anything of the cache."""
    said = [getattr(config, name, None) for config in configs for name in ("use_cache", "cache_implementation")]
    return not {"use_cache", "cache_implementation"} & kwargs.keys() and all(one in (None, True) for one in said)


def _new_tokens(tokens: int, kwargs: Mapping[str, Any], *configs: Any) -> int:
    """Return how many tokens ``generate`` may add to ``tokens`` ids; 0 where only its own default says so."""
    new, length = (said(name, kwargs, *configs) for name in ("max_new_tokens", "max_length"))
    return max(new if new is not None else (length or 0) - tokens, 0)


def _new_cache(runtime: Runtime, rules: Rules | None = None) -> CompressedCache:
    """Return an empty cache, by default under the rules of the call or the model."""
    rules = runtime.rules_now if rules is None else rules
    cache = CompressedCache(rules.policy, rules.budget, runtime.identity, runtime.adapted.heads, rules.entry_format)
    cache.own_budget = rules.own_budget
    return cache


def _prefill(
    model: Any,
    cache: CompressedCache,
    text: Tensor,
    attention_mask: Tensor | None,
    position_ids: Tensor | None,
    logits_to_keep: int,
) -> Tensor:
    """Read a prompt: ids ``[B, N]``, or embeddings ``[B, N, D]``, whose ids the cache then does not know."""
    text = text.clone(memory_format=torch.contiguous_format)
    start = first_real_column(attention_mask, *text.shape[:2])
    columns = torch.arange(text.shape[1], device=text.device)
    positions = _positions(position_ids, (columns - start.to(text.device)[:, None]).clamp(min=0))
    if position_ids is not None:
        _check_ascending(positions, start)

    run, ids = graph_of(model, text, positions, logits_to_keep), text if text.ndim == 2 else None
    return prefill(cache, start, text.shape[1], run, cache.block or model._kvpass.block, ids)


def _continue(
    model: Any,
    cache: CompressedCache,
    input_ids: Tensor,
    attention_mask: Tensor | None,
    position_ids: Tensor | None,
    logits_to_keep: int,
) -> tuple[CompressedCache, Tensor]:
    runtime: Runtime = model._kvpass
    rules = runtime.rules
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
        graph = graph_of(model, ids, positions, logits_to_keep)
        logits, record = append(cache, t, graph, THRESHOLDS[rules.recompress], ids)
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
        graph = graph_of(model, own_ids, own_positions, tokens - first if logits_to_keep else 0)
        found, record = append(part, tokens, graph, THRESHOLDS[model._kvpass.rules.recompress])
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


def graph_of(model: Any, ids: Tensor, positions: Tensor, logits_to_keep: int) -> Callable[[Call], Tensor]:
    """Return a function that captures the decoder if needed and runs it for a call."""
    runtime: Runtime = model._kvpass
    own: Any = type(model).__mro__[2]  # the class of the user's model
    forward = types.MethodType(own.forward, model)
    return lambda call: runtime.captures.run(call, forward, ids, positions, logits_to_keep, runtime.identity.hooks)


def _continuous_batching() -> Any:
    """Return the module for it.

    Raises:
        ValueError: the version of transformers has no interface for it.
    """
    if not HAS_ALLOCATORS:
        raise ValueError(
            "continuous batching (generate_batch, init_continuous_batching) of a kvpass model needs transformers 5.18 "
            "or later: before, a request holds as many blocks of cache as it has tokens; call generate with a batch, "
            "or serve the model with vLLM (docs/serve.md)"
        )
    from kvpass.frontends import continuous

    return continuous


@functools.cache
def _warn_of_question(policy: str) -> None:
    """Log, once for each policy, that it goes by what the end of a text asks."""
    others = ", ".join(name for name, cls in POLICIES.items() if not cls.needs_question and cls.needs_budget)
    logging.getLogger("kvpass").warning(
        "policy %r scores by what the end of a text asks: if the question comes later, see docs/which-policy.md; "
        "these score without a question: %s",
        policy,
        others,
    )


def compressed_class(cls: type[PreTrainedModel]) -> type[CompressedModel]:
    """Return a class of the same name that has our ``forward`` before the model's own."""
    return type(cls.__name__, (CompressedModel, cls), {"__module__": cls.__module__, "__doc__": cls.__doc__})
