"""Texts of requests to the lm-evaluation-harness backend: where the context ends and the question begins."""

from __future__ import annotations

SEPARATOR = "<|kvpass:ask|>"
"""Stands between context and question in the text of a request. It is removed before a text is tokenised."""


def without_separator(text: str) -> str:
    """The text as a model sees it that compresses the whole prompt."""
    return text.replace(SEPARATOR, "")


def split_at_separator(text: str) -> tuple[str, str]:
    """Context and question of a request with scope ``"context"``.

    The last separator counts; those before it, in few-shot examples, are removed.

    Raises:
        ValueError: no separator, or no question after it.
    """
    context, separator, question = text.rpartition(SEPARATOR)
    start = text if len(text) <= 60 else f"{text[:60]}..."
    if not separator:
        raise ValueError(
            f"scope='context' needs {SEPARATOR!r} between context and question, as the tasks of kvpass have it; "
            f"this prompt has none: {start!r}"
        )
    if not question.strip():
        raise ValueError(f"scope='context': nothing follows {SEPARATOR!r} in the prompt {start!r}")
    return without_separator(context), question
