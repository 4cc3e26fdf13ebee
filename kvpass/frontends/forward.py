"""The forward of a compiled model: arguments are checked, then a prompt is read or a filled cache continued."""

from __future__ import annotations

import re
import types
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import Cache, GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from kvpass.adapt.positions import check_rows_stay
from kvpass.cache.cache import CompressedCache
from kvpass.cache.prompt_record import PromptRecord
from kvpass.compiler.step import Call, append, continued, prefill
from kvpass.errors import CacheMismatchError
from kvpass.frontends.padding import Padding, first_real_column, move_keys, read_padding
from kvpass.frontends.runtime import Runtime
from kvpass.policies import Policy
from kvpass.policies.rules import THRESHOLDS
from kvpass.ranks import digest, run_on_all_ranks
from kvpass.torch_compat import dynamo_disable
from kvpass.transformers_compat import CACHE

OUTPUTS = ("output_attentions", "output_hidden_states", "output_router_logits")
ONLY_LOGITS = "a compiled graph does not return intermediate tensors; use the uncompiled model"
_OF_WHOLE_TEXT = ("next_sequence_length", "is_first_iteration")
_TAKEN = (
    "input_ids inputs_embeds attention_mask position_ids past_key_values cache use_cache logits_to_keep return_dict"
).split()
"""Arguments that a kvpass model's ``forward`` takes."""

NO_IMAGES = "kvpass reads no images, videos or sound yet: use the uncompiled model for a prompt that has them"
_TOKEN_TYPES = ("token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids")
_OF_IMAGES = re.compile("pixel|image|video|audio|vision|patches|target_sizes|^(moe_)?mm_|^input_(features|values)")

UNSUPPORTED = {
    "labels": "a kvpass model computes no loss: compute it from the logits, or use the uncompiled model",
    "token_type_ids": "a kvpass model takes zeros only: call the tokenizer with return_token_type_ids=False",
    **dict.fromkeys(OUTPUTS, ONLY_LOGITS),
    **dict.fromkeys(_OF_WHOLE_TEXT, "the model's class prepares every step from the whole text and knows no cache"),
}
"""Unsupported arguments of ``forward``, with a reason for each."""


_STAYS = (
    "past_key_values is reusable and stays as it is: this call of one token continues a copy. In a decoding loop give "
    "the next call output.past_key_values, or begin with cache.clone() or compress(..., reusable=False)"
)


if TYPE_CHECKING:

    class _Base(PreTrainedModel, GenerationMixin):
        __getattr__: None  # type: ignore[assignment,misc]  # torch's would admit every attribute

else:
    _Base = object


class CompressedForward(_Base):
    """Base class before the model's own class."""

    _kvpass: Runtime

    # the decoder is compiled inside, also if the user wraps the model in torch.compile
    @partial(dynamo_disable, reason="kvpass has compiled the decoder: call the model as it is, without torch.compile")
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
                must ascend by one: a row is one sequence. Several axes ``[axes, B, T]`` (M-RoPE) if all are equal.
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
        held: CompressedCache | None = take_cache({"past_key_values": past_key_values, "cache": cache})
        runtime = self._kvpass

        def checked() -> Tensor:
            if (name := unsupported_argument(kwargs)) is not None:
                reason = UNSUPPORTED.get(name, f"a kvpass model takes {', '.join(_TAKEN)}; leave it out")
                reason = NO_IMAGES if is_of_images(name) else reason
                raise ValueError(f"forward argument {name!r} is not supported: {reason}")
            check_cache(held)
            begun = held is not None and not held.is_empty
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
            if self.training:
                raise ValueError("the model is in training mode; call model.eval() first")
            if held is not None:
                runtime.check_cache(held, runtime.rules_now)
            return text

        def facts(_: Tensor) -> dict[str, str]:
            return {
                "input_ids": digest(input_ids),
                "inputs_embeds": digest(inputs_embeds),
                "attention_mask": digest(attention_mask),
                "position_ids": digest(position_ids),
                "logits_to_keep": str(logits_to_keep),
                "tokens in the cache": str(0 if held is None else held.columns),
                **runtime.describe(),
            }

        one_token = isinstance(input_ids, Tensor) and input_ids.ndim == 2 and input_ids.shape[1] == 1
        ranks = runtime.captures.compiler.ranks
        text = checked() if one_token else run_on_all_ranks(ranks, "a call of the model", checked, facts)
        with torch.inference_mode(False), torch.no_grad():
            if held is not None and not held.is_empty:
                held, logits = continue_cache(self, held, text, attention_mask, position_ids, logits_to_keep)
            else:
                held = runtime.new_cache() if held is None else held
                logits = read_prompt(self, held, text, attention_mask, position_ids, logits_to_keep)
                runtime.last_prompt = held.record
        returned: dict[str, Any] = {CACHE: None if use_cache is False else held}
        output = CausalLMOutputWithPast(logits=logits, **returned)
        return output.to_tuple() if return_dict is False else output


def decoder_of(model: Any, ids: Tensor, positions: Tensor, logits_to_keep: int) -> Callable[[Call], Tensor]:
    """Return a function that captures the decoder of a compiled model if needed, and runs it for a call."""
    runtime: Runtime = model._kvpass
    own: Any = type(model).__bases__[1]  # the class of the user's model
    forward = types.MethodType(own.forward, model)
    return lambda call: runtime.captures.run(call, forward, ids, positions, logits_to_keep)


def read_prompt(
    model: Any,
    cache: CompressedCache,
    text: Tensor,
    attention_mask: Tensor | None,
    position_ids: Tensor | None,
    logits_to_keep: int,
) -> Tensor:
    """Fill a cache with ids ``[B, N]``, or embeddings ``[B, N, D]``, whose ids it then does not know."""
    text = text.clone(memory_format=torch.contiguous_format)
    start = first_real_column(attention_mask, *text.shape[:2])
    columns = torch.arange(text.shape[1], device=text.device)
    positions = _positions(position_ids, (columns - start.to(text.device)[:, None]).clamp(min=0))
    if position_ids is not None:
        _check_ascending(positions, start)
    run, ids = decoder_of(model, text, positions, logits_to_keep), text if text.ndim == 2 else None
    return prefill(cache, start, text.shape[1], run, model._kvpass.block_now, ids)


def continue_cache(
    model: Any,
    cache: CompressedCache,
    input_ids: Tensor,
    attention_mask: Tensor | None,
    position_ids: Tensor | None,
    logits_to_keep: int,
) -> tuple[CompressedCache, Tensor]:
    """Append ids ``[B, T]`` to a filled cache or a copy; return that and the logits."""
    runtime: Runtime = model._kvpass
    b, t = input_ids.shape
    if cache.reusable and t == 1 and not runtime.in_call:
        warnings.warn(_STAYS, stacklevel=6)  # who called the model
    cache = continued(cache, b, input_ids.device)
    if runtime.adapted.longrope_limit is not None:
        check_rows_stay(runtime.adapted.longrope_limit, cache.state.start, cache.columns, t)
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
        positions = _positions(position_ids, columns - cache.state.start[:, None])
        decoder = decoder_of(model, ids, positions, logits_to_keep)
        logits, record = append(cache, t, decoder, THRESHOLDS[runtime.rules.recompress], ids)
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
    positions = _positions(given, within + (cache.columns - padding.taken - cache.state.start)[:, None])
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
        decoder = decoder_of(model, own_ids, own_positions, tokens - first if logits_to_keep else 0)
        found, record = append(part, tokens, decoder, THRESHOLDS[model._kvpass.rules.recompress])
        if not parts:
            logits = found.new_empty(*wanted.shape, found.shape[2])
        logits[rows] = found.gather(1, (wanted[rows] - first)[..., None].expand(-1, -1, found.shape[2]))
        if model._kvpass.positions_in_keys:
            move_keys(part, padding.mask.shape[1] - part.columns)
        parts.append(part)
        members.append(rows)
    order = torch.cat(members).argsort()
    joined = cache.state.joined([part.state for part in parts], order, padding.mask, ids)
    cache.state, cache.record = joined, parts[0].record if len(parts) == 1 else cache.record
    return logits, record if len(parts) == 1 else None


def _positions(given: Tensor | None, computed: Tensor) -> Tensor:
    if given is None:
        return computed.contiguous()
    if given.ndim == 3 and bool((given == given[:1]).all()):  # axes of M-RoPE, all equal where all tokens are text
        given = given[0]
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
    """Return the first unsupported argument of ``forward``, of images if any; those without effect do not count."""
    unsupported = []
    for name, value in given.items():
        harmless = value is None or name == "cache_position" or (name in OUTPUTS and not value)
        if name not in _TAKEN and not harmless and not says_text(name, value):
            unsupported.append(name)
    return min(unsupported, key=lambda name: not is_of_images(name), default=None)


def says_text(name: str, value: Any) -> bool:
    """Return whether an argument is a tensor of token types that are all zero: each token is text."""
    return name in _TOKEN_TYPES and isinstance(value, Tensor) and not bool(value.any())


def is_of_images(name: str) -> bool:
    """Return whether the name of an argument is one of images, videos or sound, as processors give them."""
    return _OF_IMAGES.search(name) is not None


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
