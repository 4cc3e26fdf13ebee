"""LAVa: a score that can be compared across heads, and layer budgets by entropy; and its published variants."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kvpass.policies.head_splits import AdaptiveHeads, HeadSplit, UniformHeads
from kvpass.policies.layer_splits import EntropyLayers, LayerSplit, PyramidLayers, UniformLayers
from kvpass.policies.observation import Observation
from kvpass.policies.options import check_float, check_int, option
from kvpass.policies.scores import Group, pool_scores, reduce_group
from kvpass.policies.snapkv import WindowAttention


@dataclass(frozen=True, kw_only=True)
class Lava(WindowAttention):
    """Eviction with dynamic head and layer budgets: LAVa (Shen et al. 2025, arXiv 2509.09754).

    ``s[k, i] = max over group(pool(mean over window rows of a[h, :, i])) * max_{j < M} |v[k, j]|_1``; heads compete for
    the entries of their layer (top-k across heads); layers share the total in proportion to the normalised entropy of
    their scores (:class:`EntropyLayers`).

    Departures from the paper: the largest value norm is taken over evictable positions, since window entries are never
    evicted (as in the released code). The released code adds a safeguard whose constant part, ``int(alpha * budget)``
    per head, includes the window and so overspends; ``parity="code"`` reproduces this. It also crashes if a layer's
    share exceeds its entries; here such a layer is kept whole.

    Args:
        pool, kernel_size, group: as in :class:`~kvpass.policies.snapkv.SnapKV`; the group is reduced after pooling.
        alpha: uniform part of a layer's budget, 0 to 1; None: 0 as in the paper, 0.2 with ``parity="code"``.
    """

    name = "lava"
    inputs = frozenset({"question"})

    group: Group = "max"
    alpha: float | None = option(None, check_float, 0.0, 1.0)

    def score(self, obs: Observation) -> Tensor:
        pooled = pool_scores(obs.mean[..., : obs.evictable], self.pool, self.kernel_size)
        s = reduce_group(pooled, obs.kv_heads, self.group)
        return s if obs.evictable == 0 else s * obs.value_norm[..., : obs.evictable].amax(-1, keepdim=True)

    def heads(self) -> HeadSplit:
        default = 0.2 if self.parity == "code" else 0.0
        alpha = default if self.alpha is None else self.alpha
        return AdaptiveHeads(alpha, parity=self.parity, frozen_window=self.window)

    def layers(self) -> LayerSplit:
        return EntropyLayers(self.parity)


@dataclass(frozen=True, kw_only=True)
class LavaUniform(Lava):
    """LAVa with equal layer budgets (arXiv 2509.09754: "-layer" in table 10, LAVa-Uniform in table 13)."""

    name = "lava_uniform"

    def layers(self) -> LayerSplit:
        return UniformLayers(self.parity)


@dataclass(frozen=True, kw_only=True)
class LavaPyramid(Lava):
    """LAVa with the layer budgets of PyramidKV (arXiv 2509.09754, table 13; arXiv 2406.02069).

    With ``parity="code"`` the pyramid is that of the Ada-KV repository, on which LAVa's code is built: no uniform
    branch.

    Args:
        beta: as in :class:`~kvpass.policies.pyramidkv.PyramidKV`.
    """

    name = "lava_pyramid"

    beta: int = option(20, check_int, 1)

    def layers(self) -> LayerSplit:
        return PyramidLayers(self.beta, self.window, parity=self.parity)


@dataclass(frozen=True, kw_only=True)
class LavaNoHead(Lava):
    """LAVa with the same number of entries for every KV head of a layer (arXiv 2509.09754).

    It is "-head" in table 10; no code was released for it. ``alpha`` has no effect, since the heads share equally.
    """

    name = "lava_nohead"

    def heads(self) -> HeadSplit:
        return UniformHeads()
