"""Generated texts to calibrate on: prose, dialogue, code, tables and lists of facts, the same in every run."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

_PEOPLE = (
    "Anna Berg, Tomas Reyes, Mei Tanaka, Oluwaseun Ade, Clara Whitfield, Ivan Petrov, Leila Haddad, Jonas Lind, "
    "Priya Nair, Samuel Okoro, Greta Holm, Diego Marin, Yara Costa, Henrik Dahl, Ruth Abrams, Kenji Mori"
).split(", ")
_PLACES = (
    "Larkfield, the old harbour, Montreal, the northern valley, Osaka, the river market, Lisbon, the glass factory, "
    "Nairobi, the upper lake, Tromso, the railway museum, Valparaiso, the botanical garden, Krakow, the salt mine"
).split(", ")
_THINGS = (
    "lantern, ledger, compass, violin, water pump, letter, telescope, ferry, greenhouse, clock, map, bridge, engine, "
    "recipe, printing press, loom, barometer, bicycle, manuscript, windmill"
).split(", ")
_QUALITIES = (
    "narrow, forgotten, expensive, blue, unusually heavy, carefully repaired, half-finished, quiet, famous, borrowed, "
    "rusty, precise, fragile, enormous, hand-made, unreliable"
).split(", ")
_ACTS = (
    "measured, described, sold, repaired, carried, searched for, painted, lost, inherited, examined, photographed, "
    "returned, dismantled, admired, hid, compared"
).split(", ")
_TIMES = (
    "before the storm, in the spring of {year}, on the third morning, after the meeting, while it was still dark, "
    "two weeks later, at the end of the season, during the strike, on a Sunday in {month}, shortly after noon"
).split(", ")
_MONTHS = "January February March April May June July August September October November December".split()
_REASONS = (
    "because nobody else knew how it worked, although the price had doubled, so that the others could rest, "
    "without telling the owner, which surprised everyone in the village, and wrote down every step, "
    "since the road would soon be closed, in spite of the cold, as the contract required, but never spoke of it again"
).split(", ")
_NAMES = "total index buffer weight offset price width queue label speed margin token height score batch limit".split()
_VERBS = "load parse count merge update filter sort scale split check format store".split()
_FIELDS = "population, area in km2, founded, mean rainfall, main export, elevation, budget, area code".split(", ")


def generated_texts(words: int = 900, rounds: int = 5) -> list[str]:
    """Return ``rounds`` texts of each of the five kinds, of about so many words each."""
    writers: tuple[Callable[[random.Random], Iterator[str]], ...] = (_prose, _dialogue, _code, _table, _facts)
    texts = []
    for number in range(rounds * len(writers)):
        text, parts = "", writers[number % len(writers)](random.Random(number))
        while len(text) < 6 * words:
            text += next(parts)
        texts.append(text)
    return texts


def _when(rng: random.Random) -> str:
    return rng.choice(_TIMES).format(year=rng.randint(1850, 2020), month=rng.choice(_MONTHS))


def _sentence(rng: random.Random) -> str:
    who, thing, place = rng.choice(_PEOPLE), rng.choice(_THINGS), rng.choice(_PLACES)
    quality, act, reason = rng.choice(_QUALITIES), rng.choice(_ACTS), rng.choice(_REASONS)
    when = _when(rng)
    forms = (
        f"{when.capitalize()}, {who} {act} the {quality} {thing} near {place}, {reason}. ",
        f"{who} {act} the {thing} {when}; it was {quality}, and it had come from {place}. ",
        f"In {place} stood the {quality} {thing}. {who} had {act} it {when}, {reason}. ",
        f"Nobody in {place} remembered who {act} the {thing}. It may have been {who}, {when}. ",
        f"The {thing} cost {rng.randint(12, 9800)} crowns, more than {who} earned in {place}. ",
        f"{who} walked from {place} to {rng.choice(_PLACES)} and {act} a {quality} {thing}, {reason}. ",
    )
    return rng.choice(forms)


def _prose(rng: random.Random) -> Iterator[str]:
    while True:
        yield "".join(_sentence(rng) for _ in range(rng.randint(3, 7))).strip() + "\n\n"


def _dialogue(rng: random.Random) -> Iterator[str]:
    pair = [name.split()[0] for name in rng.sample(_PEOPLE, 2)]
    while True:
        thing, place, quality, act = (rng.choice(x) for x in (_THINGS, _PLACES, _QUALITIES, _ACTS))
        questions = (
            f"Have you seen the {quality} {thing}?",
            f"Who {act} the {thing} in {place}?",
            f"When does the train to {place} leave?",
            f"Why did you say that the {thing} was {quality}?",
            f"What is the number of the {thing}?",
        )
        question = rng.choice(questions)
        answers = (
            f"I think {rng.choice(_PEOPLE)} {act} it {_when(rng)}.",
            f"At {rng.randint(1, 12)}:{rng.randint(10, 59)}, from platform {rng.randint(1, 9)}.",
            f"It is {rng.randint(1000, 9999999)}, and please do not forget it.",
            f"No. The last time was in {place}, and it looked {quality}.",
            f"Because {rng.choice(_PEOPLE)} told me so, {_when(rng)}.",
        )
        yield f"{pair[0]}: {question}\n{pair[1]}: {rng.choice(answers)}\n"


def _code(rng: random.Random) -> Iterator[str]:
    while True:
        verb, one, two, three = rng.choice(_VERBS), *rng.sample(_NAMES, 3)
        number = rng.randint(2, 4096)
        forms = (
            f"def {verb}_{one}({two}, {three}={number}):\n"
            f'    """{verb.capitalize()} the {one} of each {two}."""\n'
            f"    {one} = []\n    for item in {two}:\n        if item.{three} > {three}:\n"
            f"            {one}.append({rng.choice(_VERBS)}_{two}(item))\n    return {one}\n\n\n",
            f"class {verb.capitalize()}{one.capitalize()}:\n"
            f"    def __init__(self, {two}: int = {number}) -> None:\n"
            f"        self.{two} = {two}\n        self.{three}: dict[str, float] = {{}}\n\n"
            f"    def {rng.choice(_VERBS)}(self, key: str) -> float:\n"
            f"        return self.{three}.get(key, 0.0) / max(self.{two}, 1)\n\n\n",
            f"int {verb}_{one}(const int *{two}, size_t {three}) {{\n    int {one} = {number};\n"
            f"    for (size_t i = 0; i < {three}; ++i) {{\n        {one} += {two}[i] * {rng.randint(2, 99)};\n"
            f"    }}\n    return {one};\n}}\n\n",
            f"SELECT {one}, COUNT({two}) FROM {three}s WHERE {one} >= {number} GROUP BY {one} ORDER BY {two};\n\n",
            f'{{"{one}": {number}, "{two}": "{rng.choice(_THINGS)}", "{three}": [{rng.random():.3f}, null]}}\n',
        )
        yield rng.choice(forms)


def _table(rng: random.Random) -> Iterator[str]:
    while True:
        first, second = rng.sample(_FIELDS, 2)
        comma = rng.random() < 0.5
        rows = [f"name,{first},{second}"] if comma else [f"| name | {first} | {second} |", "|---|---|---|"]
        for _ in range(rng.randint(5, 12)):
            cells = [rng.choice(_PLACES).title(), str(rng.randint(3, 99999)), f"{rng.uniform(0, 500):.2f}"]
            rows.append(",".join(cells) if comma else f"| {' | '.join(cells)} |")
        yield "\n".join(rows) + f"\n\nSource: {rng.choice(_PEOPLE)}, {rng.randint(1950, 2024)}.\n\n"


def _facts(rng: random.Random) -> Iterator[str]:
    number = 0
    while True:
        number += 1
        thing, quality, place = rng.choice(_THINGS), rng.choice(_QUALITIES), rng.choice(_PLACES)
        forms = (
            f"{number}. The code of the {quality} {thing} is {rng.randint(100000, 9999999)}.\n",
            f"{number}. {rng.choice(_PEOPLE)} was born on {rng.randint(1, 28)} {rng.choice(_MONTHS)} "
            f"{rng.randint(1880, 2005)} in {place}.\n",
            f"{number}. The key to {place} is kept by {rng.choice(_PEOPLE)}.\n",
            f"{number}. A {thing} weighs {rng.randint(1, 900)} kg and is {quality}.\n",
            f"{number}. From {place} to {rng.choice(_PLACES)} it is {rng.randint(4, 1900)} km.\n",
        )
        yield rng.choice(forms)
