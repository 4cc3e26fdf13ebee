"""Needle in a haystack: facts, lists and variables, and a grid of length x depth.

The text is that of the built-in model, word for word one token there; any other tokenizer reads it as English with
invented names. The prompt is completed, not answered in a chat.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from transformers import PreTrainedTokenizerBase

from kvpass.eval.needle import text as needle_text
from kvpass.eval.tasks.base import Sample, encode, largest

LENGTHS = (0.25, 0.5, 0.75, 1.0)
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)

NAMES = {"needle": "single", "multi_needle": "multiquery"} | {
    f"needle_{task}": task for task in needle_text.TASKS if task not in ("single", "multiquery")
}
"""Names in the registry, and what each hides and asks: a key of :data:`~kvpass.eval.needle.text.TASKS`."""
_SEEDS = 100_000
"""Contexts that one seed can number before it meets those of the next."""


def code_match(prediction: str, answers: Sequence[str]) -> float:
    """1 if each answer stands in the prediction, its numbers as whole numbers, spaces between digits aside."""
    said, *codes = (re.sub(r"(?<=\d) +(?=\d)", "", text) for text in (prediction, *answers))
    return float(all(re.search(rf"(?<!\d){re.escape(code)}(?!\d)", said) for code in codes))


@dataclass(frozen=True)
class Needle:
    """Facts at random places; every sample asks one question.

    Args:
        name: one of :data:`NAMES`.
    """

    name: str
    chat: bool = False

    def samples(self, tokenizer: PreTrainedTokenizerBase, tokens: int, count: int, seed: int) -> list[Sample]:
        made: list[Sample] = []
        index = 0
        while len(made) < count:
            made += hidden_facts(tokenizer, tokens, _SEEDS * seed + index, name=f"{index}", task=NAMES[self.name])
            index += 1
        return made[:count]

    def metric(self, prediction: str, sample: Sample) -> float:
        return code_match(prediction, sample.answers)


@dataclass(frozen=True)
class NeedleGrid(Needle):
    """One fact, at each of :data:`DEPTHS` in texts of each of :data:`LENGTHS`."""

    name: str = "needle_grid"

    def samples(self, tokenizer: PreTrainedTokenizerBase, tokens: int, count: int, seed: int) -> list[Sample]:
        cells = [(round(part * tokens), depth) for part in LENGTHS for depth in DEPTHS]
        made = []
        for index in range(count):
            length, depth = cells[index % len(cells)]
            (sample,) = hidden_facts(tokenizer, length, _SEEDS * seed + index, name=f"{index}")
            context = move_fact(sample.context, sample.question.removeprefix(" question "), depth)
            made.append(replace(sample, context=context, labels={"length": length, "depth": depth}))
        return made


def hidden_facts(
    tokenizer: PreTrainedTokenizerBase, tokens: int, seed: int, *, name: str, task: str = "single"
) -> list[Sample]:
    """One text with facts, and a sample for each that is asked for.

    Args:
        tokens: longest prompt; met exactly where each word is a token.
        name: of the text; first part of each sample's id. task: a key of :data:`~kvpass.eval.needle.text.TASKS`.

    Raises:
        ValueError: too few tokens.
    """

    def build(words: int) -> list[Sample]:
        made = needle_text.sample(task, words, seed)
        texts = (f" {' , '.join(question.answers)} ." for question in made.questions)
        limits = [len(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts]
        return [
            Sample(
                id=f"{name}.{index}",
                context=made.context,
                question=f" {question.text}",
                answers=question.answers,
                max_new_tokens=limits[index],
            )
            for index, question in enumerate(made.questions)
        ]

    kind = needle_text.TASKS[task]
    smallest = 32 + 12 * kind.keys * kind.attributes * kind.values * (kind.hops + 1)
    samples = build(max(tokens, smallest))
    if len(encode(tokenizer, samples[0], chat=False)) == tokens:
        return samples
    words = largest(
        lambda words: build(words)[0], tokenizer, tokens, smallest=smallest, chat=False, name=f"needle, {task}"
    )
    return build(words)


def move_fact(context: str, lead: str, depth: float) -> str:
    """The text with the sentence that begins with ``lead`` at another place.

    Args:
        depth: share of the other sentences that stand before it, in [0, 1].
    """
    sentences = context.removesuffix(" .").split(" . ")
    (fact,) = [sentence for sentence in sentences if sentence.startswith(lead)]
    sentences.remove(fact)
    sentences.insert(round(depth * len(sentences)), fact)
    return " . ".join(sentences) + " ."
