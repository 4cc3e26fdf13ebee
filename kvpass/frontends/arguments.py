"""Raise for unsupported models and for unsupported arguments of ``generate``."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvpass.errors import UnsupportedAttentionError
from kvpass.frontends.forward import NO_IMAGES, ONLY_LOGITS, OUTPUTS, UNSUPPORTED, check_cache, is_of_images
from kvpass.policies.rules import Rules
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

_FROM_PRETRAINED = "load it with transformers.AutoModelForCausalLM.from_pretrained"


def check_model(model: object) -> None:
    """Raise for models that ``kvpass.compile`` does not support, as far as known without tracing."""
    if isinstance(model, str | Path):
        raise ValueError(f"model={str(model)!r} is a name: {_FROM_PRETRAINED}({str(model)!r}) and give what it returns")
    kind = type(model).__name__
    if not isinstance(model, PreTrainedModel):
        inside = model.named_modules() if isinstance(model, nn.Module) else ()
        for path, wrapped in inside:
            if isinstance(wrapped, PreTrainedModel):
                instead = f"model.{path}"
                if hasattr(model, "get_base_model"):
                    instead = "model.merge_and_unload() or model.get_base_model(), which has the adapter in its layers"
                raise ValueError(f"model of type {kind} is around a {type(wrapped).__name__}: compile {instead}")
        raise ValueError(
            f"model of type {kind}: kvpass.compile takes a transformers model; "
            'for any other decoder use torch.compile(module, backend="kvpass", ...) in a session'
        )
    if model.training:
        raise ValueError("the model is in training mode; call model.eval() first")
    for wish in OUTPUTS:
        if getattr(model.config, wish, None):
            raise ValueError(f"config.{wish}=True: {ONLY_LOGITS}, or set it to False")
    if model.config.is_encoder_decoder:
        raise ValueError(f"{kind} is an encoder-decoder; kvpass compresses decoders only")
    if not model.can_generate():
        raise ValueError(
            f"{kind} is no causal language model: it has no head that predicts the next token; if its checkpoint is "
            f"of a decoder, {_FROM_PRETRAINED}; if it is a part of a model that has one, compile that"
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


def check_generate(kwargs: Mapping[str, Any], given: Any, default: Any) -> None:
    """Raise for unsupported arguments of ``generate``; ``given``, ``default``: generation configurations."""
    cache = kwargs[CACHE]
    check_cache(cache)
    kind = kwargs.get("cache_implementation") or getattr(given, "cache_implementation", None)
    if kind not in (None, "dynamic", getattr(default, "cache_implementation", None)):
        raise ValueError(
            "generate argument 'cache_implementation' is not supported: a kvpass model fills a compressed cache of its "
            f"own, not a {kind} one; leave it out, or use the uncompiled model"
        )
    if said("use_cache", kwargs, given, default) is False:
        if kwargs.get("use_cache") is None:
            raise ValueError(
                "the model is configured with use_cache=False, which computes the whole text again for every new "
                "token: pass use_cache=True, or use_cache=False if that is meant"
            )
        chunk = said("prefill_chunk_size", kwargs, given)
        for name, value in (("past_key_values", cache), ("prefill_chunk_size", chunk)):
            if value is not None:
                raise ValueError(
                    f"use_cache=False and {name}: the whole text is computed again for every new token, and a cache "
                    "would get it each time; leave one of them out"
                )
    for name, value in kwargs.items():
        if value is not None and is_of_images(name):
            raise ValueError(f"generate argument {name!r} is not supported: {NO_IMAGES}")
    for name, reason in (_OF_GENERATE | UNSUPPORTED).items():
        value = in_force(name, kwargs, given, default)
        if value is not None and value is not False and not (name == "custom_generate" and callable(value)):
            raise ValueError(f"generate argument {name!r} is not supported: {reason}")
    if getattr(default, "prefill_chunk_size", None) is not None:
        raise ValueError(
            "prefill_chunk_size in model.generation_config is not supported: give it to generate, or prefill_block to "
            "kvpass.compile"
        )


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
    if text.ndim == 3 or tokens <= seen:
        return
    real = not_padding(text[:, seen:], kwargs, *configs)
    inside = (real.cummax(1).values & ~real).any(1).nonzero()
    if inside.numel():
        pad, ones = said("pad_token_id", kwargs, *configs), "torch.ones_like(input_ids)"
        if seen:
            ones = "torch.cat([cache.attention_mask, torch.ones_like(new_ids)], 1)"
        raise ValueError(
            f"input_ids: row {int(inside[0])} has the pad token ({pad}) behind other tokens, and no attention_mask is "
            "given, so transformers takes it for padding, which must be on the left: if it is text, pass "
            f'attention_mask={ones}; if it is padding, set tokenizer.padding_side = "left"'
        )


def not_padding(ids: Tensor, kwargs: Mapping[str, Any], *configs: Any) -> Tensor:
    """Return which ids ``[B, T]`` transformers takes for real tokens where ``generate`` gets no mask."""
    pad, ends = (said(name, kwargs, *configs) for name in ("pad_token_id", "eos_token_id"))
    is_end = pad in (ends if isinstance(ends, list | tuple) else [ends])
    return torch.ones_like(ids, dtype=torch.bool) if pad is None or is_end else ids != pad


def said(name: str, given: Mapping[str, Any], *configs: Any) -> Any:
    """Return an argument of ``generate``, or what the first configuration with a value says; else None."""
    values = (given.get(name), *(getattr(config, name, None) for config in configs))
    return next((value for value in values if value is not None), None)


def in_force(name: str, given: Mapping[str, Any], *configs: Any) -> Any:
    """Like :func:`said`, but an argument that is given as None says so, whatever is configured."""
    return given[name] if name in given else said(name, {}, *configs)


def check_drafts(kwargs: Mapping[str, Any], *configs: Any, rules: Rules, recurrent: bool) -> bool:
    """Check that drafts can be taken back, where ``generate``, as given or configured, is to check or make some.

    Returns:
        whether it is.
    """
    reason, asked = None, "assistant_model"
    if not said("is_assistant", kwargs, *configs):
        asked = next((name for name in _DRAFTS if in_force(name, kwargs, *configs) is not None), "")
    if not asked:
        return False
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
    return True
