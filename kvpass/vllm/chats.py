"""What the body of a request says of a document, and the tokens of a chat about one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from kvpass.chat import Message, Template, document_messages
from kvpass.vllm.admission import DOCUMENT, check_names


def named_document(request: Any) -> Any:
    """Return the name of the document that a body has, None for none; from its top level it goes to ``vllm_xargs``.

    Raises:
        ValueError: the body has another key that begins with ``kvpass``, or the endpoint answers nothing.
    """
    extra = {name: value for name, value in (request.model_extra or {}).items() if name.startswith("kvpass")}
    arguments = getattr(request, "vllm_xargs", None) or {}
    check_names([*extra, *arguments])
    if extra and not hasattr(request, "vllm_xargs"):
        raise ValueError(f"{DOCUMENT}: this endpoint knows no documents")
    if extra:
        request.vllm_xargs = arguments = {**arguments, **extra}
    return arguments.get(DOCUMENT)


_OF_TEMPLATE = ("tools", "chat_template", "chat_template_kwargs", "reasoning_effort", "documents")
"""What a body may give to the chat template."""


class DocumentChat(NamedTuple):
    """The chat that a document begins, as :class:`kvpass.Document` wrote it to the file."""

    name: str
    ids: Sequence[int]
    template: Template
    before: str  # the text up to the first question
    system: str | None

    @classmethod
    def of(cls, name: str, ids: Sequence[int], notes: Mapping[str, Any], tokenizer: Any) -> DocumentChat | None:
        """Return that of a file with these notes; None if its text is in no chat template."""
        state = notes.get("document")
        if not isinstance(state, dict) or not isinstance(state.get("before"), str) or state.get("options") is None:
            return None
        return cls(name, ids, Template(tokenizer, state["options"]), state["before"], state.get("system"))

    def short(self, messages: Sequence[Any]) -> tuple[str, list[Message]]:
        """Return the text before the first question, and the messages, with "d" in place of the document.

        Args:
            messages: that begin with a question, or with the document's text, a blank line and the question; before
                it the document's system text may be.
        Raises:
            ValueError: they begin otherwise.
        """
        begin = [message for message in messages[:1] if message["role"] in ("system", "developer")]
        first, *others = messages[len(begin) :] or [{"role": "nobody"}]
        if begin and _text(begin[0]) != self.system:
            made = "without a system text" if self.system is None else f"with the system text {self.system!r}"
            raise ValueError(
                f"document {self.name!r} was read {made}: leave that of the chat out, or read the document with it: "
                "'kvpass compress --system TEXT'"
            )
        head = self.template.before(document_messages(self.system, "d", ""))
        question = _text(first).removeprefix(self.before[len(head) - len("d\n\n") :])
        if first["role"] != "user" or not question.strip():
            raise ValueError(f"a chat about document {self.name!r} must begin with a question of the user")
        return head, [*document_messages(self.system, "d", question), *others]

    def whole(self, head: str, text: str | None, request: Any) -> str:
        """Return the text of the whole chat.

        Args:
            head: before the first question of :meth:`short`. text: of these messages, None if there is none.
        Raises:
            ValueError: the text begins otherwise than the document.
        """
        if text is None or not text.startswith(head):
            given = [name for name in _OF_TEMPLATE if getattr(request, name, None)]
            raise ValueError(
                f"before the first question the chat template writes{' with ' if given else ''}{' and '.join(given)} "
                f"another text than document {self.name!r} begins with: leave that out, or read the document anew; it "
                f"was read with the options {self.template.options}"
            )
        return self.before + text[len(head) :]

    def rest(self, ids: list[int]) -> list[int]:
        """Return the tokens behind the document's; raise ValueError if these do not begin with them."""
        document, rest = ids[: len(self.ids)], ids[len(self.ids) :]
        if document != [*self.ids] or not rest:
            raise ValueError(
                f"the tokens of the chat do not begin with those of document {self.name!r}: begin the question with "
                "another character, and leave add_special_tokens and truncate_prompt_tokens out"
            )
        return rest


def _text(message: Mapping[str, Any]) -> str:
    """Return the text of a message; raise ValueError if it has other parts."""
    content = message.get("content")
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else [*(content or [])]
    if any(part.get("type") != "text" for part in parts):
        raise ValueError("the first message of a chat about a document must be text")
    return "\n".join(part["text"] for part in parts)
