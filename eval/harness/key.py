"""What an answer of the lm-evaluation-harness backend depends on beside the request, as a key for stored answers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

import kvpass
from kvpass.cache.fingerprint import Identity
from kvpass.eval.environment import answering_digest

_FILES = ("answer.py", "prompt.py", *sorted(path.name for path in Path(__file__).parent.glob("harness*.py")))


def library_versions() -> dict[str, str]:
    """Versions of the libraries that decide answers."""
    return {"version": kvpass.__version__, **{name: version(name) for name in ("torch", "transformers", "lm_eval")}}


def fingerprint(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, settings: Mapping[str, Any]) -> str:
    """SHA-256 over model, tokenizer, code, libraries and settings.

    The model is known by its class, configuration and weights, not by the name it was loaded under.

    Args:
        settings: whatever else decides an answer; values that JSON cannot say are taken by their ``repr``.
    """
    known = {
        "model": Identity(model).describe(),
        "generation": model.generation_config.to_dict(),
        "tokenizer": _describe(tokenizer),
        "device": model.device.type,
        "code": answering_digest(*_FILES),
        "libraries": library_versions(),
        "settings": dict(settings),
    }
    return hashlib.sha256(json.dumps(known, sort_keys=True, default=repr).encode()).hexdigest()


def prefix_keys(store: Any, prefix: str) -> None:
    """Let a table of the package ``sqlitedict`` find only what was stored with the same prefix.

    Raises:
        ValueError: it is another kind of table.
    """
    if not hasattr(store, "encode_key"):
        raise ValueError(
            "use_cache: this version of lm_eval keeps its answers in a way kvpass does not know, and would "
            "share them between policies; run without use_cache"
        )
    store.encode_key = lambda key: f"{prefix}:{key}"


def _describe(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    described = {"class": type(tokenizer).__name__, "special": tokenizer.special_tokens_map}
    if not tokenizer.is_fast:
        return {**described, "vocabulary": tokenizer.get_vocab()}
    whole = json.loads(tokenizer.backend_tokenizer.to_str())
    return {**described, **{name: part for name, part in whole.items() if name not in ("padding", "truncation")}}
