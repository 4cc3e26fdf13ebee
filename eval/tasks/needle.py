"""Needle in a haystack: one fact, several facts, and a grid of length x depth.

The text is that of the built-in model, word for word one token there; any other tokenizer reads it as English with
invented names. The prompt is completed, not answered in a chat.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from transformers import PreTrainedTokenizerBase

from kvpass.eval.needle import text as needle_text
from kvpass.eval.tasks.base import Sample, check_count, encode, largest

LENGTHS = (0.25, 0.5, 0.75, 1.0)
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)

_SHORTEST, _SHORTEST_MANY = 48, 128
_SEEDS = 100_000
"""Contexts that one seed can number before it meets those of the next."""


def code_match(prediction: str, answer: str) -> float:
    """1 if the answer is a whole number in the prediction, spaces between digits aside."""
    said, code = (re.sub(r"(?<=\d) +(?=\d)", "", text) for text in (prediction, answer))
    return float(re.search(rf"(?<!\d){re.escape(code)}(?!\d)", said) is not None)


@dataclass(frozen=True)
class Needle:
    """Facts at random places; every sample asks for one of them.

    Args:
        name: in the registry. many: eight facts a context, four of them asked for; else one.
    """

    name: str
    many: bool
    chat: bool = False

    def samples(self, tokenizer: PreTrainedTokenizerBase, tokens: int, count: int, seed: int) -> list[Sample]:
        check_count(count)
        made: list[Sample] = []
        index = 0
        while len(made) < count:
            made += hidden_facts(tokenizer, tokens, _SEEDS * seed + index, many=self.many, name=f"{index}")
            index += 1
        return made[:count]

    def metric(self, prediction: str, sample: Sample) -> float:
        return code_match(prediction, sample.answers[0])


@dataclass(frozen=True)
class NeedleGrid:
    """One fact, at each of :data:`DEPTHS` in texts of each of :data:`LENGTHS`."""

    name: str = "needle_grid"
    chat: bool = False

    def samples(self, tokenizer: PreTrainedTokenizerBase, tokens: int, count: int, seed: int) -> list[Sample]:
        check_count(count)
        cells = [(round(part * tokens), depth) for part in LENGTHS for depth in DEPTHS]
        made = []
        for index in range(count):
            length, depth = cells[index % len(cells)]
            (sample,) = hidden_facts(tokenizer, length, _SEEDS * seed + index, many=False, name=f"{index}")
            context = move_fact(sample.context, _lead(sample), depth)
            made.append(replace(sample, context=context, labels={"length": length, "depth": depth}))
        return made

    def metric(self, prediction: str, sample: Sample) -> float:
        return code_match(prediction, sample.answers[0])


def hidden_facts(tokenizer: PreTrainedTokenizerBase, tokens: int, seed: int, *, many: bool, name: str) -> list[Sample]:
    """One text with facts, and a sample for each that is asked for.

    Args:
        tokens: longest prompt; met exactly where each word is a token.
        many: eight facts, else one.
        name: of the text; first part of each sample's id.

    Raises:
        ValueError: too few tokens.
    """

    def build(words: int) -> list[Sample]:
        made = needle_text.sample("multiquery" if many else "single", words, seed)
        return [_sample(made.context, question.text, question.answers[0], words) for question in made.questions]

    smallest = _SHORTEST_MANY if many else _SHORTEST
    guess = build(max(tokens, smallest))
    if len(encode(tokenizer, guess[0], chat=False)) != tokens:
        task = "multi_needle" if many else "needle"
        found = largest(lambda words: build(words)[0], tokenizer, tokens, smallest=smallest, chat=False, name=task)
        guess = build(int(found.labels["words"]))
    return [
        replace(sample, id=f"{name}.{index}", max_new_tokens=_answer_tokens(tokenizer, sample), labels={})
        for index, sample in enumerate(guess)
    ]


def _sample(context: str, question: str, answer: str, words: int) -> Sample:
    return Sample(
        id="", context=context, question=f" {question}", answers=(answer,), max_new_tokens=1, labels={"words": words}
    )


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


def _lead(sample: Sample) -> str:
    return sample.question.removeprefix(" question ")


def _answer_tokens(tokenizer: PreTrainedTokenizerBase, sample: Sample) -> int:
    return len(tokenizer(f" {sample.answers[0]} .", add_special_tokens=False)["input_ids"])
