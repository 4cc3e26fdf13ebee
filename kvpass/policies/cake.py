"""CAKE: layer budgets by attention dispersion and shift, variance in the score, eviction while decoding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from kvpass.config import Budget
from kvpass.policies.base import Policy
from kvpass.policies.decode_rules import DecodeRule, PooledLastQuery
from kvpass.policies.layer_splits import CakeLayers, LayerSplit
from kvpass.policies.observation import Observation
from kvpass.policies.options import check_choice, check_float
from kvpass.policies.scores import Group, Pool, check_score_options, pool_scores, reduce_group

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


def temperatures(model: str, budget: Budget | int | float | str | None) -> tuple[float, float]:
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


def check_temperatures(tau1: float | None, tau2: float | None, *, required: bool) -> None:
    """Raise if a temperature is not positive, or missing where CAKE's layer split needs it."""
    for name, tau in (("tau1", tau1), ("tau2", tau2)):
        if tau is None:
            if required:
                raise ValueError(
                    f"{name}=None: CAKE's layer split needs a number in (0, inf); give both temperatures as options, "
                    "for instance tau1=1.6, tau2=0.4 (kvpass.policies.cake.TEMPERATURES lists the published ones)"
                )
        else:
            check_float(name, tau, 0.0, open_low=True)


@dataclass(frozen=True, kw_only=True)
class Cake(Policy):
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

    name: ClassVar[str] = "cake"

    pool: Pool = "avg"
    kernel_size: int = 5
    group: Group = "mean"
    gamma: float = 200.0
    tau1: float | None = None
    tau2: float | None = None
    indicator: Indicator = "sum"
    evict_during_decode: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_score_options(self.pool, self.kernel_size, self.group)
        check_float("gamma", self.gamma, 0.0)
        check_temperatures(self.tau1, self.tau2, required=True)
        check_choice("indicator", self.indicator, ("sum", "mean", "var", "product"))
        check_choice("evict_during_decode", self.evict_during_decode, (True, False))

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
        assert self.tau1 is not None and self.tau2 is not None
        return CakeLayers(self.tau1, self.tau2, self.parity)

    def decode_rule(self) -> DecodeRule | None:
        if not self.evict_during_decode:
            return None
        return PooledLastQuery(
            window=self.window,
            pool=self.pool,
            kernel_size=self.kernel_size,
            group=self.group,
            storage_order=self.parity == "code",
        )

    def layer_budgets(self, weights: Tensor, entries: Tensor, available: Tensor, kv_heads: int, seen: int) -> Tensor:
        """As in the base class; the released code keeps prompts up to ``budget + window`` tokens whole."""
        budgets = super().layer_budgets(weights, entries, available, kv_heads, seen)
        if self.parity == "paper":
            return budgets
        layer = torch.arange(weights.shape[1], device=weights.device)
        whole = torch.where(layer < seen, (available * kv_heads)[:, None], 0)
        return torch.where(self._spared(entries, available)[:, None], whole, budgets)

    def recorded_budgets(self, weights: Tensor, entries: Tensor, available: Tensor, kv_heads: int) -> Tensor:
        """As in the base class; for a prompt kept whole, the released code records the uniform budget."""
        budgets = super().recorded_budgets(weights, entries, available, kv_heads)
        if self.parity == "paper":
            return budgets
        return torch.where(self._spared(entries, available)[:, None], (entries * kv_heads)[:, None], budgets)

    def decode_quota(self, kept: Tensor, entries: Tensor, available: Tensor) -> Tensor:
        """As in the base class; the released code cuts such a prompt at the first new token."""
        if self.parity == "paper":
            return super().decode_quota(kept, entries, available)
        return torch.where(self._spared(entries, available)[:, None], entries[:, None], kept)

    def capacity(self, entries: int, num_layers: int, kv_heads: int) -> int:
        spared = self.window * num_layers * kv_heads if self.parity == "code" else 0
        return super().capacity(entries, num_layers, kv_heads) + spared

    def _spared(self, entries: Tensor, available: Tensor) -> Tensor:
        return available <= entries + self.window
