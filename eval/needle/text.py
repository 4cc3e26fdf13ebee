"""Prompts that test the built-in model: ``sample(task, tokens, seed)``.

A text is words separated by one space; each word, three-digit number and mark is one token. Filler sentences hide
*facts* (``the code of bara dador is 482 913 .``: an attribute of a two-word name, with a value of one or two tokens),
*lists* (``one code of bara dador is 482 .``, several times with other values) and *variables* (``let bara = 482 .``,
``let lato = bara .``). Some filler is a decoy: it has names and numbers that answer nothing. A question repeats the
words in front of the value: ``question the code of bara dador is``; the answer ends with a full stop. That of a list
is its values in any order, ``482 , 913 .``, that of a variable its chain, ``bara = 482 .``.

One name in eight is held out: its two words occur in training, but never together. Everything is drawn from seeds.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from kvpass.eval.needle.words import (
    ATTRIBUTES,
    DECOYS,
    FIRST_WORDS,
    HELD_OUT_NAMES,
    LONGEST_SIMPLE_SENTENCE,
    NUMBERS,
    SECOND_WORDS,
    SHORTEST_SENTENCE,
    Fact,
    Name,
    chain_words,
    decoy,
    make_sentence,
)

LONGEST = 32768
"""Tokens of the longest prompt; longer ones would need more numbers than there are."""


@dataclass(frozen=True)
class Task:
    """What a prompt hides and asks.

    Attributes:
        keys: names with facts, variables, or names with lists.
        questions: how many are asked of one context.
        form: see :class:`Fact`.
        attributes: facts of each name, one an attribute: those not asked for are hard distractors.
        values: length of a list; for other forms 1.
        hops: for variables, the length of each chain behind the number.
    """

    keys: int
    questions: int = 1
    form: str = "long"
    attributes: int = 1
    values: int = 1
    hops: int = 0


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


@dataclass(frozen=True)
class Question:
    """One question of a context.

    Attributes:
        text: put it behind the context with a space between; greedy decoding says the answer.
        answers: what the answer must say; several are separated by ``,`` and may come in any order.
        max_new_tokens: length of a right answer, full stop included.
    """

    text: str
    answers: tuple[str, ...]
    max_new_tokens: int


@dataclass(frozen=True)
class Sample:
    """A text with facts in it, and questions about them.

    Attributes:
        context: one space between tokens, without the ``<bos>`` that the tokenizer puts first.
    """

    context: str
    questions: tuple[Question, ...]

    def ask(self, question: Question) -> str:
        """The text and one question: a whole prompt."""
        return f"{self.context} {question.text}"


def sample(task: str | Task, tokens: int, seed: int) -> Sample:
    """Hide what a task asks for at random places of random filler.

    The answers' numbers occur nowhere else in the context; names of facts also occur in decoys.

    Args:
        task: a key of :data:`TASKS`, or another task.
        tokens: length of the context and one question in tokens, ``<bos>`` included; met exactly.
        seed: of everything random. Names never occur in training; variables are single words, all seen.

    Raises:
        ValueError: no such task, or tokens that do not hold it, or above :data:`LONGEST`, or more values than numbers.
    """
    if isinstance(task, str) and task not in TASKS:
        raise ValueError(f"task={task!r}: must be one of {', '.join(TASKS)}")
    kind = TASKS[task] if isinstance(task, str) else task
    rng = random.Random(f"{task}/{tokens}/{seed}/True")  # as ever, so that texts stay the same
    left = rng.sample(NUMBERS, len(NUMBERS))[::-1]

    def number() -> str:
        if not left:
            raise ValueError(f"tokens={tokens}: {kind.keys} keys and filler need more than {len(NUMBERS)} numbers")
        return left.pop()

    names = rng.sample(HELD_OUT_NAMES, kind.keys)
    hidden, asked = (_variables if kind.form == "variable" else _facts)(rng, kind, names, number)
    rng.shuffle(asked)
    asked = asked[: kind.questions]
    used = 1 + sum(len(sentence) for sentence in hidden) + len(asked[0][0])
    shortest = used + 2 * SHORTEST_SENTENCE
    if not shortest <= tokens <= LONGEST:
        raise ValueError(f"tokens={tokens}: {len(hidden)} facts and a question need {shortest} to {LONGEST}")
    sentences = _filler(rng, tokens - used, names, number)
    places = sorted(rng.randrange(len(sentences) + 1) for _ in hidden)
    for sentence, place in reversed(list(zip(hidden, places, strict=True))):
        sentences.insert(place, sentence)
    questions = tuple(
        Question(
            " ".join(question), tuple(" ".join(value) for value in values), sum(len(value) + 1 for value in values)
        )
        for question, values in asked
    )
    return Sample(" ".join(word for sentence in sentences for word in sentence), questions)


_Asked = tuple[list[str], list[tuple[str, ...]]]  # words of a question, values of its answer


def _facts(
    rng: random.Random, kind: Task, names: Sequence[Name], number: Callable[[], str]
) -> tuple[list[list[str]], list[_Asked]]:
    """Facts in random order, and what may be asked; values have one or two tokens."""
    hidden, asked = [], []
    for name in names:
        for attribute in rng.sample(ATTRIBUTES, kind.attributes):
            sizes = [1] * kind.values if kind.form == "list" else [rng.randint(1, 2)]
            facts = [Fact((attribute, *name), tuple(number() for _ in range(size)), kind.form) for size in sizes]
            hidden += [fact.sentence for fact in facts]
            asked.append((facts[0].question, [fact.value for fact in facts]))
    rng.shuffle(hidden)
    return hidden, asked


def _variables(
    rng: random.Random, kind: Task, names: Sequence[Name], number: Callable[[], str]
) -> tuple[list[list[str]], list[_Asked]]:
    """Chains in random order, each link behind the one it names, and their last links."""
    words = rng.sample(FIRST_WORDS, len(names) * (kind.hops + 1))
    chains = [words[i :: len(names)] for i in range(len(names))]
    values = [(number(),) for _ in chains]
    links = [
        [Fact((chain[0],), value, "variable").sentence]
        + [Fact((word,), (before,), "variable").sentence for before, word in pairwise(chain)]
        for chain, value in zip(chains, values, strict=True)
    ]
    turns = [i for i in range(len(links)) for _ in links[i]]
    rng.shuffle(turns)
    left = [iter(chain) for chain in links]
    hidden = [next(left[i]) for i in turns]
    asked = [
        (Fact((chain[-1],), value, "variable").question, [chain_words([*chain[-2::-1], *value])])
        for chain, value in zip(chains, values, strict=True)
    ]
    return hidden, asked


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
