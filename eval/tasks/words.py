"""Words and sentences of the built-in needle model; each word is one token.

One name in eight is held out: its two words occur in training, but never together.
"""

from __future__ import annotations

import random

ATTRIBUTES = ("code", "pin", "number")
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


HELD_OUT_NAMES: tuple[Name, ...] = tuple(
    (a, b) for i, a in enumerate(FIRST_WORDS) for j, b in enumerate(SECOND_WORDS) if (i + j) % 8 == 0
)
"""Names that did not occur in training."""

LEADS = {"long": "the {} of {} {} is", "short": "{} {} {}", "list": "one {} of {} {} is"}
"""Words in front of a value of an attribute of a name."""
QUESTIONS = LEADS | {"list": "the {}s of {} {} are"}


def _noun_phrase(rng: random.Random) -> list[str]:
    if rng.random() < 0.6:
        return ["the", rng.choice(ADJECTIVES), rng.choice(NOUNS)]
    return [rng.choice(_DETERMINERS), rng.choice(NOUNS)]


def _place(rng: random.Random) -> list[str]:
    return [rng.choice(_PREPOSITIONS), "the", rng.choice(PLACES)]


def _clause(rng: random.Random) -> list[str]:
    """6 to 10 words."""
    form, subject = rng.random(), _noun_phrase(rng)
    if form < 0.4:
        return [*subject, rng.choice(VERBS), *_noun_phrase(rng), *_place(rng)]
    if form < 0.6:
        return [*subject, rng.choice(_ADVERBS), rng.choice(VERBS), *_noun_phrase(rng)]
    if form < 0.8:
        return ["in", "the", rng.choice(_TIMES), *subject, rng.choice(VERBS), *_noun_phrase(rng)]
    return [*subject, "was", "very", rng.choice(ADJECTIVES), *_place(rng)]


def decoy(rng: random.Random, name: Name, number: str) -> list[str]:
    """7 to 11 words with a name or number that answers no question."""
    form = rng.randrange(4)
    if form == 0:
        return [*name, "paid", number, "coins", *_place(rng), "."]
    if form == 1:
        return ["in", "the", rng.choice(_TIMES), *name, "counted", number, "coins", "."]
    if form == 2:
        return [*name, rng.choice(VERBS), *_noun_phrase(rng), *_place(rng), "."]
    return [*_noun_phrase(rng), "in", "room", number, rng.choice(VERBS), *_noun_phrase(rng), "."]


def english_sentence(rng: random.Random) -> str:
    """A sentence of filler as text for any model."""
    sentence = " ".join(make_sentence(rng)).removesuffix(" .").replace(" ,", ",")
    return f"{sentence[0].upper()}{sentence[1:]}."


def make_sentence(rng: random.Random) -> list[str]:
    clause = _clause(rng)
    if rng.random() < 0.2:
        clause += [",", rng.choice(_CONJUNCTIONS), *_clause(rng)]
    return [*clause, "."]
