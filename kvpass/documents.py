"""Compress a document once, ask it questions later: what the commands ``compress`` and ``ask`` do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

import kvpass
from kvpass.api import restore_cache
from kvpass.backend import Compiler
from kvpass.cache import CompressedCache
from kvpass.cache_file import read_metadata
from kvpass.config import Budget
from kvpass.errors import CacheFileError
from kvpass.loading import load_model
from kvpass.policies import from_spec


@dataclass(frozen=True, eq=False)
class Document:
    """A compressed text and the model that can be asked about it.

    Attributes:
        model: from ``kvpass.compile``. cache: the text; questions leave it as it is.
    """

    model: Any
    tokenizer: PreTrainedTokenizerBase
    cache: CompressedCache
    notes: Mapping[str, str]

    @classmethod
    def compress(
        cls,
        text: str,
        *,
        model: str,
        policy: str,
        budget: int | float | str | None,
        options: Mapping[str, Any] | None = None,
        dtype: str = "auto",
        device: str = "cpu",
        backend: Compiler = "inductor",
    ) -> Document:
        """Compress a text before any question is known.

        Args:
            model: ``builtin``, or a folder or hub name. options: of the policy. dtype: as ``kvpass eval`` has it.
        Raises:
            ValueError: the text is empty, or an argument does not fit.
        """
        if not text.strip():
            raise ValueError("the document is empty")
        made, tokenizer = load_model(model, dtype=dtype, device=device)
        fast = kvpass.compile(made, policy=policy, budget=budget, backend=backend, **(options or {}))
        ids = tokenizer(text, return_tensors="pt").input_ids
        return cls(fast, tokenizer, fast.compress(ids.to(device)), {"model": model, "dtype": dtype})

    def save(self, path: str | Path) -> None:
        """Write the cache and the name of the model to a file for :meth:`load`."""
        self.cache.save(path, notes=self.notes)

    @classmethod
    def load(
        cls, path: str | Path, *, model: str | None = None, device: str = "cpu", backend: Compiler = "inductor"
    ) -> Document:
        """What :meth:`save` wrote; policy, options and budget come from the file, and the model unless it is given.

        Raises:
            ValueError: the file is damaged or no document, or the model is not the one that compressed it.
        """
        metadata = read_metadata(path)
        notes = metadata["notes"]
        if "model" not in notes or "dtype" not in notes:
            raise CacheFileError(path, "is a cache that names no model: kvpass.load_cache reads it")
        made, tokenizer = load_model(model or notes["model"], dtype=notes["dtype"], device=device)
        policy, budget = from_spec(metadata["policy"]), Budget.from_dict(metadata["budget"])
        fast = kvpass.compile(made, policy=policy, budget=budget, backend=backend)
        return cls(fast, tokenizer, restore_cache(path, metadata, fast), notes)

    def ask(self, question: str, *, new_tokens: int = 64) -> str:
        """The model's continuation, greedily, of the text followed by the question.

        Raises:
            ValueError: the question is empty, or ``new_tokens`` below 1.
        """
        if new_tokens < 1:
            raise ValueError(f"new_tokens={new_tokens}: must be >= 1")
        ids = self.tokenizer(question, add_special_tokens=False, return_tensors="pt").input_ids
        if ids.numel() == 0:
            raise ValueError("the question has no tokens")
        ids = ids.to(self.cache.device)
        mask = torch.cat([self.cache.attention_mask, torch.ones_like(ids)], 1)
        out = self.model.generate(
            ids,
            attention_mask=mask,
            past_key_values=self.cache,
            max_new_tokens=new_tokens,
            do_sample=False,
            use_cache=True,
        )
        return str(self.tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)).strip()
