"""LAVa-Uniform: the ablation of LAVa without dynamic layer budgets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvpass.policies.lava import Lava
from kvpass.policies.layer_splits import LayerSplit, UniformLayers


@dataclass(frozen=True, kw_only=True)
class LavaUniform(Lava):
    """LAVa with equal layer budgets (arXiv 2509.09754: "-layer" in table 10, LAVa-Uniform in table 13)."""

    name: ClassVar[str] = "lava_uniform"

    def layers(self) -> LayerSplit:
        return UniformLayers(capped=self.parity == "paper")
