"""``kvpass choose``: which policy, budget and format of entries a model and some texts need, without labels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from statistics import mean

import torch
from torch import Tensor
from torch.nn.functional import kl_div

import kvpass
from kvpass.cache.fingerprint import weights_digest
from kvpass.chat import read_text
from kvpass.config import BudgetLike, EntryFormat, read_bytes
from kvpass.eval.environment import command_line, save_json
from kvpass.eval.options import ChooseOptions, names
from kvpass.eval.policy_spec import PolicySpec, parse_formats, parse_policies, typed
from kvpass.eval.prompt import Prompt, tokenize
from kvpass.eval.run import MOST_TOGETHER, stop_tokens
from kvpass.eval.runner import Runner, chunks
from kvpass.eval.statistics import bootstrap
from kvpass.eval.tables import Tables
from kvpass.eval.tasks import encode, find_tasks
from kvpass.eval.tasks.base import library
from kvpass.loading import load_model
from kvpass.progress import progress_bar, progress_console

POLICIES = {
    "prompt": "full,lava,lava:kernel_size=31,snapkv,ada_snapkv,compactor,kvzip",
    "context": "full,kvzip,compactor,keydiff,layer_defensivekv,expected_attention",
}
"""What is tried in each scope if no policy is named."""

_COLUMNS = ("", "policy", "budget", "entries", "KiB", "agreement", "95 % interval", "KL", "interval of KL")


@dataclass(eq=False)
class Condition:
    """A policy, budget and format of entries, and what was measured under it.

    Attributes:
        nbytes: of the largest cache, when the compressed part of a prompt has been read. agreement: of each prompt, the
            share of the answer's tokens whose argmax is the full cache's. kl: mean KL(full || compressed), in nats.
    """

    spec: PolicySpec
    budget: BudgetLike = None
    entry_format: EntryFormat = "model"
    nbytes: float = 0.0
    agreement: list[float] = field(default_factory=list)
    kl: list[float] = field(default_factory=list)

    @property
    def call(self) -> str:
        """The call of ``kvpass.compile``."""
        arguments = {"policy": self.spec.name, **dict(self.spec.options), "budget": self.budget}
        arguments["entries"] = None if self.entry_format == "model" else self.entry_format
        given = (f"{name}={value!r}" for name, value in arguments.items() if value is not None)
        return f"kvpass.compile(model, {', '.join(given)})"


class Choosing:
    """A checked run; ``ValueError`` for a model, text, task, policy or goal that does not exist or fit."""

    def __init__(self, options: ChooseOptions) -> None:
        library("scipy.stats")  # missed now, not after the last prompt
        self.options = options
        self.memory = None if options.memory is None else read_bytes(options.memory, "memory")
        if not 0 < options.agreement <= 1:
            raise ValueError(f"agreement={options.agreement}: must be in (0, 1]")
        if bool(options.texts) == bool(options.tasks):
            raise ValueError("prompts are made of --texts or of --tasks: give one of the two")
        specs, budgets = parse_policies(options.policies or POLICIES[options.scope]), names(options.budgets)
        tried = [
            Condition(spec, budget, entry_format)
            for entry_format in parse_formats(options.entries)
            for spec in specs
            for budget in (map(typed, budgets) if spec.resolve().needs_budget else [None])
        ]
        self.conditions = list({each.call: each for each in (Condition(PolicySpec("full")), *tried)}.values())
        self.full, *others = self.conditions
        if not others:
            raise ValueError("nothing to choose from: name policies and budgets, or entries, besides the full cache")
        self.model, self.tokenizer = load_model(options.model, dtype=options.dtype, device=options.device)
        self.prompts = list(self._texts() if options.texts else self._tasks())
        if len(self.prompts) < 2:
            raise ValueError(f"{len(self.prompts)} prompt: an interval needs 2; give a smaller length, or more samples")
        compiled = partial(kvpass.compile, self.model, policy="full", backend=options.backend)
        formats = dict.fromkeys(condition.entry_format for condition in self.conditions)
        self.runners = {name: Runner(model=compiled(entries=name), tokenizer=self.tokenizer) for name in formats}

    def _texts(self) -> Iterator[tuple[Prompt, int, Sequence[int]]]:
        """Cut texts into pieces; yield prompts, evenly spread over them, with the tokens that follow as answers."""
        options, answer, pieces = self.options, self.options.max_new_tokens, []
        special = tokenize(self.tokenizer, "", "", special=True).ids
        size = options.length + answer - len(special)
        for path in options.texts or ():
            ids = self.tokenizer(read_text(path), add_special_tokens=False, verbose=False)["input_ids"]
            if len(ids) < size:
                raise ValueError(f"text {str(path)!r}: has {len(ids)} tokens, {size} are needed; give a smaller length")
            pieces += [(*special, *ids[end - size : end]) for end in range(size, len(ids) + 1, size)]
        count = min(options.samples, len(pieces))
        for piece in (pieces[number * len(pieces) // count] for number in range(count)):
            yield Prompt(piece[:-answer], min(answer, options.length // 2)), answer, piece[-answer:]

    def _tasks(self) -> Iterator[tuple[Prompt, int, Sequence[int]]]:
        """Yield prompts of tasks, with the most tokens of each answer, which is still to be made."""
        options = self.options
        for task in find_tasks(names(options.tasks), options.data_dir):
            for sample in task.samples(self.tokenizer, options.length, options.samples, 0):
                prompt = encode(self.tokenizer, sample, chat=task.chat, limit=options.length)
                yield prompt, min(options.max_new_tokens, sample.max_new_tokens), ()

    @torch.no_grad()
    def run(self) -> None:
        """Read each prompt once for each format of entries, measure every condition, and sort them by bytes."""
        stops = stop_tokens(self.model, self.tokenizer)
        with progress_bar(progress_console()) as progress:
            bar = progress.add_task("answers measured", total=len(self.prompts) * len(self.conditions))
            for prompt, limit, answer in self.prompts:
                prompt = prompt.scoped(self.options.scope, 1)
                if not answer:
                    greedy = self.runners["model"].greedy([prompt], [limit], stops, [("full", None)])
                    (((_, _, answer, _),),) = greedy
                measured = {condition: (nbytes, logits) for condition, nbytes, logits in self._logits(prompt, answer)}
                expected = measured[self.full][1]
                for condition, (nbytes, logits) in measured.items():
                    agreement, kl = compare(expected, logits)
                    condition.nbytes = max(condition.nbytes, nbytes)
                    condition.agreement.append(agreement)
                    condition.kl.append(kl)
                progress.update(bar, advance=len(measured))
        self.conditions.sort(key=lambda condition: (condition.nbytes, -mean(condition.agreement)))

    def _logits(self, prompt: Prompt, answer: Sequence[int]) -> Iterator[tuple[Condition, float, Tensor]]:
        """Yield conditions, with bytes of the cache and logits of the answer ``[A, V]``."""
        ids = torch.tensor([[*prompt.rest, *answer[:-1]]], device=self.model.device)
        for entry_format, runner in self.runners.items():
            of_format = [condition for condition in self.conditions if condition.entry_format == entry_format]
            for some in chunks(of_format, MOST_TOGETHER):
                rules = [(condition.spec.resolve(), condition.budget) for condition in some]
                for batch in runner.compressed([prompt], [0], rules):
                    rows = ids.expand(len(batch.conditions), -1)
                    logits = runner.model(rows, past_key_values=batch.cache, logits_to_keep=len(answer)).logits
                    for number, kept, of_row in zip(batch.conditions, batch.kept, logits, strict=True):
                        yield some[number], kept.cache_bytes, of_row

    def choice(self) -> tuple[Condition, bool]:
        """Return the smallest condition that agrees enough, or the best that fits; or the nearest, and False."""
        tried = [condition for condition in self.conditions if condition is not self.full]
        if self.memory is not None:
            fits = [condition for condition in tried if condition.nbytes <= self.memory]
            return max(fits or tried[:1], key=lambda condition: mean(condition.agreement)), bool(fits)
        low = {condition: bootstrap(condition.agreement, 0.0).low for condition in tried}
        agree = [condition for condition in tried if low[condition] >= self.options.agreement]
        return agree[0] if agree else max(tried, key=low.__getitem__), bool(agree)

    def table(self, chosen: Condition) -> Tables:
        """A line for each condition, the smallest cache first; ``*`` marks the chosen one."""
        options, rows = self.options, []
        for condition in self.conditions:
            cells = ["*" if condition is chosen else "", str(condition.spec), str(condition.budget or "all")]
            cells += [condition.entry_format, f"{condition.nbytes / 1024:.0f}"]
            agreement, kl = bootstrap(condition.agreement, 0.0), bootstrap(condition.kl, 0.0)
            cells += [f"{agreement.mean:.1%}", f"{agreement.low:.1%}-{agreement.high:.1%}"]
            cells += [f"{kl.mean:.3f}", f"{kl.low:.3f}-{kl.high:.3f}"]
            rows.append(cells)
        title = f"{options.model}, scope {options.scope}: {len(self.prompts)} prompts of {options.length} tokens"
        return Tables([(title, _COLUMNS, rows)], left=4, spare=_COLUMNS[-1:])

    def save(self, path: Path, chosen: Condition) -> None:
        """Write the chosen condition, for :func:`kvpass.chosen`, and all numbers."""
        result = {
            "policy": chosen.spec.resolve().spec,
            "budget": chosen.budget,
            "entries": chosen.entry_format,
            "weights": weights_digest(self.model, {}, rounded=True),
            "command": command_line(),
            "measured": [asdict(condition) for condition in self.conditions],
        }
        save_json(path, result)


def compare(full: Tensor, logits: Tensor) -> tuple[float, float]:
    """Return the share of rows with the same argmax, and the mean KL(full || other) in nats, of logits ``[A, V]``."""
    same = (full.argmax(-1) == logits.argmax(-1)).float().mean()
    expected, found = full.float().log_softmax(-1), logits.float().log_softmax(-1)
    return float(same), float(kl_div(found, expected, reduction="batchmean", log_target=True))
