"""Documents that are compressed once and asked many times, and chats whose history is compressed as it grows."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from threading import Event
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase, StoppingCriteriaList, TextIteratorStreamer

from kvpass.api import restore_cache
from kvpass.cache.cache import CompressedCache
from kvpass.cache.cache_file import CacheMetadata, read_saved
from kvpass.cache.prompt_record import PromptRecord
from kvpass.config import Spans
from kvpass.errors import CacheFileError
from kvpass.frontends.transformers import CompressedModel
from kvpass.look import page
from kvpass.progress import reading
from kvpass.transformers_compat import CACHE

log = logging.getLogger("kvpass")

Message = dict[str, str]

ROLES = ("system", "tools")
Protect = Sequence[str] | Spans
"""Roles whose text stands before the first message of the user, or spans of tokens."""

_MARKS = ("a.", "1!", "Éa?", "(x)", "中.")
"""Texts in the place of a question; they begin and end with characters of different classes."""

_THOUGHT = re.compile("<think>.*?</think>\\s*", re.DOTALL)


class Template:
    """The text of a chat, and its token ids, as a tokenizer's chat template has it.

    Without a template the messages follow each other, a blank line before each question.

    Args:
        tokenizer: of the model. options: arguments of the template, such as ``enable_thinking=False``; None: no
            template is used, even if there is one.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, options: Mapping[str, Any] | None) -> None:
        self.tokenizer = tokenizer
        self.options = None if options is None or not tokenizer.chat_template else dict(options)

    def text(self, messages: Sequence[Message]) -> str:
        """Return the messages as text that ends where an answer to the last one begins.

        Raises:
            ValueError: the template cannot write these messages.
        """
        if self.options is None:
            return "".join(m["content"] if m["role"] == "assistant" else f"\n\n{m['content']}" for m in messages)[2:]
        try:
            return str(
                self.tokenizer.apply_chat_template(
                    list(messages), tokenize=False, add_generation_prompt=True, **self.options
                )
            )
        except Exception as error:  # jinja's, and what a template itself raises
            raise ValueError(f"the chat template of this tokenizer refuses the messages: {error}") from error

    def ids(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer(text, add_special_tokens=self.options is None).input_ids
        return ids

    def before(self, messages: Sequence[Message]) -> str:
        """Return the text before a question that is put at the end of the last message."""
        *earlier, last = messages
        return _common(*(self.text([*earlier, last | {"content": last["content"] + mark}]) for mark in _MARKS))

    def head(self, system: str | None) -> int:
        """Return how many tokens are before the text of the user's first message: those of system text and tools."""
        return len(_common(*(self.ids(self.text(opening(system, mark, "a"))) for mark in _MARKS)))

    def with_document(self, text: str, system: str | None, before: str) -> str | None:
        """Put a document into the text of a chat that has "d" in its place (:func:`opening`).

        Args:
            text: of the chat. before: that of the chat with the document, up to the first question.
        Returns:
            the text; None if the chat begins otherwise. What is rendered may have the date of today.
        """
        head = self.before(opening(system, "d", ""))
        return before + text[len(head) :] if text.startswith(head) else None

    def end(self) -> list[int]:
        """Return the special token that the template puts behind an answer, if it puts one: it ends an answer too."""
        if self.options is None:
            return []
        user = {"role": "user", "content": "a"}
        texts = [self.text([user, {"role": "assistant", "content": mark}, user]) for mark in _MARKS[:2]]
        after = texts[0][len(_common(*texts)) + len(_MARKS[0]) :].lstrip()
        return [token for token in self.ids(after)[:1] if token in self.tokenizer.all_special_ids]


class Document:
    """A text that was compressed before any question is known; questions and chats about it do not change it.

    Make one with :meth:`read` or :meth:`load`.

    Attributes:
        model: from ``kvpass.compile``. cache: of the chat up to the place of the first question.
        notes: of the caller, saved beside it; anything that JSON can represent.
    """

    def __init__(
        self,
        model: CompressedModel,
        tokenizer: PreTrainedTokenizerBase,
        cache: CompressedCache,
        *,
        before: str,
        system: str | None,
        options: Mapping[str, Any] | None,
    ) -> None:
        self.model, self.tokenizer, self.cache = model, tokenizer, cache
        self.template, self.notes = Template(tokenizer, options), dict[str, Any]()
        self._before, self._system = before, system

    @classmethod
    def read(
        cls, source: str | Path, model: CompressedModel, tokenizer: PreTrainedTokenizerBase, **options: Any
    ) -> Document:
        """Compress a file, UTF-8, given as a ``Path`` or by a name without spaces; or a text, as :meth:`of_text`.

        Raises:
            ValueError: as for :meth:`of_text`, or the file is no UTF-8. OSError: it cannot be read.
        """
        is_text = isinstance(source, str) and any(map(str.isspace, source))
        return cls.of_text(str(source) if is_text else read_text(Path(source)), model, tokenizer, **options)

    @classmethod
    def of_text(
        cls,
        text: str,
        model: CompressedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        system: str | None = None,
        chat: bool = True,
        protect: Protect = (),
        guide: str | None = None,
        **options: Any,
    ) -> Document:
        """Compress a text, as the begin of a chat if the tokenizer has a chat template.

        The text begins the user's first message, behind it come a blank line and the question.

        Args:
            model: from ``kvpass.compile``. tokenizer: of the model. system: text of a system message before it.
            chat: False: a plain text, which the model continues. protect: what every head keeps, in the budget:
                ``("system", "tools")`` is all before the text; or spans of tokens of the chat so far, as of
                :meth:`kvpass.CompressedModel.compress`.
            guide: a question of the kind to come, or several in one text: what it asks for is kept, see ``compress``.
            options: of the chat template, such as ``enable_thinking=False``.
        Raises:
            ValueError: the text is empty, or longer than the model takes; the template refuses it, or the policy the
                guide.
        """
        if not text.strip():
            raise ValueError("the document is empty")
        template = Template(tokenizer, options if chat else None)
        before = template.before(opening(system, text, ""))
        ids = _common(*(template.ids(before + mark) for mark in _MARKS))
        check_length(model, len(ids) + 1, "the document")
        given: dict[str, Any] = {"protect": _spans(protect, lambda: template.head(system))}
        if guide is not None:
            asked = template.ids(template.text(opening(system, text, guide.strip())))
            given["guide"] = torch.tensor([asked[len(_common(asked, ids)) :]], device=model.device)
        with reading(len(ids)):
            cache = model.compress(torch.tensor([ids], device=model.device), **given)
        return cls(model, tokenizer, cache, before=before, system=system, options=template.options)

    @classmethod
    def load(cls, path: str | Path, model: CompressedModel, tokenizer: PreTrainedTokenizerBase) -> Document:
        """Load what :meth:`save` wrote.

        Raises:
            CacheFileError, CacheMismatchError, OSError: as for :func:`kvpass.load_cache`, or the file is of a cache
                without a document.
        """
        return cls.restored(path, *read_saved(path), model, tokenizer)

    @classmethod
    def restored(
        cls,
        path: str | Path,
        metadata: CacheMetadata,
        tensors: Mapping[str, Tensor],
        model: CompressedModel,
        tokenizer: PreTrainedTokenizerBase,
    ) -> Document:
        """Like :meth:`load`, for a caller that has read the file."""
        notes = dict(metadata.notes)
        state = notes.pop("document", None)
        if not isinstance(state, dict) or not isinstance(state.get("before"), str):
            raise CacheFileError(path, "is a cache without a document: kvpass.load_cache reads it")
        document = cls(model, tokenizer, restore_cache(path, metadata, tensors, model), **state)
        document.notes = notes
        return document

    def save(self, path: str | Path) -> None:
        """Write the cache, the text and the notes to a file, as :meth:`kvpass.CompressedCache.save` does."""
        state = {"before": self._before, "system": self._system, "options": self.template.options}
        self.cache.save(path, notes={**self.notes, "document": state})

    def ask(self, question: str, **options: Any) -> str:
        """Return the answer to a question, which knows no question before; see :meth:`Chat.send`."""
        return self.chat().send(question, **options)

    def stream(self, question: str, **options: Any) -> Iterator[str]:
        """Yield the answer to a question piece by piece; see :meth:`Chat.stream`."""
        return self.chat().stream(question, **options)

    def html(self) -> str:
        """Return one HTML page: the text, each token shaded by the share of KV heads that keep it, by layer.

        Raises:
            ValueError: all layers have sliding windows or are recurrent, or several processes share the heads.
        """
        return page(self.cache.state, self.tokenizer)

    def chat(self) -> Chat:
        """Return a chat that begins with this document."""
        return Chat(self.model, self.tokenizer, document=self)

    def text(self, messages: Sequence[Message]) -> str:
        """Return the text of a chat about the document, up to an answer to the last of these messages."""
        first, *others = messages
        short = self.template.text([*opening(self._system, "d", first["content"]), *others])
        text = self.template.with_document(short, self._system, self._before)
        if text is None:
            raise ValueError(
                "the chat template changes what comes before the first question, as those do that move the system text "
                "to the last message: read the document without a system text"
            )
        return text


class Chat:
    """A chat, whose turns go on from each other in one cache.

    The text of a turn is that of the whole chat by the template. What the cache holds of it is not read again; where
    the template changes what was said before, as those that drop thoughts do, that is read again.

    Args:
        model: from ``kvpass.compile``; with ``recompress`` the cache stays within its budget. tokenizer: of the model.
        system: text of a system message. document: that the chat is about. chat: False: messages are plain text.
        protect: ``("system", "tools")``: what comes before the first message stays in every head, and counts in the
            budget; ``()``: it may be dropped.
        options: of the chat template.
    Attributes:
        messages: of the user and the assistant so far, as ``apply_chat_template`` takes them.
        cache: what was read so far; None before the first turn.
        notice: what the last turn dropped of the chat, as a sentence, which the logger ``kvpass`` says too; or "".
    """

    def __init__(
        self,
        model: CompressedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        system: str | None = None,
        document: Document | None = None,
        chat: bool = True,
        protect: Sequence[str] | None = None,
        **options: Any,
    ) -> None:
        if document is not None and (system is not None or options or protect is not None or not chat):
            raise ValueError(
                "system, chat, protect and options of the template are those of the document: leave them out"
            )
        self.model, self.tokenizer = model, tokenizer
        self.messages: list[Message] = []
        self.cache: CompressedCache | None = None
        self.notice = ""
        self._document, self._system = document, system
        self._template = Template(tokenizer, options if chat else None) if document is None else document.template
        self._protect = (ROLES if model.policy.needs_budget else ()) if protect is None else protect

    def send(self, message: str, **options: Any) -> str:
        """Return the answer to a message.

        It ends with the turn, or after ``max_new_tokens``, 512 by default. A call that fails or is interrupted leaves
        the chat as it was.

        Args:
            options: of ``generate``; greedy by default.
        Raises:
            ValueError: the message is empty, or the chat and its answer are longer than the model takes.
        """
        self.notice, messages = "", [*self.messages, {"role": "user", "content": message.strip()}]
        if not message.strip():
            raise ValueError("the message is empty")
        ids = self._ids(messages)
        most = _positions(self.model)
        length = len(ids) + (0 if self.cache is None else self.cache.forgotten)
        new_tokens = 512 if most is None else max(min(512, most - length), 1)
        options = {"max_new_tokens": new_tokens, "do_sample": False, "use_cache": True} | options
        check_length(self.model, length + options["max_new_tokens"], "the chat with its answer")
        cache, seen = self._held(ids)
        new = torch.tensor([ids[seen:]], device=self.model.device)
        if cache is None:
            options |= {"protect": _spans(self._protect, lambda: self._template.head(self._system))}
        else:
            options |= {"past_key_values": cache}
        mask = torch.ones(1, len(ids), dtype=torch.int64, device=new.device)  # over what the cache holds too
        options = {"eos_token_id": self._ends(), **options, "attention_mask": mask, "return_dict_in_generate": True}
        before = None if cache is None else cache.record
        out = self.model.generate(new, **options)
        self.cache = out[CACHE] if cache is None else cache
        self._notice(before)
        answer = str(self.tokenizer.decode(out.sequences[0, new.shape[1] :], skip_special_tokens=True))
        plain = self._template.options is None
        self.messages = [*messages, {"role": "assistant", "content": answer if plain else answer.strip()}]
        return answer.strip()

    def stream(self, message: str, **options: Any) -> Iterator[str]:
        """Yield the answer to a message in pieces of whole words; see :meth:`send`.

        Who stops before the last piece stops the model too; the turn then counts as interrupted.
        """
        before, stop = self.messages, Event()
        pieces = TextIteratorStreamer(self.tokenizer, skip_prompt=True, skip_special_tokens=True)

        def is_stopped(ids: Tensor, scores: Any, **_: Any) -> Tensor:
            return torch.full((len(ids),), stop.is_set(), device=ids.device)

        options["stopping_criteria"] = StoppingCriteriaList([*options.get("stopping_criteria", []), is_stopped])
        with ThreadPoolExecutor(1) as thread:
            turn = thread.submit(self.send, message, streamer=pieces, **options)
            turn.add_done_callback(lambda _: pieces.text_queue.put(pieces.stop_signal))  # also of a call that failed
            try:
                yield from filter(None, pieces)
                turn.result()
            except BaseException:
                stop.set()
                wait([turn])
                self.messages = before
                raise

    def forget_turn(self, turn: int) -> None:
        """Take a message of the user and its answer out of the chat, and out of the cache.

        Args:
            turn: 0 for the first one; -1 for the last.
        Raises:
            IndexError: there is none. ValueError: see :meth:`kvpass.CompressedCache.forget`.
        """
        first = 2 * range(len(self.messages) // 2)[turn]
        self._forget([*self.messages[:first], *self.messages[first + 2 :]])

    def forget_thinking(self) -> None:
        """Take what the answers have within ``<think>`` out of the chat, and out of the cache; see :meth:`forget_turn`.

        Where the template leaves thoughts out of the text, their entries would else be dropped and the chat read again.
        """
        for place, message in enumerate(self.messages):
            if message["role"] == "assistant" and (said := _THOUGHT.sub("", message["content"])) != message["content"]:
                self._forget([*self.messages[:place], message | {"content": said}, *self.messages[place + 1 :]])

    def _forget(self, messages: list[Message]) -> None:
        """Take these messages for the chat so far; the cache forgets what comes before the rest that they share.

        Where the template writes them otherwise, that is all behind their common begin, which the next turn reads.
        """
        if self.cache is not None and self.cache.ids is not None:
            held: list[int] = self.cache.ids[0].tolist()
            ids = self._ids([*messages, {"role": "user", "content": _MARKS[0]}])
            same = len(_common(held, ids[:-1]))
            ends = (end for end in range(same, len(held)) if held[end] == ids[same])
            end = next((end for end in ends if held[end:] == ids[same : same + len(held) - end]), len(held))
            if end > same:
                positions = self.cache.state.text_positions
                self.cache.forget(positions[same], positions[end - 1] + 1)
        self.messages = messages

    def _notice(self, before: PromptRecord | None) -> None:
        """Say what was dropped of the chat, if it was compressed since a record was made."""
        assert self.cache is not None
        record = self.cache.record
        if record is None or record is before:
            return
        tokens = record.columns - int(record.start[0])
        kept = sum(int(record.lengths(x).sum()) for x in record.full_layers)
        heads = sum(x.kept[0].numel() for x in record.full_layers)
        if kept < heads * tokens:
            self.notice = (
                f"the chat was compressed: of {tokens} tokens each head keeps {kept / heads:.0f} on average, as "
                f"{record.policy.name} ranks them"
            )
            log.info("%s", self.notice)

    def _ids(self, messages: Sequence[Message]) -> list[int]:
        """Return the token ids of the whole chat, up to an answer to the last message."""
        if self._document is not None:
            return self._template.ids(self._document.text(messages))
        return self._template.ids(self._template.text([*_system_message(self._system), *messages]))

    def _held(self, ids: list[int]) -> tuple[CompressedCache | None, int]:
        """Return a cache that holds the first of these ids, and how many; at least one is left."""
        cache = self.cache
        if cache is not None and cache.ids is not None and not cache.interrupted:
            held: list[int] = cache.ids[0].tolist()
            same = len(_common(held, ids[:-1]))
            extra = len(held) - same
            if extra and cache.state.only_appends and extra <= cache.state.appended:
                cache.crop(-extra)
                extra = 0
            if not extra:
                return cache, same
            log.info("the chat is read again: its template has changed what was said before, or it was interrupted")
        if self._document is None:
            return None, 0
        cache = self._document.cache.clone()
        assert cache.ids is not None
        if cache.ids[0].tolist() != ids[: cache.columns]:
            raise ValueError("the question changes the tokens of the document's end: begin it with another character")
        return cache, cache.columns

    def _ends(self) -> list[int]:
        ends = self.model.generation_config.eos_token_id
        return sorted({*(ends if isinstance(ends, list) else [] if ends is None else [ends]), *self._template.end()})


def _spans(protect: Protect, head: Callable[[], int]) -> Spans | None:
    """Return the spans of a chat's tokens; ``head``: how many come before the first message of the user.

    Raises:
        ValueError: a name is none of a role.
    """
    if isinstance(protect, Tensor):
        return protect
    spans = [part for part in protect if not isinstance(part, str)]
    if roles := {part for part in protect if isinstance(part, str)}:
        if roles - {*ROLES}:
            raise ValueError(f"protect={protect!r}: name {' or '.join(ROLES)}, or give spans of tokens")
        spans += [(0, tokens)] if (tokens := head()) else []
    return spans or None


def _common(*sequences: Any) -> Any:
    """Return what several texts or lists begin with alike."""
    columns = enumerate(zip(*sequences, strict=False))
    shortest = min(map(len, sequences))
    return sequences[0][: next((i for i, column in columns if len(set(column)) > 1), shortest)]


def _system_message(text: str | None) -> list[Message]:
    """Return the messages before the user's first one: none without a text."""
    return [] if text is None else [{"role": "system", "content": text}]


def opening(system: str | None, document: str, question: str) -> list[Message]:
    """Return the messages of a chat about a document up to its first question."""
    return [*_system_message(system), {"role": "user", "content": f"{document}\n\n{question}"}]


def _positions(model: CompressedModel | PreTrainedModel) -> int | None:
    """Return how many tokens a model takes; None where it does not say."""
    return getattr(model.config.get_text_config(), "max_position_embeddings", None)


def check_length(model: CompressedModel | PreTrainedModel, tokens: int, what: str) -> None:
    """Raise ValueError if a model does not take so many tokens."""
    most = _positions(model)
    if most is not None and tokens > most:
        raise ValueError(f"{what} has {tokens} tokens, and the model takes {most}: shorten it")


def read_text(path: Path) -> str:
    """Return the text of a file, UTF-8 with or without a byte order mark.

    Raises:
        ValueError: it is in another encoding. OSError: it cannot be read.
    """
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{str(path)!r} is no UTF-8 text: byte {error.start} is {error.object[error.start]:#x}"
        ) from None
