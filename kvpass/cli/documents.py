"""Documents for the commands ``compress``, ``ask`` and ``chat``: with the name of their model."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import kvpass
from kvpass.cache.cache_file import CacheMetadata, read_saved
from kvpass.chat import Document
from kvpass.config import Compiler
from kvpass.errors import CacheFileError
from kvpass.fetch import PACKAGES
from kvpass.loading import load_model
from kvpass.policies import Policy, from_spec, resolve_budget


def read_document(
    text: str,
    *,
    model: str,
    dtype: str = "auto",
    device: str = "cpu",
    system: str | None = None,
    chat: bool = True,
    **options: Any,
) -> Document:
    """Compress a text; ``system`` and ``chat`` as in :meth:`kvpass.Document.read`, ``options`` of ``kvpass.compile``.

    Raises:
        ValueError: the text is empty, or an argument does not fit.
    """
    loaded, tokenizer = load_model(model, dtype=dtype, device=device)
    document = Document.of_text(text, kvpass.compile(loaded, **options), tokenizer, system=system, chat=chat)
    document.notes = {"model": model, "dtype": dtype}
    return document


def load_document(
    path: str | Path, *, model: str | None = None, device: str = "cpu", backend: Compiler = "inductor"
) -> Document:
    """Load a file of ``kvpass compress``; policy, options, budget and format of entries come from it.

    Without ``model`` also the name of the model, if loading it downloads nothing.

    Raises:
        ValueError: the file is damaged or no document, the model is not the one that compressed it, or None and the
            file names another.
    """
    metadata, tensors = read_saved(path)
    named, dtype = metadata.notes.get("model"), metadata.notes.get("dtype")
    if not isinstance(named, str) or not isinstance(dtype, str):
        raise CacheFileError(path, "is a cache that names no model: kvpass.load_cache reads it")
    policy = _policy_of(path, metadata)
    if not model and named != "builtin" and named not in PACKAGES and not os.path.isdir(named):
        raise CacheFileError(
            path,
            f"names the model {named!r}, which is no folder here, and what is downloaded is not for a file to "
            "decide; say which model it is: kvpass ask FILE QUESTION --model NAME",
        )
    loaded, tokenizer = load_model(model or named, dtype=dtype, device=device)
    fast = kvpass.compile(loaded, policy=policy, budget=metadata.budget, backend=backend, entries=metadata.entry_format)
    return Document.restored(path, metadata, tensors, fast, tokenizer)


def _policy_of(path: str | Path, metadata: CacheMetadata) -> Policy:
    """Return the policy that a file names, checked against the budget; ``CacheFileError`` if there is none."""
    try:
        policy = from_spec(metadata.policy)
        resolve_budget(policy, metadata.budget)
    except (ValueError, RecursionError) as error:
        raise CacheFileError(path, f"was made with a policy that this kvpass does not have: {error}") from None
    return policy
