"""``kvpass demo``: facts in a long text, asked for with full and compressed caches."""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.text import Text

import kvpass
from kvpass.chat import Template, check_length, read_text
from kvpass.config import Budget, one_of
from kvpass.eval.bench.systems import storage_bytes
from kvpass.eval.options import DemoOptions
from kvpass.eval.policy_spec import parse_policies
from kvpass.eval.prompt import parse_scopes
from kvpass.eval.run import stop_tokens
from kvpass.eval.runner import each_cache
from kvpass.eval.tables import rich_table
from kvpass.eval.tasks.base import Sample, answer_places, contains, encode
from kvpass.eval.tasks.manual import Manual
from kvpass.eval.tasks.needle import Task, hide
from kvpass.loading import load_model
from kvpass.progress import progress_bar, progress_console
from kvpass.report import Report, import_figure
from kvpass.transformers_compat import CACHE

ENTRIES, SHARES, TIMED = (36, 40, 64), (0.25, 0.5), 16  # budgets of the built-in model, of others; timed tokens


@dataclass
class System:
    """A row of the tables, with answers by the number of the question."""

    name: str
    budget: str = "all"
    condition: tuple[Any, Any] = ("full", None)
    answers: dict[int, str] = field(default_factory=dict)
    cache_bytes: int = 0
    token_ms: float = 0.0


class Demo:
    """A run; raises ``ValueError`` and ``ImportError`` for options that do not fit, and without matplotlib."""

    def __init__(self, options: DemoOptions) -> None:
        self.options, path, facts = options, options.document, options.facts
        if (path is None) != (options.question is None):
            raise ValueError("--document and --question go together")
        self.scopes = parse_scopes(options.scopes or ("context,prompt" if path else "prompt"))
        specs = parse_policies(options.policies or ("lava,kvzip" if path else "lava,snapkv,streaming_llm"))
        one_of("output", options.output.suffix, (".png", ".pdf", ".svg"))
        import_figure()
        self.decoder, self.tokenizer = load_model(options.model, dtype="auto", device="cpu")
        budgets: tuple[float, ...] = ENTRIES if path is None and options.model == "builtin" else SHARES
        if path is not None:
            self.samples = [Sample("", read_text(path), f"\n\n{options.question}", (), options.max_new_tokens)]
        elif options.model == "builtin":
            self.samples = hide(Task(keys=facts, questions=facts), options.tokens or 2048, options.seed)
        else:
            self.samples = Manual().samples(self.tokenizer, options.tokens or 1024, facts, options.seed)
        self.prompts = [encode(self.tokenizer, sample, chat=True) for sample in self.samples]
        self.ends = [*stop_tokens(self.decoder, self.tokenizer), *Template(self.tokenizer, {}).end()]
        check_length(self.decoder, len(self.prompts[0]) + self.samples[0].max_new_tokens, "the prompt with its answer")
        self.systems = [System("transformers"), System("kvpass full")]
        for spec, budget in itertools.product(specs, budgets):
            if (policy := spec.resolve()).needs_budget:  # full: anyway
                for scope in self.scopes:
                    Budget.parse(budget).check(len(self.prompts[0].scoped(scope, 1).head), policy.window, 1)
                shown = f"{budget:.0%}" if budgets is SHARES else str(budget)
                self.systems.append(System(f"kvpass {spec}", shown, (policy, budget)))
        if len(self.systems) == 2:
            raise ValueError(f"policies={options.policies!r}: name one that compresses")

    def run(self) -> None:
        """Ask every system every question; print answers, a summary and the conditions; draw what was kept."""
        model = kvpass.compile(self.decoder, policy="full", backend=self.options.backend)
        for scope in self.scopes:
            with progress_bar(progress_console()) as progress:
                for number in progress.track(range(len(self.prompts)), description="questions"):
                    self._ask(model, scope, number)
            self._show(scope)
        policies = dict.fromkeys(x.name.removeprefix("kvpass ") for x in self.systems[2:])
        notes = f"""\
Measured on {self.decoder.device}, {torch.get_num_threads()} threads, {self.decoder.dtype}, batch 1, backend \
{self.options.backend}; torch {torch.__version__}, transformers {transformers.__version__}. Model: {self.options.model}.
Prompts: {len(self.prompts)} of {len(self.prompts[0])} tokens, seed {self.options.seed}; greedy decoding. kvpass reads \
each once for all policies, and behind what it kept the last token (scope prompt) or the question (context).
Policies: {", ".join(policies)}, with default options unless given. Budget: entries per KV head per layer, with the \
window. ms per token: median of {TIMED - 1} between generated tokens, prefill and compilation aside.
Picture of what was kept at budget {self.systems[2].budget}, first question: {self.options.output.absolute()}"""
        Console().print(notes, highlight=False, markup=False)

    def _ask(self, model: Any, scope: str, number: int) -> None:
        """Ask every system a question; draw what two policies kept for the first one, with their answers."""
        # the last token is fed after compression: a prefill's full attention would give the first word
        prompt, (plain, *systems) = self.prompts[number].scoped(scope, 1), self.systems
        self._answer(self.decoder, prompt.ids, number, plain)
        caches = each_cache(model, [system.condition for system in systems], torch.tensor([prompt.head]))
        drawn: dict[str, Report] = {}
        for cache, system in zip(caches, systems, strict=True):
            self._answer(model, prompt.rest, number, system, past_key_values=cache)
            if number == 0 and scope == self.scopes[0] and system.budget == systems[1].budget and len(drawn) < 2:
                drawn[f"{system.name.removeprefix('kvpass ')} answers {system.answers[0][:40]!r}"] = model.report(cache)
        if drawn:
            (first, *beside), marks = drawn.values(), answer_places(self.tokenizer, self.samples, chat=True)
            first.plot(self.options.output, *beside, marks=marks, titles=[*drawn])

    def _answer(self, model: Any, ids: tuple[int, ...], number: int, system: System, **cache: Any) -> None:
        """Note the answer to a question and the bytes of the cache; for the first also the time between tokens."""
        tokens, limit = torch.tensor([ids]), self.samples[number].max_new_tokens
        call = {"attention_mask": torch.ones_like(tokens), "do_sample": False, "eos_token_id": self.ends or None}
        out = model.generate(tokens, return_dict_in_generate=True, max_new_tokens=limit, **call, **cache)
        text = str(self.tokenizer.decode(out.sequences[0, tokens.shape[1] :], skip_special_tokens=True))
        system.answers[number] = " ".join((text if self.options.document else text.partition(".")[0]).split())
        system.cache_bytes = storage_bytes(out[CACHE]) if model is self.decoder else out[CACHE].nbytes
        if number == 0:  # whatever compiles does so before the first token
            times: list[float] = []  # of the prompt, and of each token
            clock = SimpleNamespace(put=lambda _: times.append(time.perf_counter()), end=lambda: None)
            model.generate(tokens, streamer=clock, min_new_tokens=TIMED, max_new_tokens=TIMED, **call, **cache)
            system.token_ms = 1e3 * torch.tensor(times[1:], dtype=torch.float64).diff().median().item()

    def _show(self, scope: str) -> None:
        """Print the answers about facts under the smallest budget, and a summary of all systems."""
        full, small, document = self.systems[0], self.systems[2], self.options.document is not None
        if not document:
            shown = [x for x in self.systems if x.budget in (full.budget, small.budget)]
            header = ("question", "answer", *(f"{x.name.removeprefix('kvpass ')}\n{x.budget}" for x in shown))
            table = rich_table(header, (), left=len(header), caption="system over budget")
            for n, sample in enumerate(self.samples):
                texts = (x.answers[n] for x in shown)
                colored = (Text(text, "green" if contains(text, *sample.answers) else "red") for text in texts)
                asked = sample.question.split("question the ")[-1].removesuffix(" is").strip()
                table.add_row(asked, *sample.answers, *colored)
            Console().print(table)
        header = ("system", "budget", "answer" if document else "right", "cache\nKiB", "of full", "ms per\ntoken")
        title = f"scope {scope}: the question is {'' if scope == 'prompt' else 'not '}known when the text is compressed"
        table = rich_table(header, (), left=3 if document else 1, title=title)
        for x in self.systems:
            right = [contains(x.answers[n], *sample.answers) for n, sample in enumerate(self.samples) if not document]
            result = Text(x.answers[0] if document else f"{sum(right)}/{len(right)}")
            share, kib = f"{x.cache_bytes / full.cache_bytes:.1%}", f"{x.cache_bytes / 1024:.0f}"
            table.add_row(x.name, x.budget, result, kib, share, f"{x.token_ms:.2f}")
        Console().print(table)
