"""The forward of a compiled model: arguments are checked, then a prompt is read or a filled cache continued."""

from __future__ import annotations

import types
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from transformers import Cache, GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from kvpass.adapt.images import Merged, merge
from kvpass.adapt.positions import check_rows_stay
from kvpass.cache.cache import CompressedCache
from kvpass.cache.prompt_record import PromptRecord
from kvpass.cache.spans import read_spans
from kvpass.compiler.step import Call, append, continued, prefill
from kvpass.config import Spans
from kvpass.errors import CacheMismatchError
from kvpass.frontends.arguments import (
    PROTECTS_PROMPTS,
    TAKEN,
    TOKEN_TYPES,
    UNSUPPORTED,
    check_cache,
    check_embeds,
    check_ids,
    check_images,
    take_cache,
    take_images,
    unsupported_argument,
)
from kvpass.frontends.padding import Padding, first_real_column, move_keys, read_padding
from kvpass.frontends.runtime import Runtime
from kvpass.policies.conditions import THRESHOLDS
from kvpass.ranks import digest, run_on_all_ranks
from kvpass.torch_compat import dynamo_disable
from kvpass.transformers_compat import CACHE

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
    """The forward of a compiled model: base class before the model's own class, which :mod:`kvpass.api` makes."""

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
        protect: Spans | None = None,
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
            protect: parts of a prompt that are kept in any case, see :meth:`compress`.
            kwargs: images and videos, as the processor of the model gives them, whose marks are in ``input_ids``.
        Returns:
            fp logits ``[B, T or logits_to_keep, vocabulary]`` and the cache (None with ``use_cache=False``); with
            ``return_dict=False`` a tuple of those that are not None.
        Raises:
            ValueError: an argument is unsupported, or does not fit the cache, which is then unchanged.
        """
        cache = take_cache({"past_key_values": past_key_values, "cache": cache})
        images = take_images(kwargs)
        inputs = Inputs(input_ids, inputs_embeds, attention_mask, position_ids, cache, logits_to_keep, protect, images)
        runtime, check = self._kvpass, partial(_check, self, inputs, kwargs)
        if isinstance(input_ids, Tensor) and input_ids.ndim == 2 and input_ids.shape[1] == 1:
            check()
        else:
            ranks = runtime.captures.compiler.ranks
            run_on_all_ranks(ranks, "a call of the model", check, lambda _: inputs.facts | runtime.describe())
        with torch.inference_mode(False), torch.no_grad():
            inputs = _with_images(self, inputs)
            filled, logits = _continue(self, inputs) if inputs.continues else _read_prompt(self, inputs)
        returned: dict[str, Any] = {CACHE: None if use_cache is False else filled}
        output = CausalLMOutputWithPast(logits=logits, **returned)
        return output.to_tuple() if return_dict is False else output


class Inputs(NamedTuple):
    """Arguments of ``forward``, which describes them."""

    ids: Tensor | None
    embeds: Tensor | None
    attention_mask: Tensor | None
    position_ids: Tensor | None
    cache: Any  # a CompressedCache when they have been checked, or None
    logits_to_keep: int
    protect: Spans | None
    images: Mapping[str, Any]
    merged: Merged | None = None  # with the ids, where there are images

    @property
    def text(self) -> Tensor:
        """The ids, or the embeddings."""
        if self.merged is not None:
            return self.merged.packed
        text = self.ids if self.embeds is None else self.embeds
        assert text is not None
        return text

    @property
    def continues(self) -> bool:
        """Whether they come after what a cache holds."""
        return self.cache is not None and not self.cache.is_empty

    @property
    def facts(self) -> dict[str, str]:
        """What all processes that share a model must be given alike."""
        tensors = {"input_ids": self.ids, "inputs_embeds": self.embeds}
        tensors |= {"attention_mask": self.attention_mask, "position_ids": self.position_ids}
        spans = digest(self.protect) if isinstance(self.protect, Tensor) else str(self.protect)
        numbers = {
            "protect": spans,
            "logits_to_keep": self.logits_to_keep,
            "tokens in the cache": getattr(self.cache, "columns", 0),
        }
        return {name: digest(x) for name, x in tensors.items()} | {name: str(n) for name, n in numbers.items()}


def _check(model: Any, inputs: Inputs, others: Mapping[str, Any]) -> None:
    """Raise for arguments of ``forward`` that the model does not take; ``others``: those that are not named there."""
    runtime: Runtime = model._kvpass
    if (name := unsupported_argument(others)) is not None:
        reason = UNSUPPORTED.get(name, f"a kvpass model takes {', '.join(TAKEN)}; leave it out")
        raise ValueError(f"forward argument {name!r} is not supported: {reason}")
    check_cache(inputs.cache)
    if inputs.embeds is not None:
        check_embeds(inputs.embeds, inputs.ids, model, runtime.conditions_now.policy, begun=inputs.continues)
    elif inputs.ids is None:
        raise ValueError("input_ids=None: a kvpass model takes token ids, or inputs_embeds")
    else:
        check_ids(inputs.ids, model.device)
    if inputs.images:
        check_images(inputs.images, inputs.embeds is None, inputs.position_ids, model, runtime)
    if not isinstance(inputs.logits_to_keep, int) or inputs.logits_to_keep < 0:
        raise ValueError(f"logits_to_keep={inputs.logits_to_keep!r}: must be an int >= 0")
    if inputs.protect is not None and inputs.continues:
        raise ValueError(PROTECTS_PROMPTS)
    if model.training:
        raise ValueError("the model is in training mode; call model.eval() first")
    if inputs.cache is not None:
        runtime.check_cache(inputs.cache, runtime.conditions_now)


def _with_images(model: Any, inputs: Inputs) -> Inputs:
    """Return the inputs with their images, or those that were given to ``generate``, merged into the text."""
    ids, cache = inputs.ids, inputs.cache
    given = (inputs.images, len(inputs.text)) if inputs.images else model._kvpass.take_images()
    if given is None or ids is None:
        return inputs
    images, times = given[0], len(ids) // given[1]  # beams have each row several times
    new = slice(-ids.shape[1], None)
    mask = None if inputs.attention_mask is None else inputs.attention_mask[::times, new]
    images = {name: value[:, new] if name in TOKEN_TYPES else value for name, value in images.items()}
    merged = merge(model, ids[::times], mask, images)
    tensors: dict[str, Any] = {name: x for name, x in merged._asdict().items() if isinstance(x, Tensor)}
    merged = merged._replace(**{name: x.repeat_interleave(times, 0) for name, x in tensors.items()})
    if inputs.continues and merged.positions is not None and merged.ahead is not None:
        ahead = merged.ahead + (0 if cache.state.ahead is None else cache.state.ahead)
        merged = merged._replace(positions=merged.positions + cache.state.next_positions[:, None, None], ahead=ahead)
    return inputs._replace(merged=merged)


def _decoder_of(
    model: Any, ids: Tensor, positions: Tensor, logits_to_keep: int, merged: Merged | None = None
) -> Callable[[Call], Tensor]:
    """Return a function that captures the decoder of a compiled model if needed, and runs it for a call."""
    runtime: Runtime = model._kvpass
    forward = types.MethodType(model._original_class.forward, model)

    def run(call: Call) -> Tensor:
        call.merged = merged
        if merged is not None:
            _check_sees(merged, call)
        return runtime.captures.run(call, forward, ids, positions, logits_to_keep)

    return run


def _check_sees(merged: Merged, call: Call) -> None:
    """Raise ValueError where tokens of images see later ones, on a filled cache or where the policy scores by them."""
    policy = call.cache.policy
    observed = 0 if "column_sum" in policy.inputs else -(policy.queries_read or 0)  # 0: all
    if call.phase != "prefill" and (merged.sees is not None or merged.sees_near is not None):
        reason = "a cache is filled: give all images with the first prompt"
    elif policy.needs_budget and merged.sees is not None and bool(merged.sees.triu(1)[:, observed:].any()):
        by = f"the last {-observed}" if observed else "all"
        reason = f"policy {policy.name!r} scores by {by} tokens: take another, or give more text behind the image"
    else:
        return
    raise ValueError(f"tokens of an image see later ones in this model, and {reason}")


def _read_prompt(model: Any, inputs: Inputs) -> tuple[CompressedCache, Tensor]:
    """Fill a cache with a prompt; return it and the logits. The ids of embeddings are not known to it."""
    runtime: Runtime = model._kvpass
    cache, merged = runtime.new_cache() if inputs.cache is None else inputs.cache, inputs.merged
    if inputs.protect is not None:
        cache.protect = inputs.protect
    if merged is not None and isinstance(cache.protect, tuple | list) and [*cache.protect] == ["images"]:
        cache.protect = merged.images
        if not bool(merged.images.any()):
            raise ValueError('protect=("images",): the configuration of the model does not name the tokens of images')
    text = inputs.text.clone(memory_format=torch.contiguous_format)
    start = first_real_column(inputs.attention_mask, *text.shape[:2])
    columns = torch.arange(text.shape[1], device=text.device)
    positions = _positions(inputs, (columns - start.to(text.device)[:, None]).clamp(min=0))
    if inputs.position_ids is not None and merged is None:
        _check_ascending(positions, start)
    run = _decoder_of(model, text, positions, inputs.logits_to_keep, merged)
    ids = None if inputs.ids is None else inputs.ids.clone()
    logits = prefill(cache, start, text.shape[1], run, runtime.block_now, ids)
    if merged is not None and cache.record is not None:
        cache.state.ahead = merged.ahead
        cache.record = replace(cache.record, images=read_spans(merged.images, start, text.shape[1]))
    runtime.last_prompt = cache.record
    return cache, logits


def _continue(model: Any, inputs: Inputs) -> tuple[CompressedCache, Tensor]:
    """Append a text to a filled cache or a copy; return that and the logits."""
    runtime: Runtime = model._kvpass
    (rows, tokens), mask, merged = inputs.text.shape[:2], inputs.attention_mask, inputs.merged
    if inputs.cache.reusable and tokens == 1 and not runtime.in_call:
        warnings.warn(_STAYS, stacklevel=6)  # who called the model
    cache = continued(inputs.cache, rows, inputs.text.device)
    if runtime.adapted.longrope_limit is not None:
        check_rows_stay(runtime.adapted.longrope_limit, cache.state.start, cache.state.columns, tokens)
    padding = None
    if mask is not None:
        if tuple(mask.shape) != (rows, cache.columns + tokens):
            raise CacheMismatchError(
                f"attention_mask of shape {list(mask.shape)}: must be [{rows}, {cache.columns + tokens}], "
                "tokens in the cache and new ones"
            )
        if tokens > 1 or mask.device.type == "cpu":
            padding = read_padding(mask, cache)
    text = inputs.text.clone(memory_format=torch.contiguous_format)
    if padding is not None:
        logits, record = _append_padded(model, cache, text, inputs, padding)
    else:
        counted = torch.arange(tokens, device=text.device) + cache.state.next_positions[:, None]
        positions = _positions(inputs, counted, cache.forgotten)
        decoder = _decoder_of(model, text, positions, inputs.logits_to_keep, merged)
        logits, record = append(cache, tokens, decoder, THRESHOLDS[runtime.conditions.recompress], inputs.ids)
    if merged is not None:
        cache.state.appended = 0  # images are not taken back
        cache.state.ahead = cache.state.ahead if merged.ahead is None else merged.ahead
    if record is not None:
        runtime.last_prompt = record
    return cache, logits


def _append_padded(
    model: Any, cache: CompressedCache, text: Tensor, inputs: Inputs, padding: Padding
) -> tuple[Tensor, PromptRecord | None]:
    """Append the real tokens of each row, in one call for all rows with as many, and pad the shorter rows anew.

    Returns:
        logits of the columns in ``inputs``; those of padding are the ones of the last real token before, or else of
        the first. And the new record, if all rows were compressed in one call.
    """
    runtime: Runtime = model._kvpass
    if inputs.merged is not None and bool(padding.taken.any()):
        raise ValueError("attention_mask takes tokens back in a call with images: take them back before, by cache.crop")
    real, logits_to_keep = padding.real, inputs.logits_to_keep
    within = (real.cumsum(1) - 1).clamp(min=0)  # number of the real token whose logits a column gets
    counted = within + (cache.state.next_positions - padding.taken)[:, None]
    positions, wanted = _positions(inputs, counted, cache.forgotten), within[:, -logits_to_keep:]
    logits, record = text.new_empty(0), None
    parts: list[CompressedCache] = []
    groups = padding.groups()
    for taken, tokens, rows in groups:
        part = cache.clone()
        part.batch_select_indices(rows)
        if taken:
            part.crop(-taken)
        new, new_positions = (x[rows][real[rows]].unflatten(0, (-1, tokens)) for x in (text, positions))
        first = int(wanted[rows].min())
        decoder = _decoder_of(model, new, new_positions, tokens - first if logits_to_keep else 0, inputs.merged)
        computed, record = append(part, tokens, decoder, THRESHOLDS[runtime.conditions.recompress])
        if not parts:
            logits = computed.new_empty(*wanted.shape, computed.shape[2])
        logits[rows] = computed.gather(1, (wanted[rows] - first)[..., None].expand(-1, -1, computed.shape[2]))
        if runtime.positions_in_keys:
            move_keys(part, padding.mask.shape[1] - part.columns)
        parts.append(part)
    order = torch.cat([rows for *_, rows in groups]).argsort()
    assert inputs.ids is not None
    joined = cache.state.joined([part.state for part in parts], order, padding.mask, inputs.ids)
    cache.state, cache.record = joined, parts[0].record if len(parts) == 1 else cache.record
    return logits, record if len(parts) == 1 else None


def _positions(inputs: Inputs, computed: Tensor, forgotten: int = 0) -> Tensor:
    """Return true positions: those given, which do not count forgotten tokens, computed ones, or those of images."""
    given, merged = inputs.position_ids, inputs.merged
    if given is None or merged is not None:  # beside images those given are transformers', in generate
        return computed.contiguous() if merged is None or merged.positions is None else merged.positions
    if given.ndim == 3 and bool((given == given[:1]).all()):  # axes of M-RoPE, all equal where all tokens are text
        given = given[0]
    if given.ndim != 2 or given.shape[1] != computed.shape[1] or given.shape[0] not in (1, computed.shape[0]):
        axes = "; several axes (M-RoPE) are those of images, which the model counts itself" * (given.ndim == 3)
        raise ValueError(f"position_ids of shape {list(given.shape)}: must be {list(computed.shape)}{axes}")
    return (given.expand(computed.shape[0], -1) + forgotten).contiguous()


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
