"""A text with images, as the language model inside of a class that reads images gets it.

The class's own code merges what it makes of images into the embeddings of the text. It runs as it is, up to its
language model, and is stopped there. What the language model was given is what captures take: embeddings, and behind
them in the same tensor what else each token has, such as the features that Qwen3-VL adds in later layers.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from kvpass.adapt.changed_class import changed_class, in_captures, once

Parts = tuple[tuple[str, tuple[int, ...], bool], ...]
"""Arguments that are side by side in a tensor ``[B, T, P]``: name, sizes for each token, whether it is a list."""

_ADDS = "_deepstack_process"  # method of a language model that adds a list's values to the tokens of a mask
_PREFIX = "kvpass_"  # of arguments that the language model takes, and the class around it does not
_MARKS = ("image_token_id", "image_token_index", "video_token_id", "video_token_index")
_STOPS = ContextVar("stop before the language model", default=False)


class Merged(NamedTuple):
    """A text with images, as captures take it.

    Attributes:
        packed: ``[B, T, P]``. parts: of it; empty: embeddings alone. images: which tokens are of images, ``[B, T]``.
        positions: ``[B, T, axes]``; None: those of text. ahead: see :class:`~kvpass.cache.state.KVState`.
        sees, sees_near: what tokens see in layers without and with a sliding window, ``[B, T, T]``; None: no later one.
    """

    packed: Tensor
    parts: Parts
    images: Tensor
    positions: Tensor | None
    ahead: Tensor | None
    sees: Tensor | None
    sees_near: Tensor | None


class _Reached(BaseException):
    """Raised, with its arguments, in place of running the language model."""


def admit_images(model: Any) -> None:
    """Let the language model of a compiled copy be stopped, if the model's class reads images."""
    if any("pixel" in name for name in inspect.signature(type(model).forward).parameters):
        language_model = model.get_decoder()
        language_model.__class__ = _stopped(type(language_model))


@once
def _stopped(kind: type[nn.Module]) -> Any:
    def captured(self: Any, *args: Any, **given: Any) -> Any:
        merged = {name.removeprefix(_PREFIX): value for name, value in given.items() if name.startswith(_PREFIX)}
        given = {name: value for name, value in given.items() if not name.startswith(_PREFIX)}
        return kind.forward(self, *args, **{**given, **merged})

    def plain(self: Any, *args: Any, **given: Any) -> Any:
        if _STOPS.get():
            raise _Reached({"args": args, **given} if args else given)
        return kind.forward(self, *args, **given)

    changed = {"forward": in_captures(captured, plain)}
    if hasattr(kind, _ADDS):  # captures add zeros to the other tokens
        changed[_ADDS] = in_captures(lambda self, hidden, mask, values: hidden + values, getattr(kind, _ADDS))
    return changed_class(kind, **changed)


def unpacked(packed: Tensor, parts: Parts) -> dict[str, Any]:
    """Return the arguments that a tensor ``[B, T, P]`` has side by side."""
    given: dict[str, Any] = {}
    sizes = [math.prod(shape) for _, shape, _ in parts]
    for (name, shape, is_list), part in zip(parts, packed.split(sizes, -1), strict=True):
        value = part.contiguous().unflatten(-1, shape)
        given[name] = list(value.unbind(2)) if is_list else value
    return given


def merge(model: Any, ids: Tensor, mask: Tensor | None, images: Mapping[str, Any]) -> Merged:
    """Run a compiled copy's own code up to its language model; ValueError: what that is given is not understood.

    Args:
        ids, mask: int64 ``[B, T]``. images: further arguments of the model's forward.
    """
    given = _given(model, input_ids=ids, attention_mask=mask, **images)
    given = {k: x for k, x in given.items() if not (x is None or x is False or k in ("return_dict", "logits_to_keep"))}
    real = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()
    counted = real.cumsum(1) - 1, torch.arange(ids.shape[1], device=ids.device)  # without padding, and with it
    embeds, positions, axes, ahead = given.pop("inputs_embeds", None), given.pop("position_ids", None), None, None
    if embeds is None:
        _refuse(model, "input_ids", ids)
    if positions is not None and positions.shape[:-2] == (3,):
        axes = positions.permute(1, 2, 0).contiguous()
        ahead = axes.amax(2).masked_fill(~real, -1).amax(1) + 1 - real.sum(1)
    elif positions is not None and not any(bool(((positions == each) | ~real).all()) for each in counted):
        _refuse(model, "position_ids", positions)
    sees = _sees_later(model, given.pop("attention_mask", None), real)
    parts, values = _parts(model, given, ids, embeds)
    packed = torch.cat([embeds, *values], -1)
    text = unpacked(packed, parts) if parts else {"inputs_embeds": packed}
    text["position_ids"] = counted[0] if axes is None else positions
    passed_on = _given(model, **text)  # as captures give it
    for name, value in text.items():
        found = passed_on.get(name)
        if found is None or len(found) != len(value) or not all(map(torch.equal, found, value)):
            _refuse(model, f"another {name.removeprefix(_PREFIX)} than it is given, which is", value)
    marks = [mark for name in _MARKS if isinstance(mark := getattr(model.config, name, None), int)]
    of_images = torch.isin(ids, torch.tensor(marks, dtype=ids.dtype, device=ids.device))
    return Merged(packed, parts, of_images, axes, ahead, *sees)


def _given(model: Any, **arguments: Any) -> dict[str, Any]:
    """Return what a model's own code gives its language model, which is not run."""
    stops = _STOPS.set(True)
    try:
        model._original_class.forward(model, use_cache=False, **arguments)
    except _Reached as reached:
        return dict(*reached.args)
    finally:
        _STOPS.reset(stops)
    return {}


def _parts(model: Any, given: Mapping[str, Any], ids: Tensor, embeds: Tensor) -> tuple[Parts, list[Tensor]]:
    """Return what belongs to tokens beside embeddings, ``[B, T, P]`` each, and what all of that is."""
    takes = inspect.signature(model._original_class.forward).parameters
    parts, values = list[Any](), list[Tensor]()
    masks = {name: x for name, x in given.items() if isinstance(x, Tensor) and x.dtype == torch.bool}
    adds = len(masks) == 1 and hasattr(model.get_decoder(), _ADDS)
    for name, value in given.items():
        if (is_list := isinstance(value, list)) and adds:
            stacked = torch.stack(value, 1)
            value = stacked.new_zeros(*ids.shape, *stacked.shape[1:]).index_put((*masks.values(),), stacked)
        if isinstance(value, Tensor) and value.is_floating_point() and value.shape[:2] == ids.shape:
            parts.append((name if name in takes else _PREFIX + name, tuple(value.shape[2:]), is_list))
            values.append(value.flatten(2).to(embeds))
        elif not (name in masks and adds):
            _refuse(model, name, value)
    return (("inputs_embeds", (embeds.shape[2],), False), *parts) if parts else (), values


def _sees_later(model: Any, masks: Any, real: Tensor) -> list[Tensor | None]:
    """Return the masks of layers without and with a sliding window, bool ``[B, T, T]``, where tokens see later ones."""
    found, both = dict.fromkeys(("full_attention", "sliding_attention")), real[:, :, None] & real[:, None]
    for name, mask in masks.items() if isinstance(masks, dict) else [(name, masks) for name in found]:
        if mask is None or (isinstance(mask, Tensor) and mask.ndim == 2 and bool((mask.bool() == real).all())):
            continue
        if not isinstance(mask, Tensor) or mask.ndim != 4:
            _refuse(model, name, mask)
        seen = (mask if mask.dtype == torch.bool else mask == 0)[:, 0] & both
        later, hides = bool(seen.triu(1).any()), bool((both & ~seen).tril().any())
        if (later and name not in found) or (hides and name == "full_attention"):
            _refuse(model, name, mask)
        if later:
            found[name] = seen
    return list(found.values())


def _refuse(model: Any, name: str, value: Any) -> NoReturn:
    what = f"of shape {list(value.shape)}" if isinstance(value, Tensor) else f"of type {type(value).__name__}"
    raise ValueError(
        f"{type(model).__name__} gives its language model {name} {what} with images: kvpass takes embeddings, "
        "positions and what belongs to single tokens; use the uncompiled model for prompts with images"
    )
