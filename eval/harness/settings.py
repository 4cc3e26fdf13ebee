"""What the harness passes in and stores: arguments, generation settings, and the keys of ``--use_cache``."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import kvpass
from kvpass.eval.environment import model_digest, source_digest


def refuse_unsupported(arguments: dict[str, Any], batch_size: object) -> None:
    """Raise ``ValueError`` for what the harness's own model can do and this one cannot."""
    if arguments.get("backend") == "seq2seq":
        raise ValueError("backend='seq2seq': kvpass compresses decoders only")
    if arguments.get("tp_plan") not in (None, "auto"):
        raise ValueError(f"tp_plan={arguments['tp_plan']!r}: must be 'auto', the plan of the model's own class")
    for name in ("parallelize", "mixed_precision_dtype"):
        if arguments.get(name):
            raise ValueError(f"{name}={arguments[name]!r}: not supported by the model 'kvpass'")
    if not str(batch_size).isdecimal() or int(str(batch_size)) < 1:
        raise ValueError(
            f"batch_size={batch_size!r}: must be an int >= 1; 'auto' would measure neither compression nor generation"
        )


def generation_settings(requested: dict[str, Any], end: str | None, default: int, max_length: int) -> dict[str, Any]:
    """Arguments of ``generate``, and ``until``, for a request as the harness's own models read it.

    Args:
        end: text of the token that ends a text. default: new tokens where the request does not say.
    Raises:
        ValueError: no room for a prompt, or more than one answer a request.
    """
    kwargs: dict[str, Any] = dict(normalize_gen_kwargs(requested, default))
    kwargs["until"] = handle_stop_sequences(kwargs["until"], end)
    kwargs["max_new_tokens"] = kwargs.pop("max_gen_toks")
    if kwargs["max_new_tokens"] >= max_length or "max_length" in kwargs:
        raise ValueError(
            f"generation arguments {requested!r}: max_gen_toks must be below max_length = {max_length}, and "
            "max_length is an argument of the model"
        )
    if (kwargs.get("num_return_sequences") or 1) != 1:
        raise ValueError(
            f"generation arguments {requested!r}: num_return_sequences must be 1 (a request has one answer)"
        )
    if not kwargs["do_sample"]:
        kwargs.pop("temperature", None)
    return kwargs


def library_versions() -> dict[str, str]:
    """Versions of the libraries that decide answers."""
    return {"version": kvpass.__version__, **{name: version(name) for name in ("torch", "transformers", "lm_eval")}}


def fingerprint(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, settings: Mapping[str, Any]) -> str:
    """SHA-256 over model (not its name), tokenizer, code, libraries, and settings: whatever else decides an answer."""
    decisive = {
        "model": model_digest(model),
        "generation": model.generation_config.to_dict(),
        "tokenizer": _describe(tokenizer),
        "device": model.device.type,
        "code": source_digest(),
        "libraries": library_versions(),
        "settings": dict(settings),
    }
    return hashlib.sha256(json.dumps(decisive, sort_keys=True, default=repr).encode()).hexdigest()


def prefix_keys(store: Any, prefix: str) -> None:
    """Put a prefix before every key of a ``sqlitedict`` table; ``ValueError`` where it is another class of table."""
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
