"""CAKE: layer budgets by attention dispersion and shift, variance in the score, eviction while decoding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from kvpass.config import Budget, BudgetLike
from kvpass.policies.decode_rules import DecodeRule, PooledLastQuery
from kvpass.policies.layer_splits import LayerSplit, cake_layers
from kvpass.policies.observation import Observation
from kvpass.policies.options import check_bool, check_choice, check_float, option
from kvpass.policies.scores import Pool, pool_scores, reduce_group
from kvpass.policies.snapkv import WindowAttention
from kvpass.ranks import ONE_PROCESS, Ranks

TEMPERATURES: dict[tuple[str, int], tuple[float, float]] = {
    ("llama-3.1-8b", 1024): (1.6, 0.4),
    ("llama-3.1-8b", 128): (1.6, 0.6),
    ("llama-2-7b", 1024): (1.9, 1.8),
    ("llama-2-7b", 128): (0.9, 2.3),
    ("llama-2-13b", 1024): (0.5, 0.4),
    ("llama-2-13b", 128): (1.8, 2.0),
    ("mistral-7b-v0.3", 1024): (0.8, 0.5),
    ("mistral-7b-v0.3", 128): (1.0, 0.8),
    ("qwen2.5-7b", 1024): (1.5, 0.6),
    ("qwen2.5-7b", 128): (0.4, 0.6),
}
"""(model, budget) -> (tau1, tau2) as published in the released code (github.com/antgroup/cakekv)."""

Indicator = Literal["sum", "mean", "var", "product"]


def temperatures(model: str, budget: BudgetLike) -> tuple[float, float]:
    """Return CAKE's published (tau1, tau2) for a model name and a budget in entries.

    Raises:
        ValueError: none are published; the released code silently uses 1, 1.
    """
    wanted = None if budget is None else Budget.parse(budget)
    # From names such as "meta-llama/Llama-3.1-8B-Instruct".
    plain = model.lower().replace("meta-llama-", "llama-").replace("-instruct", "")
    for (name, entries), taus in TEMPERATURES.items():
        if name in plain and Budget.parse(entries) == wanted:
            return taus
    known = ", ".join(f"{name} at {entries}" for name, entries in TEMPERATURES)
    raise ValueError(
        f"no published CAKE temperatures for model={model!r}, budget={budget}: give both as options, for instance "
        f"tau1=1.6, tau2=0.4 (published: {known})"
    )


@dataclass(frozen=True, kw_only=True)
class Cake(WindowAttention):
    """Layer budgets by attention dispersion and shift: CAKE (Qin et al. 2025, arXiv 2503.12491).

    Score of a query head: ``mean + gamma * var`` of a over the window rows (unbiased), pooled, then reduced over the
    group. Every head of a layer keeps the same number; layers share by preference (:class:`CakeLayers`). While
    decoding, a full head evicts by the pooled attention of the newest query (:class:`PooledLastQuery`).

    Departures by default: budgets by exact water-filling instead of the code's integer rule; eviction whenever the
    prompt exceeds the budget (code: budget + window); decode pooling over neighbours in position order.
    ``parity="code"`` reproduces all three.

    Args:
        pool, kernel_size, group: as in :class:`~kvpass.policies.snapkv.SnapKV`.
        gamma: weight of the variance, >= 0.
        tau1, tau2: temperatures of dispersion and shift, > 0; required. See :func:`temperatures`.
        indicator: ``"sum"`` (the method) or its ablations ``"mean"``, ``"var"``, ``"product"``.
        evict_during_decode: False: decoding only appends.
    """

    name = "cake"
    inputs = frozenset({"question"})

    pool: Pool = "avg"
    kernel_size: int = 5
    gamma: float = option(200.0, check_float, 0.0)
    tau1: float | None = option(None, check_float, 0.0, open_low=True)
    tau2: float | None = option(None, check_float, 0.0, open_low=True)
    indicator: Indicator = option("sum", check_choice, Indicator)
    evict_during_decode: bool = option(True, check_bool)

    def score(self, obs: Observation) -> Tensor:
        # Variance first: on CUDA one pass over the keys then gives the mean too.
        variance, mean = obs.variance[..., : obs.evictable], obs.mean[..., : obs.evictable]
        match self.indicator:
            case "sum":
                worth = mean + self.gamma * variance
            case "mean":
                worth = mean
            case "var":
                worth = variance
            case "product":
                worth = mean * variance
        return reduce_group(pool_scores(worth, self.pool, self.kernel_size), obs.kv_heads, self.group)

    def layers(self) -> LayerSplit:
        return cake_layers(self.tau1, self.tau2, self.parity, self.window if self.parity == "code" else None)

    def decode_rule(self) -> DecodeRule | None:
        if not self.evict_during_decode:
            return None
        return PooledLastQuery(
            window=self.window,
            pool=self.pool,
            kernel_size=self.kernel_size,
            group=self.group,
            released=self.parity == "code",
        )

    def decode_quota(self, kept: Tensor, entries: Tensor, available: Tensor, ranks: Ranks = ONE_PROCESS) -> Tensor:
        """As in the base class; the released code cuts a prompt that it spared at the first new token."""
        spared = self.window if self.parity == "code" else 0
        return super().decode_quota(kept, entries, available - spared)
