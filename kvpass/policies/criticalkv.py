"""CriticalKV: half of a head's entries by attention, the rest by attention times the norm of the projected value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from kvpass.policies.head_splits import HeadSplit, SafeguardedHeads, UniformHeads
from kvpass.policies.observation import Observation
from kvpass.policies.options import check_choice, check_float, option
from kvpass.policies.refinement import refine_scores
from kvpass.policies.scores import Pool
from kvpass.policies.snapkv import WindowAttention


@dataclass(frozen=True, kw_only=True)
class CriticalKV(WindowAttention):
    """Bound the change of the layer's output: CriticalKV (Feng et al. 2025, arXiv 2502.03805).

    With n entries of a head, window included, the best ``first_stage * n`` by SnapKV's score s are kept; the others by
    ``(s + epsilon) * norm``, where norm is the mean over the group of the L1 norm of ``W_h v``, W_h being the columns
    of the output projection that read query head h. The window counts to the first stage.

    How many entries a head keeps follows from s alone: all the same (``base="snapkv"``), or, with
    ``base="ada_snapkv"``, as many as it has among the layer's best, each head's best ``alpha * n`` in any case. These
    also come before the second stage. Layers are uniform, so that n is known when a layer is scored; both stages are
    then one order of entry, and the kept sets those of deciding once. ``parity`` makes no difference: paper and code
    have the same total.

    Departure: the code takes at least one entry by s, however small ``first_stage * n``; the same here.

    Args:
        first_stage: part of a head's entries that is kept by s alone. epsilon: added to s in the second stage.
        base: ``"snapkv"`` or ``"ada_snapkv"``. alpha: of ``"ada_snapkv"``, each head's certain part of n.
    """

    name = "criticalkv"
    inputs = frozenset({"question", "projection", "heads"})

    pool: Pool = "avg"
    kernel_size: int = 5
    base: Literal["snapkv", "ada_snapkv"] = option("snapkv", check_choice, ("snapkv", "ada_snapkv"))
    alpha: float = option(0.2, check_float, 0.0, 1.0)
    first_stage: float = option(0.5, check_float, 0.0, 1.0)
    epsilon: float = option(1e-4, check_float, 0.0)

    def score(self, obs: Observation) -> Tensor:
        return refine_scores(self, obs, super().score(obs), self.first_stage, self.epsilon)

    def heads(self) -> HeadSplit:
        return UniformHeads() if self.base == "snapkv" else SafeguardedHeads(self.alpha, self.window)
