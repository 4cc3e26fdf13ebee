"""Segments of a pool, one for each layer and head, and the pool that is made of some.

Legend: B batch, E pool slots, P = segments + 1.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvpass.operands import BUFFERS
from kvpass.ops.slots import EMPTY

POOL = {name for name, buffer in BUFFERS.items() if buffer.saved and "pool" in buffer.sizes}
"""Buffers that have one element or row for each slot of the pool."""
TAIL = {name for name, buffer in BUFFERS.items() if buffer.saved and "tail" in buffer.sizes}
"""Buffers that have one number or row for each slot of the tail."""


def segments_of(pool: Tensor, offsets: Tensor) -> list[list[Tensor]]:
    """Return the segments of each row of a buffer ``[B, E, ...]`` of a pool; offsets: their bounds ``[B, P]``."""
    return [
        list(row[: sum(counts)].split(counts)) for row, counts in zip(pool, offsets.diff(dim=1).tolist(), strict=True)
    ]


def pool_of(name: str, rows: Sequence[Sequence[Tensor]]) -> Tensor:
    """Return the buffer of that name of a pool with these segments in each row."""
    joined, fill = [torch.cat(list(row)) for row in rows], EMPTY if name == "pool_positions" else 0
    slots = max(2, *map(len, joined))
    return torch.stack([pad(x, (*(0, 0) * (x.ndim - 1), 0, slots - len(x)), value=fill) for x in joined])
