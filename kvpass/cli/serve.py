"""The command ``kvpass serve``: what is checked before vLLM starts, and what starts it."""

from __future__ import annotations

import json
import shlex
import sys
from itertools import pairwise
from typing import Any

from transformers import AutoConfig, AutoTokenizer

from kvpass.cache.cache_file import read_saved
from kvpass.cache.fingerprint import compare, settings_of
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


def prepare(options: ServeOptions, policy: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Check model and files of a server; return the words that start it, and lines that say what it serves.

    Args:
        policy: its name, options and budget; empty: each request names a document.
    Raises:
        ValueError, OSError: there is no such model, or a file is no document of it, or the engine could not serve it.
    """
    flags, files, entries = options.flags or [], options.documents or [], options.entries
    words = [part for flag in flags for part in flag.split("=", 1)]
    given = {flag.replace("_", "-"): value for flag, value in pairwise([*words, ""])}  # the last one, as vLLM takes it
    if "--additional-config" in given:
        raise ValueError("--additional-config is what --policy, --budget, --room, --entries and --document fill in")
    with located(options.model) as place:
        config, tokenizer = AutoConfig.from_pretrained(place), AutoTokenizer.from_pretrained(place)
    dtype, positions = [], getattr(config.get_text_config(), "max_position_embeddings", None) or _LENGTH
    if first := "".join(files[:1]).partition("=")[2]:
        metadata, _ = read_saved(first)
        entries, dtype = entries or metadata.entry_format, ["--dtype", metadata.model["dtype"].removeprefix("torch.")]
    ours = {KEY: {**policy, "room": options.room, "documents": files, "entries": entries or "model"}}
    settings, length = Settings.read(ours), given.get("--max-model-len", "")
    assert settings is not None
    documents = read(settings, int(length) if length.isdigit() else positions)
    for name, document in documents.items():
        try:
            compare(dict(settings_of(config.to_dict())), document.metadata.model["config"], "config.")
        except ValueError as error:
            raise ValueError(f"document {name!r}: {error}") from error
    longest = max([_LENGTH - options.room, *(len(document.ids) for document in documents.values())])
    filled = [*_FLAGS, *dtype, "--max-model-len", str(min(positions, longest + options.room))]
    server = [sys.executable, "-P", "-m", "vllm.entrypoints.openai.api_server", "--model", place]
    command = [*server, "--served-model-name", options.model, *filled, "--additional-config", json.dumps(ours), *flags]

    chosen = f"{settings.policy.text}, {settings.budget} entries per KV head and layer"
    chosen = "only requests about documents" if settings.only_documents else chosen
    lines = [f"{options.model}: {chosen}; room {settings.room} tokens, entries {settings.entry_format!r}"]
    lines += [f"document {name!r}: {_size(document)}" for name, document in documents.items()]
    lines += ["", "when it runs, try:"]
    address, model = f"localhost:{given.get('--port', 8000)}", given.get("--served-model-name", options.model)
    if not settings.only_documents:
        lines.append(_curl(address, model, None, is_chat=bool(tokenizer.chat_template)))
    for name, document in [*documents.items()][:1]:
        chat = DocumentChat.of(name, document.ids, document.metadata.notes, tokenizer)
        lines.append(_curl(address, model, name, is_chat=chat is not None))
    return command, lines


def _curl(address: str, model: str, document: str | None, *, is_chat: bool) -> str:
    """Return a command that asks a server."""
    question = "What is a cache?" if document is None else "What is this text about?"
    body: dict[str, Any] = {"model": model, "max_tokens": 64, "temperature": 0}
    body |= {"messages": [{"role": "user", "content": question}]} if is_chat else {"prompt": f"\n\n{question}"}
    if document is not None:
        body |= {DOCUMENT: document} | ({} if is_chat else {"add_special_tokens": False})
    url = f"{address}/v1/{'chat/' if is_chat else ''}completions"
    return f"curl {url} -H 'Content-Type: application/json' -d {shlex.quote(json.dumps(body))}"


def _size(document: SavedDocument) -> str:
    parts = [*document.segments(document.of_rank(ONE_PROCESS))]
    share = sum(len(part["pool_k"]) for part in parts) / len(parts) / len(document.ids)
    size = sum(tensor.nbytes for part in parts for tensor in part.values()) / 2**20
    return f"{len(document.ids)} tokens, {share:.0%} of the entries kept, {size:.2f} MiB"
