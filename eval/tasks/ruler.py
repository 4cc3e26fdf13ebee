"""The RULER tasks that need no download (Hsieh et al. 2024, arXiv 2404.06654): 8 needle tasks, tracing, counting.

Generators, wording and words are kvpass's own, the parameters RULER's; so scores compare policies and models with each
other, not with published tables (the tasks of lm-evaluation-harness have the official wording). Where RULER hides
needles in essays, generated sentences serve, or ``<data_dir>/needle/paul_graham_essays.jsonl[.gz]`` if there is one;
the label ``haystack`` says which.
"""

from __future__ import annotations

import itertools
import random
import re
import string
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

from transformers import PreTrainedTokenizerBase

from kvpass.eval.metrics import string_match_all
from kvpass.eval.needle.words import ADJECTIVES, NOUNS, PLACES, make_sentence
from kvpass.eval.tasks.base import Sample, check_count, find_rows, largest, read_rows

_NOISE = "Coal is black and snow is white. Tides rise and fall. Leaves turn in autumn. On it goes, year after year."
_KEY_WORDS = (ADJECTIVES, NOUNS, PLACES)
_ZETA_2 = 1.6449340668482264


@dataclass(frozen=True, kw_only=True)
class Ruler(ABC):
    """A generator: every sample has its own seed, and the biggest size whose prompt fits.

    Args:
        name: in the registry. max_new_tokens: RULER's.
    """

    name: str
    max_new_tokens: int
    chat: bool = True

    def samples(self, tokenizer: PreTrainedTokenizerBase, tokens: int, count: int, seed: int) -> list[Sample]:
        check_count(count)
        return [self._sample(tokenizer, tokens, str(index), f"{self.name}/{seed}/{index}") for index in range(count)]

    def metric(self, prediction: str, sample: Sample) -> float:
        return string_match_all(prediction, sample.answers)

    def _sample(self, tokenizer: PreTrainedTokenizerBase, tokens: int, index: str, seed: str) -> Sample:
        return largest(
            lambda size: self.build(size, tokens, index, random.Random(seed)),
            tokenizer,
            tokens,
            smallest=self.smallest,
            chat=self.chat,
            name=self.name,
        )

    @property
    @abstractmethod
    def smallest(self) -> int:
        """Least size that can be built."""

    @abstractmethod
    def build(self, size: int, tokens: int, index: str, rng: random.Random) -> Sample:
        """A sample with a haystack of ``size`` units, for prompts of ``tokens``."""


Haystack = Literal["noise", "essay", "needle"]


@dataclass(frozen=True, kw_only=True)
class Niah(Ruler):
    """Magic values of keys, hidden in a haystack: of ``keys`` keys ``queries`` are asked for, each with ``values``.

    Args:
        haystack: one repeated sentence, an essay, or needles of other keys.
        uuid_keys, uuid_values: UUIDs instead of words and seven-digit numbers.
        essay: sentences of an essay of the user's.
    """

    haystack: Haystack
    keys: int = 1
    values: int = 1
    queries: int = 1
    uuid_keys: bool = False
    uuid_values: bool = False
    essay: tuple[str, ...] = ()
    max_new_tokens: int = 128

    @property
    def smallest(self) -> int:
        return self.keys * self.values

    def build(self, size: int, tokens: int, index: str, rng: random.Random) -> Sample:
        kind = "uuid" if self.uuid_values else "number"
        taken: set[str] = set()

        def key() -> str:
            return _unique(lambda: _uuid(rng) if self.uuid_keys else "-".join(map(rng.choice, _KEY_WORDS)), taken)

        def value() -> str:
            return _unique(lambda: _uuid(rng) if self.uuid_values else str(rng.randrange(10**6, 10**7)), taken)

        def needle(key: str, value: str) -> str:
            return f"A magic {kind} of {key} is {value}."

        hidden = {key(): [value() for _ in range(self.values)] for _ in range(self.keys)}
        needles = [needle(k, v) for k, vs in hidden.items() for v in vs]
        rng.shuffle(needles)
        asked = rng.sample(list(hidden), self.queries)
        depths = sorted(rng.random() for _ in needles)
        match self.haystack:
            case "noise":
                hay = [_NOISE] * size
            case "essay":
                hay = _essay(self.essay, size)
            case "needle":
                hay = [needle(key(), value()) for _ in range(size)]
        for depth, sentence in reversed(list(zip(depths, needles, strict=True))):
            hay.insert(round(depth * len(hay)), sentence)
        several, crowded = self.values * self.queries > 1, self.keys * self.values > 1 or self.haystack == "needle"
        subject = f"magic {kind}s of {_listed(asked)}" if several else f"magic {kind} of {asked[0]}"
        return Sample(
            id=index,
            context=f"{'Some' if crowded else 'One'} magic {kind}{'s are' if crowded else ' is'} hidden in this text. "
            f"Remember {'them' if crowded else 'it'}: you will be asked afterwards.\n"
            + (" " if self.haystack == "essay" else "\n").join(hay),
            question=f"\nWhat {'are all the' if several else 'is the'} {subject} given in the text?",
            answer_prefix=f" The {subject} given in the text {'are' if several else 'is'}",
            answers=tuple(v for k in asked for v in hidden[k]),
            max_new_tokens=self.max_new_tokens,
            labels={
                "haystack": ("given essay" if self.essay else "generated") if self.haystack == "essay" else "fixed"
            },
        )


@dataclass(frozen=True, kw_only=True)
class VariableTracking(Ruler):
    """Find every variable that a chain of assignments gives one value; the worked example in front is RULER's idea."""

    name: str = "vt"
    hops: int = 4
    max_new_tokens: int = 30

    @property
    def smallest(self) -> int:
        return self.hops + 1

    def build(self, size: int, tokens: int, index: str, rng: random.Random) -> Sample:
        shown = self._chain(self.hops + 1, 3, rng)
        asked = self._chain(size, 5, rng)
        example = "".join(self._parts(*shown)) + f" {' '.join(shown[1])}"
        context, question, prefix = self._parts(*asked)
        return Sample(
            id=index,
            context=f"{example}\n\n{context}",
            question=question,
            answer_prefix=prefix,
            answers=tuple(asked[1]),
            max_new_tokens=self.max_new_tokens,
        )

    def _chain(self, noises: int, letters: int, rng: random.Random) -> tuple[str, list[str], str]:
        """The text, the variables in the order of assignment, and their value."""
        taken: set[str] = set()
        variables = [
            _unique(lambda: "".join(rng.choices(string.ascii_uppercase, k=letters)), taken)
            for _ in range(self.hops + 1)
        ]
        value = str(rng.randrange(10_000, 100_000))
        links = [f"VAR {variables[0]} = {value}"]
        links += [f"VAR {after} = VAR {before}" for before, after in itertools.pairwise(variables)]
        lines = [_NOISE] * noises
        places = sorted(rng.sample(range(noises + 1), len(links)))
        for place, link in reversed(list(zip(places, links, strict=True))):
            lines.insert(place, link)
        return "\n".join(lines), variables, value

    def _parts(self, text: str, variables: list[str], value: str) -> tuple[str, str, str]:
        return (
            f"Follow the variable assignments hidden in this text.\n\n{text}",
            f"\nQuestion: Which variables have the value {value} in the text above?",
            f" Answer: The text above gives the value {value} to {len(variables)} variables:",
        )


@dataclass(frozen=True, kw_only=True)
class CommonWords(Ruler):
    """Name the ten words of a numbered list that occur most often: 30 times, the others 3; in short lists 6 and 1."""

    name: str = "cwe"
    common: int = 10
    max_new_tokens: int = 120

    @property
    def smallest(self) -> int:
        return self.common + 1

    def build(self, size: int, tokens: int, index: str, rng: random.Random) -> Sample:
        short = tokens < 4096
        shown, shown_common = self._words(*((20, 3, 1) if short else (40, 10, 3)), rng)
        listed, common = self._words(size, *((6, 1) if short else (30, 3)), rng)
        example = "".join(self._parts(shown)) + f" {_numbered(shown_common)}"
        context, question, prefix = self._parts(listed)
        return Sample(
            id=index,
            context=f"{example}\n\n{context}",
            question=question,
            answer_prefix=prefix,
            answers=tuple(common),
            max_new_tokens=self.max_new_tokens,
        )

    def _words(self, size: int, often: int, seldom: int, rng: random.Random) -> tuple[list[str], list[str]]:
        """A shuffled list with ``size`` different words, and the common ones."""
        taken: set[str] = set()
        words = [_unique(lambda: _invented_word(rng), taken) for _ in range(size)]
        common = words[: self.common]
        listed = common * often + words[self.common :] * seldom
        rng.shuffle(listed)
        return listed, common

    def _parts(self, words: list[str]) -> tuple[str, str, str]:
        return (
            f"This is a numbered list of words. Some occur more often than others: remember those.\n{_numbered(words)}",
            f"\nQuestion: Which {self.common} words are the most common ones of the list above?",
            f" Answer: The {self.common} most common words of the list are:",
        )


@dataclass(frozen=True, kw_only=True)
class FrequentWords(Ruler):
    """Name the three most frequent words of a coded text; frequencies fall with the square of the rank.

    The most frequent "word" is a row of dots, which does not count.
    """

    name: str = "fwe"
    max_new_tokens: int = 50

    @property
    def smallest(self) -> int:
        return 100

    def build(self, size: int, tokens: int, index: str, rng: random.Random) -> Sample:
        taken: set[str] = set()
        ranked = ["..."]
        text: list[str] = []
        for rank in itertools.count(1):
            times = int(size / (rank * rank * _ZETA_2))
            if times == 0:
                break
            text += [ranked[rank - 1]] * times
            ranked.append(_unique(lambda: "".join(rng.choices(string.ascii_lowercase, k=6)), taken))
        rng.shuffle(text)
        return Sample(
            id=index,
            context="Read this coded text and count how often each coded word occurs. Which three are the most "
            f"frequent? {' '.join(text)}",
            question="\nQuestion: Which three coded words occur most often in the text above? The dots '...' do not "
            "count. Do not explain.",
            answer_prefix=" Answer: The three words that occur most often in the coded text are:",
            answers=tuple(ranked[1:4]),
            max_new_tokens=self.max_new_tokens,
        )


def tasks(data_dir: Path | None) -> list[Ruler]:
    """The eleven tasks, with the essay of ``data_dir`` if it holds one."""
    path = None if data_dir is None else find_rows(data_dir / "needle", "paul_graham_essays")
    essay = () if path is None else essay_sentences(path)
    return [
        Niah(name="niah_single_1", haystack="noise"),
        Niah(name="niah_single_2", haystack="essay", essay=essay),
        Niah(name="niah_single_3", haystack="essay", essay=essay, uuid_values=True),
        Niah(name="niah_multikey_1", haystack="essay", essay=essay, keys=4),
        Niah(name="niah_multikey_2", haystack="needle"),
        Niah(name="niah_multikey_3", haystack="needle", uuid_keys=True, uuid_values=True),
        Niah(name="niah_multivalue", haystack="essay", essay=essay, values=4),
        Niah(name="niah_multiquery", haystack="essay", essay=essay, keys=4, queries=4),
        VariableTracking(),
        CommonWords(),
        FrequentWords(),
    ]


def essay_sentences(path: Path) -> tuple[str, ...]:
    """Sentences of the field ``text`` of every row, in order."""
    text = " ".join(str(row["text"]) for row in read_rows(path, 10**6))
    return tuple(re.split(r"(?<=[.!?])\s+", " ".join(text.split())))


def _essay(given: tuple[str, ...], size: int) -> list[str]:
    """The first ``size`` sentences of the given essay, over and over, or of the generated one."""
    return list(itertools.islice(itertools.cycle(given), size)) if given else list(_generated(size))


@lru_cache(maxsize=64)
def _generated(size: int) -> tuple[str, ...]:
    rng = random.Random("essay")
    sentences = (" ".join(make_sentence(rng)).removesuffix(" .").replace(" ,", ",") for _ in range(size))
    return tuple(f"{sentence[0].upper()}{sentence[1:]}." for sentence in sentences)


def _unique(draw: Callable[[], str], taken: set[str]) -> str:
    """Something drawn that was not taken yet.

    Raises:
        ValueError: nothing new in a thousand draws.
    """
    for _ in range(1000):
        if (drawn := draw()) not in taken:
            taken.add(drawn)
            return drawn
    raise ValueError(f"tokens too many: the generator knows no more than about {len(taken)} different words or keys")


def _uuid(rng: random.Random) -> str:
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))


def _invented_word(rng: random.Random) -> str:
    return "".join(rng.choice("bdfgklmnprstvz") + rng.choice("aeiou") for _ in range(rng.randint(2, 3)))


def _numbered(words: list[str]) -> str:
    return " ".join(f"{number}. {word}" for number, word in enumerate(words, 1))


def _listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
