"""``kvpass demo``: facts in a long text, asked for with full and compressed caches."""

from __future__ import annotations

import itertools
import random
import statistics
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.markup import escape

import kvpass
from kvpass.chat import Template, read_text
from kvpass.config import Budget
from kvpass.eval.bench.systems import storage_bytes
from kvpass.eval.options import DemoOptions
from kvpass.eval.policy_spec import parse_policies
from kvpass.eval.prompt import parse_scopes
from kvpass.eval.run import stop_tokens
from kvpass.eval.runner import each_cache
from kvpass.eval.tables import rich_table
from kvpass.eval.tasks.base import Sample, encode, largest
from kvpass.eval.tasks.needle import Task, hide
from kvpass.eval.tasks.words import ADJECTIVES, NOUNS, english_sentence
from kvpass.loading import load_model
from kvpass.progress import progress_bar, progress_console
from kvpass.report import import_figure
from kvpass.transformers_compat import CACHE

BUDGETS, SHARES = (36, 40, 64), (0.25, 0.5)
"""Entries, for the built-in model and its facts, which need little; shares of the prompt for other models."""
POLICIES, TIMED = ("lava", "snapkv", "streaming_llm"), 16


class Demo:
    """A run; raises ``ValueError`` and ``ImportError`` for options that do not fit, and without matplotlib."""

    def __init__(self, options: DemoOptions) -> None:
        self.options = options
        facts, builtin, path = options.facts, options.model == "builtin", options.document
        if (path is None) != (options.question is None):
            raise ValueError("--document and --question go together")
        self.scopes = parse_scopes(options.scopes or ("context,prompt" if path else "prompt"))
        specs = parse_policies(options.policies or ("lava,kvzip" if path else ",".join(POLICIES)))
        if options.output.suffix != ".png":
            raise ValueError(f"output={str(options.output)!r}: must end in .png")
        import_figure()
        transformers.utils.logging.disable_progress_bar()
        self.decoder, self.tokenizer = load_model(options.model, dtype="auto", device="cpu")
        tokens = options.tokens or (2048 if builtin else 1024)
        if path is not None:
            limit = options.max_new_tokens
            self.samples = [Sample(str(path), read_text(path), f"\n\n{options.question}", (), max_new_tokens=limit)]
        elif builtin:  # the id is the name that is asked about
            samples = hide(Task(keys=facts, questions=facts), tokens, options.seed)
            self.samples = [replace(sample, id=" ".join(sample.question.split()[-3:-1])) for sample in samples]
        else:
            self.samples = self._english_samples(tokens, facts, options.seed)
        self.prompts = [encode(self.tokenizer, sample, chat=True) for sample in self.samples]
        self.ends = [*stop_tokens(self.decoder, self.tokenizer), *Template(self.tokenizer, {}).end()]
        n, budgets = len(self.prompts[0]), BUDGETS if builtin and path is None else SHARES
        if budgets is BUDGETS and n <= max(BUDGETS):
            raise ValueError(f"tokens={n}: must be above {max(BUDGETS)} for the budgets of the demo")
        compressed = [(spec, b) for spec in specs if spec.resolve().needs_budget for b in budgets]  # full: anyway
        if not compressed:
            raise ValueError(f"policies={options.policies!r}: name one that compresses")
        for (spec, budget), scope in itertools.product(compressed, self.scopes):
            Budget.parse(budget).check(len(self.prompts[0].scoped(scope, 1).head), spec.resolve().window, 1)
        window = getattr(self.decoder.config.get_text_config(), "max_position_embeddings", None)
        if window and (longest := n + max(TIMED, self.samples[0].max_new_tokens)) > window:
            raise ValueError(f"tokens={n}: with the answer {longest}, and the model reads at most {window}")
        self.conditions: list[Any] = [("full", None), *((spec.resolve(), budget) for spec, budget in compressed)]
        rows = [("transformers", "all", "100%"), ("kvpass full", "all", "100%")]
        for spec, budget in compressed:
            share = f"{budget:.0%}" if budgets is SHARES else f"{budget / n:.1%}"
            rows.append((f"kvpass {spec}", share if budgets is SHARES else str(budget), share))
        self.answers = [SimpleNamespace(system=name, budget=b, share=s, texts={}) for name, b, s in rows]

    def _english_samples(self, tokens: int, facts: int, seed: int) -> list[Sample]:
        """For other models. Values have two digits, which the pooling of scores carries along: docs/limits.md."""

        def build(sentences: int, asked: int = 0) -> Sample:
            rng = random.Random(seed)
            names = [" ".join(name) for name in rng.sample(list(itertools.product(ADJECTIVES, NOUNS)), facts)]
            values = [str(number) for number in rng.sample(range(10, 100), facts)]
            text = [english_sentence(rng) for _ in range(sentences)]
            for name, value in zip(names, values, strict=True):
                text.insert(rng.randrange(len(text) + 1), f"The code of the {name} is {value}.")
            name, answers = names[asked], (values[asked],)
            question, prefix = f"\n\nWhat is the code of the {name} in the text above?", f"The code of the {name} is"
            return Sample(name, " ".join(text), question, answers, max_new_tokens=8, answer_prefix=prefix)

        size = largest(build, self.tokenizer, tokens, smallest=1, chat=True, name="demo")
        return [build(size, asked) for asked in range(facts)]

    def run(self) -> None:
        """Ask every system every question; print answers, a summary and the conditions; draw what one policy kept."""
        model = kvpass.compile(self.decoder, policy="full", backend=self.options.backend)
        for scope in self.scopes:
            self._ask(model, scope)
            self._show(Console(), scope)
        self._show_conditions(Console())

    def _ask(self, model: Any, scope: str) -> None:
        """Ask every system every question, those with all entries once."""
        first = scope == self.scopes[0]
        with progress_bar(progress_console()) as progress:
            task = progress.add_task("answers", total=len(self.prompts) * len(self.conditions))
            # the last token is fed after compression: a prefill's full attention would give the first word
            for index, prompt in enumerate(prompt.scoped(scope, 1) for prompt in self.prompts):
                if first:
                    self._answer(self.decoder, prompt.ids, index, self.answers[0])
                skipped = 0 if first else 1
                caches = each_cache(model, self.conditions[skipped:], torch.tensor([prompt.head]))
                for cache, answers in zip(caches, self.answers[1 + skipped :], strict=True):
                    self._answer(model, prompt.rest, index, answers, past_key_values=cache)
                    if first and index == 0 and answers is self.answers[2]:
                        facts = [(x, x.context.partition(x.answers[0])[0]) for x in self.samples if x.answers]
                        cut = (replace(x, context=before.rstrip()) for x, before in facts)
                        places = [len(encode(self.tokenizer, sample, chat=True).head) for sample in cut]
                        marks = {"fact asked for": places[:1], "other facts": places[1:]} if facts else {}
                        model.report(cache).plot(self.options.output, marks=marks)
                    progress.advance(task)

    def _answer(self, model: Any, ids: tuple[int, ...], index: int, answers: SimpleNamespace, **cache: Any) -> None:
        """Note the answer to a question and the bytes of the cache; after the first also the time between tokens."""
        tokens = torch.tensor([ids])
        call = {"attention_mask": torch.ones_like(tokens), "do_sample": False, "use_cache": True, **cache}
        call["eos_token_id"] = self.ends or None
        limit = self.samples[index].max_new_tokens
        out = model.generate(tokens, return_dict_in_generate=True, max_new_tokens=limit, **call)
        text = str(self.tokenizer.decode(out.sequences[0, tokens.shape[1] :], skip_special_tokens=True))
        text = text if self.options.document else text.partition(".")[0]
        answers.texts[index] = " ".join(text.split())
        answers.cache_bytes = storage_bytes(out[CACHE]) if model is self.decoder else out[CACHE].nbytes
        if index == 0:  # whatever compiles does so before the first token
            times: list[float] = []  # of the prompt, and of each token
            clock = SimpleNamespace(put=lambda _: times.append(time.perf_counter()), end=lambda: None)
            model.generate(tokens, streamer=clock, min_new_tokens=TIMED, max_new_tokens=TIMED, **call)
            answers.token_ms = 1e3 * statistics.median(b - a for a, b in itertools.pairwise(times[1:]))

    def _show(self, console: Console, scope: str) -> None:
        options, n, full, small = self.options, len(self.prompts[0]), self.answers[0], self.answers[2]
        if options.document is None:
            shown = [answers for answers in self.answers if answers.budget in (full.budget, small.budget)]
            rows = [
                [x.id, *x.answers, *(f"[{'green' if t == x.answers[0] else 'red'}]{escape(t)}[/]" for t in texts)]
                for x, *texts in zip(self.samples, *(answers.texts.values() for answers in shown), strict=True)
            ]
            systems = (f"{answers.system.removeprefix('kvpass ')}\n{answers.budget}" for answers in shown)
            title = f"{options.facts} facts in {n} tokens: the code, pin or number of a name"
            console.print(rich_table(("name", "value", *systems), rows, title=title, caption="system over budget"))
        rows = []
        for x in self.answers:
            right = sum((x.texts[index],) == sample.answers for index, sample in enumerate(self.samples))
            result = [escape(x.texts[0])] if options.document else [x.share, f"{right}/{len(x.texts)}"]
            share, kib = f"{x.cache_bytes / full.cache_bytes:.1%}", f"{x.cache_bytes / 1024:.0f}"
            rows.append([x.system, x.budget, *result, kib, share, f"{x.token_ms:.2f}"])
        names, left = (["answer"], 3) if options.document else (["of\nprompt", "exact"], 1)
        columns = ("system", "budget", *names, "cache\nKiB", "of full", "ms per\ntoken")
        known = {"prompt": "known when the text is compressed", "context": "not known when the text is compressed"}
        title = f"scope {scope}: the question is {known[scope]}"
        console.print(rich_table(columns, rows, left=left, title=title))

    def _show_conditions(self, console: Console) -> None:
        options, n, full, small = self.options, len(self.prompts[0]), self.answers[0], self.answers[2]
        policies = dict.fromkeys(x.system.removeprefix("kvpass ") for x in self.answers[2:])
        seed = "" if options.document else f", the same text with another question each, seed {options.seed}"
        device, dtype = self.decoder.device, str(self.decoder.dtype).removeprefix("torch.")
        notes = f"""\
Measured on {device}, {torch.get_num_threads()} threads, {dtype}, batch 1, backend {options.backend}; \
torch {torch.__version__}, transformers {transformers.__version__}. Model: {options.model}.
Prompts: {len(self.prompts)} of {n} tokens{seed}; greedy decoding. kvpass reads each once for all policies, without \
its last token (scope prompt) or its question (context), and goes on from there: a prefill computes with full \
attention, and the first word would be right whatever is kept.
Policies: {", ".join(policies)}, with default options unless given. Budget: entries per KV head per layer, with the \
window; {small.budget} occupy {small.cache_bytes} bytes (spare slots included), all {full.cache_bytes}.
ms per token: median of {TIMED - 1} between generated tokens, generate's own work included, prefill and compilation \
not.
One text and {len(self.prompts)} questions: a demonstration, not an evaluation.
What {next(iter(policies))} kept at budget {small.budget}, first question: {options.output.absolute()}"""
        console.print(notes, highlight=False, markup=False)
