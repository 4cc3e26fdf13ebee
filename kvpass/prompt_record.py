"""What was kept of a prompt."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kvpass.config import Geometry


@dataclass(frozen=True, eq=False, kw_only=True)
class PromptRecord:
    """What was kept of the last prompt: the facts ``model.report()`` prints.

    Attributes:
        geometry: KV geometry. start: first real column, int64 ``[B]``. columns: N.
        entries: budget per KV head per layer of each row, window included, int64 ``[B]``.
        kept: pool entries, int64 ``[B, L, K]``. window: window tokens of each row, int64 ``[B]``.
        mass: share of the window queries' attention that kept entries and window hold, fp32 ``[B, L, K]``.
        weights: layer weights of the policy, fp64 ``[B, L]`` (zeros for fixed layer splits).
        positions: true positions of the pool's entries, int32 ``[B, E]``; offsets int32 ``[B, L*K + 1]`` cut it.
        nbytes: bytes the cache really occupied after the prompt.
    """

    geometry: Geometry
    start: Tensor
    columns: int
    entries: Tensor
    kept: Tensor
    window: Tensor
    mass: Tensor
    weights: Tensor
    positions: Tensor
    offsets: Tensor
    nbytes: int
