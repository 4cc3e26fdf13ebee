"""Policy, budget and recompression of a model, checked against each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from kvpass.config import ENTRY_FORMATS, Budget, BudgetLike, EntryFormat, one_of
from kvpass.policies import Policy, check_registered, resolve, resolve_budget
from kvpass.policies.base import Input
from kvpass.policies.cake import temperatures

Recompress = Literal["never", "when_full", "every_turn"]
"""When to compress to the budget again, after several tokens were appended at once."""

THRESHOLDS: dict[Recompress, float] = {"never": float("inf"), "when_full": 2.0, "every_turn": 1.0}
"""Thresholds: a row is compressed again when it holds more entries than this times its budget."""


@dataclass(frozen=True)
class Conditions:
    """Checked settings of a compiled model; ``budget`` is None if the policy keeps everything.

    ``own_budget``: the budget is that of one call, not the model's.
    """

    policy: Policy
    budget: Budget | None
    recompress: Recompress
    entry_format: EntryFormat = "model"
    own_budget: bool = False

    def with_budget(self, budget: BudgetLike) -> Conditions:
        """Return the conditions of a call with this budget of its own; None: the same conditions."""
        if budget is None:
            return self
        return replace(self, budget=resolve_budget(self.policy, budget), own_budget=True)


def read_conditions(
    policy: str | Policy,
    budget: BudgetLike,
    recompress: str,
    *,
    window: int | None,
    options: Mapping[str, Any],
    model_name: str,
    entries: str = "model",
) -> Conditions:
    """Return the conditions of ``kvpass.compile``'s arguments; its docstring describes them and the errors."""
    all_options = dict(options) if window is None else {"window": window, **options}
    if policy == "cake" and not {"tau1", "tau2"} & all_options.keys():
        all_options["tau1"], all_options["tau2"] = temperatures(model_name, budget)
    resolved = check_registered(resolve(policy, **all_options))
    checked, again = resolve_budget(resolved, budget), one_of("recompress", recompress, THRESHOLDS)
    if again != "never" and (refusal := _refusal(resolved)) is not None:
        raise ValueError(f"recompress={recompress!r} with policy {resolved.name!r}: {refusal}")
    return Conditions(resolved, checked, again, one_of("entries", entries, ENTRY_FORMATS))


def _refusal(policy: Policy) -> str | None:
    """Return why a policy cannot score entries after the prompt is gone; one that evicts while decoding need not."""
    if policy.decode_rule() is not None:
        return None
    if not policy.needs_budget:
        return "it keeps everything, there is no budget to return to"
    if policy.parity == "code":
        return "released rules (parity='code') know only a prompt"
    for name, reason in _OF_A_PROMPT.items():
        if name in policy.inputs or (name == "replays" and policy.compact):
            return reason
    return "it compares the scores of all layers, which is done in a prompt only" if policy.compares_layers else None


_OF_A_PROMPT: dict[Input, str] = {
    "projection": "its score reads the output projection, which only a prompt has at hand",
    "rotation": "its score turns queries back by their position, and only a prompt has queries of all its tokens",
    "replays": "it runs the prompt once more behind all its entries, which are no longer there",
    "token_scores": "its score reads what enters attention, which only a prompt has at hand",
    "prompt": "its score is defined for a prompt, not for the entries that are left of one",
    "column_sum": "its score needs more than the window's queries",
    "queries": "its score needs more than the window's queries, or its class does not say otherwise in inputs",
    "heads": "it does not score each KV head by itself, and heads no longer hold the same positions",
}
"""Why a policy with this input cannot score the entries that are left of a prompt."""
