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
from kvpass.eval.bench.systems import storage_bytes
from kvpass.eval.options import DemoOptions
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
        facts, builtin = options.facts, options.model == "builtin"
        if options.output.suffix != ".png":
            raise ValueError(f"output={str(options.output)!r}: must end in .png")
        import_figure()
        transformers.utils.logging.disable_progress_bar()
        self.decoder, self.tokenizer = load_model(options.model, dtype="auto", device="cpu")
        tokens = options.tokens or (2048 if builtin else 1024)
        if builtin:  # the id is the name that is asked about
            samples = hide(Task(keys=facts, questions=facts), tokens, options.seed)
            self.samples = [replace(sample, id=" ".join(sample.question.split()[-3:-1])) for sample in samples]
        else:
            self.samples = self._english_samples(tokens, facts, options.seed)
        # the last token is fed after compression: a prefill's full attention would give the first word
        self.prompts = [encode(self.tokenizer, sample, chat=True).scoped("prompt", 1) for sample in self.samples]
        n = len(self.prompts[0])
        if n <= (least := max(BUDGETS) if builtin else int(32 / min(SHARES))):  # the window fits
            raise ValueError(f"tokens={n}: must be above {least} for the budgets of the demo")
        window = getattr(self.decoder.config.get_text_config(), "max_position_embeddings", None)
        if window and (longest := n + max(TIMED, self.samples[0].max_new_tokens)) > window:
            raise ValueError(f"tokens={n}: with the answer {longest}, and the model reads at most {window}")
        compressed = list(itertools.product(POLICIES, BUDGETS if builtin else SHARES))
        self.conditions: list[Any] = [("full", None), *compressed]
        rows = [("transformers", "all", "100%"), ("kvpass full", "all", "100%")]
        for policy, budget in compressed:
            share = f"{budget / n:.1%}" if builtin else f"{budget:.0%}"
            rows.append((f"kvpass {policy}", str(budget) if builtin else share, share))
        self.answers = [SimpleNamespace(system=name, budget=b, share=s, texts=[]) for name, b, s in rows]

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
        """Ask every system every question; print answers, a summary and the conditions; draw what lava kept."""
        model = kvpass.compile(self.decoder, policy="full", backend=self.options.backend)
        with progress_bar(progress_console()) as progress:
            task = progress.add_task("answers", total=len(self.prompts) * len(self.conditions))
            for index, prompt in enumerate(self.prompts):
                self._answer(self.decoder, prompt.ids, index, self.answers[0])
                caches = each_cache(model, self.conditions, torch.tensor([prompt.head]))
                for cache, answers in zip(caches, self.answers[1:], strict=True):
                    self._answer(model, prompt.rest, index, answers, past_key_values=cache)
                    if index == 0 and answers is self.answers[2]:
                        cut = (replace(x, context=x.context.partition(x.answers[0])[0].rstrip()) for x in self.samples)
                        places = [len(encode(self.tokenizer, sample, chat=True).head) for sample in cut]
                        marks = {"fact asked for": places[:1], "other facts": places[1:]}
                        model.report(cache).plot(self.options.output, marks=marks)
                    progress.advance(task)
        self._show(Console())

    def _answer(self, model: Any, ids: tuple[int, ...], index: int, answers: SimpleNamespace, **cache: Any) -> None:
        """Note the answer to a question and the bytes of the cache; after the first also the time between tokens."""
        tokens = torch.tensor([ids])
        call = {"attention_mask": torch.ones_like(tokens), "do_sample": False, "use_cache": True, **cache}
        limit = self.samples[index].max_new_tokens
        out = model.generate(tokens, return_dict_in_generate=True, max_new_tokens=limit, **call)
        text = str(self.tokenizer.decode(out.sequences[0, tokens.shape[1] :], skip_special_tokens=True))
        answers.texts.append(" ".join(text.partition(".")[0].split()))
        answers.cache_bytes = storage_bytes(out[CACHE]) if model is self.decoder else out[CACHE].nbytes
        if index == 0:  # whatever compiles does so before the first token
            times: list[float] = []  # of the prompt, and of each token
            clock = SimpleNamespace(put=lambda _: times.append(time.perf_counter()), end=lambda: None)
            model.generate(tokens, streamer=clock, min_new_tokens=TIMED, max_new_tokens=TIMED, **call)
            answers.token_ms = 1e3 * statistics.median(b - a for a, b in itertools.pairwise(times[1:]))

    def _show(self, console: Console) -> None:
        options, n = self.options, len(self.prompts[0])
        full, small = self.answers[0], self.answers[2]
        shown = [answers for answers in self.answers if answers.budget in (full.budget, small.budget)]
        rows = [
            [x.id, *x.answers, *(f"[{'green' if t == x.answers[0] else 'red'}]{escape(t)}[/]" for t in texts)]
            for x, *texts in zip(self.samples, *(answers.texts for answers in shown), strict=True)
        ]
        names = (f"{answers.system.removeprefix('kvpass ')}\n{answers.budget}" for answers in shown)
        title = f"{options.facts} facts in {n} tokens: the code, pin or number of a name"
        console.print(rich_table(("name", "value", *names), rows, title=title, caption="system over budget"))
        rows = []
        for x in self.answers:
            right = sum(text == sample.answers[0] for text, sample in zip(x.texts, self.samples, strict=True))
            share, kib = f"{x.cache_bytes / full.cache_bytes:.1%}", f"{x.cache_bytes / 1024:.0f}"
            rows.append([x.system, x.budget, x.share, f"{right}/{len(x.texts)}", kib, share, f"{x.token_ms:.2f}"])
        columns = ("system", "budget", "of\nprompt", "exact", "cache\nKiB", "of full", "ms per\ntoken")
        console.print(rich_table(columns, rows, title="accuracy, memory and speed"))
        device, dtype = self.decoder.device, str(self.decoder.dtype).removeprefix("torch.")
        notes = f"""\
Measured on {device}, {torch.get_num_threads()} threads, {dtype}, batch 1, backend {options.backend}; \
torch {torch.__version__}, transformers {transformers.__version__}. Model: {options.model}.
Prompts: {options.facts} of {n} tokens, the same text with another question each, seed {options.seed}; greedy \
decoding. kvpass reads each once for all policies, without its last token, and goes on from there: a prefill computes \
with full attention, and the first word would be right whatever is kept.
Policies: {", ".join(POLICIES)}, with default options. Budget: entries per KV head per layer, window included; \
{small.budget} occupy {small.cache_bytes} bytes (spare slots included), all {full.cache_bytes}.
ms per token: median of {TIMED - 1} between generated tokens, generate's own work included, prefill and compilation \
not.
One text and {options.facts} questions: a demonstration, not an evaluation.
What lava kept at budget {small.budget}, first question: {options.output.absolute()}"""
        console.print(notes, highlight=False, markup=False)
