"""``kvpass::`` operators on CUDA: kernels to read keys and values, plus the policies' tensor functions.

Contracts as in :mod:`kvpass.ops.reference`. No operator reads a device value on the host: the start columns of a padded
prompt are given on the CPU too, everything else stays where it is. The module needs Triton, and is imported when an
operator first runs on CUDA.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from kvpass.kernels import prompt_attention, slot_decode, slot_lines, window_statistics
from kvpass.kernels.block_attention import attend_blocks as attend_blocks_of
from kvpass.kernels.gather import gather_winners
from kvpass.kernels.ragged_decode import attend_ragged
from kvpass.kernels.ragged_extend import attend_extend
from kvpass.operands import (
    AppendBuffers,
    Attention,
    BlockSelection,
    Candidates,
    PartialAttention,
    PrefillBuffers,
    SlotCache,
)
from kvpass.ops import reference
from kvpass.policies.base import Policy
from kvpass.policies.observation import Observation
from kvpass.rotation import rotated_call, rotated_output

SPLIT_TOKENS = 8
"""Up to so many new tokens the pool is split among programs; above, query blocks are enough."""


def column_sums(call: Attention, lse: Tensor, start: Tensor, first: Tensor) -> Tensor:
    """See :func:`kvpass.ops.reference.column_sums`."""
    return window_statistics.column_sums(readable(call), first, lse, call.q.shape[2])


def score_layer(
    call: Attention,
    lse: Tensor,
    start: Tensor,
    first: Tensor,
    layer: int,
    num_layers: int,
    policy: Policy,
    *operands: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """See :func:`kvpass.ops.reference.score_layer`; one launch per statistic covers all rows."""
    call = readable(call)
    site = SiteStatistics(call, first, lse, policy.window)

    def observed(obs: Observation, rows: slice, column: int) -> Observation:
        return KernelObservation(**vars(obs), site=site, rows=rows, column=column)

    return reference.score_layer(call, None, start, first, layer, num_layers, policy, *operands, observed=observed)


def gather_layer(buffers: PrefillBuffers, candidates: Candidates, *operands: Any) -> None:
    """See :func:`kvpass.ops.reference.gather_layer`; an overfull pool is a device-side assertion."""
    k, v = _last_dim_contiguous(candidates.k), _last_dim_contiguous(candidates.v)
    reference.gather_layer(buffers, candidates._replace(k=k, v=v), *operands, move=gather_winners)


cascade_step = reference.cascade_step
fixed_shares = reference.fixed_shares
pack = reference.pack
evict_lowest = slot_lines.evict_lowest
pool_in_order = slot_lines.pool_in_order


def attend_cache(call: Attention, held: AppendBuffers, layer: int) -> Tensor:
    """See :func:`kvpass.ops.reference.attend_cache`; needs the counters ``arrivals``.

    The caller must ensure that T more tokens fit in the tails: the device is not asked.
    """
    attend = attend_ragged if call.q.shape[2] <= SPLIT_TOKENS else attend_extend
    return rotated_output(attend(readable(rotated_call(call, held)), held, layer), call, held)


def attend_slots(call: Attention, lines: SlotCache, layer: int) -> tuple[Tensor, Tensor | None]:
    """See :func:`kvpass.ops.slots.attend_slots`; each line must have an empty slot, which is not checked."""
    out, attention = slot_decode.attend_slots(readable(rotated_call(call, lines)), lines, layer)
    return rotated_output(out, call, lines), attention


def readable(call: Attention) -> Attention:
    """Return the call with contiguous last dims, as kernels need it; copies only if necessary."""
    q, k, v = map(_last_dim_contiguous, call[:3])
    return call._replace(q=q, k=k, v=v, sinks=None if call.sinks is None else call.sinks.contiguous())


def _last_dim_contiguous(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def attend_prompt(
    call: Attention, start: Tensor, sliding_window: int | None = None, chunked: bool = False
) -> tuple[Tensor, Tensor]:
    """See :func:`kvpass.ops.reference.attend_prompt`; also the log-sum-exp fp32 ``[B, H, T]``, ``-inf`` in padding."""

    def attend(part: Attention, window: int | None, rows: slice) -> tuple[Tensor, Tensor]:
        return prompt_attention.attend(part, window)

    return reference.attend_rows(readable(call), start, sliding_window, chunked, attend)


def attend_blocks(call: Attention, selection: BlockSelection, block: int) -> PartialAttention:
    """See :func:`kvpass.ops.reference.attend_blocks`."""
    return attend_blocks_of(readable(call), selection, block)


@dataclass(frozen=True, eq=False)
class SiteStatistics:
    """Statistics of all rows of an attention op, computed at first use; fp32, zero in padding.

    Attributes:
        call: over the whole prompt, q holding the last R rows. first: first real column, int64 ``[B]``. lse:
            log-sum-exp of these rows, ``[B, H, R]``. window: rows that observe. sums: column sums by number of rows.
    """

    call: Attention
    first: Tensor
    lse: Tensor
    window: int
    sums: dict[int, Tensor] = field(default_factory=dict)

    @cached_property
    def mean(self) -> Tensor:
        known = vars(self).get("spread")
        return self._over(self.window)[0] if known is None else known[0]

    @cached_property
    def spread(self) -> tuple[Tensor, ...]:
        """Mean, variance and entropy in one pass; read ``mean`` after it, so that it is reused."""
        return self._over(self.window, spread=True)

    def _over(self, window: int, spread: bool = False) -> tuple[Tensor, ...]:
        return window_statistics.window_statistics(self.call, self.first, self.lse, window, spread=spread)

    @cached_property
    def last_row(self) -> Tensor:
        if self.window <= 1:
            return self.mean
        return self._over(window=0)[0]

    def recent_sum(self, rows: int) -> Tensor:
        if rows not in self.sums:
            self.sums[rows] = window_statistics.column_sums(self.call, self.first, self.lse, rows)
        return self.sums[rows]


def _sliced(statistic: Callable[[SiteStatistics], Tensor]) -> Any:
    """Return a property: the part of a statistic ``[B, heads, N]`` for an observation's rows and columns."""
    return property(lambda obs: statistic(obs.site)[obs.rows, :, obs.column :])


@dataclass(frozen=True, eq=False, kw_only=True)
class KernelObservation(Observation):
    """Observation whose statistics are slices of those of the whole attention op."""

    site: SiteStatistics
    rows: slice
    column: int

    mean = _sliced(lambda site: site.mean)
    variance = _sliced(lambda site: site.spread[1])
    entropy = _sliced(lambda site: site.spread[2])
    last_row = _sliced(lambda site: site.last_row)

    def recent_sum(self, rows: int) -> Tensor:
        return self.site.recent_sum(rows)[self.rows, :, self.column :]

    @cached_property
    def value_norm(self) -> Tensor:
        return torch.linalg.vector_norm(self.values, 1, -1, dtype=torch.float32)  # without a copy in fp32
