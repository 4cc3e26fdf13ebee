"""Decode rules: which entry gives way to a new token, so that the cache keeps its size for any output length.

A step sees slots, ``[B, K, C]``: position -1 is empty, the new token is in its slot already. A rule turns the new
query's attention over the slots into scores; :func:`kvpass.decode.survivors` then keeps each head's best.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from kvpass.decode import older, reorder
from kvpass.observation import Observation
from kvpass.policies.scores import Group, Pool, pool_scores, reduce_group


class Slots(NamedTuple):
    """What one layer holds while decoding.

    Attributes:
        position: true position, int64 ``[B, K, C]``, -1 = empty.
        place: storage order, ascending; only the released CAKE code reads it.
        memory: what the rule remembers of each entry, fp32 ``[B, K, C]``, 0 for empty slots.
        value_norm: L1 norm of each value row, fp32 ``[B, K, C]``.
    """

    position: Tensor
    place: Tensor
    memory: Tensor
    value_norm: Tensor


class DecodeRule(Protocol):
    """A rule; ``window`` newest tokens are never evicted, the new one included (0: it competes too)."""

    @property
    def window(self) -> int: ...

    def memory(self, obs: Observation) -> Tensor:
        """What to remember of every prompt entry, fp32 ``[B, K, N]``."""
        ...

    def observe(self, attention: Tensor, slots: Tensor | Slots) -> tuple[Tensor, Tensor]:
        """Scores and updated memory, both fp32 ``[B, K, C]``, from the new query's attention ``[B, H, C]``."""
        ...

    def stored(self, scores: Tensor, slots: Slots, keep: Tensor) -> Tensor:
        """Storage order after the step."""
        ...
