"""Files of ``compress``, which name their model, and of ``Document.save``: for ``ask``, ``chat`` and ``look``."""

from __future__ import annotations

import os
from pathlib import Path

from transformers import AutoTokenizer

import kvpass
from kvpass.cache.cache_file import CacheMetadata, read_saved
from kvpass.cache.state import KVState
from kvpass.chat import Document
from kvpass.config import Compiler
from kvpass.errors import CacheFileError
from kvpass.fetch import PACKAGES
from kvpass.loading import load_model, located
from kvpass.look import page
from kvpass.policies import Policy, from_spec, resolve_budget


def load_document(
    path: str | Path, *, model: str | None = None, device: str = "cpu", backend: Compiler = "inductor"
) -> Document:
    """Load a file of a document; policy, options, budget and format of entries come from it.

    Without ``model`` also the name of the model, if ``kvpass compress`` wrote it and loading it downloads nothing.

    Raises:
        ValueError: the file is damaged or no document, the model is not the one that compressed it, or None and the
            file names another.
    """
    metadata, tensors = read_saved(path)
    name, dtype = _model_of(path, metadata, model)
    policy = _policy_of(path, metadata)
    loaded, tokenizer = load_model(name, dtype=dtype, device=device)
    fast = kvpass.compile(loaded, policy=policy, budget=metadata.budget, backend=backend, entries=metadata.entry_format)
    return Document.restored(path, metadata, tensors, fast, tokenizer)


def document_page(path: str | Path, *, model: str | None = None) -> str:
    """Return :meth:`kvpass.Document.html` of a file; of the model only the tokenizer is loaded.

    Raises:
        ValueError: as for :func:`load_document`, or as for ``html``.
    """
    metadata, tensors = read_saved(path)
    with located(_model_of(path, metadata, model)[0]) as place:
        tokenizer = AutoTokenizer.from_pretrained(place)
    state = KVState(policy=_policy_of(path, metadata), budget=metadata.budget, entry_format=metadata.entry_format)
    return page(state.restored(metadata, tensors), tokenizer)


def _model_of(path: str | Path, metadata: CacheMetadata, model: str | None) -> tuple[str, str]:
    """Return the name of the model of a file, ``model`` if given, and its dtype; ``CacheFileError`` without one."""
    named, dtype = metadata.notes.get("model", model), metadata.notes.get("dtype", model and "auto")
    if not isinstance(named, str) or not isinstance(dtype, str):
        raise CacheFileError(path, "names no model; say which it is: kvpass ask FILE QUESTION --model NAME")
    if not model and named != "builtin" and named not in PACKAGES and not os.path.isdir(named):
        raise CacheFileError(
            path,
            f"names the model {named!r}, which is no folder here, and what is downloaded is not for a file to "
            "decide; say which model it is: kvpass ask FILE QUESTION --model NAME",
        )
    return model or named, dtype


def _policy_of(path: str | Path, metadata: CacheMetadata) -> Policy:
    """Return the policy that a file names, checked against the budget; ``CacheFileError`` if there is none."""
    try:
        policy = from_spec(metadata.policy)
        resolve_budget(policy, metadata.budget)
    except (ValueError, RecursionError) as error:
        raise CacheFileError(path, f"was made with a policy that this kvpass does not have: {error}") from None
    return policy
