"""StreamingLLM: the first few tokens and the most recent ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvpass.observation import Observation
from kvpass.policies.base import Policy
from kvpass.policies.options import check_int


@dataclass(frozen=True, kw_only=True)
class StreamingLLM(Policy):
    """StreamingLLM (Xiao et al. 2023, arXiv 2309.17453): ``sinks`` first tokens, then the latest that fit.

    Score of position i: its index; sinks above all, the first one highest. Departure: keys keep the positions they were
    made with (the paper re-numbers them inside the cache), as every later comparison does.

    Args:
        sinks: first tokens kept before any other.
    """

    name: ClassVar[str] = "streaming_llm"

    sinks: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        check_int("sinks", self.sinks, 0)

    def score(self, obs: Observation) -> Tensor:
        index = torch.arange(obs.evictable, device=obs.keys.device)
        worth = torch.where(index < self.sinks, obs.evictable + self.sinks - index, index).float()
        return worth.expand(obs.keys.shape[0], obs.kv_heads, -1)
