"""A call of ``generate``: its arguments are checked, and become those of transformers' ``generate``."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kvpass.cache.cache import CompressedCache
from kvpass.compiler.blocks import check_block
from kvpass.config import Block, Spans
from kvpass.errors import CacheMismatchError
from kvpass.frontends.arguments import (
    PROTECTS_PROMPTS,
    UNSUPPORTED,
    check_cache,
    check_embeds,
    check_ids,
    check_images,
    says_text,
    take_cache,
    take_images,
)
from kvpass.frontends.runtime import Runtime
from kvpass.frontends.whole_text import (
    check_whole_text,
    has_new_ids,
    new_ids_only,
    with_mask_of_cache,
    with_text_of_cache,
)
from kvpass.policies.conditions import Conditions
from kvpass.transformers_compat import CACHE

_OF_GENERATE = {
    "assistant_early_exit": "the compiled decoder runs all of its layers; give an assistant_model",
    "assistant_tokenizer": "drafts of a model with another vocabulary are not tested; give one with the same",
    "custom_generate": "one from the Hub takes the place of generate as a whole; give the loop itself, a function",
    "token_healing": "it changes the last ids of the prompt; do that before the call",
}
"""Unsupported arguments of ``generate``, with a reason for each."""

_DRAFTS = ("assistant_model", "prompt_lookup_num_tokens")
"""Arguments of ``generate`` that say who drafts tokens which the model then checks."""


class Request:
    """A call of ``generate``.

    Args:
        model: compiled. conditions: of the call. arguments: of ``generate``, by name. protect: spans of its prompt.
    Attributes:
        arguments: of transformers' ``generate``, by name, but for the configuration, the ids and the cache.
        config: generation configuration that was given. ids: those of transformers' ``generate``.
        cache: that the call fills or continues; None: transformers makes none. columns: it had before the call.
        block: tokens of a block of the prompt, where ``prefill_chunk_size`` says them. images: of the call.
        drafts: whether tokens are drafted that may be taken back.
        ids_of_cache: how many of ``ids`` are the cache's, before the new ones.
    Raises:
        ValueError, CacheMismatchError: see :meth:`kvpass.CompressedModel.generate`.
    """

    def __init__(
        self, model: Any, conditions: Conditions, arguments: dict[str, Any], protect: Spans | None = None
    ) -> None:
        self.model, self.conditions = model, conditions
        self.runtime: Runtime = model._kvpass
        images = take_images(arguments)
        self.arguments = {name: value for name, value in arguments.items() if not says_text(name, value)}
        self.config = self.arguments.pop("generation_config")
        self.cache: CompressedCache | None = take_cache(self.arguments)
        if self.arguments.get("use_cache") is None:
            self.arguments.pop("use_cache", None)  # transformers takes None for False, but makes a cache
        self.assists = bool(self.says("is_assistant"))
        if self.assists and getattr(self.config, "cache_implementation", None) == "dynamic_full":  # before 5.17
            self.config = copy.deepcopy(self.config)
            self.config.cache_implementation = None
        self._check_cache()
        self._check_arguments()
        self.columns = 0 if self.cache is None else self.cache.columns
        self.block = self._take_block()
        self.drafts = self._check_drafts()
        self.arguments["disable_compile"] = True  # with a static cache, transformers would compile our forward
        self.ids_of_cache = 0
        text = self._check_text()
        if protect is not None and (text is None or self.columns or self.says("use_cache") is False):
            raise ValueError(PROTECTS_PROMPTS)
        if images:
            with_ids = text is not None and text.ndim == 2 and self.says("use_cache") is not False
            check_images(images, with_ids, self.arguments.get("position_ids"), model, self.runtime)
        makes = self._cache_is_default() or protect is not None or bool(images)
        if self.cache is None and (self.assists or (text is not None and makes)):
            self.cache = self.runtime.new_cache(conditions)
            self.cache.for_one_call, self.cache.assists = True, self.assists
        elif self.cache is not None:
            self.cache.for_one_call = False
        if self.cache is not None and protect is not None:
            self.cache.protect = protect
        self.images = [(images, len(text))] if images and text is not None else []
        if self.cache is not None and text is not None:
            self._reserve_and_join(self.cache, text)

    def says(self, name: str) -> Any:
        """Return an argument of ``generate``, or what the first configuration with a value says; else None."""
        configs = (getattr(config, name, None) for config in (self.config, self.model.generation_config))
        return next((value for value in (self.arguments.get(name), *configs) if value is not None), None)

    def in_force(self, name: str) -> Any:
        """Like :meth:`says`, but an argument that is given as None says so, whatever is configured."""
        return self.arguments[name] if name in self.arguments else self.says(name)

    def run(self, generate: Callable[..., Any]) -> Any:
        """Return what transformers' ``generate`` returns, of the new ids alone."""
        ids, arguments = self.arguments.pop("inputs"), self.arguments
        values = {"generation_config": self.config, CACHE: self.cache}  # beam search would reorder a cache that is None
        arguments |= {name: value for name, value in values.items() if value is not None}
        # ids by position: a class of its own generate may name them otherwise
        run, cache = partial(generate, *([] if ids is None else [ids]), **arguments), self.cache
        try:
            output = self.runtime.call(self.conditions, run, self.block, self.images)
        except BaseException:
            if self.drafts and cache is not None:
                _take_back(cache, self.columns)
            raise
        if self.columns == 0 and cache is not None and cache.record is not None:
            self.runtime.last_prompt = cache.record  # not that of a negative prompt, which is read later
        if self.ids_of_cache:
            output = new_ids_only(output, self.ids_of_cache)
        if cache is not None and cache.reusable:
            cache.answer_end = getattr(output, "sequences", output)[:, -1].tolist()
        return output

    # -- checks -----------------------------------------------------------------------------------------------------

    def _check_cache(self) -> None:
        """Raise for a cache that the call cannot have, or for one beside ``use_cache=False``."""
        cache, default = self.cache, self.model.generation_config
        check_cache(cache)
        kind = self.arguments.get("cache_implementation") or getattr(self.config, "cache_implementation", None)
        if kind not in (None, "dynamic", getattr(default, "cache_implementation", None)):
            raise ValueError(
                "generate argument 'cache_implementation' is not supported: a kvpass model fills a compressed cache of "
                f"its own, not a {kind} one; leave it out, or use the uncompiled model"
            )
        if self.says("use_cache") is False:
            if "use_cache" not in self.arguments:
                raise ValueError(
                    "the model is configured with use_cache=False, which computes the whole text again for every new "
                    "token: pass use_cache=True, or use_cache=False if that is meant"
                )
            for name, value in (("past_key_values", cache), ("prefill_chunk_size", self.says("prefill_chunk_size"))):
                if value is not None:
                    raise ValueError(
                        f"use_cache=False and {name}: the whole text is computed again for every new token, and a "
                        "cache would get it each time; leave one of them out"
                    )

    def _check_arguments(self) -> None:
        """Raise for arguments that are not supported, or contradict the cache."""
        for name, reason in (_OF_GENERATE | UNSUPPORTED).items():
            value = self.in_force(name)
            if value is not None and value is not False and not (name == "custom_generate" and callable(value)):
                raise ValueError(f"generate argument {name!r} is not supported: {reason}")
        if getattr(self.model.generation_config, "prefill_chunk_size", None) is not None:
            raise ValueError(
                "prefill_chunk_size in model.generation_config is not supported: give it to generate, or prefill_block "
                "to kvpass.compile"
            )
        if self.cache is None:
            return
        if self.conditions.own_budget and self.cache.budget != self.conditions.budget:
            raise CacheMismatchError(
                f"generate(budget=...) is {self.conditions.budget}, but the cache has {self.cache.budget} and keeps "
                "it: leave it out"
            )
        texts = ("inputs", "input_ids", "inputs_embeds")
        if not self.cache.is_empty and all(self.arguments.get(name) is None for name in texts):
            raise ValueError("no input_ids beside a filled cache: pass the tokens that come next, at least one")

    def _take_block(self) -> Block | None:
        """Take ``prefill_chunk_size`` out of the arguments and the configuration."""
        configured = getattr(self.config, "prefill_chunk_size", None)
        tokens = self.arguments.pop("prefill_chunk_size", configured)
        if tokens is None:
            return None
        block = check_block(tokens, "prefill_chunk_size")
        if configured is not None:
            self.config = copy.deepcopy(self.config)
            self.config.prefill_chunk_size = None
        return block

    def _check_drafts(self) -> bool:
        """Return whether tokens are drafted, here or by another model, and raise if they could not be taken back."""
        asked, policy = "assistant_model", self.conditions.policy
        if not self.assists:
            asked = next((name for name in _DRAFTS if self.in_force(name) is not None), "")
        if not asked:
            return False
        if self.runtime.adapted.recurrent is not None:
            reason = (
                "recurrent layers: they hold the state after the last token, not those before, so a draft that is not "
                "accepted could not be taken back"
            )
        elif policy.decode_rule() is not None:
            reason = (
                f"policy {policy.name!r}: for every draft it evicts an entry, which would be lost where the draft is "
                "not accepted; where it has the option, give evict_during_decode=False"
            )
        elif self.conditions.recompress != "never":
            reason = f"recompress={self.conditions.recompress!r}"
        else:
            return True
        raise ValueError(f"generate argument {asked!r} is not supported with {reason}")

    def _check_text(self) -> Tensor | None:
        """Return the ids ``[B, T]`` or embeddings ``[B, T, D]``; None: transformers begins with a token of its own."""
        arguments = self.arguments
        embeds, mask = arguments.get("inputs_embeds"), arguments.get("attention_mask")
        text = arguments.get("input_ids", arguments["inputs"]) if embeds is None else embeds
        if embeds is not None:  # beside embeddings ids are only returned
            check_embeds(embeds, None, self.model, self.conditions.policy, begun=self.columns > 0)
        elif text is not None:
            check_ids(text)
        if text is None:
            return None
        if self.assists and mask is None:  # the other model leaves out a mask of ones
            mask = arguments["attention_mask"] = torch.ones(text.shape[:2], dtype=torch.int64, device=text.device)
        self._check_mask(mask, text)
        return text

    def _check_mask(self, mask: Tensor | None, text: Tensor) -> None:
        """Check that a mask has the length of the text, or of the tokens seen and the text.

        Without a mask transformers takes the padding token for padding wherever it stands.
        """
        tokens, seen = text.shape[1], self.columns
        if mask is not None:
            if mask.ndim == 2 and mask.shape[1] not in (tokens, seen + tokens):
                both = f"{tokens} (these ids) or {seen + tokens} (the tokens in the cache too)"
                raise ValueError(
                    f"attention_mask of shape {list(mask.shape)} for ids of {tokens} tokens: must have "
                    f"{both if seen else tokens}"
                )
            return
        if text.ndim == 3 or tokens <= seen:
            return
        real = self._not_padding(text[:, seen:])
        inside = (real.cummax(1).values & ~real).any(1).nonzero()
        if inside.numel():
            ones = "torch.ones_like(input_ids)"
            if seen:
                ones = "torch.cat([cache.attention_mask, torch.ones_like(new_ids)], 1)"
            raise ValueError(
                f"input_ids: row {int(inside[0])} has the pad token ({self.says('pad_token_id')}) behind other tokens, "
                "and no attention_mask is given, so transformers takes it for padding, which must be on the left: if "
                f'it is text, pass attention_mask={ones}; if it is padding, set tokenizer.padding_side = "left"'
            )

    def _not_padding(self, ids: Tensor) -> Tensor:
        """Return which ids ``[B, T]`` transformers takes for real tokens where ``generate`` gets no mask."""
        pad, ends = self.says("pad_token_id"), self.says("eos_token_id")
        is_end = pad in (ends if isinstance(ends, list | tuple) else [ends])
        return torch.ones_like(ids, dtype=torch.bool) if pad is None or is_end else ids != pad

    def _cache_is_default(self) -> bool:
        """Whether neither the call nor a configuration says anything of the cache."""
        names = ("use_cache", "cache_implementation")
        return not any(name in self.arguments or self.says(name) not in (None, True) for name in names)

    # -- text and cache ---------------------------------------------------------------------------------------------

    def _reserve_and_join(self, cache: CompressedCache, text: Tensor) -> None:
        """Say how many columns the cache will hold, and put the text of a filled one before the new ids."""
        arguments, tokens = self.arguments, text.shape[1]
        mask, is_ids = arguments.get("attention_mask"), text.ndim == 2
        continues = is_ids and has_new_ids(cache, text, mask)
        if self.columns and is_ids and not continues:
            check_whole_text(cache, text)
            if mask is None:  # a pad token may be part of the text that the cache holds
                new_mask = self._not_padding(text[:, self.columns :])
                arguments["attention_mask"] = with_mask_of_cache(cache, new_mask)
        new, length = self.says("max_new_tokens"), self.says("max_length")
        new = max(new if new is not None else (length or 0) - tokens, 0)  # 0: only by their own default
        cache.expected = (self.columns if continues else 0) + tokens + new - 1  # the last is not appended
        if continues:
            self.arguments, self.ids_of_cache = with_text_of_cache(cache, text, arguments, self.says)


def _take_back(cache: CompressedCache, columns: int) -> None:
    """Take back what an interrupted call with drafts appended to a cache of ``columns``, or mark it interrupted."""
    taken = cache.columns - columns
    if cache.interrupted or taken == 0:
        return
    if columns == 0:
        cache.reset()
    elif cache.state.only_appends and taken <= cache.state.appended:
        cache.crop(-taken)
    else:
        cache.interrupted = True
