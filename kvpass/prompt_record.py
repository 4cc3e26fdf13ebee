"""What was kept of a prompt."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kvpass.config import LayerGroup


@dataclass(frozen=True, eq=False, kw_only=True)
class StoreRecord:
    """What the layers of one KV geometry kept.

    Attributes:
        group: the layers and their geometry. kept: pool entries, int64 ``[B, L, K]``.
        mass: share of the window queries' attention that kept entries and window hold, fp32 ``[B, L, K]``.
        weights: layer weights of the policy, fp64 ``[B, L]`` (zeros for fixed layer splits).
        positions: true positions of the pool's entries, int32 ``[B, E]``; offsets int32 ``[B, L*K + 1]`` cut it.
    """

    group: LayerGroup
    kept: Tensor
    mass: Tensor
    weights: Tensor
    positions: Tensor
    offsets: Tensor


@dataclass(frozen=True, eq=False, kw_only=True)
class PromptRecord:
    """What was kept of the last prompt: the facts ``model.report()`` prints.

    Attributes:
        start: first real column, int64 ``[B]``. columns: N.
        entries: budget per KV head per layer of each row, window included, int64 ``[B]``.
        window: window tokens of each row, int64 ``[B]``.
        stores: one record per KV geometry of the layers that share the budget.
        rings: layers with a sliding window, which are outside the budget.
        nbytes: bytes the cache really occupied after the prompt, rings included. ring_nbytes: the rings alone.
    """

    start: Tensor
    columns: int
    entries: Tensor
    window: Tensor
    stores: tuple[StoreRecord, ...]
    rings: tuple[LayerGroup, ...]
    nbytes: int
    ring_nbytes: int
