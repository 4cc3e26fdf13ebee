"""Ada-PyramidKV: PyramidKV's layer budgets; the heads of a layer compete."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvpass.policies.head_splits import AdaptiveHeads, HeadSplit, ReleasedAdaptiveHeads
from kvpass.policies.layer_splits import LayerSplit, PyramidLayers
from kvpass.policies.options import check_float, check_int
from kvpass.policies.window_attention import WindowAttention


@dataclass(frozen=True, kw_only=True)
class AdaPyramidKV(WindowAttention):
    """Head split of Ada-KV (arXiv 2407.11550), layer split of PyramidKV (arXiv 2406.02069).

    Departures: budgets are computed for each prompt (the Ada-KV repository computes them once and keeps them), and a
    prompt shorter than ``2 * B`` is divided uniformly; ``parity="code"`` lacks that branch, as released.

    Args:
        alpha: as in :class:`~kvpass.policies.ada_snapkv.AdaSnapKV`.
        beta: as in :class:`~kvpass.policies.pyramidkv.PyramidKV`.
    """

    name: ClassVar[str] = "ada_pyramidkv"

    alpha: float = 0.2
    beta: int = 20

    def __post_init__(self) -> None:
        super().__post_init__()
        check_float("alpha", self.alpha, 0.0, 1.0)
        check_int("beta", self.beta, 1)

    def heads(self) -> HeadSplit:
        return ReleasedAdaptiveHeads(self.alpha) if self.parity == "code" else AdaptiveHeads(self.alpha)

    def layers(self) -> LayerSplit:
        return PyramidLayers(
            beta=self.beta, window=self.window, parity=self.parity, short_uniform=self.parity == "paper"
        )
