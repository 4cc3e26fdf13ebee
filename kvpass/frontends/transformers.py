"""The model that ``kvpass.compile`` returns: the user's own class with our methods."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers.modeling_outputs import CausalLMOutputWithPast

from kvpass.cache.cache import CompressedCache
from kvpass.cache.copying import forbid_pickling
from kvpass.compiler.blocks import check_block
from kvpass.config import Block, Budget, BudgetLike, Spans
from kvpass.frontends.arguments import check_ids
from kvpass.frontends.generate_hooks import GenerateHooks
from kvpass.frontends.request import Request
from kvpass.frontends.whole_text import by_name
from kvpass.graphs.prompt_program import PromptProgram
from kvpass.policies import Policy, PolicyName, resolve_budget
from kvpass.policies.conditions import Conditions, read_conditions
from kvpass.policies.options import check_int
from kvpass.report import Report
from kvpass.transformers_compat import CACHE


class CompressedModel(GenerateHooks):
    """Base class before the model's own class, so that ``isinstance`` and ``generate`` work as before.

    To type checkers it is a model of transformers with the methods below. Modules of its own class are unknown to them:
    use the original model, which shares the parameters.
    """

    def generate(
        self,
        inputs: Tensor | None = None,
        generation_config: Any = None,
        *args: Any,
        budget: BudgetLike = None,
        protect: Spans | None = None,
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

        ``budget`` is that of this call, by default the model's. A filled cache keeps its own, and the spans of its
        prompt; those of a new prompt are ``protect``, as of :meth:`compress`. What another thread sets meanwhile
        (:meth:`set_budget`, :meth:`set_policy`) does not change a call that has begun.

        ``prefill_chunk_size`` is taken as ``prefill_block`` of this call: what is kept is that of the whole prompt.

        As ``assistant_model`` of another model, it reads the prompt of its ``generate`` once and compresses it; drafts
        that are not accepted are taken back.

        Raises:
            ValueError: drafts, checked or made (``assistant_model``, ``prompt_lookup_num_tokens``), with a policy that
                evicts while decoding, with recompression, recurrent layers or layers with a sliding window; a cache of
                another kind, given or asked for by ``cache_implementation`` (one that the checkpoint configures is
                replaced by ours); or the configuration has ``use_cache=False`` and the call does not set it.
            CacheMismatchError: the cache is not of this model and its policy, or has another budget; or ids that are
                taken for the whole sequence do not begin with the text of the cache.
        """
        given = by_name(super().generate, args, kwargs)  # type: ignore[misc]
        arguments = {"inputs": inputs, "generation_config": generation_config, **given}
        request = Request(self, self._kvpass.conditions_now.with_budget(budget), arguments, protect)
        return request.run(super().generate)  # type: ignore[misc]

    def generate_batch(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise AttributeError: continuous batching of transformers runs attention of its own, over all tokens."""
        raise AttributeError(
            f"a compiled {type(self).__name__} has no continuous batching (generate_batch, init_continuous_batching): "
            "serve the model with the vLLM plug-in (docs/serve.md), or call generate with a batch"
        )

    init_continuous_batching = continuous_batching_context_manager = generate_batch
    destroy_cached_continuous_batching_manager = generate_batch

    def compress(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        *,
        inputs_embeds: Tensor | None = None,
        reusable: bool = True,
        budget: BudgetLike = None,
        protect: Spans | None = None,
        guide: Tensor | None = None,
        **images: Any,
    ) -> CompressedCache:
        """Compress a context before the question is known (question-agnostic scope).

        The logger ``kvpass`` says once if the policy goes by the question.

        Args:
            input_ids: the context, int64 ``[B, N]``. attention_mask: ``[B, N]`` when rows are left-padded.
            inputs_embeds: the context as embeddings ``[B, N, D]``, in place of ``input_ids``.
            reusable: True: each later call continues from a copy, so you can ask any number of independent questions.
                False: later calls continue the cache itself, as in a conversation.
            budget: of this context alone, by default the model's. Calls continue the cache whatever the model's is.
            protect: parts of the context that every head of every layer keeps, also when it is compressed again. They
                count in the budget, and the policy divides what is left. ``(start, stop)`` in tokens of each row,
                counted from its first real one; a mask of columns, bool ``[B, N]``; or ``("images",)``, all tokens of
                images. Layers with a sliding window keep their newest tokens alone, and recurrent ones a state.
            guide: ids of a question of the kind to come, int64 ``[1, G]`` or ``[B, G]``. It is read behind the
                context, its queries score the entries in place of the window's, and it is not kept. Policies that do
                not go by a question refuse it; so do models with sliding windows or recurrent layers.
            images: images and videos of the context, as the processor of the model gives them: ``compress(**inputs)``.
        Raises:
            ValueError: ``guide`` with a policy that evicts while decoding, or with images; spans are not within the
                text, overlap or have more tokens than the budget beside the window; or as for a call.
        """
        if guide is not None and images:
            raise ValueError(f"guide with {', '.join(images)}: a guide is of a context without images; leave one out")
        conditions = self._kvpass.conditions_now.with_budget(budget)
        if guide is None and "question" in self.policy.inputs:
            _warn_of_question(self.policy.name)
        cache = self._kvpass.new_cache(conditions)
        input_ids, attention_mask = _prepared([cache], input_ids, attention_mask, protect, guide)
        read = functools.partial(self.forward, past_key_values=cache, inputs_embeds=inputs_embeds, logits_to_keep=1)
        self._kvpass.call(conditions, functools.partial(read, input_ids, attention_mask, **images))
        cache.reusable = reusable
        return cache

    def compress_each(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        *,
        conditions: Iterable[tuple[PolicyName | Policy, BudgetLike]],
        reusable: bool = True,
        protect: Spans | None = None,
        guide: Tensor | None = None,
    ) -> list[CompressedCache]:
        """Compress a context under several policies and budgets, and read it once.

        Each cache is what :meth:`compress` returns under its condition. To continue it, give the model its condition:
        ``model.set_policy(cache.policy, cache.budget)``. All caches are held at once. Policies that replay the same
        tokens share the replay.

        Args:
            input_ids, attention_mask, reusable, protect, guide: as in :meth:`compress`. conditions: pairs of a policy
                and its budget.
        Returns:
            one cache for each condition. The conditions of the model do not change, and there is nothing to report.
        Raises:
            ValueError: no condition, or one is out of range; several processes share the model; or as for a call.
        """
        runtime = self._kvpass
        if runtime.captures.compiler.ranks.several:
            raise ValueError(
                "compress_each: several processes share this model, whose prompts fill one cache at a time; call "
                "set_policy and compress or generate for each policy"
            )
        chosen = [self._read_conditions(policy, budget) for policy, budget in conditions]
        if not chosen:
            raise ValueError("conditions=[]: name at least one, a pair of a policy and its budget")
        kept = [runtime.new_cache(each) for each in chosen]
        ids, mask = _prepared(kept, input_ids, attention_mask, protect, guide)
        kept[0].fills = kept[1:]
        read = functools.partial(self.forward, past_key_values=kept[0], logits_to_keep=1)
        runtime.call(chosen[0], functools.partial(read, ids, mask))
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
        try:
            for rows in batch_sizes:
                check_int("batch_sizes", rows, 1)
                token, cache = torch.zeros(rows, 1, dtype=torch.int64, device=self.device), None
                for tokens in (prompt_tokens, 2, 1) if turns else (prompt_tokens, 1):
                    out = self.forward(token.expand(-1, tokens), past_key_values=cache, logits_to_keep=1)
                    assert isinstance(out, CausalLMOutputWithPast)
                    cache = out[CACHE]
        finally:
            self._kvpass.last_prompt = before

    def __reduce_ex__(self, protocol: Any) -> Any:
        return forbid_pickling(
            self,
            f"a compiled {type(self).__name__} cannot be pickled, it holds captured graphs and compiled code: save the "
            "original model, and call kvpass.compile again after it is loaded",
        )

    @property
    def policy(self) -> Policy:
        """The policy that decides which entries are kept."""
        return self._kvpass.conditions.policy

    @property
    def budget(self) -> Budget | None:
        """How much of each prompt is kept; None for a policy that keeps everything."""
        return self._kvpass.conditions.budget

    @property
    def prefill_block(self) -> Block:
        """Tokens of a block of later prompts, as ``kvpass.compile`` takes it; can be set, nothing is compiled again."""
        return self._kvpass.block

    @prefill_block.setter
    def prefill_block(self, block: Block) -> None:
        self._kvpass.block = check_block(block)

    def set_budget(self, budget: BudgetLike) -> None:
        """Set the budget of later prompts; compiled graphs stay valid, since they do not depend on it.

        Earlier caches keep their budget: calls with them raise until it is set again, but for those of a call with a
        budget of its own. A ``generate`` that runs in another thread is not changed. The report of the last prompt is
        discarded.

        Raises:
            ValueError: unreadable, below window + 1, missing, or given to a policy that has none; nothing changed.
        """
        conditions = self._kvpass.conditions
        self._kvpass.conditions = replace(conditions, budget=resolve_budget(conditions.policy, budget))
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
        self._kvpass.conditions = self._read_conditions(policy, budget, window=window, **policy_options)
        self._kvpass.last_prompt = None

    def _read_conditions(
        self, policy: str | Policy, budget: BudgetLike, *, window: int | None = None, **options: Any
    ) -> Conditions:
        """Return the conditions of a policy and budget for this model, which does not change."""
        conditions = read_conditions(
            policy,
            budget,
            self._kvpass.conditions.recompress,
            window=window,
            options=options,
            model_name=str(self.config.name_or_path),
            entries=self._kvpass.conditions.entry_format,
        )
        self._kvpass.check_policy(conditions.policy)
        return conditions

    def program(self) -> PromptProgram:
        """Return the program by which prompts are read and compressed, to be printed.

        It is a ``torch.fx.GraphModule``; docs/add-a-pass.md says how passes of your own change such programs.

        Raises:
            RuntimeError: no prompt has been compiled yet: call ``warmup`` or read one.
        """
        runtime = self._kvpass
        for reader in reversed(runtime.captures.compiler.readers):
            if (read := reader()) is not None:
                return read.program([runtime.conditions.policy], runtime.adapted.heads)
        raise RuntimeError("no prompt has been compiled yet: call warmup(), or read a prompt first")

    def report(self, cache: CompressedCache | None = None) -> Report:
        """Return what the last prompt kept, or that of a cache, and what was compiled for its policy.

        Raises:
            ValueError: no prompt has been prefilled yet, or none since policy or budget were set; or the cache has
                another policy or budget than the model, or was loaded from a file, which holds no record.
        """
        runtime = self._kvpass
        if cache is not None:
            runtime.check_cache(cache, runtime.conditions)
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
            expanded=adapted.expanded,
            compiled=tuple(
                record for record in runtime.captures.compiler.records if record.policy == prompt.policy.spec
            ),
        )


def _prepared(
    caches: Sequence[CompressedCache],
    ids: Tensor | None,
    mask: Tensor | None,
    protect: Spans | None,
    guide: Tensor | None,
) -> tuple[Tensor | None, Tensor | None]:
    """Tell empty caches what to protect and how long the guide is; return ids and mask of the context with the guide.

    ValueError: a policy has no use of it, or it does not fit the ids.
    """
    for cache in caches:
        cache.protect = protect
    if guide is None:
        return ids, mask
    for policy in (cache.policy for cache in caches):
        if "question" not in policy.inputs or policy.compact or policy.decode_rule() is not None:
            reason = "it also evicts while decoding, or compacts" if "question" in policy.inputs else "it reads none"
            raise ValueError(f"guide with policy {policy.name!r}: {reason}; take one that scores by a question alone")
    if ids is None:
        raise ValueError("guide with inputs_embeds: give the context as input_ids")
    check_ids(guide)
    if len(guide) not in (1, len(ids)):
        raise ValueError(f"guide of shape {list(guide.shape)}: must have one row, or {len(ids)} as input_ids")
    for cache in caches:
        cache.guide = guide.shape[1]
    joined = torch.cat([ids, guide.expand(len(ids), -1)], 1)
    return joined, None if mask is None else pad(mask, (0, guide.shape[1]), value=1)


@functools.cache
def _warn_of_question(policy: str) -> None:
    """Log, once for each policy, that it goes by what the end of a text asks."""
    logging.getLogger("kvpass").warning(
        "the question is not known yet, and policy %r goes by it: take kvzip, which reads the text twice, or "
        "compactor, which reads it once (docs/which-policy.md)",
        policy,
    )
