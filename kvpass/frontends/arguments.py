"""Raise for unsupported models and for unsupported arguments of ``forward`` and ``generate``."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel

from kvpass.cache.cache import CompressedCache
from kvpass.errors import CacheMismatchError, UnsupportedAttentionError
from kvpass.policies.base import Policy
from kvpass.policies.rules import Rules
from kvpass.ranks import Ranks
from kvpass.transformers_compat import CACHE

_OUTPUTS = ("output_attentions", "output_hidden_states", "output_router_logits")
_ONLY_LOGITS = "a compiled graph does not return intermediate tensors; use the uncompiled model"
_OF_WHOLE_TEXT = ("next_sequence_length", "is_first_iteration")
_TAKEN = (
    "input_ids inputs_embeds attention_mask position_ids past_key_values cache use_cache logits_to_keep return_dict"
).split()
"""Arguments that a kvpass model's ``forward`` takes."""

_OF_FORWARD = {
    "labels": "a kvpass model computes no loss: compute it from the logits, or use the uncompiled model",
    "token_type_ids": "a kvpass model takes none: call the tokenizer with return_token_type_ids=False",
    **dict.fromkeys(_OUTPUTS, _ONLY_LOGITS),
    **dict.fromkeys(_OF_WHOLE_TEXT, "the model's class prepares every step from the whole text and knows no cache"),
}
"""Unsupported arguments of ``forward``, with a reason for each."""

_OF_GENERATE = {
    "assistant_early_exit": "the compiled decoder runs all of its layers; give an assistant_model",
    "assistant_tokenizer": "drafts of a model with another vocabulary are not tested; give one with the same",
    "custom_generate": "a loop from elsewhere may read the cache in ways that a compressed one has not",
    "token_healing": "it changes the last ids of the prompt; do that before the call",
}
"""Unsupported arguments of ``generate``, with a reason for each."""

_DRAFTS = ("assistant_model", "prompt_lookup_num_tokens")
"""Arguments of ``generate`` that say who drafts tokens which the model then checks."""

_FROM_PRETRAINED = "load it with transformers.AutoModelForCausalLM.from_pretrained"


def check_model(model: object) -> None:
    """Raise for models that ``kvpass.compile`` does not support, as far as known without tracing."""
    if isinstance(model, str | Path):
        raise ValueError(f"model={str(model)!r} is a name: {_FROM_PRETRAINED}({str(model)!r}) and give what it returns")
    kind = type(model).__name__
    if not isinstance(model, PreTrainedModel):
        raise ValueError(
            f"model of type {kind}: kvpass.compile takes a transformers model; "
            'for any other decoder use torch.compile(module, backend="kvpass", ...) in a session'
        )
    if model.training:
        raise ValueError("the model is in training mode; call model.eval() first")
    for wish in _OUTPUTS:
        if getattr(model.config, wish, None):
            raise ValueError(f"config.{wish}=True: {_ONLY_LOGITS}, or set it to False")
    if model.config.is_encoder_decoder:
        raise ValueError(f"{kind} is an encoder-decoder; kvpass compresses decoders only")
    if not model.can_generate():
        raise ValueError(
            f"{kind} is no causal language model: it has no head that predicts the next token; if its checkpoint is "
            f"of a decoder, {_FROM_PRETRAINED}"
        )
    if "logits_to_keep" not in inspect.signature(type(model).forward).parameters:
        raise ValueError(
            f"{kind} is not supported: its forward has no argument logits_to_keep, by which kvpass asks for the last "
            'logits only; a decoder inside it may work with torch.compile(module, backend="kvpass", ...)'
        )
    if any(hasattr(module, "create_position_ids_from_input_ids") for module in model.modules()):
        raise ValueError(f"{kind} counts positions from its padding token on; kvpass counts them from 0")
    if getattr(model.config.get_text_config(), "recurrent_kv_cache_mode", None) == "last_loop":  # Dory
        raise ValueError(
            f"{kind} with recurrent_kv_cache_mode='last_loop' attends to other keys with a cache than without one, and "
            "kvpass makes its cache from the decoder without one"
        )
    for path, _ in model.named_modules():
        if path.endswith(".indexer"):
            raise UnsupportedAttentionError(
                path.removesuffix(".indexer"),
                "indexer",
                "it is sparse: an indexer with keys of its own, which no cache of kvpass holds, chooses what each "
                "token attends to",
            )


def check_ids(ids: object, device: torch.device | None = None) -> None:
    """Check that ``ids`` are token ids, int64 or int32 ``[B, T]``, on ``device`` if given."""
    if isinstance(ids, Mapping):
        raise ValueError(f"input_ids of type {type(ids).__name__}: give what it holds by name, as in model(**inputs)")
    if not isinstance(ids, Tensor):
        raise ValueError(
            f"input_ids of type {type(ids).__name__}: must be a tensor of token ids, such as "
            'tokenizer(text, return_tensors="pt").input_ids'
        )
    if ids.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"input_ids of {ids.dtype}: token ids must be int64 or int32, use input_ids.long()")
    if ids.ndim != 2 or ids.numel() == 0:
        hint = ", use input_ids[None]" if ids.ndim == 1 and ids.numel() else ""
        raise ValueError(f"input_ids of shape {list(ids.shape)}: must be [B, T] with B, T >= 1{hint}")
    if device is not None and ids.device != device:
        raise ValueError(f"input_ids on {ids.device}, but the model is on {device}: use input_ids.to(model.device)")


def check_embeds(embeds: object, ids: object, model: PreTrainedModel, policy: Policy, *, begun: bool) -> None:
    """Check that ``inputs_embeds`` are a prompt that this model and policy take.

    Args:
        ids: ``input_ids`` of the same call of ``forward``, if any. begun: the cache is filled.
    """
    if ids is not None:
        raise ValueError("input_ids and inputs_embeds are two forms of one prompt: give one of them")
    if not isinstance(embeds, Tensor) or not embeds.is_floating_point() or embeds.ndim != 3 or embeds.numel() == 0:
        found = f"{embeds.dtype} {list(embeds.shape)}" if isinstance(embeds, Tensor) else type(embeds).__name__
        raise ValueError(f"inputs_embeds of {found}: must be floating numbers [B, T, D] with B, T >= 1")
    if embeds.device != model.device:
        raise ValueError(f"inputs_embeds on {embeds.device}, but the model is on {model.device}")
    if begun:
        raise ValueError(
            "inputs_embeds with a filled cache are not supported, only as a prompt: pass the new tokens as input_ids, "
            "or everything as inputs_embeds and no cache"
        )
    if policy.replays_prompt:
        raise ValueError(
            f"inputs_embeds with policy {policy.name!r} are not supported: it replays the ids of the prompt, which "
            "embeddings do not have; take another policy, or pass input_ids"
        )


def unsupported_argument(given: Mapping[str, Any]) -> str | None:
    """Return the first unsupported argument of ``forward``; arguments without effect do not count."""
    for name, value in given.items():
        harmless = value is None or name == "cache_position" or (name in _OUTPUTS and not value)
        if name not in _TAKEN and not harmless:
            return name
    return None


def check_forward(given: Mapping[str, Any]) -> None:
    """Raise for unsupported arguments of ``forward``."""
    name = unsupported_argument(given)
    if name is not None:
        reason = _OF_FORWARD.get(name, f"a kvpass model takes {', '.join(_TAKEN)}; leave it out")
        raise ValueError(f"forward argument {name!r} is not supported: {reason}")


def take_cache(given: dict[str, Any]) -> Any:
    """Take the cache out of the arguments, where it has one of two names."""
    caches = [cache for cache in (given.pop("past_key_values", None), given.pop("cache", None)) if cache is not None]
    if len(caches) > 1:
        raise ValueError("past_key_values and cache are two names of one argument: give one of them")
    return caches[0] if caches else None


def check_cache(given: object) -> None:
    """Check that ``past_key_values``, as the user gave it, is a cache of kvpass or None."""
    if given is None or isinstance(given, CompressedCache):
        return
    kind = type(given).__name__
    if not isinstance(given, Cache):
        raise ValueError(f"past_key_values of type {kind}: must be a kvpass.CompressedCache, or None for a new prompt")
    if given.get_seq_length() > 0:
        raise CacheMismatchError(
            f"past_key_values is a {kind} with {given.get_seq_length()} tokens; a kvpass model continues only on a "
            "CompressedCache of its own: pass the whole text and no cache"
        )
    raise ValueError(
        f"past_key_values is an empty {kind}, and would stay empty, since a kvpass model fills a cache of its own: "
        "leave it out, and take the cache from the output (of generate with return_dict_in_generate=True)"
    )


def check_generate(kwargs: Mapping[str, Any], given: Any, default: Any) -> None:
    """Raise for unsupported arguments of ``generate``; ``given``, ``default``: generation configurations."""
    configured = given or default
    cache = kwargs[CACHE]
    check_cache(cache)
    kind = kwargs.get("cache_implementation") or getattr(given, "cache_implementation", None)
    if kind not in (None, "dynamic", getattr(default, "cache_implementation", None)):
        advice = "call generate_batch" if kind == "paged" else "leave it out, or use the uncompiled model"
        raise ValueError(
            "generate argument 'cache_implementation' is not supported: a kvpass model fills a compressed cache of its "
            f"own, not a {kind} one; {advice}"
        )
    begins = not (isinstance(cache, CompressedCache) and not cache.is_empty)
    if begins and kwargs.get("use_cache") is None and said("use_cache", {}, configured, default) is False:
        raise ValueError(
            "the model is configured with use_cache=False, which computes the whole text again for every new token: "
            "pass use_cache=True, or use_cache=False if that is meant"
        )
    for name, reason in (_OF_GENERATE | _OF_FORWARD).items():
        value = kwargs.get(name, getattr(configured, name, None))
        if value is not None and value is not False:
            raise ValueError(f"generate argument {name!r} is not supported: {reason}")
    if getattr(default, "prefill_chunk_size", None) is not None:
        raise ValueError(
            "prefill_chunk_size in model.generation_config is not supported: give it to generate, or prefill_block to "
            "kvpass.compile"
        )
    if getattr(configured, "is_assistant", None):
        raise ValueError("assistant_model: a kvpass model cannot draft for another one; give the uncompiled model")


def check_generate_mask(mask: Tensor | None, text: Tensor, seen: int, kwargs: Mapping[str, Any], *configs: Any) -> None:
    """Check that the mask of ``generate`` has the length of its ids, or of the tokens seen and these.

    Args:
        mask: as given. text: ids ``[B, T]``, or embeddings. seen: columns in the cache. kwargs, configs: of the call,
            which may name the padding token: without a mask transformers takes that for padding wherever it stands.
    """
    tokens = text.shape[1]
    if mask is not None:
        if mask.ndim == 2 and mask.shape[1] not in (tokens, seen + tokens):
            lengths = (
                f"{tokens}" if seen == 0 else f"{tokens} (these ids) or {seen + tokens} (the tokens in the cache too)"
            )
            raise ValueError(
                f"attention_mask of shape {list(mask.shape)} for ids of {tokens} tokens: must have {lengths}"
            )
        return
    pad, ends = (said(name, kwargs, *configs) for name in ("pad_token_id", "eos_token_id"))
    if seen or text.ndim == 3 or pad is None or pad in (ends if isinstance(ends, list | tuple) else [ends]):
        return
    real = text != pad
    inside = (real.cummax(1).values & ~real).any(1).nonzero()
    if inside.numel():
        raise ValueError(
            f"input_ids: row {int(inside[0])} has the pad token ({pad}) behind other tokens, and no attention_mask is "
            "given, so transformers takes it for padding, which must be on the left: if it is text, pass "
            'attention_mask=torch.ones_like(input_ids); if it is padding, set tokenizer.padding_side = "left"'
        )


def said(name: str, given: Mapping[str, Any], *configs: Any) -> Any:
    """Return an argument of ``generate``, or what the first configuration with a value says; else None."""
    values = (given.get(name), *(getattr(config, name, None) for config in configs))
    return next((value for value in values if value is not None), None)


def drafts_asked(kwargs: Mapping[str, Any], configured: Any) -> str | None:
    """Return the argument of ``generate``, given or configured, by which it is asked to check drafts."""
    return next((name for name in _DRAFTS if kwargs.get(name, getattr(configured, name, None)) is not None), None)


def check_drafts(asked: str, rules: Rules, *, recurrent: bool) -> None:
    """Check that tokens of drafts, for which the argument ``asked`` asks, can be taken back."""
    reason = None
    if recurrent:
        reason = (
            "recurrent layers: they hold the state after the last token, not those before, so a draft that is not "
            "accepted could not be taken back"
        )
    elif rules.policy.decode_rule() is not None:
        reason = (
            f"policy {rules.policy.name!r}: for every draft it evicts an entry, which would be lost where the draft is "
            "not accepted; where it has the option, give evict_during_decode=False"
        )
    elif rules.recompress != "never":
        reason = f"recompress={rules.recompress!r}"
    if reason is not None:
        raise ValueError(f"generate argument {asked!r} is not supported with {reason}")


def check_one_process(ranks: Ranks, asked: str) -> None:
    """Check that no other process shares the model: then a prompt fills one cache."""
    if ranks.several:
        raise ValueError(
            f"{asked}: several processes share this model, whose prompts fill one cache at a time; call set_policy and "
            "compress or generate for each policy"
        )
