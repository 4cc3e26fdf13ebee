"""``kvpass demo``: facts in a long text, asked for with full and compressed caches."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.table import Table
from transformers.generation.streamers import BaseStreamer

import kvpass
from kvpass import builtin
from kvpass.cache.cache import CompressedCache
from kvpass.compiler.backend import Compiler
from kvpass.eval.bench.systems import storage_bytes
from kvpass.eval.needle.text import Question, Task, sample
from kvpass.eval.needle.words import HELD_OUT_NAMES
from kvpass.eval.tables import rich_table
from kvpass.frontends.options import PolicyName
from kvpass.frontends.transformers import CompressedModel
from kvpass.progress import progress_bar, progress_console
from kvpass.report import import_figure
from kvpass.transformers_compat import CACHE

BUDGETS = (36, 40, 64)
POLICIES: tuple[PolicyName, ...] = ("lava", "snapkv", "streaming_llm")
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
        ValueError: a number out of range, or an output that does not end in .png.
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


@dataclass
class Answers:
    """What one system answered.

    Attributes:
        label: of the system. budget: entries per KV head per layer, "all" for a full cache.
        texts: one a question. token_ms: milliseconds from one token to the next, of a text longer than an answer.
        cache_bytes: at the end of an answer. first_seconds: the first answer, compilation included.
    """

    label: str
    budget: int | str = "all"
    texts: list[str] = field(default_factory=list)
    token_ms: float = 0.0
    cache_bytes: int = 0
    first_seconds: float = 0.0


class _Clock(BaseStreamer):
    """Notes when ``generate`` hands out a token; the first note is the prompt."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None: ...

    def token_ms(self) -> float:
        """Median between generated tokens; whatever compiles does so before the first of them."""
        return 1e3 * statistics.median(after - before for before, after in itertools.pairwise(self.times[1:]))


class Demo:
    """A checked run of the demo.

    Raises:
        ValueError: too few tokens for the facts. ImportError: without matplotlib.
    """

    def __init__(self, settings: DemoSettings) -> None:
        self.settings = settings
        import_figure()
        transformers.utils.logging.disable_progress_bar()
        self.model, self.tokenizer = builtin.load()
        self.sample = sample(Task(keys=settings.facts, questions=settings.facts), settings.tokens, settings.seed)

    def run(self, console: Console) -> None:
        """Ask every system for every fact; print the answers, the summary and what was measured."""
        model = kvpass.compile(self.model, policy="full", backend=self.settings.backend)
        answers = []
        with progress_bar(progress_console()) as progress:
            task = progress.add_task("", total=(2 + len(POLICIES) * len(BUDGETS)) * self.settings.facts)

            def ask(model: Any, asked: Answers) -> None:
                progress.update(task, description=f"{asked.label} {asked.budget}")
                self._ask(model, asked, lambda: progress.advance(task))
                answers.append(asked)

            ask(self.model, Answers("transformers"))
            ask(model, Answers("kvpass full"))
            for policy, budget in itertools.product(POLICIES, BUDGETS):
                model.set_policy(policy, budget)
                ask(model, Answers(f"kvpass {policy}", budget))
                if (policy, budget) == ("lava", min(BUDGETS)):
                    model.report().plot(self.settings.output, marks=self._facts())
        console.print(self._answer_table(answers))
        console.print(self._summary_table(answers))
        console.print(self._notes(answers), highlight=False, markup=False)

    def _ask(self, model: Any, answers: Answers, advance: Callable[[], None]) -> None:
        """Ask for every fact; a model's first prompt and decode step compile."""
        longest = max(question.max_new_tokens for question in self.sample.questions)
        begin = time.perf_counter()
        for question in self.sample.questions:
            answers.texts.append(self._generate(model, question, answers, max_new_tokens=longest))
            answers.first_seconds = answers.first_seconds or time.perf_counter() - begin
            advance()
        self._generate(model, self.sample.questions[0], answers, min_new_tokens=_TIMED, max_new_tokens=_TIMED)

    def _generate(self, model: Any, question: Question, answers: Answers, **limits: int) -> str:
        """The answer to a question; notes the time between tokens and the cache bytes."""
        ids, held, clock = self.tokenizer(self.sample.ask(question), return_tensors="pt")["input_ids"], {}, _Clock()
        if isinstance(model, CompressedModel):  # else a prefill's full attention would give the first number
            ids, held = ids[:, -1:], {"past_key_values": model.compress(ids[:, :-1])}
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            **held,
            **limits,
            do_sample=False,
            use_cache=True,
            streamer=clock,
            return_dict_in_generate=True,
        )
        cache = out[CACHE]
        if "min_new_tokens" in limits:
            answers.token_ms = clock.token_ms()
        else:
            answers.cache_bytes = cache.nbytes if isinstance(cache, CompressedCache) else storage_bytes(cache)
        return str(self.tokenizer.decode(out.sequences[0, ids.shape[1] :]))

    def _facts(self) -> dict[str, list[int]]:
        """Positions of the answers, which the text holds once each; <bos> is position 0."""
        words = self.sample.context.split()
        places = [1 + words.index(question.answers[0].split()[0]) for question in self.sample.questions]
        return {"fact asked for": places[:1], "other facts": places[1:]}

    def _answer_table(self, answers: list[Answers]) -> Table:
        shown = [answer for answer in answers if answer.budget in ("all", min(BUDGETS))]
        systems = (f"{answer.label.removeprefix('kvpass ')}\n{answer.budget}" for answer in shown)
        rows = []
        for index, question in enumerate(self.sample.questions):
            cells = []
            for text in (answer.texts[index] for answer in shown):
                style = "green" if question.answered_by(text) else "red"
                cells.append(f"[{style}]{text.removesuffix(' .')}[/]")
            rows.append([" ".join(question.text.split()[-3:-1]), question.answers[0], *cells])
        title = f"{self.settings.facts} facts in {self.settings.tokens} tokens: the code, pin or number of a name"
        return rich_table(("name", "value", *systems), rows, title=title, caption="system over budget")

    def _summary_table(self, answers: list[Answers]) -> Table:
        tokens, full = self.settings.tokens, answers[0].cache_bytes
        rows = [
            [
                answer.label,
                str(answer.budget),
                f"{answer.budget / tokens:.1%}" if isinstance(answer.budget, int) else "100 %",
                f"{sum(map(Question.answered_by, self.sample.questions, answer.texts))}/{self.settings.facts}",
                f"{answer.cache_bytes / 1024:.0f}",
                f"{answer.cache_bytes / full:.1%}",
                f"{answer.token_ms:.2f}",
                f"{answer.first_seconds:.1f}",
            ]
            for answer in answers
        ]
        columns = ("system", "budget", "of\nprompt", "exact", "cache\nKiB", "of full", "ms per\ntoken", "first\ns")
        return rich_table(columns, rows, title="accuracy, memory and speed")

    def _notes(self, answers: list[Answers]) -> str:
        shown, s = next(answer for answer in answers if answer.budget == min(BUDGETS)), self.settings
        return f"""\
Measured on {self.model.device}, {torch.get_num_threads()} threads, {str(self.model.dtype).removeprefix("torch.")}, \
batch 1, backend {s.backend}; torch {torch.__version__}, transformers {transformers.__version__}.
Prompts: {s.facts} of {s.tokens} tokens, the same text with another question each, seed {s.seed}; greedy decoding. \
kvpass compresses a prompt without its last token and goes on from there: a prefill computes with full attention, and \
the first number would be right whatever is kept.
Policies: {", ".join(POLICIES)}, with default options. Budget: entries per KV head per layer, window included; \
{shown.budget} entries occupy {shown.cache_bytes} bytes (spare slots included), all entries {answers[0].cache_bytes}.
ms per token: median of {_TIMED - 1} between generated tokens, generate's own work included, prefill and compilation \
not; first s: the first answer, all included: a policy compiles for its first budget only.
One text and {s.facts} questions: a demonstration, not an evaluation.
What lava kept at budget {shown.budget}, first question: {s.output.absolute()}"""
