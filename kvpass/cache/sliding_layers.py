"""Ring buffers of the layers with a sliding window; their size is fixed and outside the budget.

Legend: B batch, L layers of this geometry and window, K KV heads, D head dim, R ring slots (the sliding window).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvpass.cache.buffer_reuse import NO_REUSE, BufferReuse
from kvpass.config import LayerGroup
from kvpass.operands import BUFFERS, RingBuffers


@dataclass(frozen=True, eq=False)
class SlidingWindowLayers:
    """The last ``window`` columns of some layers; column c is in slot ``c % R``.

    Attributes:
        group: the layers, their geometry and window. ring_k, ring_v: read and written by every graph.
    """

    group: LayerGroup
    ring_k: Tensor
    ring_v: Tensor

    @classmethod
    def empty(
        cls, group: LayerGroup, rows: int, dtype: torch.dtype, device: torch.device, reuse: BufferReuse
    ) -> SlidingWindowLayers:
        """Return rings for ``rows`` rows of a batch."""
        g, window = group.geometry, group.sliding_window
        assert window is not None
        sizes = {"L": g.layers, "B": rows, "K": g.kv_heads, "R": window, "D": g.key_dim, "V": g.value_dim}
        shapes = {name: BUFFERS[name].shape(sizes) for name in RingBuffers._fields}
        return cls(group, *(reuse.empty((group, name), shapes[name], dtype, device).zero_() for name in shapes))

    @property
    def state(self) -> dict[str, Tensor]:
        """The buffers by name."""
        return {"ring_k": self.ring_k, "ring_v": self.ring_v}

    def _each(self, change: Callable[[Tensor], Tensor]) -> SlidingWindowLayers:
        return SlidingWindowLayers(self.group, change(self.ring_k), change(self.ring_v))

    def to(self, device: torch.device) -> SlidingWindowLayers:
        """Return a copy on another device."""
        return self._each(lambda x: x.to(device, copy=True))

    def clone(self, reuse: BufferReuse = NO_REUSE) -> SlidingWindowLayers:
        """Return an independent copy."""
        return SlidingWindowLayers(
            self.group, *(reuse.copy((self.group, name), ring) for name, ring in self.state.items())
        )

    def with_rows(self, index: Tensor) -> SlidingWindowLayers:
        """Return a ring buffer whose row i is row ``index[i]`` of this one."""
        return self._each(lambda x: x.index_select(1, index.to(x.device)))

    @classmethod
    def joined(cls, parts: Sequence[SlidingWindowLayers], shifts: Sequence[int], order: Tensor) -> SlidingWindowLayers:
        """Return rings of the rows of several; columns of each part move by its shift.

        Args:
            order: place of each row among those of all parts, int64 ``[B]``.
        """

        def joined(rings: Sequence[Tensor]) -> Tensor:
            moved = [ring.roll(shift, 3) for ring, shift in zip(rings, shifts, strict=True)]
            return torch.cat(moved, 1).index_select(1, order)

        return cls(parts[0].group, joined([part.ring_k for part in parts]), joined([part.ring_v for part in parts]))

    @property
    def window(self) -> int | None:
        """R."""
        return self.group.sliding_window

    @property
    def nbytes(self) -> int:
        """Bytes of the storages."""
        return sum(x.untyped_storage().nbytes() for x in self.state.values())
