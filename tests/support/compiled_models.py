"""Prompts, answers and compiled models that tests of whole models share."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import kvpass
from recorded_calls import interrupt
from tiny_models import compiled_once, left_pad, random_ids, sharing_captures, tiny_model

GIVEN: dict[str, Any] = {"budget": 20, "window": 8, "backend": "eager"}
UNLIMITED = 10**6
"""A budget above the length of every prompt of a test."""


def two_layers(family: str = "llama", **options: Any) -> tuple[PreTrainedModel, Any]:
    """A model of two layers and its compiled copy, shared with other tests: ``compiled_once`` with :data:`GIVEN`."""
    return compiled_once(family, **{"layers": 2, **GIVEN, **options})


def compiled_anew(model: PreTrainedModel | None = None, **options: Any) -> Any:
    """A compiled model, by default a llama of one layer, that a test has for itself: with :data:`GIVEN`."""
    return kvpass.compile(model or tiny_model("llama", layers=1), **GIVEN | options)


def compiled_apart(layers: int = 2, model: PreTrainedModel | None = None, **options: Any) -> Any:
    """A compiled copy of the tiny llama that a test has for itself, with the captures of :func:`two_layers`.

    For tests that count no captures and change no weights: those of ``model`` must be the tiny llama's.
    """
    fast = compiled_anew(model or tiny_model("llama", layers=layers), **options)
    return sharing_captures(fast, "llama", layers, "eager", ())


def prompts_of(*lengths: int) -> list[Tensor]:
    """Random prompts ``[n]`` of these lengths."""
    return [random_ids(1, n, seed=n)[0] for n in lengths]


def padded(*lengths: int) -> tuple[Tensor, Tensor]:
    """:func:`prompts_of` as one left-padded batch: ids and attention mask, int64 ``[B, max n]``."""
    return left_pad(prompts_of(*lengths))


def greedy(model: Any, ids: Tensor | None = None, new: int = 6, **options: Any) -> Any:
    """What ``generate`` returns for the best ``new`` tokens; ``options`` to it."""
    return model.generate(ids, **{"max_new_tokens": new, "do_sample": False, **options})


def spoken(model: Any, ids: Tensor, new: int, mask: Tensor | None = None) -> Tensor:
    """Ids ``[B, T + new]`` of a prompt and of the best tokens after it, by a loop over ``forward``."""
    out, said = model(ids, attention_mask=mask), [ids]
    for _ in range(new):
        said.append(out.logits[:, -1:].argmax(-1))
        out = model(said[-1], past_key_values=out.past_key_values)
    return torch.cat(said, 1)


def in_pieces(model: Any, ids: Tensor, sizes: list[int], mask: Tensor | None = None) -> tuple[Tensor, Any]:
    """Logits ``[B, T, vocabulary]`` of a text that is given in pieces of so many tokens, and its cache."""
    logits: list[Tensor] = []
    cache: Any = None
    seen = 0
    for piece in ids.split(sizes, 1):
        seen += piece.shape[1]
        shown = None if mask is None else mask[:, :seen]
        out = model(piece.contiguous(), attention_mask=shown, past_key_values=cache)
        cache = out.past_key_values
        logits.append(out.logits)
    return torch.cat(logits, 1), cache


@contextmanager
def failing(
    target: Any, name: str, call: int = 1, error: type[BaseException] = KeyboardInterrupt
) -> Iterator[pytest.MonkeyPatch]:
    """The n-th call of a function inside raises an error, and so must what is done there."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(error):
        interrupt(patch, target, name, call, error)
        yield patch


def reloaded(cache: Any, fast: Any, folder: Path) -> Any:
    """The cache that a file of this one gives."""
    cache.save(folder / "cache.kv")
    return kvpass.load_cache(folder / "cache.kv", fast)
