"""LAVa-Pyramid: LAVa's score and head split with PyramidKV's layer budgets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvpass.policies.lava import Lava
from kvpass.policies.layer_splits import LayerSplit, PyramidLayers
from kvpass.policies.options import check_int


@dataclass(frozen=True, kw_only=True)
class LavaPyramid(Lava):
    """LAVa with the layer budgets of PyramidKV (arXiv 2509.09754, table 13; arXiv 2406.02069).

    With ``parity="code"`` the pyramid is that of the Ada-KV repository, on which LAVa's code is built: no uniform
    branch.

    Args:
        beta: as in :class:`~kvpass.policies.pyramidkv.PyramidKV`.
    """

    name: ClassVar[str] = "lava_pyramid"

    beta: int = 20

    def __post_init__(self) -> None:
        super().__post_init__()
        check_int("beta", self.beta, 1)

    def layers(self) -> LayerSplit:
        return PyramidLayers(
            beta=self.beta, window=self.window, parity=self.parity, short_uniform=self.parity == "paper"
        )
