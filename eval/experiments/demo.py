"""``kvpass demo``: facts hidden in a long text, asked for with the full cache and with compressed ones."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from transformers.generation.streamers import BaseStreamer

import kvpass
from kvpass import builtin
from kvpass.cache.cache import CompressedCache
from kvpass.compiler.backend import Compiler
from kvpass.eval.bench.systems import storage_bytes
from kvpass.eval.experiments.needle_accuracy import hold_last
from kvpass.eval.needle.text import Question, Task, sample
from kvpass.eval.needle.words import HELD_OUT_NAMES

BUDGETS = (36, 40, 64)
POLICIES = ("lava", "snapkv", "streaming_llm")
"""With their default options."""
_LONGEST = 10000
_TIMED = 16


@dataclass(frozen=True, kw_only=True)
class DemoSettings:
    """One run of the demo.

    Attributes:
        tokens: length of each prompt, question included. facts: how many are hidden, each asked for once.
        seed: of facts and text. output: where the heat map goes (.png).
        backend: ``"inductor"`` or ``"eager"``.

    Raises:
        ValueError: a number out of range, an output folder that does not exist.
    """

    tokens: int = 2048
    facts: int = 8
    seed: int = 0
    output: Path = Path("kvpass-demo.png")
    backend: Compiler = "inductor"

    def __post_init__(self) -> None:
        if not max(BUDGETS) < self.tokens <= _LONGEST:
            raise ValueError(
                f"tokens={self.tokens}: must be above {max(BUDGETS)}, the largest budget, and at most {_LONGEST}, "
                "what the built-in model can read"
            )
        if not 1 <= self.facts <= len(HELD_OUT_NAMES):
            raise ValueError(f"facts={self.facts}: must be between 1 and {len(HELD_OUT_NAMES)}, the number of names")
        if self.output.suffix != ".png":
            raise ValueError(f"output={str(self.output)!r}: must end in .png")
        if not self.output.absolute().parent.is_dir():
            raise ValueError(f"output={str(self.output)!r}: there is no folder {str(self.output.absolute().parent)!r}")


@dataclass
class Answers:
    """What one system answered.

    Attributes:
        label: of the system. budget: entries per KV head per layer, None for a full cache.
        texts: one a question. gaps: seconds from one token to the next, of a text longer than an answer.
        cache_bytes: at the end of an answer. first_seconds: the first answer, compilation included.
    """

    label: str
    budget: int | None
    texts: list[str] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    cache_bytes: int = 0
    first_seconds: float = 0.0

    def correct(self, questions: tuple[Question, ...]) -> int:
        return sum(map(Question.answered_by, questions, self.texts))


class _Clock(BaseStreamer):
    """Notes when ``generate`` hands out a token; the first note is the prompt."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None: ...

    @property
    def gaps(self) -> list[float]:
        """Seconds between generated tokens; whatever compiles does so before the first of them."""
        return [later - sooner for sooner, later in zip(self.times[1:], self.times[2:], strict=False)]


class Demo:
    """A checked run of the demo.

    Raises:
        ValueError: too few tokens for the facts.
    """

    def __init__(self, settings: DemoSettings) -> None:
        self.settings = settings
        transformers.utils.logging.disable_progress_bar()
        self.model, self.tokenizer = builtin.load()
        self.sample = sample(Task(keys=settings.facts, questions=settings.facts), settings.tokens, settings.seed)

    def run(self, console: Console) -> None:
        """Ask every system for every fact; print the answers, the summary and what was measured."""
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=console, transient=True) as progress:
            task = progress.add_task("", total=(2 + len(POLICIES) * len(BUDGETS)) * self.settings.facts)
            model = kvpass.compile(self.model, policy="full", backend=self.settings.backend)
            answers = [
                self._ask(self.model, Answers("transformers", None), progress, task),
                self._ask(model, Answers("kvpass full", None), progress, task),
            ]
            for policy in POLICIES:
                for budget in BUDGETS:
                    model.set_policy(policy, budget)
                    answers.append(self._ask(model, Answers(f"kvpass {policy}", budget), progress, task))
                    if (policy, budget) == ("lava", min(BUDGETS)):
                        model.report().plot(self.settings.output)
        console.print(self._answer_table(answers))
        console.print(self._summary_table(answers))
        for line in self._notes(answers):
            console.print(line, highlight=False, markup=False)

    def _ask(self, model: Any, answers: Answers, progress: Progress, task: Any) -> Answers:
        """Ask for every fact; the first prompt and the first decode step of a model compile."""
        longest = max(question.max_new_tokens for question in self.sample.questions)
        for index, question in enumerate(self.sample.questions):
            progress.update(task, description=f"{_label(answers)}: {question.text.removeprefix('question ')}")
            begin = time.perf_counter()
            text, _, answers.cache_bytes = self._generate(model, question, max_new_tokens=longest)
            if index == 0:
                answers.first_seconds = time.perf_counter() - begin
            answers.texts.append(text)
            progress.advance(task)
        _, answers.gaps, _ = self._generate(
            model, self.sample.questions[0], min_new_tokens=_TIMED, max_new_tokens=_TIMED
        )
        return answers

    def _generate(self, model: Any, question: Question, **limits: int) -> tuple[str, list[float], int]:
        """The answer, seconds between its tokens, and bytes of the cache after it."""
        given = hold_last(model, self.tokenizer(self.sample.ask(question), return_tensors="pt")["input_ids"])
        clock = _Clock()
        out = model.generate(
            **given, **limits, do_sample=False, use_cache=True, streamer=clock, return_dict_in_generate=True
        )
        cache = out.past_key_values
        size = cache.nbytes if isinstance(cache, CompressedCache) else storage_bytes(cache)
        answer = str(self.tokenizer.decode(out.sequences[0, given["input_ids"].shape[1] :]))
        return answer, clock.gaps, size

    def _answer_table(self, answers: list[Answers]) -> Table:
        shown = [answer for answer in answers if answer.budget in (None, min(BUDGETS))]
        table = Table(
            title=f"{self.settings.facts} facts in {self.settings.tokens} tokens: the code, pin or number of a name",
            caption="system over budget",
            box=box.SIMPLE_HEAD,
            padding=(0, 1, 0, 0),
        )
        table.add_column("name", no_wrap=True)
        table.add_column("value", justify="right", no_wrap=True)
        for answer in shown:
            name = answer.label.removeprefix("kvpass ")
            table.add_column(f"{name}\n{_budget(answer)}", justify="right", no_wrap=True)
        for index, question in enumerate(self.sample.questions):
            cells = []
            for answer in shown:
                text = answer.texts[index]
                style = "green" if question.answered_by(text) else "red"
                cells.append(f"[{style}]{text.removesuffix(' .')}[/]")
            table.add_row(" ".join(question.text.split()[-3:-1]), question.answers[0], *cells)
        return table

    def _summary_table(self, answers: list[Answers]) -> Table:
        table = Table(title="accuracy, memory and speed", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
        table.add_column("system", no_wrap=True)
        for column in ("budget", "of\nprompt", "exact", "cache\nKiB", "of full", "ms per\ntoken", "first\ns"):
            table.add_column(column, justify="right", no_wrap=True)
        full = answers[0].cache_bytes
        for answer in answers:
            correct, total = answer.correct(self.sample.questions), self.settings.facts
            table.add_row(
                answer.label,
                _budget(answer),
                "100 %" if answer.budget is None else f"{answer.budget / self.settings.tokens:.1%}",
                f"{correct}/{total}",
                f"{answer.cache_bytes / 1024:.0f}",
                f"{answer.cache_bytes / full:.1%}",
                f"{1e3 * statistics.median(answer.gaps):.2f}",
                f"{answer.first_seconds:.1f}",
            )
        return table

    def _notes(self, answers: list[Answers]) -> list[str]:
        shown = next(answer for answer in answers if answer.budget == min(BUDGETS))
        return [
            f"Measured on {self.model.device}, {torch.get_num_threads()} threads, "
            f"{str(self.model.dtype).removeprefix('torch.')}, batch 1, backend {self.settings.backend}; "
            f"torch {torch.__version__}, transformers {transformers.__version__}.",
            f"Prompts: {self.settings.facts} of {self.settings.tokens} tokens, the same text with another question "
            f"each, seed {self.settings.seed}; greedy decoding. kvpass compresses a prompt without its last token and "
            "goes on from there: a prefill computes with full attention, and the first number would be right whatever "
            "is kept.",
            f"Policies: {', '.join(POLICIES)}, with default options. Budget: entries per KV head per layer, window "
            f"included; {shown.budget} entries occupy {shown.cache_bytes} bytes (spare slots included), all entries "
            f"{answers[0].cache_bytes}.",
            f"ms per token: median of {_TIMED - 1} between generated tokens, generate's own work included, prefill and "
            "compilation not; first s: the first answer, all included: a policy compiles for its first budget only.",
            f"One text and {self.settings.facts} questions: a demonstration, not an evaluation.",
            f"What lava kept at budget {shown.budget}, first question: {self.settings.output.absolute()}",
        ]


def _budget(answers: Answers) -> str:
    return "all" if answers.budget is None else str(answers.budget)


def _label(answers: Answers) -> str:
    return answers.label if answers.budget is None else f"{answers.label} {answers.budget}"
