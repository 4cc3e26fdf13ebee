"""LAVa without dynamic head budgets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvpass.policies.head_splits import HeadSplit, UniformHeads
from kvpass.policies.lava import Lava


@dataclass(frozen=True, kw_only=True)
class LavaNoHead(Lava):
    """LAVa with the same number of entries for every KV head of a layer (arXiv 2509.09754).

    It is "-head" in table 10; no code was released for it. ``alpha`` has no effect, since the heads share equally.
    """

    name: ClassVar[str] = "lava_nohead"

    def heads(self) -> HeadSplit:
        return UniformHeads()
