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
from kvpass.backend import Compiler
from kvpass.cache import CompressedCache
from kvpass.eval.needle import DIGITS, Fact, make_prompt, names_of
from kvpass.eval.systems import storage_bytes

BUDGETS = (48, 64, 128)
POLICIES: dict[str, dict[str, Any]] = {"lava": {"kernel_size": 13}, "snapkv": {"kernel_size": 13}, "streaming_llm": {}}
"""Options of each policy. The model looks at a fact's name only, so the pooling must be wide enough for its digits."""


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
        if not max(BUDGETS) < self.tokens <= 8000:
            raise ValueError(
                f"tokens={self.tokens}: must be above {max(BUDGETS)}, the largest budget, and at most 8000, "
                "what the built-in model can read"
            )
        if self.output.suffix != ".png":
            raise ValueError(f"output={str(self.output)!r}: must end in .png")
        if not self.output.absolute().parent.is_dir():
            raise ValueError(f"output={str(self.output)!r}: there is no folder {str(self.output.absolute().parent)!r}")


@dataclass
class Answers:
    """What one system answered.

    Attributes:
        label: of the system. budget: entries per KV head per layer, None for a full cache.
        texts: one a fact. gaps: seconds from one generated token to the next, the step that compiles left out.
        cache_bytes: at the end of a generation. first_seconds: the first generation, compilation included.
    """

    label: str
    budget: int | None
    texts: list[str] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    cache_bytes: int = 0
    first_seconds: float = 0.0

    def correct(self, facts: tuple[Fact, ...]) -> int:
        return sum(fact.answered_by(text) for fact, text in zip(facts, self.texts, strict=True))


class _Clock(BaseStreamer):
    """Notes when ``generate`` hands out a token; the first note is the prompt."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None: ...

    @property
    def gaps(self) -> list[float]:
        """Seconds between generated tokens; the prefill is before the first of them."""
        return [later - sooner for sooner, later in zip(self.times[1:], self.times[2:], strict=False)]


class Demo:
    """A checked run of the demo.

    Raises:
        ValueError: facts or tokens out of range.
    """

    def __init__(self, settings: DemoSettings) -> None:
        self.settings = settings
        transformers.utils.logging.disable_progress_bar()
        self.model, self.tokenizer = builtin.load()
        self.prompt = make_prompt(
            names_of(self.tokenizer), tokens=settings.tokens, facts=settings.facts, seed=settings.seed
        )

    def run(self, console: Console) -> None:
        """Ask every fact of every system; print the answers, the summary and what was measured."""
        runs = [(policy, budget) for policy in POLICIES for budget in BUDGETS]
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=console, transient=True) as progress:
            task = progress.add_task("", total=(2 + len(runs)) * self.settings.facts)
            answers = [
                self._ask(self.model, Answers("transformers", None), progress, task),
                self._ask(
                    kvpass.compile(self.model, policy="full", backend=self.settings.backend),
                    Answers("kvpass full", None),
                    progress,
                    task,
                ),
            ]
            for policy, budget in runs:
                model = kvpass.compile(
                    self.model,
                    policy=policy,
                    budget=budget,
                    backend=self.settings.backend,
                    **POLICIES[policy],
                )
                answers.append(self._ask(model, Answers(f"kvpass {policy}", budget), progress, task))
                if (policy, budget) == ("lava", _middle()):
                    model.report().plot(self.settings.output)
        console.print(self._answer_table(answers))
        console.print(self._summary_table(answers))
        for line in self._notes(answers):
            console.print(line, highlight=False, markup=False)

    def _ask(self, model: Any, answers: Answers, progress: Progress, task: Any) -> Answers:
        """Ask for every fact; the first prompt and the first decode step compile."""
        for index, fact in enumerate(self.prompt.facts):
            action = "compiling, " if index == 0 else ""
            progress.update(task, description=f"{_label(answers)}: {action}{fact.question.removeprefix('question ')}")
            begin = time.perf_counter()
            text, gaps, answers.cache_bytes = self._generate(model, fact)
            if index == 0:
                answers.first_seconds = time.perf_counter() - begin
                gaps = gaps[1:]
            answers.texts.append(text)
            answers.gaps += gaps
            progress.advance(task)
        return answers

    def _generate(self, model: Any, fact: Fact) -> tuple[str, list[float], int]:
        """The answer, seconds between its tokens, and bytes of the cache after it."""
        inputs = self.tokenizer(self.prompt.ask(fact), return_tensors="pt", return_token_type_ids=False)
        clock = _Clock()
        out = model.generate(
            **inputs, max_new_tokens=DIGITS + 1, do_sample=False, streamer=clock, return_dict_in_generate=True
        )
        cache = out.past_key_values
        size = cache.nbytes if isinstance(cache, CompressedCache) else storage_bytes(cache)
        answer = str(self.tokenizer.decode(out.sequences[0, inputs["input_ids"].shape[1] :]))
        return answer, clock.gaps, size

    def _answer_table(self, answers: list[Answers]) -> Table:
        shown = [answer for answer in answers if answer.budget in (None, _middle())]
        table = Table(
            title=f"{len(self.prompt.facts)} facts in {self.settings.tokens} tokens; question the code of ... is",
            caption="system over budget",
            box=box.SIMPLE_HEAD,
        )
        table.add_column("name", no_wrap=True)
        table.add_column("code", justify="right", no_wrap=True)
        for answer in shown:
            name = answer.label.removeprefix("kvpass ")
            table.add_column(f"{name}\n{_budget(answer)}", justify="right", no_wrap=True)
        for index, fact in enumerate(self.prompt.facts):
            cells = []
            for answer in shown:
                text = answer.texts[index]
                style = "green" if fact.answered_by(text) else "red"
                cells.append(f"[{style}]{text.replace(' ', '').removesuffix('.')}[/]")
            table.add_row(fact.name, fact.code, *cells)
        return table

    def _summary_table(self, answers: list[Answers]) -> Table:
        table = Table(title="accuracy, memory and speed", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
        table.add_column("system", no_wrap=True)
        for column in ("budget", "of\nprompt", "exact", "cache\nKiB", "of full", "ms per\ntoken", "first\ns"):
            table.add_column(column, justify="right", no_wrap=True)
        full = answers[0].cache_bytes
        for answer in answers:
            correct, total = answer.correct(self.prompt.facts), len(self.prompt.facts)
            table.add_row(
                answer.label,
                _budget(answer),
                "100 %" if answer.budget is None else f"{answer.budget / self.settings.tokens:.1%}",
                f"{correct}/{total}",
                f"{answer.cache_bytes / 1024:.0f}",
                f"{answer.cache_bytes / full:.1%}",
                f"{1e3 * statistics.median(answer.gaps):.2f}" if answer.gaps else "-",
                f"{answer.first_seconds:.1f}",
            )
        return table

    def _notes(self, answers: list[Answers]) -> list[str]:
        options = ", ".join(
            " ".join([name, *(f"{key}={value}" for key, value in given.items())]) for name, given in POLICIES.items()
        )
        middle = next(answer for answer in answers if answer.budget == _middle())
        return [
            f"Measured on {self.model.device}, {torch.get_num_threads()} threads, "
            f"{str(self.model.dtype).removeprefix('torch.')}, batch 1, backend {self.settings.backend}; "
            f"torch {torch.__version__}, transformers {transformers.__version__}.",
            f"Prompts: {len(self.prompt.facts)} of {self.settings.tokens} tokens, the same text with another question "
            f"each, seed {self.settings.seed}; greedy generate.",
            f"Policies: {options}. Budget: entries per KV head per layer, window included; "
            f"{_middle()} entries occupy {middle.cache_bytes} bytes (spare slots included), all entries "
            f"{answers[0].cache_bytes}.",
            "ms per token: median time between generated tokens, generate's own work included, prefill and compilation "
            "not; first s: the first answer, all included.",
            f"One text and {len(self.prompt.facts)} questions: a demonstration, not an evaluation.",
            f"What lava kept at budget {_middle()}: {self.settings.output.absolute()}",
        ]


def _middle() -> int:
    return BUDGETS[len(BUDGETS) // 2]


def _budget(answers: Answers) -> str:
    return "all" if answers.budget is None else str(answers.budget)


def _label(answers: Answers) -> str:
    return answers.label if answers.budget is None else f"{answers.label} {answers.budget}"
