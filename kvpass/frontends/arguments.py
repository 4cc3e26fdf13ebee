"""Checks of what ``forward`` and ``generate`` are given."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel

from kvpass.cache.cache import CompressedCache
from kvpass.errors import CacheMismatchError
from kvpass.policies import Policy

OUTPUTS = ("output_attentions", "output_hidden_states", "output_router_logits")
ONLY_LOGITS = "a compiled graph does not return intermediate tensors; use the uncompiled model"
_OF_WHOLE_TEXT = ("next_sequence_length", "is_first_iteration")
TAKEN = (
    "input_ids inputs_embeds attention_mask position_ids past_key_values cache use_cache logits_to_keep return_dict "
    "protect"
).split()
"""Arguments that a kvpass model's ``forward`` takes."""

PROTECTS_PROMPTS = "protect: spans are of the prompt that fills a cache; give them with it"
TOKEN_TYPES = ("token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids")
_SOUND = "of sound, which kvpass does not read"
_OF_SOUND = "audio|^input_(features|values)"
_OF_IMAGES = f"pixel|image|video|vision|patches|target_sizes|per_grid|{_OF_SOUND}"

UNSUPPORTED = {
    "labels": "a kvpass model computes no loss: compute it from the logits, or use the uncompiled model",
    **dict.fromkeys(TOKEN_TYPES, "zeros only, or those of images with these; give return_token_type_ids=False"),
    **dict.fromkeys(OUTPUTS, ONLY_LOGITS),
    **dict.fromkeys(_OF_WHOLE_TEXT, "the model's class prepares every step from the whole text and knows no cache"),
}
"""Unsupported arguments of ``forward``, with a reason for each."""


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
    """Return the first unsupported argument of ``forward``; those without effect do not count."""
    for name, value in given.items():
        harmless = value is None or name == "cache_position" or (name in OUTPUTS and not value)
        if name not in TAKEN and not harmless and not says_text(name, value):
            return name
    return None


def says_text(name: str, value: Any) -> bool:
    """Return whether an argument is a tensor of token types that are all zero: each token is text."""
    return name in TOKEN_TYPES and isinstance(value, Tensor) and not bool(value.any())


def take_images(given: dict[str, Any]) -> dict[str, Any]:
    """Take images out of the arguments of a call, with the token types that say where they are; else nothing."""
    named = [name for name, value in given.items() if value is not None and re.search(_OF_IMAGES, name)]
    types = [name for name in TOKEN_TYPES if named and given.get(name) is not None]
    return {name: given.pop(name) for name in (*named, *types)}


def check_images(images: Mapping[str, Any], with_ids: bool, position_ids: object, model: Any, runtime: Any) -> None:
    """Raise ValueError for images that the model or its policy does not take, or not as they are given."""
    policy, takes = runtime.conditions_now.policy, inspect.signature(model._original_class.forward).parameters
    wrong = next((name for name in images if name not in takes or re.search(_OF_SOUND, name)), None)
    if wrong is not None:
        reason = f"{wrong!r} is {_SOUND if re.search(_OF_SOUND, wrong) else f'no argument of {type(model).__name__}'}"
    elif not with_ids or position_ids is not None:
        reason = "give them with input_ids, without use_cache=False and position_ids, which the model counts itself"
    elif policy.replays_prompt:
        reason = f"policy {policy.name!r} replays the ids of the prompt, and those of images do not show them"
    elif runtime.captures.compiler.ranks.several or runtime.adapted.longrope_limit is not None:
        reason = "several processes share the model, or its rope_type='longrope' may read a text again, without them"
    else:
        return
    raise ValueError(f"images are not supported here: {reason}")


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
