"""Ada-SnapKV: SnapKV's score; heads compete for the entries of their layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvpass.policies.head_splits import AdaptiveHeads, HeadSplit, ReleasedAdaptiveHeads
from kvpass.policies.options import check_choice, check_float
from kvpass.policies.window_attention import WindowAttention


@dataclass(frozen=True, kw_only=True)
class AdaSnapKV(WindowAttention):
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

    name: ClassVar[str] = "ada_snapkv"

    alpha: float = 0.2
    normalize: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_float("alpha", self.alpha, 0.0, 1.0)
        check_choice("normalize", self.normalize, (True, False))

    def heads(self) -> HeadSplit:
        if self.parity == "code":
            return ReleasedAdaptiveHeads(self.alpha, self.normalize)
        return AdaptiveHeads(self.alpha, self.normalize)
