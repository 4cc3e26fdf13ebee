"""Parts of a cache: a prompt fills them, calls append to them; they are copied, moved and saved buffer by buffer.

Legend: B batch, L layers of this geometry and window, K KV heads, D head dim, R ring slots (the sliding window).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from kvpass.cache.buffer_reuse import NO_REUSE, BufferReuse
from kvpass.cache.prompt_record import LayersRecord
from kvpass.config import LayerGroup, StateShape
from kvpass.operands import BUFFERS, RingBuffers


@dataclass(frozen=True, eq=False)
class PromptFacts:
    """What a cache is told of a prompt that it is to hold.

    Attributes:
        start: first real column of each row, int64 ``[B]`` on the CPU. columns: N.
        budgets: entries per KV head per layer of each row, window included.
        dtype, device: of keys and values. expected: further tokens that tails are reserved for.
        reuse: where memory comes from.
    """

    start: Tensor
    columns: int
    budgets: Sequence[int]
    dtype: torch.dtype
    device: torch.device
    expected: int = 0
    reuse: BufferReuse = NO_REUSE

    @property
    def rows(self) -> int:
        """B."""
        return self.start.numel()


class CachePart:
    """Buffers of some layers of a cache: attributes, named as in the table of :mod:`kvpass.operands`.

    Attributes:
        key: by which its memory is taken again. overwrites: whether a step overwrites entries.
        reuse: where memory of copies and of growth comes from.
    """

    key: Hashable
    overwrites: bool = False
    reuse: BufferReuse = NO_REUSE

    @property
    def buffers(self) -> dict[str, Tensor]:
        """The buffers by name."""
        return {name: x for name, x in vars(self).items() if name in BUFFERS}

    @property
    def prefill_state(self) -> dict[str, Tensor]:
        """Buffers of the prefill graph."""
        return self.buffers

    def finish_prefill(self) -> LayersRecord | None:
        """Store the results of the prefill graph; return what was kept, of layers that share the budget."""
        return None

    @property
    def cached_state(self) -> dict[str, Tensor]:
        """Buffers of decode and extend graphs."""
        return self.buffers

    def ensure_room(self, tokens: int, expected: int) -> None:
        """Grow, if needed, so that ``tokens`` more fit; ``expected`` in all, if known, are then reserved."""

    def advance(self, tokens: int) -> None:
        """Count tokens that a graph has written."""

    def crop(self, tokens: int) -> None:
        """Take back that many tokens, from a part that only appends."""

    @property
    def saved(self) -> dict[str, Tensor]:
        """What a file holds, by name."""
        return self.buffers

    def mapped(self, change: Callable[[str, Tensor], Tensor]) -> Self:
        """Return a copy in which each buffer is what ``change(name, buffer)`` returns."""
        twin = copy.copy(self)
        vars(twin).update({name: change(name, x) for name, x in self.buffers.items()})
        return twin

    def clone(self) -> Self:
        """Return an independent copy."""
        return self.mapped(lambda name, x: self.reuse.copy((self.key, name), x))

    def to(self, device: torch.device) -> Self:
        """Return a copy on another device."""
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

        def join(name: str, _: Tensor) -> Tensor:
            buffer, held = BUFFERS[name], [part.buffers[name] for part in parts]
            if "R" in buffer.sizes:  # column c is in slot c % R
                held = [x.roll(shift, buffer.sizes.index("R")) for x, shift in zip(held, shifts, strict=True)]
            return torch.cat(held, buffer.row_dim).index_select(buffer.row_dim, order)

        return parts[0].mapped(join)

    @property
    def nbytes(self) -> int:
        """Bytes of the storages: spare slots, tail capacity, positions and all tables included."""
        return sum(x.untyped_storage().nbytes() for x in self.buffers.values())


class SlidingWindowLayers(CachePart):
    """The last ``window`` columns of some layers, outside the budget; column c is in slot ``c % R``.

    Attributes:
        group: the layers, their geometry and window. ring_k, ring_v: read and written by every graph.
    """

    overwrites = True

    def __init__(self, group: LayerGroup, ring_k: Tensor, ring_v: Tensor) -> None:
        self.group = self.key = group
        self.ring_k, self.ring_v = ring_k, ring_v

    @classmethod
    def empty(cls, group: LayerGroup, prompt: PromptFacts) -> SlidingWindowLayers:
        """Return rings for the rows of a prompt."""
        g, window = group.geometry, group.sliding_window
        assert window is not None
        sizes = {"L": g.layers, "B": prompt.rows, "K": g.kv_heads, "R": window, "D": g.key_dim, "V": g.value_dim}
        shapes = {name: BUFFERS[name].shape(sizes) for name in RingBuffers._fields}
        made = (prompt.reuse.empty((group, name), shapes[name], prompt.dtype, prompt.device) for name in shapes)
        rings = cls(group, *(ring.zero_() for ring in made))
        rings.reuse = prompt.reuse
        return rings


class RecurrentState(CachePart):
    """A state of a recurrent layer, ``[B, *shape]``, in two copies.

    A call reads one and writes the other, so that a failed call changes none.

    Attributes:
        shape: of a row. held: after the tokens seen. made: what the next call writes.
    """

    def __init__(self, shape: StateShape, held: Tensor, made: Tensor | None = None) -> None:
        self.shape = self.key = shape
        self.held, self.made = held, torch.zeros_like(held) if made is None else made

    @classmethod
    def empty(cls, shape: StateShape, prompt: PromptFacts) -> RecurrentState:
        """Return zeros: the state before a text."""
        sizes, dtype = (prompt.rows, *shape.shape), getattr(torch, shape.dtype)
        pair = (prompt.reuse.empty((shape, name), sizes, dtype, prompt.device).zero_() for name in ("held", "made"))
        state = cls(shape, *pair)
        state.reuse = prompt.reuse
        return state

    def finish_prefill(self) -> None:
        self.advance(0)

    def advance(self, tokens: int) -> None:
        self.held, self.made = self.made, self.held

    @property
    def saved(self) -> dict[str, Tensor]:
        return {"held": self.held}
