"""The command ``kvpass serve``: what is checked before vLLM starts, and what starts it."""

from __future__ import annotations

import json
import shlex
import sys
from itertools import pairwise
from typing import Any

from transformers import AutoConfig, AutoTokenizer

from kvpass.cache.cache_file import read_saved
from kvpass.cache.fingerprint import check_settings, settings_of
from kvpass.eval.options import ServeOptions
from kvpass.loading import located
from kvpass.ranks import ONE_PROCESS
from kvpass.vllm.admission import DOCUMENT
from kvpass.vllm.chats import DocumentChat
from kvpass.vllm.documents import SavedDocument, read
from kvpass.vllm.settings import KEY, Settings

_FLAGS = "--enable-chunked-prefill --no-enable-prefix-caching --max-num-seqs 64 --max-num-batched-tokens 512".split()
_LENGTH = 4096
"""Longest prompt with its answer, unless a document is longer or the model takes less."""


class Server:
    """A server that is to be started.

    Args:
        options: of the command. policy: its name, options and budget; empty: each request names a document.
    Raises:
        ValueError: there is no such model, or a file is no document of it, or the engine could not serve it.
        OSError: a file cannot be read.
    """

    def __init__(self, options: ServeOptions, policy: dict[str, Any]) -> None:
        self._options, self._flags, files = options, options.flags or [], options.documents or []
        if self._flag("--additional-config"):
            raise ValueError("--additional-config is what --policy, --budget, --room, --entries and --document fill in")
        with located(options.model) as self._place:
            config, self._tokenizer = (
                AutoConfig.from_pretrained(self._place),
                AutoTokenizer.from_pretrained(self._place),
            )
        self._dtype, entries = self._flag("--dtype"), options.entries
        if first := "".join(files[:1]).partition("=")[2]:
            metadata, _ = read_saved(first)
            entries = entries or metadata.entry_format
            self._dtype = self._dtype or metadata.model["dtype"].removeprefix("torch.")
        self._given = {**policy, "room": options.room, "documents": files, "entries": entries or "model"}
        settings = Settings.read({KEY: self._given})
        assert settings is not None
        self._settings, length = settings, self._flag("--max-model-len") or ""
        self._positions = getattr(config.get_text_config(), "max_position_embeddings", None) or _LENGTH
        self._documents = read(settings, int(length) if length.isdigit() else self._positions)
        for name, document in self._documents.items():
            try:
                check_settings({"config": settings_of(config)}, document.metadata.model)
            except ValueError as error:
                raise ValueError(f"document {name!r}: {error}") from error

    @property
    def command(self) -> list[str]:
        """Words that start vLLM."""
        longest = max([len(document.ids) for document in self._documents.values()], default=0)
        length = min(self._positions, max(_LENGTH, longest + self._settings.room))
        return [
            *(sys.executable, "-P", "-m", "vllm.entrypoints.openai.api_server", "--model", self._place),
            *("--served-model-name", self._options.model, *_FLAGS, "--max-model-len", str(length)),
            *(["--dtype", self._dtype] if self._dtype else []),
            *("--additional-config", json.dumps({KEY: self._given}), *self._flags),
        ]

    @property
    def summary(self) -> str:
        """What is served, and requests to try."""
        settings = self._settings
        chosen = f"{settings.policy.text}, {settings.budget} entries per KV head and layer"
        chosen = "only requests about documents" if settings.only_documents else chosen
        lines = [f"{self._options.model}: {chosen}; room {settings.room} tokens, entries {settings.entry_format!r}"]
        lines += [f"document {name!r}: {_size(document)}" for name, document in self._documents.items()]
        lines += ["", "when it runs, try:"]
        if not settings.only_documents:
            lines.append(self._request("What is a cache?" if self._tokenizer.chat_template else None))
        for name, document in [*self._documents.items()][:1]:
            has_chat = DocumentChat.of(name, [], document.metadata.notes, self._tokenizer)
            lines.append(self._request("What is this text about?" if has_chat else None, name))
        return "\n".join(lines)

    def _flag(self, name: str) -> str | None:
        """Return what a flag of vLLM is given behind ``--``, the last time; None if it is not there."""
        words = [part for word in self._flags for part in (word.split("=", 1) if word.startswith("--") else [word])]
        values = [value for flag, value in pairwise(words) if flag.replace("_", "-") == name]
        return values[-1] if values else None

    def _request(self, message: str | None, document: str | None = None) -> str:
        """Return a command that sends a message, or text to continue if there is none."""
        if message is not None:
            path, body = "chat/completions", {"messages": [{"role": "user", "content": message}]}
        elif document is None:
            path, body = "completions", {"prompt": "A cache is"}
        else:
            path, body = "completions", {"prompt": "\n\nIn short:", "add_special_tokens": False}
        about = {} if document is None else {DOCUMENT: document}
        model = self._flag("--served-model-name") or self._options.model
        text = shlex.quote(json.dumps({"model": model, **body, **about, "max_tokens": 64, "temperature": 0}))
        address = f"localhost:{self._flag('--port') or 8000}/v1/{path}"
        return f"curl {address} -H 'Content-Type: application/json' -d {text}"


def _size(document: SavedDocument) -> str:
    """Return the size of a document in words."""
    parts = [*document.segments(document.of_rank(ONE_PROCESS))]
    share = sum(len(part["pool_k"]) for part in parts) / len(parts) / len(document.ids)
    size = sum(tensor.nbytes for part in parts for tensor in part.values()) / 2**20
    return f"{len(document.ids)} tokens, {share:.0%} of the entries kept, {size:.2f} MiB"
