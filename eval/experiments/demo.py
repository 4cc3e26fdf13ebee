"""``kvpass demo``: facts in a long text, or a question on a document, answered from full and compressed caches."""

from __future__ import annotations

import itertools
import random
import statistics
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from transformers import PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer

import kvpass
from kvpass.cache.cache import CompressedCache
from kvpass.eval.bench.systems import storage_bytes
from kvpass.eval.options import DemoOptions, read_text
from kvpass.eval.runner import each_cache
from kvpass.eval.tables import rich_table
from kvpass.eval.tasks.base import Sample, encode, largest
from kvpass.eval.tasks.needle import Task, hide
from kvpass.eval.tasks.words import ADJECTIVES, HELD_OUT_NAMES, NOUNS, english_sentence
from kvpass.loading import load_model
from kvpass.policies import PolicyName
from kvpass.progress import progress_bar, progress_console
from kvpass.report import import_figure
from kvpass.transformers_compat import CACHE

BUDGETS = (36, 40, 64)
"""Entries, for the built-in model and its facts, which need little."""
SHARES = (0.25, 0.5)
"""Of the prompt, for other models and documents."""
POLICIES: tuple[PolicyName, ...] = ("lava", "snapkv", "streaming_llm")
"""With their default options."""
_TIMED = 16
_ANSWER = 48  # tokens, about a document


@dataclass
class Answers:
    """What one system answered.

    Attributes:
        label: of the system. budget: of the policy; None for a full cache.
        texts: one a question. token_ms: milliseconds from one token to the next, of a text longer than an answer.
        cache_bytes: at the end of an answer.
    """

    label: str
    budget: int | float | None = None
    texts: list[str] = field(default_factory=list)
    token_ms: float = 0.0
    cache_bytes: int = 0

    @property
    def kept(self) -> str:
        return "all" if self.budget is None else f"{self.budget:{'.0%' if isinstance(self.budget, float) else ''}}"


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
        ValueError: a number out of range, one of document and question, an output that does not end in .png, no such
            model or document, or a prompt that is too short for facts or budgets, or too long for the model.
        ImportError: without matplotlib.
    """

    def __init__(self, options: DemoOptions) -> None:
        self.options, document = options, options.document
        if (document is None) != (options.question is None):
            raise ValueError("document and question: give both, or none")
        if document and options.tokens:
            raise ValueError(f"tokens={options.tokens}: a document has the length that it has")
        if not 1 <= options.facts <= len(HELD_OUT_NAMES):
            raise ValueError(f"facts={options.facts}: must be between 1 and {len(HELD_OUT_NAMES)}, the number of names")
        if options.output.suffix != ".png":
            raise ValueError(f"output={str(options.output)!r}: must end in .png")
        import_figure()
        transformers.utils.logging.disable_progress_bar()
        self.decoder, self.tokenizer = load_model(options.model, dtype="auto", device="cpu")
        builtin = options.model == "builtin"
        self.budgets: tuple[int, ...] | tuple[float, ...] = BUDGETS if builtin and not document else SHARES
        tokens = options.tokens or (2048 if builtin else 1024)
        if document:
            self.samples = [_on_document(document, options.question or "")]
        elif builtin:
            self.samples = _made_for_builtin(tokens, options.facts, options.seed)
        else:
            self.samples = _made_for_others(self.tokenizer, tokens, options.facts, options.seed)
        # the last token is fed after compression: a prefill's full attention would give the first word
        self.prompts = [encode(self.tokenizer, sample, chat=True).scoped("prompt", 1) for sample in self.samples]
        self.length = len(self.prompts[0])
        what = f"document={str(document)!r}: {self.length} tokens" if document else f"tokens={self.length}"
        least = max(BUDGETS) if self.budgets == BUDGETS else int(32 / min(SHARES))  # the window fits the budget
        if self.length <= least:
            raise ValueError(f"{what}: must be above {least} for the budgets of the demo")
        window = getattr(self.decoder.config.get_text_config(), "max_position_embeddings", None)
        longest = self.length + max(_TIMED, self.samples[0].max_new_tokens)
        if window and longest > window:
            raise ValueError(f"{what}: with the answer {longest}, and the model reads at most {window}")

    def run(self) -> None:
        """Ask every system every question; print the answers, the summary and what was measured."""
        model = kvpass.compile(self.decoder, policy="full", backend=self.options.backend)
        conditions = [("full", None), *itertools.product(POLICIES, self.budgets)]
        plain, kept = Answers("transformers"), [Answers(f"kvpass {policy}", budget) for policy, budget in conditions]
        with progress_bar(progress_console()) as progress:
            task = progress.add_task("", total=len(self.samples) * (2 + len(conditions)))
            for index, prompt in enumerate(self.prompts):
                progress.update(task, description=f"question {index + 1}")
                self._answer(self.decoder, prompt.ids, index, plain)
                progress.advance(task, 2)
                caches = each_cache(model, conditions, torch.tensor([prompt.head]))
                for (policy, budget), cache, answers in zip(conditions, caches, kept, strict=True):
                    self._answer(model, prompt.rest, index, answers, past_key_values=cache)
                    if index == 0 and (policy, budget) == ("lava", min(self.budgets)):
                        model.report(cache).plot(self.options.output, marks=self._facts())
                    progress.advance(task)
        everyone, console = [plain, *kept], Console()
        console.print(self._fact_table(everyone) if self.samples[0].answers else self._document_table(everyone))
        console.print(self._summary_table(everyone))
        console.print(self._notes(everyone), highlight=False, markup=False)

    def _answer(self, model: Any, ids: tuple[int, ...], index: int, answers: Answers, **held: Any) -> None:
        """Note the answer to a question and the cache bytes; after the first also the time between tokens."""
        sample, tokens = self.samples[index], torch.tensor([ids])

        def generate(**limits: Any) -> Any:
            greedy = {"do_sample": False, "use_cache": True, "return_dict_in_generate": True}
            return model.generate(tokens, attention_mask=torch.ones_like(tokens), **held, **greedy, **limits)

        out = generate(max_new_tokens=sample.max_new_tokens)
        said = str(self.tokenizer.decode(out.sequences[0, tokens.shape[1] :], skip_special_tokens=True))
        answers.texts.append(" ".join((said.partition(".")[0] if sample.answers else said).split()))
        cache = out[CACHE]
        answers.cache_bytes = cache.nbytes if isinstance(cache, CompressedCache) else storage_bytes(cache)
        if index == 0:
            clock = _Clock()
            generate(min_new_tokens=_TIMED, max_new_tokens=_TIMED, streamer=clock)
            answers.token_ms = clock.token_ms()

    def _facts(self) -> dict[str, list[int]]:
        """Positions of the values, which the text holds once each; none for a document."""
        places = []
        for fact in (fact for fact in self.samples if fact.answers):
            before = fact.context[: fact.context.index(fact.answers[0])].rstrip()
            places.append(len(encode(self.tokenizer, replace(fact, context=before), chat=True).head))
        return {"fact asked for": places[:1], "other facts": places[1:]} if places else {}

    def _wanted(self, answers: list[Answers]) -> list[str]:
        """The right answers, or for a document those of the full cache."""
        pairs = zip(self.samples, answers[0].texts, strict=True)
        return [asked.answers[0] if asked.answers else text for asked, text in pairs]

    def _fact_table(self, answers: list[Answers]) -> Table:
        shown = [answer for answer in answers if answer.budget in (None, min(self.budgets))]
        systems = (f"{answer.label.removeprefix('kvpass ')}\n{answer.kept}" for answer in shown)
        rows = [
            [asked.id, wanted, *(_coloured(answer.texts[index], wanted) for answer in shown)]
            for index, (asked, wanted) in enumerate(zip(self.samples, self._wanted(answers), strict=True))
        ]
        title = f"{self.options.facts} facts in {self.length} tokens: the code, pin or number of a name"
        return rich_table(("name", "value", *systems), rows, title=title, caption="system over budget")

    def _document_table(self, answers: list[Answers]) -> Table:
        (wanted,) = self._wanted(answers)
        rows = [(answer.label, answer.kept, _coloured(answer.texts[0], wanted)) for answer in answers]
        title = escape(self.options.question or "")
        return rich_table(("system", "budget", "answer"), rows, left=3, leading=1, title=title)

    def _summary_table(self, answers: list[Answers]) -> Table:
        wanted, full = self._wanted(answers), answers[0].cache_bytes
        rows = [
            [
                answer.label,
                answer.kept,
                f"{answer.budget / self.length:.1%}" if isinstance(answer.budget, int) else f"{answer.budget or 1:.0%}",
                f"{sum(map(str.__eq__, wanted, answer.texts))}/{len(wanted)}",
                f"{answer.cache_bytes / 1024:.0f}",
                f"{answer.cache_bytes / full:.1%}",
                f"{answer.token_ms:.2f}",
            ]
            for answer in answers
        ]
        exact = "exact" if self.samples[0].answers else "as\nfull"
        columns = ("system", "budget", "of\nprompt", exact, "cache\nKiB", "of full", "ms per\ntoken")
        return rich_table(columns, rows, title="accuracy, memory and speed")

    def _notes(self, answers: list[Answers]) -> str:
        options, shown = self.options, next(answer for answer in answers if answer.budget == min(self.budgets))
        if options.document:
            prompts = f"1 of {self.length} tokens"
            last = "as full: the answer of the full cache, word for word. One question"
        else:
            many, seed = f"{options.facts} of {self.length} tokens", f"seed {options.seed}"
            prompts = f"{many}, the same text with another question each, {seed}"
            last = f"One text and {options.facts} questions"
        device, dtype = self.decoder.device, str(self.decoder.dtype).removeprefix("torch.")
        return f"""\
Measured on {device}, {torch.get_num_threads()} threads, {dtype}, batch 1, backend {options.backend}; \
torch {torch.__version__}, transformers {transformers.__version__}. Model: {options.model}.
Prompts: {prompts}; greedy decoding. \
kvpass reads each once for all policies, without its last token, and goes on from there: a prefill computes with full \
attention, and the first word would be right whatever is kept.
Policies: {", ".join(POLICIES)}, with default options. Budget: entries per KV head per layer, window included; \
{shown.kept} occupy {shown.cache_bytes} bytes (spare slots included), all {answers[0].cache_bytes}.
ms per token: median of {_TIMED - 1} between generated tokens, generate's own work included, prefill and compilation \
not.
{last}: a demonstration, not an evaluation.
What lava kept at budget {shown.kept}, first question: {options.output.absolute()}"""


def _coloured(text: str, wanted: str) -> str:
    return f"[{'green' if text == wanted else 'red'}]{escape(text)}[/]"


def _on_document(document: Path, question: str) -> Sample:
    """One question about a text file.

    Raises:
        ValueError: it is empty or no text.
    """
    text = read_text(document)
    if not text.strip():
        raise ValueError(f"document={str(document)!r}: is empty")
    return Sample(id="document", context=text, question=f"\n\n{question}", answers=(), max_new_tokens=_ANSWER)


def _made_for_builtin(tokens: int, facts: int, seed: int) -> list[Sample]:
    """Samples in the language of the built-in model, each with the name that it asks about as its id."""
    samples = hide(Task(keys=facts, questions=facts), tokens, seed)
    return [replace(sample, id=" ".join(sample.question.split()[-3:-1])) for sample in samples]


def _made_for_others(tokenizer: PreTrainedTokenizerBase, tokens: int, facts: int, seed: int) -> list[Sample]:
    """Samples in English, of at most so many tokens.

    Values have two digits: scores are highest at the words before a number, and pooling carries them three entries
    further, to the space and two digits, where each digit is a token.
    """

    def build(sentences: int, asked: int = 0) -> Sample:
        rng = random.Random(seed)
        names = [" ".join(name) for name in rng.sample(list(itertools.product(ADJECTIVES, NOUNS)), facts)]
        values = [str(number) for number in rng.sample(range(10, 100), facts)]
        text = [english_sentence(rng) for _ in range(sentences)]
        for name, value in zip(names, values, strict=True):
            text.insert(rng.randrange(len(text) + 1), f"The code of the {name} is {value}.")
        return Sample(
            id=names[asked],
            context=" ".join(text),
            question=f"\n\nWhat is the code of the {names[asked]} in the text above?",
            answer_prefix=f"The code of the {names[asked]} is",
            answers=(values[asked],),
            max_new_tokens=8,
        )

    size = largest(build, tokenizer, tokens, smallest=1, chat=True, name="demo")
    return [build(size, asked) for asked in range(facts)]
