"""Recompression of a store after an extend: buffers for the extend graph, and the new store.

Legend: B batch, L layers of this geometry, K KV heads, S slots of the longest head, its entries in ascending position.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvpass.cache.layers import TAIL_STEP, FullAttentionLayers
from kvpass.cache.prompt_record import LayersRecord
from kvpass.cache.segments import POOL, TAIL, pool_of, segments_of
from kvpass.operands import BUFFERS, RecompressBuffers
from kvpass.ops.recompress import NOT_DUE, select_held
from kvpass.policies.scores import PROTECTED


class Recompression:
    """Recompression of one store, scored by the queries of one extend.

    Args:
        store: has room for the new tokens. window: newest tokens of each row that will be kept, int64 ``[B]``,
            ``NOT_DUE`` for rows that do not change.
    Attributes:
        buffers: written by the extend graph, besides the buffers of the store. every_row: whether all rows are due.
    """

    def __init__(self, store: FullAttentionLayers, window: Tensor) -> None:
        self.store, self.every_row = store, bool((window != NOT_DUE).all())
        g, device = store.geometry, store.buffers.offsets.device
        slots = store.ranks.gather(store.pool_lengths.amax()[None], 0).amax() + store.buffers.tail_k.shape[3]
        sizes = g.sizes | {"batch": store.rows, "slots": int(slots)}
        self.buffers = RecompressBuffers(
            BUFFERS["recompress_scores"].new(sizes | {"kv_heads": g.kv_heads * store.ranks.size}, device),
            BUFFERS["recompress_masses"].new(sizes, device),
            BUFFERS["recompress_weights"].new(sizes, device),
            window.to(device),
        )

    def finish(
        self, entries: Tensor, seen: Tensor, protected: Tensor | None = None
    ) -> tuple[FullAttentionLayers, LayersRecord]:
        """Return a store of the kept entries, in buffers of its own, and its record.

        Args:
            entries: evictable entries per KV head per layer on average, int64 ``[B]``.
            seen: real tokens seen of each row, new ones included, int64 ``[B]``. protected: tokens that stay in any
                case, bool ``[B, n]`` by true position.
        """
        store = self.store
        if protected is not None:
            self._protect(protected, seen)
        scores, masses, layer_weights, window = self.buffers
        available = (seen - window).clamp(min=0)
        stay = store.ranks.local_shard(select_held(scores, layer_weights, entries, available, store.policy), 2)
        due = window != NOT_DUE
        left = _moved(store, stay, due, torch.where(due, window, store.used - store.buffers.tail_start), seen)
        lengths = store.lengths
        line = torch.arange(masses.shape[3], device=masses.device)
        newest = (line >= (lengths - window[:, None, None])[..., None]) & (line < lengths[..., None])
        return left, LayersRecord(
            group=store.group,
            mass=(masses * (stay | newest)).sum(3),
            weights=layer_weights,
            positions=left.buffers.pool_positions,
            offsets=left.buffers.offsets,
        )

    def _protect(self, protected: Tensor, seen: Tensor) -> None:
        """Give the evictable entries of protected tokens the score that keeps them."""
        scores, positions = self.buffers.recompress_scores, self.store.positions(seen)
        slots, tokens = scores.shape[3], protected.shape[1]
        rows = protected[:, None, None].expand(*positions.shape[:3], -1)
        stays = rows.gather(3, positions.clamp(min=0, max=tokens - 1)) & (positions >= 0) & (positions < tokens)
        of_all = self.store.ranks.gather(pad(stays, (0, slots - stays.shape[3])).byte(), 2).bool()
        scores.masked_fill_(of_all & (scores > float("-inf")), PROTECTED)


def without(store: FullAttentionLayers, gone: Tensor, seen: Tensor) -> FullAttentionLayers:
    """Return a store without the entries of some tokens, in buffers of its own; what was in the tail is in the pool.

    Args:
        gone: tokens, bool ``[n]`` by true position. seen: as in :meth:`Recompression.finish`.
    """
    positions = store.positions(seen)
    stay, rows = (positions >= 0) & ~gone[positions.clamp(min=0)], torch.ones_like(seen, dtype=torch.bool)
    return _moved(store, stay, rows, torch.zeros_like(seen), seen)


def _moved(store: FullAttentionLayers, stay: Tensor, due: Tensor, tails: Tensor, seen: Tensor) -> FullAttentionLayers:
    """Return a store of the kept entries; rows that are not due keep their pool, and all of their tail.

    Args:
        stay: keep mask, bool ``[B, L, K, S]``. tails: tokens of each row that go into the new tail, int64 ``[B]``.
    """
    used, before = int(tails.max()), store.of_rows
    kept = torch.where(due[:, None], stay.sum(3).flatten(1), store.buffers.offsets.diff(dim=1))
    tensors = {"offsets": pad(kept.cumsum(1), (1, 0)).int(), "tail_start": used - tails}
    for name in TAIL & before.keys():
        tail = before[name]
        tensors[name] = tail.new_empty(*tail.shape[:3], used + TAIL_STEP, *tail.shape[4:])
        for row, length in enumerate(tails.tolist()):
            tensors[name][:, row, :, used - length : used] = tail[:, row, :, store.used - length : store.used]
    for name in POOL & before.keys():
        rows = segments_of(before[name], store.buffers.offsets)
        for row in due.nonzero().flatten().tolist():
            appended = _in_tail(store, before.get(name.replace("pool", "tail")), row, int(seen[row]))
            every = [torch.cat(pair) for pair in zip(rows[row], appended, strict=True)]
            rows[row] = [x[keep[: len(x)]] for x, keep in zip(every, stay[row].flatten(0, 1), strict=True)]
        tensors[name] = pool_of(name, rows)
    return store.holding(tensors, used)


def _in_tail(store: FullAttentionLayers, tail: Tensor | None, row: int, seen: int) -> Tensor:
    """What a buffer of the tails holds of one row, for each layer and head, ``[L*K, n, ...]``; None: positions."""
    first = int(store.buffers.tail_start[row])
    if tail is None:  # they follow from the tokens seen
        positions = torch.arange(first, store.used, dtype=torch.int32, device=store.buffers.offsets.device)
        return (positions + (seen - store.used)).expand(store.geometry.layers * store.geometry.kv_heads, -1)
    return tail[:, row, :, first : store.used].flatten(0, 1)
