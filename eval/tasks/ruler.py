"""RULER (Hsieh et al. 2024, arXiv 2404.06654): the eleven tasks that need no download, and questions about one text.

Metric and parameters are RULER's, the metric as lm-evaluation-harness has it. Its generators fetch essays, nltk's data
and question sets, so generators and wording here are kvpass's own: scores compare policies and models with each
other, not with published tables. Where RULER hides needles in essays, generated sentences serve.
"""

from __future__ import annotations

import itertools
import math
import random
import string
import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Literal, NamedTuple

from transformers import PreTrainedTokenizerBase

from kvpass.eval.tasks.base import Sample, largest, library
from kvpass.eval.tasks.words import ADJECTIVES, NOUNS, PLACES, english_sentence

_NOISE = "Coal is black and snow is white. Tides rise and fall. Leaves turn in autumn. On it goes, year after year."
_KEY_WORDS = (ADJECTIVES, NOUNS, PLACES)
_ZETA_2 = 1.6449340668482264


class Text(NamedTuple):
    """A prompt in parts, as in :class:`~kvpass.eval.tasks.base.Sample`."""

    context: str
    question: str
    answer_prefix: str
    answers: list[str]


@dataclass(frozen=True, kw_only=True)
class Ruler:
    """A generator: every sample has its own seed, and the biggest size whose prompt fits.

    ``build`` makes a text of a size (units of the haystack) for prompts of so many tokens, from random numbers.
    """

    name: str
    build: Callable[[int, int, random.Random], Text]
    smallest: int
    max_new_tokens: int
    chat: bool = True

    def samples(self, tokenizer: PreTrainedTokenizerBase, tokens: int, count: int, seed: int) -> list[Sample]:
        seeds = [f"{self.name}/{seed}/{index}" for index in range(count)]
        sizes = [self._largest(tokenizer, tokens, text_seed) for text_seed in seeds]
        return [self._of_size(size, tokens, str(n), seeds[n]) for n, size in enumerate(sizes)]

    def metric(self, prediction: str, sample: Sample) -> float:
        """Share of the answers that occur in the prediction, case aside."""
        ruler = library("lm_eval.tasks.ruler.common_utils")
        return float(ruler.string_match_all(ruler.postprocess_pred([prediction]), [sample.answers]))

    def _largest(self, tokenizer: PreTrainedTokenizerBase, tokens: int, seed: str) -> int:
        build = partial(self._of_size, tokens=tokens, name="", seed=seed)
        return largest(build, tokenizer, tokens, smallest=self.smallest, chat=self.chat, name=self.name)

    def _of_size(self, size: int, tokens: int, name: str, seed: str) -> Sample:
        text = self.build(size, tokens, random.Random(seed))._asdict()
        answers = tuple(text.pop("answers"))
        return Sample(**text, id=name, answers=answers, max_new_tokens=self.max_new_tokens)


@dataclass(frozen=True, kw_only=True)
class NiahRequests(Ruler):
    """A question about each key of a text, asked alone: the multi-request mode of SCBench (arXiv 2412.10319).

    With scope ``context`` the text is compressed once, and no question sees more of it than another.
    """

    build: Niah

    def samples(self, tokenizer: PreTrainedTokenizerBase, tokens: int, count: int, seed: int) -> list[Sample]:
        tasks = [replace(self, build=replace(self.build, asked=key)) for key in range(self.build.keys)]
        samples: list[Sample] = []
        for number in range(math.ceil(count / len(tasks))):
            text = f"{self.name}/{seed}/{number}"
            size = min(task._largest(tokenizer, tokens, text) for task in tasks)
            samples += [task._of_size(size, tokens, f"{number}.{key}", text) for key, task in enumerate(tasks)]
        return samples[:count]


@dataclass(frozen=True, kw_only=True)
class Niah:
    """Magic values of keys, hidden in a haystack. Of ``keys`` keys ``queries`` are asked for, each with ``values``."""

    haystack: Literal["noise", "essay", "needle"]  # one repeated sentence, generated ones, or needles of other keys
    keys: int = 1
    values: int = 1
    queries: int = 1
    uuid_keys: bool = False  # instead of words
    uuid_values: bool = False  # instead of seven-digit numbers
    asked: int | None = None  # number of the only key that is asked for; None: they are drawn

    def __call__(self, size: int, tokens: int, rng: random.Random) -> Text:
        word = "uuid" if self.uuid_values else "number"
        taken: set[str] = set()

        def key() -> str:
            return _unique(lambda: _uuid(rng) if self.uuid_keys else "-".join(map(rng.choice, _KEY_WORDS)), taken)

        def value() -> str:
            return _unique(lambda: _uuid(rng) if self.uuid_values else str(rng.randrange(10**6, 10**7)), taken)

        def needle(key: str, value: str) -> str:
            return f"A magic {word} of {key} is {value}."

        hidden = {key(): [value() for _ in range(self.values)] for _ in range(self.keys)}
        needles = [needle(k, v) for k, vs in hidden.items() for v in vs]
        rng.shuffle(needles)
        asked = rng.sample(list(hidden), self.queries) if self.asked is None else [list(hidden)[self.asked]]
        depths = sorted(rng.random() for _ in needles)
        match self.haystack:
            case "noise":
                hay = [_NOISE] * size
            case "essay":
                hay = list(_essay(size))
            case "needle":
                hay = [needle(key(), value()) for _ in range(size)]
        for depth, sentence in reversed(list(zip(depths, needles, strict=True))):
            hay.insert(round(depth * len(hay)), sentence)
        several, crowded = self.values * self.queries > 1, self.keys * self.values > 1 or self.haystack == "needle"
        subject = f"magic {word}s of {_listed(asked)}" if several else f"magic {word} of {asked[0]}"
        return Text(
            f"{'Some' if crowded else 'One'} magic {word}{'s are' if crowded else ' is'} hidden in this text. "
            f"Remember {'them' if crowded else 'it'}: you will be asked afterwards.\n"
            + (" " if self.haystack == "essay" else "\n").join(hay),
            f"\nWhat {'are all the' if several else 'is the'} {subject} given in the text?",
            f" The {subject} given in the text {'are' if several else 'is'}",
            [v for k in asked for v in hidden[k]],
        )


def variable_tracking(size: int, tokens: int, rng: random.Random) -> Text:
    """Find every variable that a chain of four assignments gives one value, after an example."""
    hops = 4

    def chain(noises: int, letters: int) -> Text:
        taken: set[str] = set()
        variables = [
            _unique(lambda: "".join(rng.choices(string.ascii_uppercase, k=letters)), taken) for _ in range(hops + 1)
        ]
        value = str(rng.randrange(10_000, 100_000))
        links = [f"VAR {variables[0]} = {value}"]
        links += [f"VAR {after} = VAR {before}" for before, after in itertools.pairwise(variables)]
        lines = [_NOISE] * noises
        places = sorted(rng.sample(range(noises + 1), len(links)))
        for place, link in reversed(list(zip(places, links, strict=True))):
            lines.insert(place, link)
        text = "\n".join(lines)
        return Text(
            f"Follow the variable assignments hidden in this text.\n\n{text}",
            f"\nQuestion: Which variables have the value {value} in the text above?",
            f" Answer: The text above gives the value {value} to {len(variables)} variables:",
            variables,
        )

    shown, asked = chain(hops + 1, 3), chain(size, 5)
    return _with_example(shown, " ".join(shown.answers), asked)


def common_words(size: int, tokens: int, rng: random.Random) -> Text:
    """Name the ten words of a numbered list that occur 30 (short: 6) times."""
    common = 10

    def listed(size: int, often: int, seldom: int) -> Text:
        taken: set[str] = set()
        words = [_unique(lambda: _invented_word(rng), taken) for _ in range(size)]
        text = words[:common] * often + words[common:] * seldom
        rng.shuffle(text)
        return Text(
            f"This is a numbered list of words. Some occur more often than others: remember those.\n{_numbered(text)}",
            f"\nQuestion: Which {common} words are the most common ones of the list above?",
            f" Answer: The {common} most common words of the list are:",
            words[:common],
        )

    short = tokens < 4096
    shown, asked = listed(*((20, 3, 1) if short else (40, 10, 3))), listed(size, *((6, 1) if short else (30, 3)))
    return _with_example(shown, _numbered(shown.answers), asked)


def frequent_words(size: int, tokens: int, rng: random.Random) -> Text:
    """Name the three most frequent words of a coded text.

    Frequencies fall with the square of the rank. The most frequent "word" is a row of dots, which does not count.
    """
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
    return Text(
        "Read this coded text and count how often each coded word occurs. Which three are the most "
        f"frequent? {' '.join(text)}",
        "\nQuestion: Which three coded words occur most often in the text above? The dots '...' do not "
        "count. Do not explain.",
        " Answer: The three words that occur most often in the coded text are:",
        ranked[1:4],
    )


def tasks() -> list[Ruler]:
    """The eleven tasks, and one of several questions about each text."""
    needles = {
        "niah_single_1": Niah(haystack="noise"),
        "niah_single_2": Niah(haystack="essay"),
        "niah_single_3": Niah(haystack="essay", uuid_values=True),
        "niah_multikey_1": Niah(haystack="essay", keys=4),
        "niah_multikey_2": Niah(haystack="needle"),
        "niah_multikey_3": Niah(haystack="needle", uuid_keys=True, uuid_values=True),
        "niah_multivalue": Niah(haystack="essay", values=4),
        "niah_multiquery": Niah(haystack="essay", keys=4, queries=4),
    }
    return [
        *(
            Ruler(name=name, build=niah, smallest=niah.keys * niah.values, max_new_tokens=128)
            for name, niah in needles.items()
        ),
        Ruler(name="vt", build=variable_tracking, smallest=5, max_new_tokens=30),
        Ruler(name="cwe", build=common_words, smallest=11, max_new_tokens=120),
        Ruler(name="fwe", build=frequent_words, smallest=100, max_new_tokens=50),
        NiahRequests(name="niah_requests", build=Niah(haystack="essay", keys=4), smallest=4, max_new_tokens=128),
    ]


def _with_example(shown: Text, answer: str, asked: Text) -> Text:
    """The prompt that is asked, behind another one of its kind and its answer."""
    example = f"{shown.context}{shown.question}{shown.answer_prefix} {answer}"
    return asked._replace(context=f"{example}\n\n{asked.context}")


@lru_cache(maxsize=64)
def _essay(size: int) -> tuple[str, ...]:
    """So many sentences, the same ones every time."""
    rng = random.Random("essay")
    return tuple(english_sentence(rng) for _ in range(size))


def _unique(draw: Callable[[], str], taken: set[str]) -> str:
    """Something drawn that was not taken yet; ``ValueError`` if a thousand draws give nothing new."""
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
