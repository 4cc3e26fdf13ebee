"""SnapKV: the attention that the last prompt tokens pay to each earlier position."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from kvpass.policies.cake import check_temperatures
from kvpass.policies.layer_splits import CakeLayers, LayerSplit
from kvpass.policies.options import check_choice
from kvpass.policies.window_attention import WindowAttention


@dataclass(frozen=True, kw_only=True)
class SnapKV(WindowAttention):
    """Keep what the window attends to most: SnapKV (Li et al. 2024, arXiv 2404.14469).

    Score of :class:`WindowAttention`, per KV head as in Ada-KV's released code; every head of every layer keeps the
    same number of its own best. With ``layer_split="cake"`` layers share as in CAKE (its table "SnapKV + P2A"), which
    needs ``tau1`` and ``tau2``.

    Departures: the paper sums over window rows and stores one cache per query head; the mean over rows and over the
    group ranks a head the same way and stores G times less. Max pooling with kernel 7, as in all published comparisons
    (the class default of the first release was average, 5).
    """

    name: ClassVar[str] = "snapkv"

    layer_split: Literal["uniform", "cake"] = "uniform"
    tau1: float | None = None
    tau2: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("layer_split", self.layer_split, ("uniform", "cake"))
        check_temperatures(self.tau1, self.tau2, required=self.layer_split == "cake")

    def layers(self) -> LayerSplit:
        if self.layer_split == "cake" and self.tau1 is not None and self.tau2 is not None:
            return CakeLayers(self.tau1, self.tau2, self.parity)
        return super().layers()
