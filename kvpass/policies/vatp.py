"""VATP: attention times the L1 norm of the value."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from kvpass.policies.decode_rules import Accumulated, DecodeRule
from kvpass.policies.observation import Observation
from kvpass.policies.options import check_bool, check_choice, check_int, option
from kvpass.policies.scores import reduce_group
from kvpass.policies.snapkv import WindowAttention

SCISSORHANDS_ROWS = 400
Indicator = Literal["snapkv", "h2o", "scissorhands"]


@dataclass(frozen=True, kw_only=True)
class Vatp(WindowAttention):
    """Multiply an attention score by the value's L1 norm: VATP (Guo et al. 2024, arXiv 2406.12335).

    ``indicator`` selects the attention score:

    * ``"snapkv"``: pooled window attention, which LAVa compares with ("SnapKV + VATP"); decoding only appends. No code
      was released; norms are multiplied after pooling, as in LAVa.
    * ``"h2o"``: attention summed over all queries, each term weighted, decoding included.
    * ``"scissorhands"``: attention summed over the last 400 prompt rows and divided by 400; decode steps are added
      undivided, as released.

    The latter two follow the official repository (its heads have no groups; repeat K and V to get the same). It
    protects the first 20 tokens because sinks have tiny values: pass ``sinks=20``.

    Args:
        sinks: first tokens, kept before any other.
        evict_during_decode: False: decoding only appends.
    """

    name = "vatp"
    inputs = frozenset({"question"})

    indicator: Indicator = option("snapkv", check_choice, Indicator)
    sinks: int = option(0, check_int, 0)
    evict_during_decode: bool = option(True, check_bool)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.indicator != "snapkv":
            more = "column_sum" if self.indicator == "h2o" else "queries"
            object.__setattr__(self, "inputs", self.inputs | {more})

    def score(self, obs: Observation) -> Tensor:
        m = obs.evictable
        match self.indicator:
            case "snapkv":
                attention = super().score(obs)
            case "h2o":
                attention = reduce_group(obs.column_sum[..., :m], obs.kv_heads, self.group)
            case "scissorhands":
                total = obs.recent_sum(SCISSORHANDS_ROWS)[..., :m]
                attention = reduce_group(total, obs.kv_heads, self.group) / SCISSORHANDS_ROWS
        worth = attention * obs.value_norm[..., :m]
        return torch.where(obs.positions[..., :m] < self.sinks, torch.finfo(torch.float32).max, worth)

    @property
    def query_rows(self) -> int | None:
        return SCISSORHANDS_ROWS if self.indicator == "scissorhands" else 0

    def decode_rule(self) -> DecodeRule | None:
        if self.indicator == "snapkv" or not self.evict_during_decode:
            return None
        rule = Accumulated(window=self.window, group=self.group, value_norm=True, sinks=self.sinks)
        if self.indicator == "scissorhands":
            return replace(rule, rows=SCISSORHANDS_ROWS, divisor=SCISSORHANDS_ROWS)
        return rule
