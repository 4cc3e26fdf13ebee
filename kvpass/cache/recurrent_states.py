"""States of recurrent layers, in two copies: a call reads one and writes the other, so that a failed call changes none.

Legend: B batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvpass.cache.buffer_reuse import NO_REUSE, BufferReuse
from kvpass.config import StateShape


@dataclass(frozen=True, eq=False)
class RecurrentStates:
    """States by their place in ``Layout.states``, each ``[B, *shape]``.

    Attributes:
        held: after the tokens seen. made: what the next call writes.
    """

    held: tuple[Tensor, ...]
    made: tuple[Tensor, ...]

    @classmethod
    def empty(
        cls, shapes: Sequence[StateShape], rows: int, device: torch.device, reuse: BufferReuse
    ) -> RecurrentStates:
        """Return zeros: the states before a text."""

        def zeros(plane: str) -> tuple[Tensor, ...]:
            return tuple(
                reuse.empty((plane, shape), (rows, *shape.shape), getattr(torch, shape.dtype), device).zero_()
                for shape in shapes
            )

        return cls(zeros("held"), zeros("made"))

    @classmethod
    def restore(cls, shapes: Sequence[StateShape], tensors: Mapping[str, Tensor]) -> RecurrentStates:
        """Return the states that :attr:`saved` named."""
        held = tuple(tensors[f"state{i}_held"] for i in range(len(shapes)))
        return cls(held, tuple(map(torch.zeros_like, held)))

    @property
    def state(self) -> dict[str, Tensor]:
        """The buffers by name."""
        made = {f"state{i}_made": tensor for i, tensor in enumerate(self.made)}
        return {**self.saved, **made}

    @property
    def saved(self) -> dict[str, Tensor]:
        """What a file holds, by name."""
        return {f"state{i}_held": tensor for i, tensor in enumerate(self.held)}

    def advance(self) -> RecurrentStates:
        """Return the states after a call that has written them."""
        return RecurrentStates(self.made, self.held)

    def clone(self, shapes: Sequence[StateShape], reuse: BufferReuse = NO_REUSE) -> RecurrentStates:
        """Return an independent copy."""
        rows = self.held[0].shape[0] if self.held else 0
        device = self.held[0].device if self.held else torch.device("cpu")
        twin = RecurrentStates.empty(shapes, rows, device, reuse)
        for copied, tensor in zip(twin.held, self.held, strict=True):
            copied.copy_(tensor)
        return twin

    def to(self, device: torch.device) -> RecurrentStates:
        """Return a copy on another device."""
        return self._each(lambda x: x.to(device, copy=True))

    def with_rows(self, index: Tensor) -> RecurrentStates:
        """Return states whose row i is row ``index[i]`` of these."""
        return self._each(lambda x: x.index_select(0, index.to(x.device)))

    @classmethod
    def joined(cls, parts: Sequence[RecurrentStates], order: Tensor) -> RecurrentStates:
        """Return states of the rows of several; ``order``: place of each row among those of all parts."""
        held = tuple(
            torch.cat(same).index_select(0, order) for same in zip(*(part.held for part in parts), strict=True)
        )
        return cls(held, tuple(map(torch.zeros_like, held)))

    @property
    def nbytes(self) -> int:
        """Bytes of the storages, of both copies."""
        return sum(x.untyped_storage().nbytes() for x in (*self.held, *self.made))

    def _each(self, change: Callable[[Tensor], Tensor]) -> RecurrentStates:
        return replace(self, held=tuple(map(change, self.held)), made=tuple(map(change, self.made)))
