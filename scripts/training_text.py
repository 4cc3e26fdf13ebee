"""Texts that train the built-in needle model, and what predicting each of their tokens teaches."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import partial

from kvpass.eval.tasks.words import (
    ATTRIBUTES,
    DECOYS,
    FIRST_WORDS,
    NOUNS,
    NUMBERS,
    SECOND_WORDS,
    SEEN_NAMES,
    SHORTEST_SENTENCE,
    VERBS,
    Fact,
    chain_words,
    decoy,
    is_held_out,
    make_sentence,
)

LONGEST_LIST = 3
"""Values of one list at most."""


class Kind(IntEnum):
    """What predicting a token teaches."""

    FILLER = 0
    FIRST = 1  # the first number of a fact's value: the step that matches the key
    REST = 2  # what follows it, and copies
    LIST = 3  # all of a list's answer, whose values may come in any order
    VARIABLE = 4  # all of a variable's answer
    IGNORED = 5  # cannot be known


@dataclass(frozen=True)
class Mix:
    """What training texts are made of; shares and probabilities are in [0, 1].

    Attributes:
        copies, lists, variables: shares of texts that repeat random words, hide lists, hide variables; the rest has
            facts, and a part of it everything.
        short: probability of the short form.
        density: lowest and highest share of sentences that are no filler; drawn log-uniformly for each text.
        attributes: how many are in use.
        clash: probability that a new name shares a word with, or is, an earlier one.
        two: probability of a value of two numbers.
        decoys: share of decoys in the filler.
        hops: longest chain of variables.
        questions: largest share of a text that is questions.
    """

    copies: float = 0.1
    lists: float = 0.15
    variables: float = 0.15
    short: float = 0.3
    density: tuple[float, float] = (0.05, 1.0)
    attributes: int = 3
    clash: float = 0.3
    two: float = 0.4
    decoys: float = DECOYS
    hops: int = 2
    questions: float = 0.4


class TrainingText:
    """One text of exactly ``length`` tokens; its end asks for facts, each once.

    Attributes:
        words: ``<bos>`` first.
        kinds: one :class:`Kind` a word.
        starts: indices of words that begin a sentence.
        others: for the index of a value in a list's answer, the values behind it: each would be as right there.
    """

    def __init__(self, length: int, rng: random.Random, mix: Mix) -> None:
        self.words: list[str] = ["<bos>"]
        self.kinds: list[Kind] = [Kind.IGNORED]
        self.starts: list[int] = []
        self.others: dict[int, tuple[str, ...]] = {}
        self._rng, self._mix = rng, mix
        self._short = rng.random() < mix.short
        self._facts: list[Fact] = []
        self._lists: dict[tuple[str, ...], list[str]] = {}
        self._chains: dict[str, tuple[str, ...]] = {}  # variable -> what it leads to, the number last
        draw = rng.random()
        if draw < mix.copies:
            while len(self.words) < length:
                self._copy(length)
        else:
            draw = (draw - mix.copies) / (1 - mix.copies)
            self._body(length, draw)
        del self.words[length:], self.kinds[length:]
        self.starts = [start for start in self.starts if start < length]
        self.others = {index: words for index, words in self.others.items() if index < length}

    def _add(self, words: Sequence[str], kinds: Sequence[Kind]) -> None:
        self.starts.append(len(self.words))
        self.words += words
        self.kinds += kinds

    def _copy(self, length: int) -> None:
        rng = self._rng
        pool: Sequence[str] = rng.choice([FIRST_WORDS, SECOND_WORDS, NUMBERS, NOUNS + VERBS])
        words = rng.choices(pool, k=rng.randint(4, max(5, min(40, length // 3))))
        self._add(["copy", *words, "|"], [Kind.FILLER] + [Kind.IGNORED] * (len(words) + 1))
        if rng.random() < 0.5:
            self._filler()
        self._add(["copy", *words, "|"], [Kind.FILLER, Kind.IGNORED] + [Kind.REST] * len(words))

    def _body(self, length: int, draw: float) -> None:
        rng, mix = self._rng, self._mix
        asked = max(0.15, rng.uniform(0, mix.questions))
        density = mix.density[0] * (mix.density[1] / mix.density[0]) ** rng.random()
        share = (1 - mix.copies) or 1.0
        writers: list[Callable[[], None]]
        if draw < mix.lists / share:
            writers = [self._list]
        elif draw < (mix.lists + mix.variables) / share:
            writers = [self._variable]
        elif rng.random() < 0.8 or not mix.lists:
            writers = [self._fact]
        else:
            writers = [self._fact, self._fact, self._list, self._variable]
        while len(self.words) < (1 - asked) * length - SHORTEST_SENTENCE:
            if rng.random() < density or len(self.starts) == 1:
                rng.choice(writers)()
            else:
                self._filler()
        todo: list[Callable[[], None]] = [
            *(partial(self._ask, fact.question, [fact.value], Kind.FIRST) for fact in self._facts),
            *(partial(self._ask_list, key, values) for key, values in self._lists.items()),
            *(
                partial(self._ask, Fact((word,), (), "variable").question, [chain_words(chain)], Kind.VARIABLE)
                for word, chain in self._chains.items()
            ),
        ]
        rng.shuffle(todo)
        while len(self.words) < length:
            (todo.pop() if todo else self._filler)()

    def _filler(self) -> None:
        rng = self._rng
        if rng.random() < self._mix.decoys:
            known = [fact.key[1:] for fact in self._facts] or [rng.choice(SEEN_NAMES)]
            name = rng.choice(known) if rng.random() < 0.5 else rng.choice(SEEN_NAMES)
            sentence = decoy(rng, (name[0], name[1]), rng.choice(NUMBERS))
        else:
            sentence = make_sentence(rng)
        self._add(sentence, [_kind_of(word) for word in sentence])

    def _key(self, taken: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
        """Attribute and name, not taken; often close to one that is."""
        rng, attributes = self._rng, ATTRIBUTES[: self._mix.attributes]
        while True:
            name = rng.choice(SEEN_NAMES)
            if taken and rng.random() < self._mix.clash:
                other = rng.choice(taken)
                name = rng.choice([(other[1], name[1]), (name[0], other[2]), (other[1], other[2])])
            key = (rng.choice(attributes), *name)
            if not is_held_out(name) and key not in taken:
                return key

    def _fact(self) -> None:
        rng = self._rng
        if self._facts and rng.random() < 0.2:  # said again, or asked in the middle of the text
            fact = rng.choice(self._facts)
            self._ask(fact.lead if rng.random() < 0.5 else fact.question, [fact.value], Kind.FIRST)
            return
        value = tuple(rng.choices(NUMBERS, k=1 + (rng.random() < self._mix.two)))
        key = self._key([fact.key for fact in self._facts])
        self._facts.append(Fact(key, value, "short" if self._short else "long"))
        self._say(self._facts[-1])

    def _list(self) -> None:
        rng = self._rng
        short = [key for key, values in self._lists.items() if len(values) < LONGEST_LIST]
        key = rng.choice(short) if short and rng.random() < 0.8 else self._key(list(self._lists))
        values = self._lists.setdefault(key, [])
        values.append(rng.choice([number for number in rng.sample(NUMBERS, 8) if number not in values]))
        self._say(Fact(key, (values[-1],), "list"))

    def _variable(self) -> None:
        rng = self._rng
        free = [word for word in FIRST_WORDS if word not in self._chains]
        if not free:
            self._filler()
            return
        word = rng.choice(free)
        known = [other for other, chain in self._chains.items() if len(chain) <= self._mix.hops]
        if known and rng.random() < 0.5:
            other = rng.choice(known)
            self._chains[word] = (other, *self._chains[other])
        else:
            self._chains[word] = (rng.choice(NUMBERS),)
        self._say(Fact((word,), self._chains[word][:1], "variable"))

    def _say(self, fact: Fact) -> None:
        self._add(fact.sentence, [_kind_of(word) for word in fact.sentence])

    def _ask_list(self, key: tuple[str, ...], values: Sequence[str]) -> None:
        values = self._rng.sample(values, len(values))
        question = Fact(key, (), "list").question
        first = len(self.words) + len(question)
        self._ask(question, [(value,) for value in values], Kind.LIST)
        self.others |= {first + 2 * i: tuple(values[i + 1 :]) for i in range(len(values) - 1)}

    def _ask(self, lead: Sequence[str], values: Sequence[tuple[str, ...]], first: Kind) -> None:
        """Add words and the values that they ask for."""
        rest = Kind.REST if first == Kind.FIRST else first
        words, kinds = list(lead), [_kind_of(word) for word in lead]
        for i, value in enumerate(values):
            words += [*value, "," if i + 1 < len(values) else "."]
            kinds += [first, *[rest] * len(value)]
        self._add(words, kinds)


_UNKNOWABLE = frozenset((*FIRST_WORDS, *SECOND_WORDS, *NUMBERS))


def _kind_of(word: str) -> Kind:
    return Kind.IGNORED if word in _UNKNOWABLE else Kind.FILLER
