"""Needle prompts: facts hidden in filler text, and the questions that ask for them.

The words are those of the built-in small model, whose tokenizer makes one token of each word, digit and mark.
Everything is drawn from one seed, so the same arguments give the same prompt on every machine.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

DIGITS = 5

_ADJECTIVES = (
    "old quiet bright narrow heavy gentle distant rusty golden silver broken hidden humble eager silent frozen dusty "
    "crooked shallow velvet wooden marble hollow crimson tall short quick slow warm cold young clever brave tired "
    "hungry lucky proud simple strange famous"
).split()
_NOUNS = (
    "farmer baker sailor teacher doctor painter merchant soldier singer writer hunter miner tailor captain clerk guard "
    "pilot nurse poet judge fox bear crow horse goat rabbit turtle spider salmon pigeon lamp chair table bottle basket "
    "hammer mirror ladder candle blanket letter ticket barrel bucket wagon engine window carpet drum flute"
).split()
_VERBS = (
    "carried watched followed found lost painted repaired sold bought cleaned moved lifted dropped opened closed "
    "counted described admired ignored visited remembered forgot borrowed measured traded guarded"
).split()
_PLACES = (
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
_FUNCTION_WORDS = "before some".split()  # the only other words of the vocabulary that look like names

_SHORTEST_SENTENCE = 7
_LONGEST_SIMPLE_SENTENCE = 11
_FACT_TOKENS = 6 + DIGITS
_QUESTION_TOKENS = 6
_NAME = re.compile(r"[bdfgklmnprstvz][aeiou](?:[bdfgklmnprstvz][aeiou]){1,2}(?:n|r|l|s|x|th)?")


@dataclass(frozen=True)
class Fact:
    """A five-digit code of a name, such as ``Fact("riges", "48213")``."""

    name: str
    code: str

    @property
    def sentence(self) -> str:
        """The sentence that hides it in the text."""
        return f"the code of {self.name} is {' '.join(self.code)} ."

    @property
    def question(self) -> str:
        """The words after which the model says the code."""
        return f"question the code of {self.name} is"

    def answered_by(self, text: str) -> bool:
        """Whether ``text`` is the code, all its digits and a full stop, spaces aside."""
        return text.replace(" ", "") == f"{self.code}."


@dataclass(frozen=True)
class NeedlePrompt:
    """A text with facts in it.

    Attributes:
        context: the text, one space between tokens, without the ``<bos>`` that the tokenizer puts first.
        facts: in the order in which they appear.
    """

    context: str
    facts: tuple[Fact, ...]

    def ask(self, fact: Fact) -> str:
        """The text and the question for one fact: a whole prompt."""
        return f"{self.context} {fact.question}"


def names_of(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """The pseudo-words of the built-in tokenizer that serve as names, in vocabulary order."""
    words = {*_ADJECTIVES, *_NOUNS, *_VERBS, *_PLACES, *_PREPOSITIONS, *_TIMES, *_ADVERBS, *_FUNCTION_WORDS}
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    return [word for word, _ in vocabulary if word not in words and _NAME.fullmatch(word)]


def make_prompt(names: Sequence[str], *, tokens: int, facts: int, seed: int) -> NeedlePrompt:
    """Hide facts at random places of random filler.

    Args:
        names: candidates for the names of the facts, each one token.
        tokens: length of the whole prompt in tokens, ``<bos>`` and question included; met exactly.
        facts: number of facts, each with another name.
        seed: of everything random.

    Raises:
        ValueError: no facts or more than there are names, or too few tokens to hold them.
    """
    if not 1 <= facts <= len(names):
        raise ValueError(f"facts={facts}: must be between 1 and {len(names)}, the number of names")
    filler = tokens - 1 - facts * _FACT_TOKENS - _QUESTION_TOKENS
    shortest = 1 + facts * _FACT_TOKENS + _QUESTION_TOKENS + 2 * _SHORTEST_SENTENCE
    if tokens < shortest:
        raise ValueError(f"tokens={tokens}: {facts} facts and a question need at least {shortest}")
    rng = random.Random(seed)
    hidden = tuple(
        Fact(name, "".join(rng.choices("0123456789", k=DIGITS))) for name in rng.sample(list(names), k=facts)
    )
    sentences = _filler(rng, filler)
    places = sorted(rng.randrange(len(sentences) + 1) for _ in hidden)
    for fact, place in reversed(list(zip(hidden, places, strict=True))):
        sentences.insert(place, fact.sentence)
    return NeedlePrompt(" ".join(sentences), hidden)


def english_words() -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    """Adjectives, nouns and places of the filler."""
    return tuple(_ADJECTIVES), tuple(_NOUNS), tuple(_PLACES)


def filler_sentence(rng: random.Random) -> str:
    """A random sentence, one space between its words and marks."""
    clause = _clause(rng)
    if rng.random() < 0.2:
        clause += f" , {rng.choice(_CONJUNCTIONS)} {_clause(rng)}"
    return f"{clause} ."


def _filler(rng: random.Random, tokens: int) -> list[str]:
    """Sentences of exactly ``tokens`` words and marks together."""
    sentences = []
    while tokens:
        sentence = filler_sentence(rng)
        rest = tokens - len(sentence.split())
        if _fillable(rest):
            sentences.append(sentence)
            tokens = rest
    return sentences


def _fillable(tokens: int) -> bool:
    """Whether sentences can add up to ``tokens``: none, one simple sentence, or two and more of them."""
    one = _SHORTEST_SENTENCE <= tokens <= _LONGEST_SIMPLE_SENTENCE
    return tokens == 0 or one or tokens >= 2 * _SHORTEST_SENTENCE


def _clause(rng: random.Random) -> str:
    """6 to 10 words."""
    kind = rng.choices(("deed", "manner", "time", "state"), weights=(2, 1, 1, 1))[0]
    subject = _noun_phrase(rng)
    place = f"{rng.choice(_PREPOSITIONS)} the {rng.choice(_PLACES)}"
    match kind:
        case "deed":
            return f"{subject} {rng.choice(_VERBS)} {_noun_phrase(rng)} {place}"
        case "manner":
            return f"{subject} {rng.choice(_ADVERBS)} {rng.choice(_VERBS)} {_noun_phrase(rng)}"
        case "time":
            return f"in the {rng.choice(_TIMES)} {subject} {rng.choice(_VERBS)} {_noun_phrase(rng)}"
        case _:
            return f"{subject} was very {rng.choice(_ADJECTIVES)} {place}"


def _noun_phrase(rng: random.Random) -> str:
    if rng.random() < 0.6:
        return f"the {rng.choice(_ADJECTIVES)} {rng.choice(_NOUNS)}"
    return f"{rng.choice(_DETERMINERS)} {rng.choice(_NOUNS)}"
