"""Types of the arguments of ``kvpass.compile``: names of policies, and budgets."""

from __future__ import annotations

from typing import Literal, TypeAlias

from kvpass.config import Budget

BudgetLike: TypeAlias = Budget | int | float | str | None

PolicyName = Literal[
    "ada_pyramidkv", "ada_snapkv", "cake", "criticalkv", "defensivekv", "duo_attention", "expected_attention", "full",
    "h2o", "keydiff", "knorm", "kvzap", "kvzip", "kvzip_plus", "lagkv", "lava", "layer_defensivekv", "lava_nohead",
    "lava_pyramid", "lava_uniform", "pyramidkv", "r_kv", "random", "snapkv", "streaming_llm", "tova", "triattention",
    "vatp",
]  # fmt: skip
"""Policies of kvpass; of your own, give an instance: a type checker does not know its name.

It knows the options of an instance too: ``kvpass.policies.Lava(window=16)``.
"""
