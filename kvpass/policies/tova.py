"""TOVA: the attention of the last query alone."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kvpass.policies.base import Policy
from kvpass.policies.decode_rules import DecodeRule, LastQuery
from kvpass.policies.observation import Observation
from kvpass.policies.options import check_bool, option


@dataclass(frozen=True, kw_only=True)
class Tova(Policy):
    """Keep what the last query attends to most: TOVA (Oren et al. 2024, arXiv 2401.06104).

    ``s[i]`` = mean over all query heads of a[h, last row, i]; all KV heads of a layer keep the same tokens. No token is
    protected: the newest one competes and may be dropped, in prefill and at every decode step.

    Args:
        window: 0 as in the paper; a positive number protects that many newest tokens.
        evict_during_decode: False: decoding only appends.
    """

    name = "tova"
    inputs = frozenset({"question", "heads"})

    window: int = 0
    evict_during_decode: bool = option(True, check_bool)

    def score(self, obs: Observation) -> Tensor:
        row = obs.all_heads(obs.last_row[..., : obs.evictable]).mean(1, keepdim=True)
        return row.expand(-1, obs.kv_heads, -1)

    def decode_rule(self) -> DecodeRule | None:
        return LastQuery(window=self.window) if self.evict_during_decode else None
