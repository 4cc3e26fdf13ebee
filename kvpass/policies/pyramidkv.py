"""PyramidKV: SnapKV's score, fewer entries in higher layers."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kvpass.policies.layer_splits import LayerSplit, PyramidLayers, Shape
from kvpass.policies.observation import Observation
from kvpass.policies.options import check_bool, check_choice, check_int, option
from kvpass.policies.snapkv import WindowAttention


@dataclass(frozen=True, kw_only=True)
class PyramidKV(WindowAttention):
    """Fewer entries in higher layers: PyramidKV (Cai et al. 2024, arXiv 2406.02069).

    Layer budgets fall from ``2 * B - B / beta`` to ``B / beta``, B = budget - window; see :class:`PyramidLayers` for
    the shapes and for short prompts. Heads are uniform. To reproduce the paper's figures, pass ``window=8``.

    The score sums over the window rows, while SnapKV's takes their mean; the ranking within a layer is the same.

    Departures by default: the arithmetic sequence is exact and remainders are repaired, so the total is the budget (the
    released floors exceed it by up to 4 %); pooling follows the code (reduce over the window, then pool).

    Args:
        beta: how flat the top is, int >= 1; the top layer keeps ``B / beta`` entries.
        shape: ``"linear"`` (the paper's choice), ``"geometric"``, ``"exponential"``, ``"entropy"`` or ``"gini"``.
        short_uniform: True: prompts shorter than ``2 * B`` are divided uniformly, as in KVCache-Factory; False: as in
            the pyramid option of the Ada-KV repository. Only used with ``parity="code"``.
    """

    name = "pyramidkv"
    inputs = frozenset({"question"})

    beta: int = option(20, check_int, 1)
    shape: Shape = option("linear", check_choice, Shape)
    short_uniform: bool = option(True, check_bool)

    def score(self, obs: Observation) -> Tensor:
        return super().score(obs) * max(obs.window, 1)

    def layers(self) -> LayerSplit:
        return PyramidLayers(self.beta, self.window, self.shape, self.parity, self.short_uniform)
