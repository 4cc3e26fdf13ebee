"""Layer splits: how many entries each layer may hold."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kvpass.policies.observation import Observation
from kvpass.policies.options import Parity
from kvpass.policies.released import cake_budgets, pyramid_budgets, truncated_budgets
from kvpass.policies.scheduler import adaptive_budgets, fixed_budgets
from kvpass.policies.scores import hashed


class LayerSplit(ABC):
    """Division of the total among layers; see :class:`kvpass.policies.base.Policy` for the methods."""

    @property
    def cascades(self) -> bool:
        """Whether a layer's share may become smaller when later layers are known.

        A class that defines ``weight`` or ``budgets`` says anew where it never does, ``cascades = False``.
        """
        return True

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if not {"weight", "budgets"}.isdisjoint(vars(cls)) and "cascades" not in vars(cls):
            cls.cascades = LayerSplit.cascades  # type: ignore[method-assign]

    def weight(self, obs: Observation, scores: Tensor) -> Tensor | None:
        return None

    @abstractmethod
    def budgets(self, weights: Tensor, entries: Tensor, available: Tensor, kv_heads: int, seen: int) -> Tensor: ...

    def overspend(self, entries: int, num_layers: int, kv_heads: int) -> int:
        """Return by how many entries all layers may exceed the total at some cascade stage."""
        return 0


@dataclass(frozen=True)
class UniformLayers(LayerSplit):
    """The same number for every layer; with ``parity="code"`` even if a layer has fewer entries."""

    parity: Parity = "paper"
    cascades = False

    def budgets(self, weights: Tensor, entries: Tensor, available: Tensor, kv_heads: int, seen: int) -> Tensor:
        if self.parity == "code":
            return zero_unseen_layers(seen, (entries * kv_heads)[:, None].expand(weights.shape))
        return fixed_budgets(torch.ones_like(weights), entries, available, kv_heads, seen)


@dataclass(frozen=True)
class AllLayers(LayerSplit):
    """All evictable entries of every layer, whatever the budget is."""

    cascades = False

    def budgets(self, weights: Tensor, entries: Tensor, available: Tensor, kv_heads: int, seen: int) -> Tensor:
        return zero_unseen_layers(seen, (available * kv_heads)[:, None].expand(weights.shape))


@dataclass(frozen=True)
class RandomLayers(LayerSplit):
    """Baseline of CAKE (arXiv 2503.12491, table 2): shares in proportion to a random weight of each layer, in [0, 1).

    The weights are a hash of (seed, layer). The total is that of :class:`UniformLayers`: a share is at most all
    evictable entries of the layer, and the other layers get what is above.
    """

    seed: int
    cascades = False

    def budgets(self, weights: Tensor, entries: Tensor, available: Tensor, kv_heads: int, seen: int) -> Tensor:
        layer = torch.arange(weights.shape[1], device=weights.device)
        drawn = hashed(self.seed, layer).double().expand(weights.shape)
        return fixed_budgets(drawn, entries, available, kv_heads, seen)


@dataclass(frozen=True)
class EntropyLayers(LayerSplit):
    """LAVa (arXiv 2509.09754): shares in proportion to the normalised entropy of the layer's scores.

    ``p = s / (sum s + 1e-16)`` over all KV heads and evictable positions, ``e = -sum p ln(p + 1e-16) / ln(K * M)``. A
    layer with a single entry has weight 0. With ``parity="code"``, as released, shares are truncated and not capped.
    """

    parity: Parity = "paper"

    def weight(self, obs: Observation, scores: Tensor) -> Tensor | None:
        s = scores.double().flatten(1)
        if s.shape[1] < 2:
            return s.new_zeros(s.shape[0])
        p = s / (s.sum(1, keepdim=True) + 1e-16)
        entropy = -(p * (p + 1e-16).log()).sum(1)
        return (entropy / math.log(s.shape[1])).clamp(min=0.0)

    def budgets(self, weights: Tensor, entries: Tensor, available: Tensor, kv_heads: int, seen: int) -> Tensor:
        if self.parity == "code":
            return truncated_budgets(weights, entries, kv_heads, seen)
        return adaptive_budgets(weights, entries, available, kv_heads, seen)

    def overspend(self, entries: int, num_layers: int, kv_heads: int) -> int:
        return num_layers


@dataclass(frozen=True)
class CakeLayers(LayerSplit):
    """CAKE (arXiv 2503.12491): shares by the layer's preference ``P = H^(1/tau1) * V^(1/tau2)``.

    a is the window's attention to evictable positions, not renormalised: ``H = sum of -a ln(a + 1e-10)`` and
    ``V = sum of the unbiased variance of a over the window rows``, both over all query heads. With ``parity="code"``,
    as released, shares are whole numbers per head (:func:`kvpass.policies.released.cake_budgets`); prompts that exceed
    the budget by at most ``spared`` tokens, if it is given, are kept whole.
    """

    tau1: float
    tau2: float
    parity: Parity = "paper"
    spared: int | None = None

    def weight(self, obs: Observation, scores: Tensor) -> Tensor | None:
        h = obs.all_heads(obs.entropy[..., : obs.evictable]).double().sum((1, 2))
        v = obs.all_heads(obs.variance[..., : obs.evictable]).double().sum((1, 2))
        return h.clamp(min=0.0) ** (1 / self.tau1) * v ** (1 / self.tau2)

    def budgets(self, weights: Tensor, entries: Tensor, available: Tensor, kv_heads: int, seen: int) -> Tensor:
        if self.parity == "paper":
            return adaptive_budgets(weights, entries, available, kv_heads, seen)
        shared = cake_budgets(weights, entries, available, kv_heads, seen)
        if self.spared is None:
            return shared
        whole = AllLayers().budgets(weights, entries, available, kv_heads, seen)
        return torch.where((available <= entries + self.spared)[:, None], whole, shared)

    def overspend(self, entries: int, num_layers: int, kv_heads: int) -> int:
        return num_layers + (self.spared or 0) * num_layers * kv_heads


def cake_layers(tau1: float | None, tau2: float | None, parity: Parity, spared: int | None = None) -> LayerSplit:
    """Return CAKE's layer split; ``spared``: as in :class:`CakeLayers`. ValueError: a temperature is missing."""
    if tau1 is None or tau2 is None:
        raise ValueError(
            f"{'tau1' if tau1 is None else 'tau2'}=None: CAKE's layer split needs a number in (0, inf); give both "
            "temperatures as options, for instance tau1=1.6, tau2=0.4 (kvpass.policies.cake.TEMPERATURES lists the "
            "published ones)"
        )
    return CakeLayers(tau1, tau2, parity, spared)


@dataclass(frozen=True)
class GlobalLayers(LayerSplit):
    """The best scores of all layers stay: layers compete as heads do, and get what they have among the best.

    Scores must compare across layers, and rank the entries of a layer (``AdaptiveHeads(0.0)``). The weight of a layer
    is the number of its entries among the best of the layers seen, which :func:`best_over_layers` counts. Scores below
    ``least`` are not kept, even if the budget has room.
    """

    least: float = -math.inf

    def budgets(self, weights: Tensor, entries: Tensor, available: Tensor, kv_heads: int, seen: int) -> Tensor:
        return zero_unseen_layers(seen, weights.long())


Shape = Literal["linear", "geometric", "exponential", "entropy", "gini"]


@dataclass(frozen=True)
class PyramidLayers(LayerSplit):
    """PyramidKV (arXiv 2406.02069): fewer entries in higher layers.

    The top layer gets ``least = entries / beta``, the bottom layer ``most = 2 * entries - least``, or all evictable
    positions if there are fewer (``most = M``, ``least = 2 * entries - M``). A prompt shorter than ``2 * entries`` is
    divided uniformly. The layers between lie

    * ``linear``: on the straight line,
    * ``geometric``: on the curve of constant ratio between neighbours,
    * ``exponential``: on ``most - (most - least) * (e^x - 1) / (e - 1)``, x from 0 to 1.

    The latter two are scaled to the total. ``entropy`` and ``gini`` depend on the prompt: shares in proportion to the
    entropy of the layer's window attention (mean over query heads), or to one minus its Gini coefficient.

    With ``parity="code"``, linear budgets are the released whole numbers, which divide a short prompt uniformly only
    with ``short_uniform``.
    """

    beta: int
    window: int
    shape: Shape = "linear"
    parity: Parity = "paper"
    short_uniform: bool = False

    @property
    def cascades(self) -> bool:
        return self.shape in ("entropy", "gini")

    def weight(self, obs: Observation, scores: Tensor) -> Tensor | None:
        if self.shape not in ("entropy", "gini"):
            return None
        a = obs.all_heads(obs.mean[..., : obs.evictable]).double()
        if obs.evictable < 2:
            return a.new_zeros(a.shape[0])
        p = a / a.sum(2, keepdim=True).clamp(min=1e-30)
        if self.shape == "entropy":
            return -torch.xlogy(p, p).sum(2).mean(1).clamp(max=0.0)
        rank = torch.arange(1, obs.evictable + 1, dtype=torch.float64, device=a.device)
        gini = (2 * rank - obs.evictable - 1).mul(p.sort(dim=2).values).sum(2) / obs.evictable
        return (1 - gini).mean(1).clamp(min=0.0)

    def budgets(self, weights: Tensor, entries: Tensor, available: Tensor, kv_heads: int, seen: int) -> Tensor:
        layers = weights.shape[1]
        if self.shape in ("entropy", "gini"):
            return adaptive_budgets(weights, entries, available, kv_heads, seen)
        if self.parity == "code" and self.shape == "linear":
            released = pyramid_budgets(
                entries, available, layers, kv_heads, self.window, self.beta, short_uniform=self.short_uniform
            )
            return zero_unseen_layers(seen, released)
        return fixed_budgets(self._curve(layers, entries, available), entries, available, kv_heads, seen)

    def _curve(self, layers: int, entries: Tensor, available: Tensor) -> Tensor:
        """Return weights fp64 ``[B, L]`` of a shape that does not depend on the prompt."""
        n, m = entries.double()[:, None], available.double()[:, None]
        most = 2 * n - n / self.beta
        least = torch.where(most >= m, 2 * n - m, n / self.beta)
        most = torch.minimum(most, m)
        x = torch.arange(layers, dtype=torch.float64, device=entries.device) / max(layers - 1, 1)
        match self.shape:
            case "geometric":
                curve = most * (least.clamp(min=1e-9) / most.clamp(min=1e-9)) ** x
            case "exponential":
                curve = most - (most - least) * x.expm1() / math.expm1(1.0)
            case _:
                curve = most - (most - least) * x
        uniform = m + self.window < 2 * n
        return torch.where(uniform | (layers == 1), 1.0, curve)

    def overspend(self, entries: int, num_layers: int, kv_heads: int) -> int:
        match self.shape, self.parity:
            case "entropy" | "gini", _:
                return num_layers
            case "linear", "code":
                return kv_heads * num_layers * num_layers // 2
            case _:
                return 0


def zero_unseen_layers(seen: int, budgets: Tensor) -> Tensor:
    """Return budgets int64 ``[B, L]`` with zeros for the layers not seen yet."""
    return torch.where(torch.arange(budgets.shape[1], device=budgets.device) < seen, budgets, 0)
