"""The part of the cache interface of transformers: sizes, and row selection for beam search."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import Cache

from kvpass.config import Layout
from kvpass.errors import CacheMismatchError


class HFCacheAdapter(Cache):
    """The interface that ``generate`` uses; a subclass holds the entries.

    Attributes:
        columns: tokens seen, padding included. start: first real column of each row, int64 ``[B]``.
        layout: where each layer's entries are stored; None before prefill.
    """

    layers: list[Any]
    columns: int
    start: Tensor
    layout: Layout | None

    def _pick_rows(self, index: Tensor) -> None:
        """Replace row i by row ``index[i]``."""
        raise NotImplementedError

    @property
    def is_empty(self) -> bool:
        return self.columns == 0

    @property
    def batch_size(self) -> int:
        return self.start.numel()

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the tokens seen, padding included as in transformers; not the kept entries."""
        return self.columns

    def get_max_length(self, layer_idx: int | None = 0) -> int:
        return -1

    get_max_cache_shape = get_max_length

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Raise: only a model that builds a mask for its cache calls this, and kvpass models build none."""
        raise self._elsewhere()

    @property
    def is_compileable(self) -> bool:
        """False: kvpass has compiled the model itself, so ``generate`` must not compile it."""
        return False

    @property
    def is_initialized(self) -> bool:
        return not self.is_empty

    @property
    def is_sliding(self) -> list[bool]:
        return [False] * len(self)

    def __len__(self) -> int:
        groups = () if self.layout is None else (*self.layout.pools, *self.layout.rings)
        return sum(group.geometry.layers for group in groups)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Replace row i by row ``beam_idx[i]`` (beam search)."""
        self._pick_rows(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows ``indices``."""
        self._pick_rows(torch.arange(self.batch_size, device=indices.device)[indices])

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row ``repeats`` times, copies next to each other."""
        self._pick_rows(torch.arange(self.batch_size).repeat_interleave(repeats))

    def crop(self, *args: Any, **kwargs: Any) -> None:
        """Raise: entries that a shorter cache needs may have been evicted."""
        raise NotImplementedError("a compressed cache cannot be cropped; assisted generation is not supported")

    def update(self, *args: Any, **kwargs: Any) -> Any:
        """Raise: only an uncompiled model calls this."""
        raise self._elsewhere()

    @staticmethod
    def _elsewhere() -> CacheMismatchError:
        return CacheMismatchError(
            "a CompressedCache was given to an uncompiled model: only the kvpass model that filled it can go on with "
            "it; give the whole text and no cache to the uncompiled one"
        )
