"""Words and sentences of the built-in needle model; each word is one token.

One name in eight is held out: its two words occur in training, but never together.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

SPECIAL_WORDS = ("<pad>", "<bos>", "<eos>", "<unk>")
ATTRIBUTES = ("code", "pin", "number")
PLURALS = {"code": "codes", "pin": "pins", "number": "numbers"}
_MARKS = ". , = |".split()
_TASK_WORDS = "question copy let value values of is are in one paid coins room counted was very".split()
ADJECTIVES = (
    "old quiet bright narrow heavy gentle distant rusty golden silver broken hidden humble eager silent frozen dusty "
    "crooked shallow velvet wooden marble hollow crimson tall short quick slow warm cold young clever brave tired "
    "hungry lucky proud simple strange famous"
).split()
NOUNS = (
    "farmer baker sailor teacher doctor painter merchant soldier singer writer hunter miner tailor captain clerk guard "
    "pilot nurse poet judge fox bear crow horse goat rabbit turtle spider salmon pigeon lamp chair table bottle basket "
    "hammer mirror ladder candle blanket letter ticket barrel bucket wagon engine window carpet drum flute"
).split()
VERBS = (
    "carried watched followed found lost painted repaired sold bought cleaned moved lifted dropped opened closed "
    "described admired ignored visited remembered forgot borrowed measured traded guarded"
).split()
PLACES = (
    "river forest market harbor castle village bridge tower garden valley station library temple tavern school island "
    "desert meadow canyon orchard"
).split()
_PREPOSITIONS = "near behind beside beyond inside outside above below across toward".split()
_TIMES = (
    "morning evening winter summer autumn spring night noon monday tuesday wednesday thursday friday saturday sunday"
).split()
_ADVERBS = "slowly quickly often rarely always never soon quietly loudly carefully".split()
_DETERMINERS = "the a every one some".split()
_CONJUNCTIONS = "and but while because then".split()

FIRST_WORDS = tuple(a + b for a in "ba de fi go ku la mi no".split() for b in "ra du li mo pe sha to vi".split())
SECOND_WORDS = tuple(
    a + b for a in "da fe gi jo ru so te zu".split() for b in "bax dor fen gil lum nix pas thu".split()
)
NUMBERS = tuple(f"{number:03d}" for number in range(1000))

SHORTEST_SENTENCE = 7
LONGEST_SIMPLE_SENTENCE = 11
DECOYS = 0.15

Name = tuple[str, str]


def vocabulary() -> list[str]:
    """All words in the order of their token ids, padded to a multiple of 64."""
    groups: tuple[Iterable[str], ...] = (
        *(SPECIAL_WORDS, _MARKS, _TASK_WORDS, ATTRIBUTES, PLURALS.values(), ADJECTIVES, NOUNS, VERBS, PLACES),
        *(_PREPOSITIONS, _TIMES, _ADVERBS, _DETERMINERS, _CONJUNCTIONS, FIRST_WORDS, SECOND_WORDS, NUMBERS),
    )
    words = dict.fromkeys(chain.from_iterable(groups))
    return [*words, *(f"<unused{i}>" for i in range(-len(words) % 64))]


HELD_OUT_NAMES: tuple[Name, ...] = tuple(
    (a, b) for i, a in enumerate(FIRST_WORDS) for j, b in enumerate(SECOND_WORDS) if (i + j) % 8 == 0
)
"""Names that did not occur in training."""


@dataclass(frozen=True)
class Fact:
    """A value of a name's attribute, or of a variable.

    Attributes:
        key: attribute and the two words of the name; for a variable, its one word.
        value: one or two numbers.
        form: ``long`` (the code of bara dador is), ``short`` (code bara dador), ``list`` (one code of bara dador is) or
            ``variable`` (let bara =, asked as ``the value of bara is``; the answer is the chain to its number).
    """

    key: tuple[str, ...]
    value: tuple[str, ...]
    form: str = "long"

    @property
    def lead(self) -> list[str]:
        """The words in front of the value, where it is said."""
        return {
            "long": ["the", self.key[0], "of", *self.key[1:], "is"],
            "short": [*self.key],
            "list": ["one", self.key[0], "of", *self.key[1:], "is"],
            "variable": ["let", *self.key, "="],
        }[self.form]

    @property
    def question(self) -> list[str]:
        """The words in front of the value, where it is asked for."""
        if self.form == "list":
            return ["question", "the", PLURALS[self.key[0]], "of", *self.key[1:], "are"]
        if self.form == "variable":
            return ["question", "the", "value", "of", *self.key, "is"]
        return ["question", *self.lead]

    @property
    def sentence(self) -> list[str]:
        return [*self.lead, *self.value, "."]


def chain_words(chain: Sequence[str]) -> tuple[str, ...]:
    """What a variable leads to, link by link: ``lato = bara = 482``."""
    return tuple(" = ".join(chain).split())


def _noun_phrase(rng: random.Random) -> list[str]:
    if rng.random() < 0.6:
        return ["the", rng.choice(ADJECTIVES), rng.choice(NOUNS)]
    return [rng.choice(_DETERMINERS), rng.choice(NOUNS)]


def _place(rng: random.Random) -> list[str]:
    return [rng.choice(_PREPOSITIONS), "the", rng.choice(PLACES)]


def _clause(rng: random.Random) -> list[str]:
    """6 to 10 words."""
    kind, subject = rng.random(), _noun_phrase(rng)
    if kind < 0.4:
        return [*subject, rng.choice(VERBS), *_noun_phrase(rng), *_place(rng)]
    if kind < 0.6:
        return [*subject, rng.choice(_ADVERBS), rng.choice(VERBS), *_noun_phrase(rng)]
    if kind < 0.8:
        return ["in", "the", rng.choice(_TIMES), *subject, rng.choice(VERBS), *_noun_phrase(rng)]
    return [*subject, "was", "very", rng.choice(ADJECTIVES), *_place(rng)]


def decoy(rng: random.Random, name: Name, number: str) -> list[str]:
    """7 to 11 words with a name or number that answers no question."""
    kind = rng.randrange(4)
    if kind == 0:
        return [*name, "paid", number, "coins", *_place(rng), "."]
    if kind == 1:
        return ["in", "the", rng.choice(_TIMES), *name, "counted", number, "coins", "."]
    if kind == 2:
        return [*name, rng.choice(VERBS), *_noun_phrase(rng), *_place(rng), "."]
    return [*_noun_phrase(rng), "in", "room", number, rng.choice(VERBS), *_noun_phrase(rng), "."]


def english_sentence(rng: random.Random) -> str:
    """A sentence of filler as text for any model."""
    sentence = " ".join(make_sentence(rng)).removesuffix(" .").replace(" ,", ",")
    return f"{sentence[0].upper()}{sentence[1:]}."


def make_sentence(rng: random.Random) -> list[str]:
    """A sentence of filler, its words and marks."""
    clause = _clause(rng)
    if rng.random() < 0.2:
        clause += [",", rng.choice(_CONJUNCTIONS), *_clause(rng)]
    return [*clause, "."]
