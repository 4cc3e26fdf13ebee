"""Tasks: samples of a context and a question, their token ids, a score.

The prompt of a sample is ``context + question + answer_prefix``, one string. Scope ``prompt`` compresses all of it,
scope ``context`` only the part before the question: the ids are the same in both.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from kvpass.eval.prompt import Prompt, tokenize

_CUT = "\x1fkvpass\x1f"
"""Marks the end of the context while a chat template is applied."""
_LETTER = r"[^\W\u0e00-\u0eff\u2e80-\uffff]"
"""Of a script that puts spaces between words, unlike Chinese, Japanese and Thai."""


@dataclass(frozen=True)
class Sample:
    """One question."""

    id: str  # within its task
    context: str  # what scope "context" compresses
    question: str  # the rest, with the space or newline that divides the two at its front
    answers: tuple[str, ...]  # references
    max_new_tokens: int
    answer_prefix: str = ""  # how the model's turn begins, behind the chat template if there is one
    classes: tuple[str, ...] = ()  # of a classification
    labels: Mapping[str, int | float | str] = field(default_factory=dict)  # to report, such as the depth


def library(name: str) -> Any:
    """Import a library of the extra ``eval``; an ``ImportError`` says how to install it."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ImportError(f"this evaluation needs the package {name!r}: pip install 'kvpass[eval]'") from error


def contains(prediction: str, answer: str) -> bool:
    """Return whether the answer stands in the prediction as words of its own, case and kind of blanks aside."""
    words = r"\s+".join(map(re.escape, answer.split()))
    return re.search(f"(?<!{_LETTER}){words}(?!{_LETTER})", prediction, re.IGNORECASE) is not None


def encode(tokenizer: PreTrainedTokenizerBase, sample: Sample, *, chat: bool, limit: int | None = None) -> Prompt:
    """Token ids of a sample: the head is the context, the rest the question; beyond ``limit`` it loses its middle.

    Args:
        chat: put the prompt into the tokenizer's chat template; without effect when it has none.

    Raises:
        ValueError: a slow tokenizer, or a part of the prompt without a token.
    """
    before, after = sample.context, sample.question
    templated = chat and tokenizer.chat_template is not None
    if templated:
        message = [{"role": "user", "content": f"{before}{_CUT}{after}"}]
        rendered = str(tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True))
        before, after = rendered.split(_CUT)
    prompt = tokenize(tokenizer, before, after + sample.answer_prefix, special=not templated)
    if limit is not None:
        prompt = prompt.cut(limit, "middle")
    for name, part in (("context", prompt.head), ("question", prompt.rest)):
        if not part:
            raise ValueError(f"{name} of sample {sample.id!r} has no token (limit={limit})")
    return prompt


def answer_places(tokenizer: PreTrainedTokenizerBase, samples: Sequence[Sample], *, chat: bool) -> dict[str, list[int]]:
    """Tokens of a prompt in front of answers that stand once in its text, that of the first question by itself."""
    places: dict[str, list[int]] = {}
    for number, sample in enumerate(sample for sample in samples if sample.answers):
        before, *behind = sample.context.split(sample.answers[0])
        if len(behind) == 1:
            shortened = replace(sample, context=before.rstrip())
            place = len(encode(tokenizer, shortened, chat=chat).head)
            places.setdefault("other facts" if number else f"asked for: {sample.answers[0]}", []).append(place)
    return places


def largest(
    build: Callable[[int], Sample],
    tokenizer: PreTrainedTokenizerBase,
    tokens: int,
    *,
    smallest: int,
    chat: bool,
    name: str,
) -> int:
    """The size of the biggest sample of at most ``tokens`` tokens, by binary search.

    ``build`` makes a sample of a size, at least ``smallest``: bigger sizes give longer prompts.

    Raises:
        ValueError: even the smallest is too long; it names the task.
    """

    def length(size: int) -> int:
        return len(encode(tokenizer, build(size), chat=chat))

    if (needed := length(smallest)) > tokens:
        raise ValueError(f"tokens={tokens}: task {name!r} needs at least {needed}")
    good, step = smallest, 1
    while length(good + step) <= tokens:
        good, step = good + step, 2 * step
    while step := step // 2:
        if length(good + step) <= tokens:
            good += step
    return good
