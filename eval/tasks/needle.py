"""Needle in a haystack: facts, lists and variables, and a grid of length x depth.

A text is words separated by one space; each word, three-digit number and mark is one token of the built-in model, and
any other tokenizer reads it as English with invented names. Filler sentences hide *facts* (``the code of bara dador is
482 913 .``: an attribute of a two-word name, with a value of one or two tokens), *lists* (``one code of bara dador is
482 .``, several times with other values) and *variables* (``let bara = 482 .``, ``let lato = bara .``). Some filler is
a decoy: it has names and numbers that answer nothing. A question repeats the words in front of the value: ``question
the code of bara dador is``; the answer ends with a full stop. That of a list is its values in any order, ``482 , 913
.``, that of a variable its chain, ``bara = 482 .``. The prompt is completed, not answered in a chat.

One name in eight is held out: its two words occur in training, but never together. Everything is drawn from seeds.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from transformers import PreTrainedTokenizerBase

from kvpass.eval.tasks.base import Sample, encode, largest
from kvpass.eval.tasks.words import (
    ATTRIBUTES,
    DECOYS,
    FIRST_WORDS,
    HELD_OUT_NAMES,
    LEADS,
    LONGEST_SIMPLE_SENTENCE,
    NUMBERS,
    QUESTIONS,
    SECOND_WORDS,
    SHORTEST_SENTENCE,
    Name,
    decoy,
    make_sentence,
)

LONGEST = 32768
"""Tokens of the longest prompt; longer ones would need more numbers than there are."""


@dataclass(frozen=True)
class Task:
    """What a prompt hides and asks."""

    keys: int  # names with facts, variables, or names with lists
    questions: int = 1  # of one context
    form: str = "long"  # a key of LEADS, or "variable"
    attributes: int = 1  # facts of each name: those not asked for are hard distractors
    values: int = 1  # length of a list; for other forms 1
    hops: int = 0  # for variables, the length of each chain behind the number


TASKS = {
    "single": Task(keys=1),
    "multikey": Task(keys=4),
    "multikey12": Task(keys=12),
    "short12": Task(keys=12, form="short"),
    "attributes": Task(keys=4, attributes=3),
    "multiquery": Task(keys=8, questions=4),
    "multivalue": Task(keys=2, form="list", values=3),
    "tracking0": Task(keys=3, form="variable"),
    "tracking1": Task(keys=3, form="variable", hops=1),
    "tracking2": Task(keys=3, form="variable", hops=2),
}


LENGTHS = (0.25, 0.5, 0.75, 1.0)
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)

NAMES = {"needle": "single", "multi_needle": "multiquery"} | {
    f"needle_{task}": task for task in TASKS if task not in ("single", "multiquery")
}
"""Names in the registry, and what each hides and asks: a key of :data:`TASKS`."""
_SEEDS = 100_000
"""Contexts that one seed can number before it meets those of the next."""


def hide(task: str | Task, tokens: int, seed: int) -> list[Sample]:
    """Hide what a task asks for at random places of random filler, and ask questions of that one text.

    The answers' numbers occur nowhere else in the context; names of facts also occur in decoys. Greedy decoding of the
    built-in model says the answer: several are separated by ``,`` and may come in any order.

    Args:
        task: a key of :data:`TASKS`, or another task.
        tokens: length of the context and one question in tokens, ``<bos>`` included; met exactly.
        seed: of everything random. Names never occur in training; variables are single words, all seen.

    Raises:
        ValueError: no such task, or tokens that do not hold it, or above :data:`LONGEST`, or more values than numbers.
    """
    if isinstance(task, str) and task not in TASKS:
        raise ValueError(f"task={task!r}: must be one of {', '.join(TASKS)}")
    plan = TASKS[task] if isinstance(task, str) else task
    rng = random.Random(f"{task}/{tokens}/{seed}/True")  # as ever, so that texts stay the same
    left = rng.sample(NUMBERS, len(NUMBERS))[::-1]

    def number() -> str:
        if not left:
            raise ValueError(f"tokens={tokens}: {plan.keys} keys and filler need more than {len(NUMBERS)} numbers")
        return left.pop()

    names = rng.sample(HELD_OUT_NAMES, plan.keys)
    hidden, asked = (_variables if plan.form == "variable" else _facts)(rng, plan, names, number)
    rng.shuffle(asked)
    asked = asked[: plan.questions]
    used = 1 + sum(len(sentence) for sentence in hidden) + len(asked[0][0])
    shortest = used + 2 * SHORTEST_SENTENCE
    if not shortest <= tokens <= LONGEST:
        raise ValueError(f"tokens={tokens}: {len(hidden)} facts and a question need {shortest} to {LONGEST}")
    sentences = _filler(rng, tokens - used, names, number)
    places = sorted(rng.randrange(len(sentences) + 1) for _ in hidden)
    for sentence, place in reversed(list(zip(hidden, places, strict=True))):
        sentences.insert(place, sentence)
    context = " ".join(word for sentence in sentences for word in sentence)
    return [
        Sample(
            id=str(index),
            context=context,
            question=f" {' '.join(question)}",
            answers=tuple(" ".join(value) for value in values),
            max_new_tokens=sum(len(value) + 1 for value in values),  # full stop included
        )
        for index, (question, values) in enumerate(asked)
    ]


_Asked = tuple[list[str], list[tuple[str, ...]]]  # words of a question, values of its answer


def _facts(
    rng: random.Random, plan: Task, names: Sequence[Name], number: Callable[[], str]
) -> tuple[list[list[str]], list[_Asked]]:
    """Facts in random order, and what may be asked; values have one or two tokens."""
    hidden, asked = [], []
    for name in names:
        for attribute in rng.sample(ATTRIBUTES, plan.attributes):
            sizes = [1] * plan.values if plan.form == "list" else [rng.randint(1, 2)]
            values = [tuple(number() for _ in range(size)) for size in sizes]
            hidden += [[*LEADS[plan.form].format(attribute, *name).split(), *value, "."] for value in values]
            question = QUESTIONS[plan.form].format(attribute, *name)
            asked.append((f"question {question}".split(), values))
    rng.shuffle(hidden)
    return hidden, asked


def _variables(
    rng: random.Random, plan: Task, names: Sequence[Name], number: Callable[[], str]
) -> tuple[list[list[str]], list[_Asked]]:
    """Chains in random order, each link behind the one it names, and their last links."""
    words = rng.sample(FIRST_WORDS, len(names) * (plan.hops + 1))
    chains = [[number(), *words[i :: len(names)]] for i in range(len(names))]
    links = [[f"let {word} = {before} .".split() for before, word in pairwise(chain)] for chain in chains]
    turns = [left for left in map(iter, links) for _ in range(plan.hops + 1)]
    rng.shuffle(turns)
    asked = [
        (f"question the value of {chain[-1]} is".split(), [tuple(" = ".join(chain[-2::-1]).split())])
        for chain in chains
    ]
    return [next(left) for left in turns], asked


def _filler(rng: random.Random, tokens: int, names: Sequence[Name], number: Callable[[], str]) -> list[list[str]]:
    """Sentences of exactly ``tokens`` words; half of the decoys have one of ``names``."""
    sentences = []
    while tokens:
        if rng.random() < DECOYS:
            name = rng.choice(names) if rng.random() < 0.5 else (rng.choice(FIRST_WORDS), rng.choice(SECOND_WORDS))
            sentence = decoy(rng, name, number())
        else:
            sentence = make_sentence(rng)
        rest = tokens - len(sentence)
        if rest == 0 or rest >= 2 * SHORTEST_SENTENCE or SHORTEST_SENTENCE <= rest <= LONGEST_SIMPLE_SENTENCE:
            sentences.append(sentence)
            tokens = rest
    return sentences


def code_match(prediction: str, answers: Sequence[str]) -> float:
    """1 if each answer stands in the prediction, its numbers as whole numbers, spaces between digits aside."""
    text, *codes = (re.sub(r"(?<=\d) +(?=\d)", "", words) for words in (prediction, *answers))
    return float(all(re.search(rf"(?<!\d){re.escape(code)}(?!\d)", text) for code in codes))


@dataclass(frozen=True)
class Needle:
    """Facts at random places; every sample asks one question. The name is one of :data:`NAMES`."""

    name: str
    chat: bool = False

    def samples(self, tokenizer: PreTrainedTokenizerBase, tokens: int, count: int, seed: int) -> list[Sample]:
        task = NAMES[self.name]
        texts = range(math.ceil(count / TASKS[task].questions))
        samples = (hidden_facts(tokenizer, tokens, _SEEDS * seed + n, name=f"{n}", task=task) for n in texts)
        return [sample for of_text in samples for sample in of_text][:count]

    def metric(self, prediction: str, sample: Sample) -> float:
        return code_match(prediction, sample.answers)


@dataclass(frozen=True)
class NeedleGrid(Needle):
    """One fact, at each of :data:`DEPTHS` in texts of each of :data:`LENGTHS`."""

    name: str = "needle_grid"

    def samples(self, tokenizer: PreTrainedTokenizerBase, tokens: int, count: int, seed: int) -> list[Sample]:
        cells = [(round(part * tokens), depth) for part in LENGTHS for depth in DEPTHS]
        samples = []
        for index in range(count):
            length, depth = cells[index % len(cells)]
            (sample,) = hidden_facts(tokenizer, length, _SEEDS * seed + index, name=f"{index}")
            context = move_fact(sample.context, sample.question.removeprefix(" question "), depth)
            samples.append(replace(sample, context=context, labels={"length": length, "depth": depth}))
        return samples


def hidden_facts(
    tokenizer: PreTrainedTokenizerBase, tokens: int, seed: int, *, name: str, task: str = "single"
) -> list[Sample]:
    """One text of at most ``tokens`` tokens with facts, and a sample for each that is asked for.

    ``name``: of the text; first part of each sample's id. ``task``: a key of :data:`TASKS`.

    Raises:
        ValueError: too few tokens.
    """

    def build(words: int) -> list[Sample]:
        samples = []
        for sample in hide(task, words, seed):
            answer = tokenizer(f" {' , '.join(sample.answers)} .", add_special_tokens=False)["input_ids"]
            samples.append(replace(sample, id=f"{name}.{sample.id}", max_new_tokens=len(answer)))
        return samples

    plan = TASKS[task]
    smallest = 32 + 12 * plan.keys * plan.attributes * plan.values * (plan.hops + 1)
    samples = build(max(tokens, smallest))
    if len(encode(tokenizer, samples[0], chat=False)) == tokens:
        return samples
    words = largest(
        lambda words: build(words)[0], tokenizer, tokens, smallest=smallest, chat=False, name=f"needle, {task}"
    )
    return build(words)


def move_fact(context: str, lead: str, depth: float) -> str:
    """The text with the sentence that begins with ``lead`` behind a share, ``depth``, of the other sentences."""
    sentences = context.removesuffix(" .").split(" . ")
    (fact,) = [sentence for sentence in sentences if sentence.startswith(lead)]
    sentences.remove(fact)
    sentences.insert(round(depth * len(sentences)), fact)
    return " . ".join(sentences) + " ."
