"""The metadata of a cache file, used to write and to read it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvpass.config import MAX_ENTRIES, Budget, Layout

MOST_COLUMNS = 1 << 26
"""Most columns in a file: a mask over the columns must fit in memory."""
MOST_SLOTS = 2 * MAX_ENTRIES
"""Most slots of a tail: a head that decoding evicts from holds its budget and a window."""


@dataclass(frozen=True, kw_only=True)
class LayersFacts:
    """Of a store: tail slots in use, and the most slots a tail needs (0 where decoding does not evict)."""

    used: int
    tail_bound: int


@dataclass(frozen=True, kw_only=True)
class CacheMetadata:
    """JSON metadata of a file of format 1; names as in :class:`kvpass.cache.cache.CompressedCache`.

    The numbers are checked for consistency here; :mod:`kvpass.cache.check_saved` checks the tensors.

    Attributes:
        model: fingerprint of the model that filled the cache, see :class:`kvpass.cache.fingerprint.ModelFingerprint`.
        policy: its ``spec``. entries: budget of each row in entries. stores: of the groups in ``layout.pools``. notes:
            the user's.
    Raises:
        ValueError: the numbers contradict each other.
    """

    kvpass_version: str
    model: dict[str, Any]
    policy: str
    budget: Budget | None
    layout: Layout
    columns: int
    entries: tuple[int, ...]
    reusable: bool
    stores: tuple[LayersFacts, ...]
    notes: dict[str, Any]

    def __post_init__(self) -> None:
        if not 1 <= self.columns <= MOST_COLUMNS:
            raise ValueError(f"columns={self.columns}: must be from 1 to 2**26")
        if not (self.layout.pools or self.layout.rings):
            raise ValueError("layout: must have a group of layers")
        if len(self.stores) != len(self.layout.pools):
            raise ValueError(f"stores: {len(self.stores)} for {len(self.layout.pools)} groups of layers with a budget")
        for facts in self.stores:
            if not (0 <= facts.used <= self.columns and 0 <= facts.tail_bound <= MOST_SLOTS):
                raise ValueError(f"{facts} after {self.columns} columns")
        least, most = self._bounds_of_entries()
        if not self.entries or not all(least <= entries <= most for entries in self.entries):
            raise ValueError(f"entries={list(self.entries)}: must be {least} to {most} of each row")

    def _bounds_of_entries(self) -> tuple[int, int]:
        """Return the smallest and largest budget of a row; prompts are no longer than ``columns``."""
        if self.budget is None or not self.layout.pools:
            return 1, self.columns
        most = self.budget.entries(self.columns, self.layout.token_bytes)
        return 1 if self.budget.kind == "fraction" else most, most
