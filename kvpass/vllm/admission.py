"""Checks of requests before the engine sees them, and the prompt of each row of a batch."""

from __future__ import annotations

import hashlib
import itertools
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from kvpass.cache.spans import check_room
from kvpass.vllm.layout import BlockLayout, BlockSize
from kvpass.vllm.settings import Settings

if TYPE_CHECKING:
    from kvpass.vllm.chats import DocumentChat
    from kvpass.vllm.documents import Documents

DOCUMENT = "kvpass_document"
"""Names a document in ``SamplingParams.extra_args``; over HTTP in the body or in ``vllm_xargs``, which has no dicts."""
PROTECT = "kvpass_protect"
"""Says, likewise, how many of the first tokens of a prompt every head of every layer keeps."""


class Continued(NamedTuple):
    """The document that a request continues, and its tokens, with which the request's prompt then begins."""

    name: str
    tokens: int

    @classmethod
    def of(cls, params: Any) -> Continued | None:
        """Return that of an admitted request's parameters."""
        found = (getattr(params, "extra_args", None) or {}).get(DOCUMENT)
        return None if found is None else cls(*found)


def block_size(layout: BlockLayout, tokens: int, params: Any) -> BlockSize:
    """Return what an admitted request needs; the scheduler, which gives it, and workers, which use it, must agree.

    Args:
        tokens: of its prompt, with those of its document. params: its sampling parameters.
    """
    document = Continued.of(params)
    return layout.size_of(tokens, params.max_tokens, document.tokens if document else 0)


class Prompt(NamedTuple):
    """The prompt of a request that runs."""

    length: int  # without what was generated
    digest: bytes  # of its tokens, and of how many are protected: what it keeps depends on both
    size: BlockSize  # of its block
    number: int  # no other that runs has it; less than most run
    document: Continued | None = None  # that it continues
    resumed: bool = False  # it was preempted, and what was generated before comes behind it
    protected: int = 0  # its first tokens that are kept in any case

    @classmethod
    def of(cls, ids: Sequence[int], size: BlockSize, number: int, params: Any = None, resumed: bool = False) -> Prompt:
        """Return that of an admitted request with these sampling parameters."""
        protected = (getattr(params, "extra_args", None) or {}).get(PROTECT) or 0
        digest = hashlib.blake2b(array("q", [protected, *ids]).tobytes(), digest_size=16).digest()
        return cls(len(ids), digest, size, number, Continued.of(params), resumed, protected)

    @property
    def compressed(self) -> int:
        """Its first tokens that are compressed; those behind them are appended."""
        return self.length if self.document is None else self.document.tokens


class Rows:
    """The prompt of each row of a worker's batch; vLLM tells attention backends only of whole lengths.

    Attributes:
        latest: of the engine that is being built; its attention backend, made later, takes it from here.
        documents: of the engine, None without any. layout: of its blocks, which the backend knows. added: rows that
            came with the last update.
    """

    latest: ClassVar[Rows]
    layout: BlockLayout

    def __init__(self, documents: Documents | None = None) -> None:
        self.documents = documents
        self._prompts: dict[int, Prompt] = {}
        self.added: list[int] = []

    def __getitem__(self, row: int) -> Prompt:
        return self._prompts[row]

    def of_first(self, rows: int) -> Tensor:
        """Return int64 ``[3, rows]``, on the host: tokens compressed, whether in a document, slots of the tails."""
        prompts = [self._prompts.get(row) for row in range(rows)]
        compressed = [prompt.compressed if prompt else 0 for prompt in prompts]
        continues = [prompt is not None and prompt.document is not None for prompt in prompts]
        tails = [prompt.size.tail if prompt else self.layout.tail for prompt in prompts]
        return torch.tensor([compressed, continues, tails], dtype=torch.int64, device="cpu")

    def update(self, removed: Sequence[int], added: Sequence[Any], moved: Sequence[Any]) -> None:
        """Apply vLLM's changes of a batch, in its order.

        Args:
            added: (row, parameters, prompt, output) of new or resumed requests, and of those that were left out of the
                step before. moved: (from, to, whether swapped).
        """
        new = set()
        for row in removed:
            self._prompts.pop(row, None)
        for row, params, ids, output in added:
            self._prompts.pop(row, None)
            numbers = {prompt.number for prompt in self._prompts.values()}
            number = next(each for each in itertools.count() if each not in numbers)
            size = block_size(self.layout, len(ids), params)
            self._prompts[row] = Prompt.of(ids, size, number, params, resumed=bool(output))
            new.add(number)
        for source, target, swapped in moved:
            prompt, other = self._prompts.pop(source, None), self._prompts.pop(target, None)
            if prompt is not None:
                self._prompts[target] = prompt
            if swapped and other is not None:
                self._prompts[source] = other
        self.added = [row for row, prompt in self._prompts.items() if prompt.number in new]


BEAMS = "kvpass does not support beam search in vLLM, which reads the prompt anew for each token"
"""Why: vLLM sends every token of every beam as a new prompt, answer included."""


def check_names(names: Iterable[object]) -> None:
    """Raise ValueError for an argument of a request that begins with ``kvpass`` and is unknown."""
    for name in names:
        if str(name).startswith("kvpass") and name not in (DOCUMENT, PROTECT):
            raise ValueError(f"{name}: kvpass does not know this argument of a request; it knows {[DOCUMENT, PROTECT]}")


@dataclass(frozen=True)
class Admission:
    """What the front end of an engine checks requests against."""

    settings: Settings
    documents: Mapping[str, Sequence[int]]  # token ids by name
    max_model_len: int
    chats: Mapping[str, DocumentChat] = field(default_factory=dict)  # of documents that begin one
    begins: frozenset[int] = frozenset()  # special tokens that begin a prompt or a chat, and no question

    @classmethod
    def of(cls, config: Any, tokenizer: Any = None) -> Admission | None:
        """Return that of an engine's ``VllmConfig``; None without kvpass."""
        settings = Settings.read(config.additional_config)
        if settings is None:
            return None
        from kvpass.vllm.chats import DocumentChat
        from kvpass.vllm.documents import read

        saved, length = read(settings, config.model_config.max_model_len), config.model_config.max_model_len
        documents = {name: document.ids for name, document in saved.items()}
        if tokenizer is None:
            return cls(settings, documents, length)
        chats = [DocumentChat.of(name, ids, saved[name].metadata.notes, tokenizer) for name, ids in documents.items()]
        begins = {ids[0] for ids in documents.values()} & {*tokenizer.get_added_vocab().values()}
        begins |= {tokenizer.bos_token_id} - {None}
        return cls(settings, documents, length, {chat.name: chat for chat in chats if chat}, frozenset(begins))

    def admit(self, request: Any) -> None:
        """Change a request: it ends with ``length`` when its room is used up, and begins with the document it names.

        A block has room for a fixed number of tokens. Chat clients usually leave ``max_tokens`` out, so a larger number
        is not an error: the answer ends with ``finish_reason="length"``, as at the end of the context.

        Args:
            request: with its own copy of ``sampling_params``.
        Raises:
            ValueError: an argument is unknown, there is no such document, its question or ``min_tokens`` is more than
                there is room for, what it protects cannot be kept, or the request is a streaming session; HTTP 400.
        """
        most = self.settings.room + 1  # the last token is never appended
        params = request.sampling_params
        check_names(params.extra_args or {})
        if request.resumable:
            raise ValueError("kvpass does not support streaming sessions: send the whole prompt in one request")
        if self.settings.only_documents or (params.extra_args or {}).get(DOCUMENT) is not None:
            most -= self._continue(request)
        if (protected := (params.extra_args or {}).get(PROTECT)) is not None:
            self._check_protected(protected, 0 if Continued.of(params) else len(request.prompt_token_ids))
        if params.min_tokens > most:
            raise ValueError(f"min_tokens={params.min_tokens}: kvpass keeps room for {most} tokens; raise 'room'")
        params.max_tokens = min(params.max_tokens, most)

    def chat_about(self, name: object) -> DocumentChat:
        """Return the chat that a document begins; ValueError for a document that begins none, or that there is not."""
        if not isinstance(name, str) or name not in self.chats:
            raise ValueError(
                f"{DOCUMENT}={name!r}: of the documents of this server, {[*self.documents]}, those with a chat are "
                f"{[*self.chats]}: name one, use /v1/completions, or start the server with one made without --no-chat"
            )
        return self.chats[name]

    def _check_protected(self, protected: object, tokens: int) -> None:
        """Raise ValueError unless so many tokens fit the budget, and the ``tokens`` that are compressed."""
        budget, window = self.settings.budget, self.settings.policy.window
        if type(protected) is not int or not 0 <= protected <= tokens:
            raise ValueError(
                f"{PROTECT}={protected!r}: must be an int from 0 to {tokens}, the tokens of the prompt that are "
                "compressed; of a question about a document there are none"
            )
        outside = min(protected, max(tokens - window, 0))
        check_room(f"{PROTECT}={protected}: {outside} tokens", outside, window, budget)

    def _continue(self, request: Any) -> int:
        """Put the tokens of the document that a request names before its own; return how many its own are."""
        params, own = request.sampling_params, len(request.prompt_token_ids)
        name = (params.extra_args or {}).get(DOCUMENT)
        if not isinstance(name, str) or name not in self.documents:
            raise ValueError(f"{DOCUMENT}={name!r}: the documents of this server are {[*self.documents]}")
        ids, room, most = self.documents[name], self.settings.room, self.max_model_len
        if self.begins.intersection(request.prompt_token_ids[:1]):
            raise ValueError(
                f"a question about document {name!r} begins with the token of a new prompt or chat: send messages to "
                '/v1/chat/completions, or "add_special_tokens": false and the text that follows the document'
            )
        if own > room:
            raise ValueError(
                f"a question of {own} tokens about document {name!r}: kvpass keeps room for {room}, with its answer; "
                "raise 'room'"
            )
        if len(ids) + own >= most:
            raise ValueError(
                f"document {name!r} has {len(ids)} tokens and the question {own}: both and an answer must fit in "
                f"--max-model-len {most}"
            )
        if params.prompt_logprobs is not None:
            raise ValueError(
                f"prompt_logprobs: document {name!r} is not read again; leave them out, and echo with logprobs"
            )
        request.prompt_token_ids = [*ids, *request.prompt_token_ids]
        params.extra_args = {**params.extra_args, DOCUMENT: Continued(name, len(ids))}
        return own
