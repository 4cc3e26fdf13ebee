"""What the body of a request says of a document, and the tokens of a chat about one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from kvpass.chat import Message, Template, opening
from kvpass.vllm.admission import DOCUMENT, check_names


def named_document(request: Any) -> Any:
    """Return the name of the document that a body has, None for none; from its top level it goes to ``vllm_xargs``."""
    extra = {name: value for name, value in (request.model_extra or {}).items() if name.startswith("kvpass")}
    arguments = {**(getattr(request, "vllm_xargs", None) or {}), **extra}
    check_names(arguments)
    if extra:
        request.vllm_xargs = arguments
    return arguments.get(DOCUMENT)


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
        match notes.get("document"):
            case {"before": str(before), "system": system, "options": dict(options)}:
                return cls(name, ids, Template(tokenizer, options), before, system)
        return None

    def short(self, messages: Sequence[Any]) -> list[Message]:
        """Return the messages of a chat, with "d" in place of the document.

        Args:
            messages: the first is a question, or the document's text, a blank line and a question; before it the
                document's system text may be.
        Raises:
            ValueError: they begin otherwise.
        """
        system = [message for message in messages[:1] if message["role"] in ("system", "developer")]
        first, *others = messages[len(system) :] or [{"role": "nobody"}]
        if system and _text(system[0]) != self.system:
            raise ValueError(
                f"document {self.name!r} was read with the system text {self.system!r}: leave that of the chat out, or "
                "read the document with it: 'kvpass compress --system TEXT'"
            )
        head = self.template.before(opening(self.system, "d", ""))
        question = _text(first).removeprefix(self.before[len(head) - len("d\n\n") :])
        if first["role"] != "user" or not question.strip():
            raise ValueError(f"a chat about document {self.name!r} must begin with a question of the user")
        return [*opening(self.system, "d", question), *others]

    def whole(self, text: str | None) -> dict[str, Any]:
        """Return the text of the whole chat, and the tokens behind the document's, as vLLM's prompts name them.

        Args:
            text: of the messages of :meth:`short`, None if there is none.
        Raises:
            ValueError: text or tokens do not begin as those of the document.
        """
        whole = None if text is None else self.template.with_document(text, self.system, self.before)
        if whole is None:
            raise ValueError(
                f"before the first question the chat template writes another text than document {self.name!r} begins "
                "with: leave tools and chat_template_kwargs out, or read the document anew, which was read with the "
                f"options {self.template.options}"
            )
        ids, known = self.template.ids(whole), len(self.ids)
        if ids[:known] != [*self.ids] or len(ids) == known:
            raise ValueError(
                f"the question changes the tokens of the end of document {self.name!r}: begin it with another character"
            )
        return {"prompt": whole, "prompt_token_ids": ids[known:]}


def _text(message: Mapping[str, Any]) -> str:
    """Return the text of a message; raise ValueError if it has other parts."""
    content = message.get("content") or ""
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else [*content]
    if any(part["type"] != "text" for part in parts):
        raise ValueError("the first message of a chat about a document must be text")
    return "\n".join(part["text"] for part in parts)
