"""H2O: the attention that all queries so far paid to each position."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from kvpass.policies.decode_rules import Accumulated, DecodeRule
from kvpass.policies.layer_splits import LayerSplit, UniformLayers, cake_layers
from kvpass.policies.observation import Observation
from kvpass.policies.options import check_bool, check_choice, check_float, option
from kvpass.policies.scores import Pool, pool_scores, reduce_group
from kvpass.policies.snapkv import WindowAttention


@dataclass(frozen=True, kw_only=True)
class H2O(WindowAttention):
    """Keep heavy hitters and the newest tokens: H2O (Zhang et al. 2023, arXiv 2306.14048).

    ``s[k, i] = pool(reduce over group(sum over all rows of a[h, :, i]))``, uniform heads and layers; the ``window``
    newest tokens are kept. While decoding, the sum goes on and the lowest score outside the window is evicted. With
    ``layer_split="cake"`` layers share as in CAKE (its table "H2O + P2A"), which needs ``tau1`` and ``tau2``.

    Departures: one cache per KV head instead of one per query head (repeat K and V to get the latter); the memory
    of evicted entries is freed, while the original masks logits.

    Args:
        pool, kernel_size, group: as in :class:`~kvpass.policies.snapkv.SnapKV`; no pooling by default. The running sum
            of the decode rule is never pooled.
        evict_during_decode: False: decoding only appends, as in the comparisons of SnapKV, Ada-KV and CAKE.
    """

    name = "h2o"
    inputs = frozenset({"question", "column_sum"})

    pool: Pool = None
    layer_split: Literal["uniform", "cake"] = option("uniform", check_choice, ("uniform", "cake"))
    tau1: float | None = option(None, check_float, 0.0, open_low=True)
    tau2: float | None = option(None, check_float, 0.0, open_low=True)
    evict_during_decode: bool = option(True, check_bool)

    def score(self, obs: Observation) -> Tensor:
        total = reduce_group(obs.column_sum[..., : obs.evictable], obs.kv_heads, self.group)
        return pool_scores(total, self.pool, self.kernel_size)

    def layers(self) -> LayerSplit:
        return cake_layers(self.tau1, self.tau2, self.parity) if self.layer_split == "cake" else UniformLayers()

    def decode_rule(self) -> DecodeRule | None:
        return Accumulated(window=self.window, group=self.group) if self.evict_during_decode else None
