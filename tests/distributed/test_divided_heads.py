"""Threads that share the heads of a layer, as processes do, keep together what ``plan`` says of all heads."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

import kvpass
from kvpass.cache.layers import FullAttentionLayers
from kvpass.config import Geometry, LayerGroup
from kvpass.operands import Attention, Candidates, Requested
from kvpass.ops import reference
from kvpass.policies import resolve
from kvpass.policies.plan import plan
from kvpass.ranks import Ranks

SIZE, LAYERS, ROWS, KV_HEADS, GROUP, TOKENS, DIM, BUDGET = 2, 3, 2, 4, 2, 60, 8, 21
OPTIONS = {
    "cake": {"tau1": 1.0, "tau2": 1.0},
    "pyramidkv": {"shape": "entropy"},
    "criticalkv": {"base": "ada_snapkv", "epsilon": 0.1},
}
WEIGHTS = torch.randn(LAYERS, 12, KV_HEADS * GROUP * DIM, generator=torch.Generator().manual_seed(1))
"""Output projections."""


@dataclass(frozen=True)
class Meeting:
    """Where threads leave tensors for each other."""

    barrier: threading.Barrier = field(default_factory=lambda: threading.Barrier(SIZE, timeout=20))
    left: dict[int, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class ThreadRanks(Ranks):
    meeting: Meeting = field(default_factory=Meeting)

    def gather(self, x: Tensor, dim: int) -> Tensor:
        self.meeting.left[self.rank] = x
        self.meeting.barrier.wait()
        found = torch.cat([self.meeting.left[rank] for rank in range(self.size)], dim)
        self.meeting.barrier.wait()
        return found


def kept(policy: Any, q: Tensor, k: Tensor, v: Tensor, start: Tensor, ranks: Ranks | None) -> Tensor:
    """What the operators of compiled models keep, bool ``[L, B, K, N]``; of the own heads where there are ranks."""
    weights = WEIGHTS
    if ranks is not None:
        weights = weights.chunk(SIZE, 2)[ranks.rank]
        q, k, v = (x.chunk(SIZE, 2)[ranks.rank] for x in (q, k, v))
    heads = k.shape[2]
    geometry = Geometry(layers=LAYERS, kv_heads=heads, key_dim=DIM, value_dim=DIM, itemsize=4)
    store = FullAttentionLayers(LayerGroup(geometry=geometry, layers=tuple(range(LAYERS))), policy, ranks)
    store.begin_prefill([BUDGET if policy.needs_budget else TOKENS] * ROWS, start, TOKENS, q.dtype, q.device)
    buffers = store._prefill
    for layer in range(LAYERS):
        call = Attention(q[layer], k[layer], v[layer], DIM**-0.5)
        asked = Requested(weights[layer], buffers.entries)
        seen = reference.judge(call, None, start, start, layer, LAYERS, policy, asked, ranks)
        reference.cascade_step(buffers, Candidates(call.k, call.v, *seen, start), layer, policy, ranks)
    reference.pack(buffers)
    store.finish_prefill()
    keep = torch.zeros(ROWS, LAYERS, heads, TOKENS + 1, dtype=torch.bool)
    positions = store.positions(TOKENS - start)
    keep.scatter_(3, torch.where(positions < 0, TOKENS, positions + start[:, None, None, None]), True)
    return keep[..., :TOKENS].transpose(0, 1)


@pytest.mark.parametrize("parity", ["paper", "code"])
@pytest.mark.parametrize("padding", [0, 9])
@pytest.mark.parametrize("name", sorted(kvpass.POLICIES))
def test_threads_keep_together_what_one_keeps(name, padding, parity):
    policy = resolve(name, window=6, parity=parity, **OPTIONS.get(name, {}))
    generator = torch.Generator().manual_seed(3)
    q, k, v = (
        torch.randn(LAYERS, ROWS, heads, TOKENS, DIM, generator=generator)
        for heads in (KV_HEADS * GROUP, KV_HEADS, KV_HEADS)
    )
    k = k * torch.linspace(0.2, 3, KV_HEADS)[:, None, None]  # heads, and so processes, differ
    start = torch.tensor([0, padding])
    meeting = Meeting()
    with ThreadPoolExecutor(SIZE) as pool:
        threads = [pool.submit(kept, policy, q, k, v, start, ThreadRanks("", r, SIZE, meeting)) for r in range(SIZE)]
        found = torch.cat([thread.result() for thread in threads], 2)
    if padding:
        assert torch.equal(found, kept(policy, q, k, v, start, None))
    else:
        budget = BUDGET if policy.needs_budget else None
        assert torch.equal(found, plan(policy, q, k, v, budget=budget, output_weights=WEIGHTS).keep)
