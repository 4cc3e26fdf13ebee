"""ChunkKV: runs of neighbouring tokens are kept or dropped together."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvpass.policies.observation import Observation
from kvpass.policies.options import check_bool, check_int, option
from kvpass.policies.scheduler import places
from kvpass.policies.scores import Pool
from kvpass.policies.snapkv import WindowAttention

_TINY = 1e-8


@dataclass(frozen=True, kw_only=True)
class ChunkKV(WindowAttention):
    """Keep whole pieces of text: ChunkKV (Liu et al. 2025, arXiv 2502.00299).

    Positions before the window are divided into chunks of ``chunk``, the last one shorter. s is SnapKV's score, summed
    over all KV heads of the layer; a chunk's score is the mean of s over its positions. The best chunks stay, the same
    in all heads; with ``each_head``, which is no rule of the paper, each head keeps those that are best by its own s.

    With ``spikes``, as in kvpress's entropy-gated form (which has chunks of 10 and 4 spikes): of a chunk whose score is
    at least the median, but the entropy of s within it, divided by its largest possible value, below the median, only
    the best ``spikes`` positions come at its turn. The others come after all chunks, by s.

    Departures: of the last chunk that the budget reaches, the best positions are kept, so that the total is exact (in
    kvpress the number of chunks is rounded down, and the chunks of the gated form are cut as here). The window is
    protected instead of competing in its chunks. The paper's reuse of a layer's choice by the next layer is left out.

    Args:
        chunk: positions of a chunk. spikes: best positions of a chunk that is worth little but for them; 0: no chunk is
            divided. each_head: each head has chunks of its own.
    """

    name = "chunkkv"
    inputs = frozenset({"question", "prompt", "heads"})

    pool: Pool = "avg"
    kernel_size: int = 5
    chunk: int = option(20, check_int, 1)
    spikes: int = option(0, check_int, 0)
    each_head: bool = option(False, check_bool)

    def score(self, obs: Observation) -> Tensor:
        """Return the negative place in the order of entry."""
        s = super().score(obs)
        s = s.flatten(0, 1) if self.each_head else obs.all_heads(s).sum(1)  # a line for each choice
        m = s.shape[1]
        chunks = pad(s, (0, -m % self.chunk), value=-1.0).unflatten(1, (-(-m // self.chunk), self.chunk))
        inside, held = chunks.clamp(min=0), (chunks >= 0).sum(2)
        worth = inside.sum(2) / held
        within = places(chunks)
        place = places(worth)[..., None] * self.chunk + within
        if self.spikes and m:
            p = inside / (inside.sum(2, keepdim=True) + _TINY)
            entropy = (-(p * (p + _TINY).log()).sum(2) / held.clamp(min=2).log()).clamp(0, 1)
            spiky = (worth >= _median(worth)) & (entropy < _median(entropy))
            later = place[0].numel() + places(chunks.flatten(1)).view_as(place)
            place = torch.where(spiky[..., None] & (within >= self.spikes), later, place)
        return -place.flatten(1)[:, :m].float().unflatten(0, (len(obs.keys), -1)).expand(-1, obs.kv_heads, -1)


def _median(x: Tensor) -> Tensor:
    """Lower median of each row, ``[B, 1]``."""
    return x.median(dim=1, keepdim=True).values
