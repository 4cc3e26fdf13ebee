"""SnapKV: the attention that the last prompt tokens pay to each earlier position."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from kvpass.policies.base import Policy
from kvpass.policies.layer_splits import LayerSplit, RandomLayers, cake_layers
from kvpass.policies.observation import Observation
from kvpass.policies.options import check_choice, check_float, check_int, check_odd, option
from kvpass.policies.refinement import Refinable
from kvpass.policies.scores import Group, Pool, pool_scores, reduce_group


@dataclass(frozen=True, kw_only=True)
class WindowAttention(Policy):
    """Base class of policies that pool attention over positions, and reduce it over a KV head's query heads.

    The score is SnapKV's, ``pool(reduce over group(mean over window rows of a[h, :, i]))``, unless a class has another.

    Args:
        pool: ``"max"``, ``"avg"`` or None. kernel_size: odd width of the pooling.
        group: reduction over the query heads of a KV head: ``"mean"``, ``"max"`` or ``"sum"``.
    """

    inputs = frozenset({"question"})

    pool: Pool = option("max", check_choice, Pool)
    kernel_size: int = option(7, check_odd)
    group: Group = option("mean", check_choice, Group)

    def score(self, obs: Observation) -> Tensor:
        mean = reduce_group(obs.mean[..., : obs.evictable], obs.kv_heads, self.group)
        return pool_scores(mean, self.pool, self.kernel_size)


@dataclass(frozen=True, kw_only=True)
class SnapKV(Refinable, WindowAttention):
    """Keep what the window attends to most: SnapKV (Li et al. 2024, arXiv 2404.14469).

    Score of :class:`WindowAttention`, per KV head as in Ada-KV's released code; every head of every layer keeps the
    same number of its own best. With ``layer_split="cake"`` layers share as in CAKE (its table "SnapKV + P2A"), which
    needs ``tau1`` and ``tau2``. With ``layer_split="random"`` each layer's share is random, the same for the same
    ``seed``: the baseline of CAKE's table 2, by which other splits can be judged.

    Departures: the paper sums over window rows and stores one cache per query head; the mean over rows and over the
    group ranks a head the same way and stores G times less. Max pooling with kernel 7, as in all published comparisons
    (the class default of the first release was average, 5).
    """

    name = "snapkv"

    layer_split: Literal["uniform", "cake", "random"] = option("uniform", check_choice, ("uniform", "cake", "random"))
    tau1: float | None = option(None, check_float, 0.0, open_low=True)
    tau2: float | None = option(None, check_float, 0.0, open_low=True)
    seed: int = option(0, check_int, 0)

    def layers(self) -> LayerSplit:
        if self.layer_split == "cake":
            return cake_layers(self.tau1, self.tau2, self.parity)
        return RandomLayers(self.seed) if self.layer_split == "random" else super().layers()
