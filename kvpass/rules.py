"""What decides which entries a model keeps, and when: policy, budget and recompression, checked against each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvpass.config import Budget
from kvpass.policies import Policy, check_registered, resolve, resolve_budget
from kvpass.policies.cake import temperatures
from kvpass.recompress import Recompress, check_recompress


@dataclass(frozen=True)
class Rules:
    """``budget`` is None for a policy that keeps everything."""

    policy: Policy
    budget: Budget | None
    recompress: Recompress


def read_rules(
    policy: str | Policy,
    budget: Budget | int | float | str | None,
    recompress: str,
    *,
    window: int | None,
    options: Mapping[str, Any],
    model_name: str,
) -> Rules:
    """Rules from what a user gives to ``kvpass.compile``; its docstring says what that may be.

    Raises:
        ValueError: a value is out of range, missing, or does not go with the others.
    """
    given = dict(options) if window is None else {"window": window, **options}
    if policy == "cake" and not {"tau1", "tau2"} & given.keys():
        given["tau1"], given["tau2"] = temperatures(model_name, budget)
    resolved = check_registered(resolve(policy, **given))
    return Rules(resolved, resolve_budget(resolved, budget), check_recompress(recompress, resolved))
