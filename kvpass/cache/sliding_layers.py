"""Ring buffers of the layers with a sliding window; their size is fixed and outside the budget.

Legend: B batch, L layers of this geometry and window, K KV heads, D head dim, R ring slots (the sliding window).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
from torch import Tensor

from kvpass.config import LayerGroup
from kvpass.operands import BUFFERS, RingBuffers


class SlidingWindowLayers:
    """The last ``sliding_window`` columns of some layers; column c is in slot ``c % R``.

    Args:
        group: the layers, their geometry and window. rows: B.
    """

    def __init__(self, group: LayerGroup, rows: int, dtype: torch.dtype, device: torch.device) -> None:
        if group.sliding_window is None:
            raise ValueError(f"layers {list(group.layers)} have no sliding window")
        self.group = group
        self.window = group.sliding_window
        g = group.geometry
        sizes = {"L": g.layers, "B": rows, "K": g.kv_heads, "R": self.window, "D": g.key_dim, "V": g.value_dim}
        self.ring_k, self.ring_v = (
            torch.zeros(BUFFERS[name].shape(sizes), dtype=dtype, device=device) for name in RingBuffers._fields
        )

    @classmethod
    def restore(cls, group: LayerGroup, tensors: Mapping[str, Tensor]) -> SlidingWindowLayers:
        """Return the ring buffer with this :attr:`state`; nothing is checked."""
        ring = cls(group, 0, tensors["ring_k"].dtype, tensors["ring_k"].device)
        ring.ring_k, ring.ring_v = tensors["ring_k"], tensors["ring_v"]
        return ring

    def to(self, device: torch.device) -> SlidingWindowLayers:
        """Return a copy on another device."""
        return SlidingWindowLayers.restore(
            self.group, {name: tensor.to(device, copy=True) for name, tensor in self.state.items()}
        )

    @property
    def state(self) -> dict[str, Tensor]:
        """Buffers that every graph reads and writes."""
        return {"ring_k": self.ring_k, "ring_v": self.ring_v}

    def clone(self) -> SlidingWindowLayers:
        """Return an independent copy."""
        twin = copy.copy(self)
        twin.ring_k, twin.ring_v = self.ring_k.clone(), self.ring_v.clone()
        return twin

    def with_rows(self, index: Tensor) -> SlidingWindowLayers:
        """Return a ring buffer whose row i is row ``index[i]`` of this one."""
        twin = copy.copy(self)
        index = index.to(self.ring_k.device)
        twin.ring_k, twin.ring_v = self.ring_k.index_select(1, index), self.ring_v.index_select(1, index)
        return twin

    @property
    def rows(self) -> int:
        """B."""
        return self.ring_k.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes of the storages."""
        return self.ring_k.untyped_storage().nbytes() + self.ring_v.untyped_storage().nbytes()
