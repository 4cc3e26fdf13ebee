"""Parts of a cache: a prompt fills them, calls append to them; they are copied, moved and saved buffer by buffer.

Legend: B batch, L layers of this geometry and window, K KV heads, D head dim, R ring slots (the sliding window).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from kvpass.cache.buffer_reuse import BufferReuse
from kvpass.config import LayerGroup, StateShape
from kvpass.operands import BUFFERS, RingBuffers


class CachePart:
    """Buffers of some layers of a cache.

    Attributes:
        buffers: a named tuple of tensors, or None for those that this part has not; the names are those of the table of
            :mod:`kvpass.operands`.
        key: by which its memory is taken again. overwrites: whether a step overwrites entries.
    """

    buffers: Any
    key: Hashable
    overwrites: bool = False

    @property
    def tensors(self) -> dict[str, Tensor]:
        return {name: x for name, x in self.buffers._asdict().items() if x is not None}

    def finish_prefill(self) -> None:
        """Take over what the prefill graph wrote."""

    @property
    def cached_state(self) -> dict[str, Tensor]:
        """Buffers of decode and extend graphs."""
        return self.tensors

    def ensure_room(self, tokens: int, expected: int, reuse: BufferReuse) -> None:
        """Grow, if needed, so that ``tokens`` more fit; ``expected`` ones, if known, are then reserved."""

    def advance(self, tokens: int) -> None:
        """Count tokens that a graph has written."""

    def crop(self, tokens: int) -> None:
        """Take back that many tokens, from a part that only appends."""

    @property
    def saved(self) -> dict[str, Tensor]:
        """What a file holds, by name."""
        return self.tensors

    def mapped(self, change: Callable[[str, Tensor], Tensor]) -> Self:
        """Return a copy in which each buffer is what ``change(name, buffer)`` returns."""
        twin = copy.copy(self)
        twin.buffers = self.buffers._replace(**{name: change(name, x) for name, x in self.tensors.items()})
        return twin

    def clone(self, reuse: BufferReuse) -> Self:
        return self.mapped(lambda name, x: reuse.copy((self.key, name), x))

    def to(self, device: torch.device) -> Self:
        return self.mapped(lambda _, x: x.to(device, copy=True))

    def with_rows(self, index: Tensor) -> Self:
        """Return a part whose row i is row ``index[i]`` of this one."""
        return self.mapped(lambda name, x: x.index_select(BUFFERS[name].row_dim, index.to(x.device)))

    @classmethod
    def joined(cls, parts: Sequence[Self], shifts: Sequence[int], order: Tensor) -> Self:
        """Return a part of the rows of several of the same layers, of which each has moved by so many columns.

        Args:
            order: place of each row among those of all parts, int64 ``[B]``.
        """
        tensors = [part.tensors for part in parts]

        def join(name: str, _: Tensor) -> Tensor:
            buffer, rows = BUFFERS[name], [of_part[name] for of_part in tensors]
            if "ring" in buffer.sizes:  # column c is in slot c % R
                rows = [x.roll(shift, buffer.sizes.index("ring")) for x, shift in zip(rows, shifts, strict=True)]
            return torch.cat(rows, buffer.row_dim).index_select(buffer.row_dim, order)

        return parts[0].mapped(join)

    @property
    def nbytes(self) -> int:
        """Bytes of the storages: spare slots, tail capacity, positions and all tables included."""
        return sum(x.untyped_storage().nbytes() for x in self.buffers if x is not None and x.ndim)  # no counters


class SlidingWindowLayers(CachePart):
    """The last ``window`` columns of some layers, outside the budget; column c is in slot ``c % R``.

    Attributes:
        group: the layers, their geometry and window. buffers: read and written by every graph.
    """

    buffers: RingBuffers
    overwrites = True

    def __init__(self, group: LayerGroup, buffers: RingBuffers) -> None:
        self.group = self.key = group
        self.buffers = buffers

    @classmethod
    def empty(
        cls, group: LayerGroup, rows: int, dtype: torch.dtype, device: torch.device, reuse: BufferReuse
    ) -> SlidingWindowLayers:
        assert group.sliding_window is not None
        sizes = group.geometry.sizes | {"batch": rows, "ring": group.sliding_window}
        shapes = {name: BUFFERS[name].shape(sizes) for name in RingBuffers._fields}
        new = (reuse.empty((group, name), shape, dtype, device) for name, shape in shapes.items())
        return cls(group, RingBuffers(*(ring.zero_() for ring in new)))


class StateBuffers(NamedTuple):
    """``held``: the state after the tokens seen; ``made``: what the next call writes."""

    held: Tensor
    made: Tensor


class RecurrentState(CachePart):
    """A state of a recurrent layer, ``[B, *shape]``, in two copies.

    A call reads one and writes the other, so that a failed call changes none.

    Attributes:
        shape: of a row.
    """

    buffers: StateBuffers

    def __init__(self, shape: StateShape, held: Tensor, made: Tensor | None = None) -> None:
        self.shape = self.key = shape
        self.buffers = StateBuffers(held, torch.zeros_like(held) if made is None else made)

    @classmethod
    def empty(cls, shape: StateShape, rows: int, device: torch.device, reuse: BufferReuse) -> RecurrentState:
        """Return zeros: the state before a text."""
        sizes, dtype = (rows, *shape.shape), getattr(torch, shape.dtype)
        return cls(shape, *(reuse.empty((shape, name), sizes, dtype, device).zero_() for name in StateBuffers._fields))

    def finish_prefill(self) -> None:
        self.advance(0)

    def advance(self, tokens: int) -> None:
        self.buffers = StateBuffers(held=self.buffers.made, made=self.buffers.held)

    @property
    def saved(self) -> dict[str, Tensor]:
        return {"held": self.buffers.held}
