"""The ``kvpass::`` operators on CUDA: kernels for what reads keys and values, the policies' tensor functions beside.

Same contracts as :mod:`kvpass.reference`. No value of the device is read on the host: the start columns of a padded
prompt come on the CPU, everything else stays where it is. Kernels are imported when an operator first runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from kvpass import reference
from kvpass.observation import Observation
from kvpass.policies.base import Policy
from kvpass.sliding import keep_newest

SPLIT_TOKENS = 8
"""Up to so many new tokens the pool is split among programs; more give each block of queries enough work of its own."""


def prompt_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    start: Tensor,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    sliding_window: int | None = None,
) -> Tensor:
    """As :func:`kvpass.reference.prompt_attention`."""
    return _attend_prompt(q, k, v, _on(q, start), scale, softcap, sinks, sliding_window)[0]


def observe_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    start: Tensor,
    scale: float,
    layer: int,
    num_layers: int,
    policy: Policy,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As :func:`kvpass.reference.observe_attention`; statistics of all rows come from one launch each."""
    first = _on(q, start)
    out, lse = _attend_prompt(q, k, v, first, scale, softcap, sinks)
    statistics = SiteStatistics(q, k, v, first, lse, scale, policy.window, softcap)

    def observe(rows: slice, column: int, window: int) -> Observation:
        live = (rows, slice(None), slice(column, None))
        return KernelObservation(
            q[live], k[live], v[live], scale, window, layer, num_layers, softcap, sinks, site=statistics, live=live
        )

    return out, *reference.judge_prompt(k, start, policy, observe)


def cascade_step(
    pool_k: Tensor,
    pool_v: Tensor,
    slots: Tensor,
    slot_traces: Tensor,
    ledger: Tensor,
    window_traces: Tensor,
    tail_k: Tensor,
    tail_v: Tensor,
    k: Tensor,
    v: Tensor,
    scores: Tensor,
    traces: Tensor,
    weight: Tensor,
    entries: Tensor,
    start: Tensor,
    layer: int,
    policy: Policy,
) -> None:
    """As :func:`kvpass.reference.cascade_step`; an overfull pool is a device-side assertion."""
    from kvpass.kernels.gather import assign_slots, gather_winners

    first = _on(k, start)
    keep, rank, place = reference.recut(slots, ledger, scores, weight, entries, first, layer, policy)
    source = assign_slots(keep, slots[reference.OWNER])
    order = rank.int().contiguous(), place.int().contiguous()
    gather_winners(source, k, v, *order, traces, first, pool_k, pool_v, slots, slot_traces, layer)
    reference.keep_window(window_traces, tail_k, tail_v, k, v, traces, layer, min(policy.window, k.shape[2]))


def pack(pool_k: Tensor, pool_v: Tensor, slots: Tensor, slot_traces: Tensor, offsets: Tensor) -> None:
    """As :func:`kvpass.reference.pack`."""
    from kvpass.kernels import gather

    gather.pack(pool_k, pool_v, slots, slot_traces, offsets)


def index_pool(offsets: Tensor, kv_heads: int) -> tuple[Tensor, Tensor]:
    """How :func:`attend_cache` divides a packed pool among programs: see :func:`kvpass.kernels.tile_map.tile_map`."""
    from kvpass.kernels.tile_map import tile_map

    return tile_map(offsets, kv_heads)


def attend_cache(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pool_k: Tensor,
    pool_v: Tensor,
    offsets: Tensor,
    tail_k: Tensor,
    tail_v: Tensor,
    tail_start: Tensor,
    tail_used: Tensor,
    scale: float,
    layer: int,
    tiles: Tensor,
    tile_offsets: Tensor,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """As :func:`kvpass.reference.attend_cache`, with the tables of :func:`index_pool`.

    The caller sees to it that T more tokens fit in the tail: the device is not asked.
    """
    from kvpass.kernels.ragged_decode import attend_ragged
    from kvpass.kernels.ragged_extend import attend_extend

    tail = (tail_k, tail_v, tail_start, tail_used)
    if q.shape[2] <= SPLIT_TOKENS:
        return attend_ragged(q, k, v, pool_k, pool_v, tiles, tile_offsets, *tail, layer, scale, softcap, sinks)
    return attend_extend(q, k, v, pool_k, pool_v, offsets, *tail, layer, scale, softcap, sinks)


def fill_ring(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    start: Tensor,
    ring_k: Tensor,
    ring_v: Tensor,
    scale: float,
    layer: int,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """As :func:`kvpass.sliding.fill_ring`."""
    keep_newest(ring_k, ring_v, k, v, torch.arange(k.shape[2], device=k.device), layer)
    return prompt_attention(q, k, v, start, scale, softcap, sinks, ring_k.shape[3])


def _on(tensor: Tensor, start: Tensor) -> Tensor:
    return start.to(tensor.device, non_blocking=True)


def _attend_prompt(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    first: Tensor,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    sliding_window: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Output ``[B, H, N, Dv]`` and log-sum-exp fp32 ``[B, H, N]``, by FlashAttention where it takes the site."""
    from kvpass.kernels.prefill_attention import flash_attention_varlen, prefill_attention

    plain = softcap is None and sinks is None
    equal = q.shape[3] == v.shape[3] and q.shape[3] % 8 == 0
    if q.is_cuda and plain and equal and q.dtype in (torch.float16, torch.bfloat16):
        return flash_attention_varlen(q, k, v, first, scale, sliding_window)
    return prefill_attention(q, k, v, first, scale, sliding_window, softcap, sinks)


@dataclass(frozen=True, eq=False)
class SiteStatistics:
    """Statistics of all rows of a site, each computed when a policy first asks; fp32, zero in padding.

    Attributes: as of :class:`Observation`; first: first real column, int64 ``[B]``; lse: log-sum-exp ``[B, H, N]``.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    first: Tensor
    lse: Tensor
    scale: float
    window: int
    softcap: float | None

    @cached_property
    def mean(self) -> Tensor:
        from kvpass.kernels.window_statistics import window_statistics

        return window_statistics(
            self.q, self.k, self.first, self.lse, self.scale, self.window, softcap=self.softcap
        ).mean

    @cached_property
    def spread(self) -> tuple[Tensor, Tensor]:
        """Variance and entropy, which only CAKE needs, and which it needs together."""
        from kvpass.kernels.window_statistics import window_statistics

        found = window_statistics(
            self.q,
            self.k,
            self.first,
            self.lse,
            self.scale,
            self.window,
            softcap=self.softcap,
            variance=True,
            entropy=True,
        )
        assert found.variance is not None and found.entropy is not None
        return found.variance, found.entropy

    @cached_property
    def last_row(self) -> Tensor:
        from kvpass.kernels.window_statistics import window_statistics

        return window_statistics(self.q, self.k, self.first, self.lse, self.scale, 0, softcap=self.softcap).mean

    @cached_property
    def value_norm(self) -> Tensor:
        from kvpass.kernels.window_statistics import value_norms

        return value_norms(self.v, self.first)

    @cached_property
    def column_sum(self) -> Tensor:
        return self.recent_sum(self.k.shape[2])

    def recent_sum(self, rows: int) -> Tensor:
        from kvpass.kernels.window_statistics import column_sums

        return column_sums(self.q, self.k, self.first, self.lse, self.scale, rows, softcap=self.softcap)


@dataclass(frozen=True, eq=False, kw_only=True)
class KernelObservation(Observation):
    """An observation whose statistics are cut out of those of the whole site."""

    site: SiteStatistics
    live: tuple[slice, slice, slice]

    @property
    def mean(self) -> Tensor:
        return self.site.mean[self.live]

    @property
    def variance(self) -> Tensor:
        return self.site.spread[0][self.live]

    @property
    def entropy(self) -> Tensor:
        return self.site.spread[1][self.live]

    @property
    def last_row(self) -> Tensor:
        return self.site.last_row[self.live]

    @property
    def value_norm(self) -> Tensor:
        return self.site.value_norm[self.live]

    @property
    def column_sum(self) -> Tensor:
        return self.site.column_sum[self.live]

    def recent_sum(self, rows: int) -> Tensor:
        return self.site.recent_sum(rows)[self.live]
