"""A made-up manual: chapters of similar sentences about things of a museum, two facts in each, which are asked for.

Between needles and documents of people: a fact is a sentence like its neighbours, and other chapters have facts of the
same kinds. Everything is drawn from seeds.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from kvpass.eval.tasks.base import Sample, contains, largest

_FACTS = {
    "designer": ("The {thing} was designed by {value}.", "Who designed the {thing}?"),
    "code": ("The code that unlocks the {thing} is {value}.", "What is the code that unlocks the {thing}?"),
    "time": ("Every day the {thing} starts at {value}.", "At what time does the {thing} start?"),
    "town": ("The {thing} was made in the town of {value}.", "In which town was the {thing} made?"),
    "year": ("The museum bought the {thing} in {value}.", "In which year did the museum buy the {thing}?"),
    "colour": ("The {thing} is painted {value}.", "In which colour is the {thing} painted?"),
    "weight": ("The {thing} weighs {value} kilograms.", "How many kilograms does the {thing} weigh?"),
    "keeper": ("Ask {value} for the key of the {thing}.", "Whom do you ask for the key of the {thing}?"),
}
_PLAIN = (
    "It stands in the {place}, where the floor is strong enough.",
    "Nobody should touch it without {tool}.",
    "After heavy use it has to rest for an hour.",
    "A second worker watches it while {tool} are changed.",
    "It needs oil once a week and new {tool} now and then.",
    "If it makes a noise, turn it off and call the office.",
    "Visitors may look at the {thing} from the {place}.",
    "In winter the {thing} is covered with a cloth.",
    "A book in the {place} says who used it last.",
    "When it stops by itself, wait until it is cold.",
    "Dust is removed with a soft brush, never with water.",
    "It came here from another museum, in two boxes.",
    "Children like the {thing} more than anything else in the {place}.",
    "The handle turns to the left, and it turns slowly.",
    "There is a drawing of the {thing} in the {place}.",
    "Before a tour begins, look whether all {tool} are there.",
    "It works best when the weather is dry.",
    "The sound of the {thing} can be heard in the {place}.",
    "A film about it is shown on Sundays.",
    "Small repairs are done at once, large ones after the season.",
    "Old {tool} are kept, since new ones are hard to find.",
    "Stand behind the line while the {thing} is running.",
    "Its parts are numbered from the left to the right.",
    "Please report what is missing to the people in the {place}.",
)
_THINGS = (
    "crane pump mill press lift furnace winch saw loom boiler hammer bell clock lathe oven wagon engine telescope "
    "organ printer scale forge anvil bicycle tractor kettle compass camera piano typewriter drill fountain elevator "
    "lantern plough cannon harvester barometer gramophone radio turbine generator steamroller microscope"
).split()
_PLACES = ("long hall", "yard", "cellar", "eastern wing", "tower", "store room", "garden house", "upper gallery")
_TOOLS = ("gloves", "belts", "filters", "brushes", "chains", "screws", "lamps", "ropes")
_FIRST_NAMES = "Anna Bruno Clara David Elena Felix Greta Hugo Irene Jonas Karin Leo Marta Nils Olga Paul".split()
_LAST_NAMES = "Adler Brandt Castell Dorn Ferrari Graves Holm Jensen Keller Lund Moreau Novak Ortega Price Quist".split()
_TOWNS = (
    "Norby Kelsen Marwick Tolva Ashgrove Brennock Quillan Varnow Petersholm Dalgreen Sundmere Oxhill Lisbeth Wexcombe "
    "Torvale Hamsund"
).split()
_COLOURS = "red green blue yellow white black grey brown orange purple pink".split()


def _values(rng: random.Random) -> dict[str, str]:
    return {
        "designer": _person(rng),
        "code": str(rng.randrange(1000, 10000)),
        "time": f"{rng.randrange(5, 12)}:{rng.randrange(10, 60)}",
        "town": rng.choice(_TOWNS),
        "year": str(rng.randrange(1950, 2020)),
        "colour": rng.choice(_COLOURS),
        "weight": str(rng.randrange(20, 1000)),
        "keeper": _person(rng),
    }


def _person(rng: random.Random) -> str:
    return f"{rng.choice(_FIRST_NAMES)} {rng.choice(_LAST_NAMES)}"


_SENTENCES = 12
"""Of a chapter, without its facts."""
NEW_TOKENS = 40
"""Of an answer, at most."""


def write_manual(sentences: int, seed: str) -> tuple[str, list[tuple[str, str]]]:
    """Return a manual, and two questions about each chapter with their answers.

    Args:
        sentences: in all, without facts; :data:`_SENTENCES` a chapter, the rest in the last one.
    """
    rng = random.Random(seed)
    names = rng.sample(_THINGS, len(_THINGS))
    text, questions = ["Manual of the museum"], []
    for number, begin in enumerate(range(0, sentences, _SENTENCES), 1):
        of_chapter = random.Random(f"{seed}/{number}")
        hall, place = divmod(number - 1, len(names))
        thing = names[place] + (f" of hall {hall + 1}" if hall else "")
        values, lines = _values(of_chapter), of_chapter.sample(_PLAIN, _SENTENCES)[: sentences - begin]
        for kind in of_chapter.sample(sorted(_FACTS), 2):
            fact, question = _FACTS[kind]
            lines.insert(of_chapter.randrange(len(lines) + 1), fact.replace("{value}", values[kind]))
            questions.append((question.format(thing=thing), values[kind]))
        words = [
            line.format(thing=thing, place=of_chapter.choice(_PLACES), tool=of_chapter.choice(_TOOLS)) for line in lines
        ]
        text += [f"Chapter {number}: the {thing}", " ".join(words)]
    rng.shuffle(questions)
    return "\n\n".join(text), questions


@dataclass(frozen=True)
class Manual:
    """Questions about one manual, which fills the prompt; more than it answers are of further ones."""

    name: str = "manual"
    chat: bool = True

    def samples(self, tokenizer: PreTrainedTokenizerBase, tokens: int, count: int, seed: int) -> list[Sample]:
        samples: list[Sample] = []
        number = 0
        while len(samples) < count:
            samples += self._of_manual(number, tokenizer, tokens, seed)
            number += 1
        return samples[:count]

    def _of_manual(self, number: int, tokenizer: PreTrainedTokenizerBase, tokens: int, seed: int) -> list[Sample]:
        """All samples of the longest manual of which the prompt with the longest question fits."""

        def build(size: int) -> list[Sample]:
            text, questions = write_manual(size, f"manual/{seed}/{number}")
            return [
                Sample(f"{number}.{n}", text, f"\n\n{question}", (answer,), max_new_tokens=NEW_TOKENS)
                for n, (question, answer) in enumerate(questions)
            ]

        def with_longest_question(size: int) -> Sample:
            return max(build(size), key=lambda sample: len(tokenizer(sample.question)["input_ids"]))

        return build(largest(with_longest_question, tokenizer, tokens, smallest=1, chat=self.chat, name=self.name))

    def metric(self, prediction: str, sample: Sample) -> float:
        """1 if the answer stands in the prediction, as words of its own, case aside."""
        (answer,) = sample.answers
        return float(contains(prediction, answer))
