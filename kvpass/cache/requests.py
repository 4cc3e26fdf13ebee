"""Cache of requests that come and go: each has one row for life, and a call appends a token to some of the rows.

Legend: B rows, E pool slots of a row, C tail slots.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor

from kvpass.cache.cache import CompressedCache
from kvpass.cache.layers import FullAttentionLayers
from kvpass.cache.part import CachePart
from kvpass.config import Layout
from kvpass.operands import BUFFERS, AppendBuffers


class RequestCache(CompressedCache):
    """Rows of equal size, each for the prompt of one request and the tokens that are appended to it.

    Args:
        prompt: a cache of one row of the same model and budget, of any prompt; it is not changed. entries: of its
            budget, window included. room: tokens that a request may append. rows: how many.
    """

    selects_rows = True

    @torch.inference_mode(False)
    def __init__(self, prompt: CompressedCache, entries: int, room: int, rows: int) -> None:
        vars(self).update(vars(prompt))
        self.record, self.ids, self.fills = None, None, ()
        self.columns = self.appended = 1
        self._stores = [copy.copy(store) for store in prompt.full_layers]
        for store in self._stores:
            made = _empty_rows(store, entries, room, rows, self._device)
            vars(store).update(made, tail_used=torch.zeros(rows, dtype=torch.int64, device=self._device))
        self.parts: list[CachePart] = [*self._stores]
        self.choose([0], 0)

    @staticmethod
    def row_bytes(prompt: CompressedCache, entries: int, room: int) -> int:
        """Bytes of one row."""
        made = (_empty_rows(store, entries, room, 1, torch.device("meta")) for store in prompt.full_layers)
        return sum(x.nbytes for buffers in made for x in buffers.values())

    @staticmethod
    def refusal(layout: Layout) -> str | None:
        """Return why a model with this layout of its cache cannot have one; None if it can."""
        if layout.rings:
            return "layers with a sliding window"
        if layout.states:
            return "recurrent layers"
        if any(group.geometry.values_in_keys for group in layout.pools):
            return "latent attention"
        if any(group.geometry.key_dim != group.geometry.value_dim for group in layout.pools):
            return "keys and values of different sizes"
        return None

    @torch.inference_mode(False)
    def put(self, row: int, prompt: CompressedCache) -> None:
        """Copy the entries of a prompt, a cache of one row, into a row; whatever that held is gone."""
        for own, store in zip(self._stores, prompt.full_layers, strict=True):
            used = {"E": int(store.offsets[0, -1]), "C": store.used}
            for name in _names(store):
                sizes, target, given = BUFFERS[name].sizes, getattr(own, name), getattr(store, name)
                at = [slice(used.get(size)) for size in sizes]
                source = given[tuple(at)]
                at[BUFFERS[name].row_dim] = slice(row, row + 1)
                target[tuple(at)] = source
            own.tail_used[row] = store.used

    def choose(self, rows: Sequence[int], last: int) -> None:
        """Name the rows of the next call, which appends one token to each; ``last``: the highest position of these."""
        index = torch.tensor(rows, device=self._device)
        self.start, self.columns = torch.zeros_like(index), max(last, 1)
        self._seen_columns = torch.tensor(self.columns, device=self._device)
        for store in self._stores:
            store.row_index = index
            if store.arrivals is not None:
                sizes = {"A": len(rows) * store.geometry.kv_heads}
                store.arrivals = BUFFERS["arrivals"].new(sizes, index.device)

    def ensure_room(self, tokens: int) -> None:
        """Do nothing: rows have their room from the start, and operators raise where it is exceeded."""

    def advance(self, tokens: int, ids: Tensor | None = None) -> None:
        for store in self._stores:
            store.tail_used[store.row_index] += tokens


def _names(store: FullAttentionLayers) -> list[str]:
    """Names of the buffers that a row has, and an append reads or writes."""
    return [name for name in store.saved_names if name in AppendBuffers._fields]


def _empty_rows(
    store: FullAttentionLayers, entries: int, room: int, rows: int, device: torch.device
) -> dict[str, Tensor]:
    """Return what takes the place of a prompt's buffers where there are rows for requests."""
    window, made = store.policy.window, dict[str, Tensor]()
    pool = max(store.capacity(max(entries - window, 0)), 2)
    sizes = {"B": rows, "Z": rows, "E": pool, "C": max(window, 1) + room}
    for name in _names(store):
        x: Tensor = getattr(store, name)
        shape = [sizes.get(size, n) for size, n in zip(BUFFERS[name].sizes, x.shape, strict=True)]
        made[name] = torch.zeros(shape, dtype=x.dtype, device=device)
    return made
