"""StreamingLLM: the first few tokens and the most recent ones."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvpass.policies.base import Policy
from kvpass.policies.decode_rules import DecodeRule, RollingWindow
from kvpass.policies.observation import Observation
from kvpass.policies.options import check_bool, check_int, option


@dataclass(frozen=True, kw_only=True)
class StreamingLLM(Policy):
    """Keep the first and the newest tokens: StreamingLLM (Xiao et al. 2023, arXiv 2309.17453).

    The score of a position is its index; the first ``sinks`` tokens score above all others, the first one highest. No
    token observes, so the default window is empty: the newest tokens stay because they score highest. While decoding,
    the newest tokens replace older ones.

    Departure: keys keep the positions they were made with (the paper re-numbers them inside the cache), as in every
    later comparison.

    Args:
        sinks: first tokens, kept before any other.
        evict_during_decode: False: decoding only appends, as in the comparisons of SnapKV's and Ada-KV's code.
    """

    name = "streaming_llm"
    inputs = frozenset()

    window: int = 0
    sinks: int = option(4, check_int, 0)
    evict_during_decode: bool = option(True, check_bool)

    def score(self, obs: Observation) -> Tensor:
        index = obs.positions[..., : obs.evictable]
        worth = torch.where(index < self.sinks, obs.evictable + self.sinks - index, index).float()
        return worth.expand(obs.keys.shape[0], obs.kv_heads, -1)

    def decode_rule(self) -> DecodeRule | None:
        return RollingWindow(window=self.window, sinks=self.sinks) if self.evict_during_decode else None
