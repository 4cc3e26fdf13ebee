"""The ``kvpass::`` operators on CUDA: kernels for what reads keys and values, the policies' tensor functions beside.

Same contracts as :mod:`kvpass.ops.reference`. No operator reads a value of the device on the host: the start columns of
a padded prompt come on the CPU, everything else stays where it is. :func:`index_pool` reads one,
once a pool is packed. Kernels are imported when an operator first runs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from kvpass.ops import reference
from kvpass.ops.evict import Kernels
from kvpass.ops.slots import Entered
from kvpass.policies.base import Policy
from kvpass.policies.observation import Observation
from kvpass.policies.scores import Group, Pool

SPLIT_TOKENS = 8
"""Up to so many new tokens the pool is split among programs; more give each block of queries enough work of its own."""
FEWEST_TILES = 2
"""Tiles a layer has at least: a graph would take the one tile, or none, of its first pool for the size of all."""


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
    """As :func:`kvpass.ops.reference.prompt_attention`."""
    q, k, v = readable(q, k, v)
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
    """As :func:`kvpass.ops.reference.observe_attention`; statistics of all rows come from one launch each."""
    q, k, v = readable(q, k, v)
    first = _on(q, start)
    out, lse = _attend_prompt(q, k, v, first, scale, softcap, sinks)
    statistics = SiteStatistics(q, k, v, first, lse, scale, policy.window, softcap)

    def observe(live: reference.Live, window: int) -> Observation:
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
    """As :func:`kvpass.ops.reference.cascade_step`; an overfull pool is a device-side assertion."""
    from kvpass.kernels.gather import assign_slots, gather_winners

    first = _on(k, start)
    keep, rank, place = reference.recut(slots, ledger, scores, weight, entries, first, layer, policy)
    source = assign_slots(keep, slots[reference.OWNER])
    order = rank.int().contiguous(), place.int().contiguous()
    k, v = readable(k, v)
    gather_winners(source, k, v, *order, traces, first, pool_k, pool_v, slots, slot_traces, layer)
    reference.keep_window(window_traces, tail_k, tail_v, k, v, traces, layer, min(policy.window, k.shape[2]))


def pack(pool_k: Tensor, pool_v: Tensor, slots: Tensor, slot_traces: Tensor, offsets: Tensor) -> None:
    """As :func:`kvpass.ops.reference.pack`."""
    from kvpass.kernels import gather

    gather.pack(pool_k, pool_v, slots, slot_traces, offsets)


def index_pool(offsets: Tensor, kv_heads: int, slots: int) -> tuple[Tensor, Tensor]:
    """How :func:`attend_cache` divides a packed pool among programs: see :func:`kvpass.kernels.tile_map.tile_map`.

    Args:
        slots: E of the pool, by which the size of a tile is chosen.
    """
    from kvpass.kernels.tile_map import NO_TILE, tile_map, tile_of

    layers = (offsets.shape[1] - 1) // kv_heads
    tiles, tile_offsets = tile_map(offsets, kv_heads, tile_of(slots // layers))
    missing = FEWEST_TILES - tiles.shape[1]
    if missing > 0:
        nothing = tiles.new_tensor([NO_TILE, NO_TILE, 0, 0])
        tiles = torch.cat([tiles, nothing.expand(tiles.shape[0], missing, 4)], 1)
    return tiles, tile_offsets


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
    """As :func:`kvpass.ops.reference.attend_cache`, with the tables of :func:`index_pool`.

    The caller sees to it that T more tokens fit in the tail: the device is not asked.
    """
    from kvpass.kernels.ragged_decode import attend_ragged
    from kvpass.kernels.ragged_extend import attend_extend

    q, k, v = readable(q, k, v)
    sinks = None if sinks is None else sinks.contiguous()
    tail = (tail_k, tail_v, tail_start, tail_used)
    if q.shape[2] <= SPLIT_TOKENS:
        return attend_ragged(q, k, v, pool_k, pool_v, tiles, tile_offsets, *tail, layer, scale, softcap, sinks)
    return attend_extend(q, k, v, pool_k, pool_v, offsets, *tail, layer, scale, softcap, sinks)


def attend_slots(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pool_k: Tensor | None,
    pool_v: Tensor | None,
    offsets: Tensor | None,
    tail_k: Tensor,
    tail_v: Tensor,
    position: Tensor,
    entered: Entered | None,
    layer: int,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """As :func:`kvpass.ops.slots.attend_slots`; a line without an empty slot is the caller's fault and not noticed."""
    from kvpass.kernels import slot_decode

    q, k, v = readable(q, k, v)
    sinks = None if sinks is None else sinks.contiguous()
    held = (pool_k, pool_v, offsets, tail_k, tail_v)
    return slot_decode.attend_slots(q, k, v, *held, position, entered, layer, scale, softcap, sinks)


def evict_losers(worth: Tensor, position: Tensor, memory: Tensor, quota: Tensor, window: int) -> Tensor:
    """As :func:`kvpass.ops.slots.evict_losers`."""
    from kvpass.kernels.slot_losers import evict_losers

    return evict_losers(worth.contiguous(), position, memory, quota, window)


def pool_in_order(
    attention: Tensor, position: Tensor, place: Tensor, window: int, pool: Pool, kernel_size: int, group: Group
) -> Tensor:
    """As :func:`kvpass.policies.decode_rules.pool_in_order`."""
    from kvpass.kernels.slot_neighbours import pool_in_order

    return pool_in_order(attention, position, place, window, pool, kernel_size, group)


SLOT_KERNELS = Kernels(attend_slots, evict_losers, pool_in_order)


def readable(*tensors: Tensor) -> list[Tensor]:
    """The tensors as kernels read them, the last dim contiguous; what is so already is not copied."""
    return [x if x.stride(-1) == 1 else x.contiguous() for x in tensors]


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
    from kvpass.kernels.prefill_attention import flash_attention_varlen, flash_takes, prefill_attention

    if softcap is None and sinks is None and flash_takes(q, v):
        return flash_attention_varlen(q, k, v, first, scale, sliding_window)
    sinks = None if sinks is None else sinks.contiguous()
    return prefill_attention(q, k, v, first, scale, sliding_window, softcap, sinks)


@dataclass(frozen=True, eq=False)
class SiteStatistics:
    """Statistics of all rows of a site, each computed when a policy first asks; fp32, zero in padding.

    Attributes: as of :class:`Observation`; first: first real column, int64 ``[B]``; lse: log-sum-exp ``[B, H, N]``;
        sums: those over rows, by their number.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    first: Tensor
    lse: Tensor
    scale: float
    window: int
    softcap: float | None
    sums: dict[int, Tensor] = field(default_factory=dict)

    @cached_property
    def mean(self) -> Tensor:
        known = vars(self).get("spread")
        return self._over(self.window)[0] if known is None else known[0]

    @cached_property
    def spread(self) -> tuple[Tensor, ...]:
        """Mean, variance and entropy in one pass: who asks for a mean too should ask for it after this."""
        return self._over(self.window, spread=True)

    def _over(self, window: int, spread: bool = False) -> tuple[Tensor, ...]:
        from kvpass.kernels.window_statistics import window_statistics

        site = (self.q, self.k, self.first, self.lse, self.scale, window)
        found = window_statistics(*site, softcap=self.softcap, variance=spread, entropy=spread)
        return tuple(x for x in (found.mean, found.variance, found.entropy) if x is not None)

    @cached_property
    def last_row(self) -> Tensor:
        if self.window <= 1:
            return self.mean
        return self._over(window=0)[0]

    @cached_property
    def value_norm(self) -> Tensor:
        from kvpass.kernels.window_statistics import value_norms

        return value_norms(self.v, self.first)

    def recent_sum(self, rows: int) -> Tensor:
        from kvpass.kernels.window_statistics import column_sums

        if rows not in self.sums:
            site = (self.q, self.k, self.first, self.lse, self.scale, rows)
            self.sums[rows] = column_sums(*site, softcap=self.softcap)
        return self.sums[rows]


@dataclass(frozen=True, eq=False, kw_only=True)
class KernelObservation(Observation):
    """An observation whose statistics are cut out of those of the whole site."""

    site: SiteStatistics
    live: reference.Live

    @property
    def mean(self) -> Tensor:
        return self.site.mean[self.live]

    @property
    def variance(self) -> Tensor:
        return self.site.spread[1][self.live]

    @property
    def entropy(self) -> Tensor:
        return self.site.spread[2][self.live]

    @property
    def last_row(self) -> Tensor:
        return self.site.last_row[self.live]

    @property
    def value_norm(self) -> Tensor:
        return self.site.value_norm[self.live]

    @property
    def column_sum(self) -> Tensor:
        return self.recent_sum(self.site.k.shape[2])

    def recent_sum(self, rows: int) -> Tensor:
        return self.site.recent_sum(rows)[self.live]
