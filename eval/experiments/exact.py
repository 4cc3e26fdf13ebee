"""``kvpass exact``: how far the compressed cache and the full one agree, and what exact answers cost."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

import kvpass
from kvpass.cache.cache import CompressedCache
from kvpass.cache.prompt_record import Acceptance
from kvpass.eval.environment import command_line, conditions, machine, versions
from kvpass.eval.options import ExactOptions, names
from kvpass.eval.policy_spec import parse_policies, typed
from kvpass.eval.run import stop_tokens
from kvpass.eval.runner import each_cache
from kvpass.eval.tables import Tables
from kvpass.eval.tasks import encode, find_tasks
from kvpass.loading import load_model
from kvpass.progress import progress_bar, progress_console
from kvpass.transformers_compat import CACHE


@dataclass
class Condition:
    """What was measured of a policy and budget.

    Attributes:
        identical: exact answers that are those of the full cache. same: answers of the compressed cache alone that are.
        accepted: of each exact answer. compressed, exact: milliseconds a token of each answer.
    """

    policy: str
    budget: str
    identical: int = 0
    same: int = 0
    accepted: list[Acceptance] = field(default_factory=list)
    compressed: list[float] = field(default_factory=list)
    exact: list[float] = field(default_factory=list)


class Exact:
    """A checked measurement.

    Each prompt but its last token is read once and compressed under every condition, question included. Answers are
    greedy and end at the model's own end token, or after ``new_tokens``.

    Raises:
        ValueError: what does not exist or is out of range: model, tasks, policies, budgets, numbers.
    """

    def __init__(self, options: ExactOptions) -> None:
        self.options = options
        policies = parse_policies(options.policies)
        for spec in policies:
            if not spec.resolve().needs_budget or spec.resolve().decode_rule() is not None:
                raise ValueError(f"policies={str(spec)!r}: must compress a prompt and only append while decoding")
        tasks = find_tasks(names(options.tasks))
        decoder, tokenizer = load_model(options.model, dtype=options.dtype, device=options.device)
        self.ends = sorted(stop_tokens(decoder, tokenizer)) or None
        self.fast = kvpass.compile(decoder, policy="full", backend=options.backend)
        self.prompts = [
            torch.tensor([encode(tokenizer, sample, chat=task.chat, limit=options.length).ids])
            for task in tasks
            for sample in task.samples(tokenizer, options.length, options.samples, options.seed)
        ]
        pairs = [(spec, typed(budget)) for spec in policies for budget in names(options.budgets)]
        self.rules = [(spec.resolve(), budget) for spec, budget in pairs]
        self.conditions = [Condition(str(spec), str(budget)) for spec, budget in pairs]
        for rule in self.rules:
            self.fast.set_policy(*rule)
        self.full: list[float] = []

    def run(self, save: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
        """Answer all prompts; ``save`` gets what is known after each. A short answer before compiles what they need."""
        short = self.prompts[0][:, :64].to(self.fast.device)
        self.fast.set_policy("full")
        self.fast.generate(short, exact=True, do_sample=False, min_new_tokens=4, max_new_tokens=4)
        with progress_bar(progress_console()) as progress:
            for ids in progress.track(self.prompts, description="prompts"):
                self._answer(ids.to(self.fast.device))
                save(result := self.result())
        return result

    def _answer(self, ids: Tensor) -> None:
        caches = each_cache(self.fast, [("full", None), *self.rules], ids[:, :-1])
        full = next(caches)
        expected, seconds, _ = self._timed(ids[:, -1:], full)
        self.full.append(seconds)
        for condition, cache in zip(self.conditions, caches, strict=True):
            found, seconds, _ = self._timed(ids[:, -1:], cache)
            condition.same += torch.equal(found, expected)
            condition.compressed.append(seconds)
            cache.full = full
            found, seconds, used = self._timed(ids[:, -1:], cache, exact=True)
            condition.identical += torch.equal(found, expected)
            condition.exact.append(seconds)
            assert used.record is not None and used.record.accepted is not None
            condition.accepted.append(used.record.accepted)

    def _timed(self, ids: Tensor, cache: CompressedCache, **options: Any) -> tuple[Tensor, float, CompressedCache]:
        """Return an answer, milliseconds a token, and the cache."""
        settings = {
            "do_sample": False,
            "eos_token_id": self.ends,
            "max_new_tokens": self.options.new_tokens,
            **options,
        }
        began = time.perf_counter()
        output = self.fast.generate(ids, past_key_values=cache, return_dict_in_generate=True, **settings)
        seconds = time.perf_counter() - began
        return output.sequences, 1000 * seconds / (output.sequences.shape[1] - 1), output[CACHE]

    def result(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {
            "command": command_line(),
            "settings": {name: value for name, value in asdict(self.options).items() if name != "json_path"},
            "versions": versions(),
            "machine": machine(self.fast.device),
            "tokens": [ids.shape[1] for ids in self.prompts],
            "full_ms": self.full,
            "conditions": [asdict(condition) for condition in self.conditions],
        }


def exact_table(result: dict[str, Any]) -> Tables:
    """Return the table of a result; times are medians."""
    header = ["policy", "budget", "identical", "same alone", "run", "accepted", "full ms", "alone ms", "exact ms"]
    rows = [_cells(condition, result["full_ms"]) for condition in result["conditions"]]
    return Tables([("", header, rows)], (conditions(result),), spare=("same alone",))


def _cells(condition: dict[str, Any], full: Sequence[float]) -> list[str]:
    count = len(condition["exact"])
    whole = Acceptance(
        *(tuple(n for one in condition["accepted"] for n in one[name]) for name in ("drafted", "accepted"))
    )
    times = (full, condition["compressed"], condition["exact"])
    return [
        *(condition["policy"], condition["budget"]),
        *(f"{condition[name]} of {count}" for name in ("identical", "same")),
        *(f"{whole.run:.1f}", f"{sum(whole.accepted) / max(sum(whole.drafted), 1):.0%}"),
        *(f"{torch.tensor(list(some)).median():.1f}" for some in times),
    ]
