"""Compressed documents, for the commands ``compress`` and ``ask``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

import kvpass
from kvpass.api import restore_cache
from kvpass.cache.cache import CompressedCache
from kvpass.cache.cache_file import CacheMetadata, read_saved
from kvpass.config import Compiler
from kvpass.errors import CacheFileError
from kvpass.fetch import PACKAGES
from kvpass.loading import load_model
from kvpass.policies import Policy, from_spec, resolve_budget


@dataclass(frozen=True, eq=False)
class Document:
    """A compressed text and the model, from ``kvpass.compile``, that answers questions about it."""

    model: Any
    tokenizer: PreTrainedTokenizerBase
    cache: CompressedCache
    notes: Mapping[str, str]

    @classmethod
    def compress(cls, text: str, *, model: str, dtype: str = "auto", device: str = "cpu", **options: Any) -> Document:
        """Compress a text before any question is known; ``options`` are those of :func:`kvpass.compile`.

        Raises:
            ValueError: the text is empty, or an argument does not fit.
        """
        if not text.strip():
            raise ValueError("the document is empty")
        loaded, tokenizer = load_model(model, dtype=dtype, device=device)
        fast = kvpass.compile(loaded, **options)
        ids = tokenizer(text, return_tensors="pt").input_ids
        cache = fast.compress(ids.to(device))
        return cls(fast, tokenizer, cache, {"model": model, "dtype": dtype})

    def save(self, path: str | Path) -> None:
        """Write the cache and the name of the model to a file for :meth:`load`."""
        self.cache.save(path, notes=self.notes)

    @classmethod
    def load(
        cls, path: str | Path, *, model: str | None = None, device: str = "cpu", backend: Compiler = "inductor"
    ) -> Document:
        """Load what :meth:`save` wrote; policy, options, budget and format of entries come from the file.

        Without ``model`` also the name of the model, if loading it downloads nothing.

        Raises:
            ValueError: the file is damaged or no document, the model is not the one that compressed it, or None and
                the file names another.
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
        fast = kvpass.compile(
            loaded, policy=policy, budget=metadata.budget, backend=backend, entries=metadata.entry_format
        )
        cache = restore_cache(path, metadata, tensors, fast)
        return cls(fast, tokenizer, cache, {"model": named, "dtype": dtype})

    def ask(self, question: str, *, new_tokens: int = 64) -> str:
        """Return the model's greedy continuation of the text followed by the question, which must have tokens."""
        inputs = self.tokenizer(question, add_special_tokens=False, return_tensors="pt", return_token_type_ids=False)
        tokens = inputs.input_ids.shape[1]
        if tokens == 0:
            raise ValueError("the question has no tokens")
        # over both, since ids longer than the document, with a mask of their own, would be taken for the whole text
        inputs["attention_mask"] = torch.ones(1, self.cache.columns + tokens, dtype=torch.int64)
        greedy = {"max_new_tokens": new_tokens, "do_sample": False, "use_cache": True}
        out = self.model.generate(**inputs.to(self.cache.device), past_key_values=self.cache, **greedy)
        return str(self.tokenizer.decode(out[0, tokens:], skip_special_tokens=True)).strip()


def _policy_of(path: str | Path, metadata: CacheMetadata) -> Policy:
    """Return the policy that a file names, checked against the budget; ``CacheFileError`` if there is none."""
    try:
        policy = from_spec(metadata.policy)
        resolve_budget(policy, metadata.budget)
    except (ValueError, RecursionError) as error:
        raise CacheFileError(path, f"was made with a policy that this kvpass does not have: {error}") from None
    return policy
