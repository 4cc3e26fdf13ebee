"""Ada-KV: the heads of a layer compete for its entries; layers uniform, or as in PyramidKV."""

from __future__ import annotations

from dataclasses import dataclass

from kvpass.policies.head_splits import AdaptiveHeads, HeadSplit
from kvpass.policies.layer_splits import LayerSplit, PyramidLayers
from kvpass.policies.options import check_bool, check_float, check_int, option
from kvpass.policies.refinement import Refinable
from kvpass.policies.snapkv import WindowAttention


@dataclass(frozen=True, kw_only=True)
class AdaSnapKV(Refinable, WindowAttention):
    """SnapKV's score, heads of a layer compete: Ada-KV (Feng et al. 2024, arXiv 2407.11550).

    Top-k across the heads of a layer, blended with a uniform part: head h keeps its best
    ``(1 - alpha) * c_h + alpha * B`` entries, where c_h is its number among the layer's best.

    Departures: this is the blend of the released code (the printed formula swaps alpha and 1 - alpha). By default the
    remainder is repaired by score, so that the total is exact; ``parity="code"`` rounds per head as released and keeps
    up to half an entry per head less or more.

    Args:
        alpha: uniform part of the budget, 0 to 1.
        normalize: before heads are compared, multiply each head's scores by the share of their sum that its best B
            entries hold (default of KVCache-Factory's port).
    """

    name = "ada_snapkv"

    alpha: float = option(0.2, check_float, 0.0, 1.0)
    normalize: bool = option(False, check_bool)

    def heads(self) -> HeadSplit:
        return AdaptiveHeads(self.alpha, self.normalize, self.parity)


@dataclass(frozen=True, kw_only=True)
class AdaPyramidKV(WindowAttention):
    """Head split of Ada-KV (arXiv 2407.11550), layer split of PyramidKV (arXiv 2406.02069).

    Departures: budgets are computed for each prompt (the Ada-KV repository computes them once and keeps them), and a
    prompt shorter than ``2 * B`` is divided uniformly; ``parity="code"`` lacks that branch, as released.

    Args:
        alpha: as in :class:`AdaSnapKV`.
        beta: as in :class:`~kvpass.policies.pyramidkv.PyramidKV`.
    """

    name = "ada_pyramidkv"

    alpha: float = option(0.2, check_float, 0.0, 1.0)
    beta: int = option(20, check_int, 1)

    def heads(self) -> HeadSplit:
        return AdaptiveHeads(self.alpha, parity=self.parity)

    def layers(self) -> LayerSplit:
        return PyramidLayers(self.beta, self.window, parity=self.parity)
