"""Memory of caches that are gone, for the next cache of the same shape.

A CUDA graph fits only the addresses that it was captured with, so a prompt in other memory is captured again.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from kvpass.torch_compat import storage_users

MOST_KEPT = 2
"""Buffers remembered per name: of a cache, and of the one before or of a copy of it."""


class BufferReuse:
    """Buffers by name; one is taken again when nothing else refers to its storage: no cache, copy, view or graph input.

    A name whose memory is taken in another shape lets go of what is free. So what is held back is at most the memory of
    the last ``most`` caches, and only until the next one.

    Args:
        most: buffers remembered per name; with 0 all memory is new.
    """

    def __init__(self, most: int = MOST_KEPT) -> None:
        self._most = most
        self._known: dict[Hashable, list[Tensor]] = {}
        self._lock = threading.Lock()
        self._alone = storage_users(torch.empty(0, device="cpu"))

    def empty(self, name: Hashable, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a contiguous tensor of any content; its memory is that of an earlier one if possible."""
        if not self._most:
            return torch.empty(shape, dtype=dtype, device=device)
        with self._lock:
            found = self._take_free(name, (tuple(shape), dtype, device))
            if found is None:  # by now nothing holds the free ones
                found = torch.empty(shape, dtype=dtype, device=device)
            self._known[name] = [*self._known[name], found][-self._most :]
            return found.detach()

    def _take_free(self, name: Hashable, kind: tuple[tuple[int, ...], torch.dtype, torch.device]) -> Tensor | None:
        """Return a free buffer of that kind, if there is one, and let go of all other free ones."""
        known, used = self._known.get(name, []), []
        found = None
        for tensor in known:
            if storage_users(tensor) > self._alone:
                used.append(tensor)
            elif (tensor.shape, tensor.dtype, tensor.device) == kind:
                found = tensor
        self._known[name] = used
        return found

    def copy(self, name: Hashable, tensor: Tensor) -> Tensor:
        """Return a contiguous copy in memory from :meth:`empty`."""
        return self.empty(name, tensor.shape, tensor.dtype, tensor.device).copy_(tensor)

    def __deepcopy__(self, memo: dict[int, Any]) -> BufferReuse:
        """Return itself: a copied cache has memory of its own, and only later ones take from here."""
        return self


NO_REUSE = BufferReuse(0)
"""Gives new memory only."""
