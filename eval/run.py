"""``kvpass eval``: tasks x policies x budgets x scopes, sample by sample, resumable."""

from __future__ import annotations

import json
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

import msgspec
from rich.console import Console
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import kvpass
from kvpass.config import Budget, BudgetLike, EntryFormat
from kvpass.eval.environment import (
    command_line,
    digest,
    machine,
    model_digest,
    policy_digest,
    save_json,
    source_digest,
    versions,
)
from kvpass.eval.options import EvalOptions, names
from kvpass.eval.policy_spec import (
    FULL,
    PolicySpec,
    PrefillSpec,
    parse_formats,
    parse_policies,
    parse_prefills,
    spec_of_contents,
    typed,
    with_format,
)
from kvpass.eval.prompt import Prompt, parse_scopes
from kvpass.eval.records import Question, Record, RecordFile, identity, newest
from kvpass.eval.results import Results, csv_of, markdown_of, read_runs, results_of
from kvpass.eval.runner import Kept, Runner, chunks
from kvpass.eval.tasks import Sample, Task, encode, find_tasks
from kvpass.eval.tasks.base import library
from kvpass.loading import launched, load_model
from kvpass.policies import Policy, resolve_budget
from kvpass.progress import progress_bar, progress_console
from kvpass.replace_file import write_shared

MOST_TOGETHER = 32
"""Conditions that share a prefill at most: their caches are held at once."""
_CONTEXT_END = 200
"""Characters of a context that a record repeats."""
_FOLDERS = re.compile(r'(?<=["=:,])(?:~|\.{0,2})/(?:[^/,=:"]*/)*')
"""Folders of paths in JSON that begin at the root, at home or with a dot."""


@dataclass(frozen=True, eq=False)
class Condition:
    """One task under one policy, budget, scope, entry format and prefill: a question a sample."""

    task: Task
    spec: PolicySpec
    budget: BudgetLike
    scope: str
    entry_format: EntryFormat = "model"
    prefill: PrefillSpec = FULL
    questions: list[Question] = field(default_factory=list)

    @property
    def label(self) -> str:
        return with_format(str(self.spec), self.entry_format, self.prefill)


class Evaluation:
    """A checked run; raises ``ValueError`` for a model, task, data or budget that does not exist or fit."""

    def __init__(self, options: EvalOptions) -> None:
        self.options = options
        self.policies, self.formats = parse_policies(options.policies), parse_formats(options.entries)
        self.prefills = parse_prefills(options.prefill)
        self.budgets: tuple[BudgetLike, ...] = tuple(map(typed, names(options.budgets)))
        self.scopes = parse_scopes(options.scopes)
        self._check_options()
        for name in ("pandas", "scipy"):  # missed now, not after the last answer
            library(name)
        tasks = find_tasks(names(options.tasks), options.data_dir)
        self.model, self.tokenizer = load_model(options.model, dtype=options.dtype, device=options.device)
        self.fingerprint = model_digest(self.model)
        self.stops = stop_tokens(self.model, self.tokenizer)
        self.libraries = {name: version(name) for name in ("torch", "transformers")}
        self._runners: dict[tuple[EntryFormat, PrefillSpec], Runner] = {}
        self.samples: dict[str, list[tuple[Sample, Prompt]]] = {task.name: self._encoded(task) for task in tasks}
        self.file = RecordFile(options.output / "samples.jsonl", writes=self.writes)
        self.runs, described = read_runs(options.output, self.file.records.values()), self._described()
        self.run_name = digest(json.dumps(described, sort_keys=True))
        self.runs[self.run_name] = described
        self.conditions = [
            self._condition(Condition(task, spec, budget, scope, entry_format, prefill))
            for entry_format in dict.fromkeys(self.formats)
            for prefill in dict.fromkeys(self.prefills)
            for spec in {spec.resolve().spec: spec for spec in self.policies}.values()
            for scope in self.scopes
            for budget in dict.fromkeys(self._budgets_of(spec))
            for task in tasks
        ]

    def _check_options(self) -> None:
        if not self.budgets and any(spec.resolve().needs_budget for spec in self.policies):
            raise ValueError("budgets='': name at least one budget")
        for spec in self.policies:
            for budget in self._budgets_of(spec):
                resolve_budget(spec.resolve(), budget)

    def _budgets_of(self, spec: PolicySpec) -> tuple[BudgetLike, ...]:
        return self.budgets if spec.resolve().needs_budget else (None,)

    @property
    def writes(self) -> bool:
        """Whether this process writes: of those that share the model, the first one."""
        return launched()[0] == 0

    def run(self) -> list[Results]:
        """Answer what is not yet answered; write and return the tables of all records of the folder."""
        begin = time.perf_counter()
        if self.writes:
            self.options.output.mkdir(parents=True, exist_ok=True)
            self._write_manifest(None)
        waiting, total = self._waiting(), sum(len(condition.questions) for condition in self.conditions)
        answered = total - sum(len(conditions) * len(indices) for conditions, indices in waiting.items())
        with progress_bar(progress_console() if self.writes else Console(quiet=True)) as progress:
            bar = progress.add_task("", total=total, completed=answered)
            for records in self._answers(waiting, lambda what: progress.update(bar, description=what)):
                for record in records:
                    self.file.add(record)
                progress.update(bar, advance=len(records), score=records[-1].score)
        self._score_anew()
        results = results_of(self.file.records.values(), self.runs)
        if self.writes:
            write_shared(self.options.output / "results.md", markdown_of(results).encode())
            write_shared(self.options.output / "results.csv", csv_of(results).encode())
            self._write_manifest(time.perf_counter() - begin)
        return results

    def _score_anew(self) -> None:
        """Score this run's records, and add again those that this changes or that are not the newest."""
        counted = newest(self.file.records.values())
        for condition in self.conditions:
            for question, (sample, _) in zip(condition.questions, self.samples[condition.task.name], strict=True):
                old = self.file.records[question.key]
                record = msgspec.structs.replace(
                    old,
                    label=condition.label,
                    answers=list(sample.answers),
                    score=condition.task.metric(old.prediction, sample),
                    labels=dict(sample.labels),
                )
                if counted.get(identity(record)) != record:
                    self.file.add(record)

    def _answers(
        self, waiting: Mapping[tuple[Condition, ...], list[int]], describe: Callable[[str], None]
    ) -> Iterator[list[Record]]:
        """Answer what waits, each prompt read once; describe it, and yield the records of each batch."""
        for conditions, indices in waiting.items():
            first, count = conditions[0], len(conditions)
            named = f"{count} conditions" if count > 1 else f"{first.label} {first.budget or ''}"
            describe(f"{named} {first.scope} {first.task.name}")
            samples = [self.samples[first.task.name][index] for index in indices]
            prompts = [prompt.scoped(first.scope, self.options.num_uncompressed_tokens) for _, prompt in samples]
            rules = [(condition.spec.resolve(), condition.budget) for condition in conditions]
            limits = [sample.max_new_tokens for sample, _ in samples]
            for answers in self._runner(first.entry_format, first.prefill).greedy(prompts, limits, self.stops, rules):
                yield [
                    self._record(conditions[number], indices[index], tokens, kept)
                    for number, index, tokens, kept in answers
                ]

    def _waiting(self) -> dict[tuple[Condition, ...], list[int]]:
        """Conditions of one task and scope, and the samples for which all of these wait.

        Processes that share the model read prompts for each condition.
        """
        waiting: defaultdict[tuple[Any, ...], list[Condition]] = defaultdict(list)
        for condition in self.conditions:
            for index, question in enumerate(condition.questions):
                if question.key not in self.file.records:
                    reads = condition.entry_format, condition.prefill
                    waiting[condition.task.name, condition.scope, *reads, index].append(condition)
        samples: defaultdict[tuple[Condition, ...], list[int]] = defaultdict(list)
        most = 1 if launched()[1] > 1 else MOST_TOGETHER
        for (*_, index), conditions in waiting.items():
            for some in chunks(conditions, most):
                samples[tuple(some)].append(index)
        return samples

    def _runner(self, entry_format: EntryFormat, prefill: PrefillSpec) -> Runner:
        """With one compiled model for each entry format and prefill: the decoder is captured once for all policies."""
        if (entry_format, prefill) not in self._runners:
            options: dict[str, Any] = {"entries": entry_format, "prefill": prefill.resolve() or "full"}
            model = kvpass.compile(self.model, policy="full", backend=self.options.backend, **options)
            runner = Runner(model=model, tokenizer=self.tokenizer, batch=self.options.batch)
            self._runners[entry_format, prefill] = runner
        return self._runners[entry_format, prefill]

    def _record(self, condition: Condition, index: int, tokens: list[int], kept: Kept) -> Record:
        (sample, prompt), question = self.samples[condition.task.name][index], condition.questions[index]
        text = str(self.tokenizer.decode(tokens, skip_special_tokens=True))
        return Record(
            key=question.key,
            label=condition.label,
            run=self.run_name,
            question=question,
            question_text=sample.question + sample.answer_prefix,
            context_end=sample.context[-_CONTEXT_END:],
            prompt_tokens=len(prompt) + prompt.cut_tokens,
            cut_tokens=prompt.cut_tokens,
            answers=list(sample.answers),
            prediction=text,
            score=condition.task.metric(text, sample),
            generated_tokens=len(tokens),
            kept=kept,
            labels=dict(sample.labels),
        )

    def _encoded(self, task: Task) -> list[tuple[Sample, Prompt]]:
        options = self.options
        samples = task.samples(self.tokenizer, options.length, options.samples, options.seed)
        if not samples:
            raise ValueError(f"task {task.name!r}: its data has no rows")
        task.metric("", samples[0])  # a library that the metric lacks is missed now, not after the first answer
        chat = options.chat and task.chat
        return [(sample, encode(self.tokenizer, sample, chat=chat, limit=options.length)) for sample in samples]

    def _condition(self, condition: Condition) -> Condition:
        """Fill in the questions of a condition."""
        task, policy, budget, scope = condition.task, condition.spec.resolve(), condition.budget, condition.scope
        named = with_format(spec_of_contents(policy), condition.entry_format, condition.prefill)
        code = source_digest() + policy_digest(policy)
        for sample, prompt in self.samples[task.name]:
            self._check_budget(policy, budget, scope, prompt)
            question = Question(
                task=task.name,
                sample=sample.id,
                policy=named,
                budget="all" if budget is None else str(budget),
                scope=scope,
                num_uncompressed_tokens=self.options.num_uncompressed_tokens,
                length=self.options.length,
                chat=self.options.chat,
                model=self.fingerprint,
                code=code,
                backend=self.options.backend,
                device=self.model.device.type,
                seed=self.options.seed,
                max_new_tokens=sample.max_new_tokens,
                stops=sorted(self.stops),
                libraries=self.libraries,
                prompt=digest(json.dumps([len(prompt.head), *prompt.ids])),
            )
            condition.questions.append(question)
        return condition

    def _check_budget(self, policy: Policy, budget: BudgetLike, scope: str, prompt: Prompt) -> None:
        """Refuse a budget that does not fit; budgets in bytes are left to the model."""
        count = self.options.num_uncompressed_tokens
        tokens = len(prompt.scoped(scope, count).head)
        if not tokens:
            raise ValueError(f"num_uncompressed_tokens={count}: leaves nothing of a prompt of {len(prompt)} tokens")
        if budget is not None and (parsed := Budget.parse(budget)).kind != "bytes":
            try:
                parsed.check(tokens, policy.window, 1)
            except ValueError as error:
                raise ValueError(f"policy {policy.name!r}, scope {scope!r}: {error}") from None

    def _described(self) -> dict[str, Any]:
        """What the run is made of, without the folders of a machine."""
        settings = asdict(self.options)
        del settings["output"]
        model = {
            "name": self.options.model,
            "class": type(self.model).__name__,
            "fingerprint": self.fingerprint,
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "parameters": self.model.num_parameters(),
        }
        described = {"command": command_line(), "settings": settings, "model": model, "versions": versions()}
        described["machine"] = machine(self.model.device)
        return dict(json.loads(_FOLDERS.sub("", json.dumps(described, default=str))))

    def _write_manifest(self, seconds: float | None) -> None:
        """Write the folder's runs; ``seconds`` of this one are None while it goes on."""
        written = {"written": datetime.now(UTC).isoformat(timespec="seconds"), "seconds": seconds}
        self.runs[self.run_name] |= {**written, "finished": seconds is not None}
        save_json(self.options.output / "manifest.json", {"runs": self.runs})


def stop_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Token ids that end an answer: those of the generation configuration and of the tokenizer."""
    configured = getattr(model.generation_config, "eos_token_id", None)
    many = configured if isinstance(configured, list) else [configured]
    return frozenset(int(token) for token in [*many, tokenizer.eos_token_id] if token is not None)
