"""Records of what was kept of a prompt; layers in one order.

Legend: B batch, L layers, K KV heads, E pool slots.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvpass.config import Budget, EntryFormat, LayerGroup
from kvpass.policies.base import Policy


@dataclass(frozen=True, eq=False, kw_only=True)
class LayersRecord:
    """What the layers of one KV geometry kept."""

    group: LayerGroup  # the layers and their geometry
    mass: Tensor  # share of the window queries' attention that kept entries and window hold, fp32 [B, L, K]
    weights: Tensor  # layer weights of the policy, fp64 [B, L], zeros for fixed layer splits
    positions: Tensor  # true positions of the pool's entries, int32 [B, E]
    offsets: Tensor  # bounds of the pool's segments, int32 [B, L*K + 1]
    output_errors: Tensor | None = None  # of compacted entries, policies.compaction.Fitted.errors, fp32 [3, L, B, K]

    @property
    def kept(self) -> Tensor:
        """Pool entries, int64 ``[B, L, K]``."""
        return entries_of(self.offsets, self.group)


@dataclass(frozen=True, eq=False, kw_only=True)
class PromptRecord:
    """What was kept of the last prompt, as printed by ``model.report()``."""

    policy: Policy
    budget: Budget | None
    start: Tensor  # first real column, int64 [B]
    columns: int  # N
    entries: Tensor  # budget per KV head per layer of each row, window included, int64 [B]
    window: Tensor  # window tokens of each row, int64 [B]
    full_layers: tuple[LayersRecord, ...]  # one per KV geometry of the layers that share the budget
    sliding_layers: tuple[LayerGroup, ...]  # outside the budget
    nbytes: int  # of the cache after the prompt, all included
    ring_nbytes: int  # of the rings alone
    state_nbytes: int  # of the states of recurrent layers alone
    entry_format: EntryFormat = "model"
    protected: int = 0  # tokens of all rows that were kept in any case
    images: Tensor | None = None  # tokens of images, bool [B, N] by true position; None: none
    computed: tuple[str, Mapping[int, Tensor]] | None = None
    """Where blocks of attention were selected, by what, and of each of these layers the share that was computed."""

    def lengths(self, store: LayersRecord) -> Tensor:
        """Return the entries that a store's layers kept, window included, int64 ``[B, L, K]``."""
        return store.kept + self.window[:, None, None]

    def entries_of_images(self) -> int:
        """Return how many entries of all rows, layers and heads are of tokens of images."""
        if self.images is None:
            return 0
        kept, window = 0, (self.columns - self.start.cpu() - self.window.cpu())[:, None]
        in_window = int(self.images[torch.arange(self.columns, device="cpu") >= window].sum())
        for store in self.full_layers:
            positions, g = store.positions.cpu().long(), store.group.geometry
            kept += int((self.images.gather(1, positions.clamp(min=0)) & (positions >= 0)).sum())
            kept += in_window * g.layers * g.kv_heads
        return kept

    def bytes_kept(self, store: LayersRecord) -> Tensor:
        """Return their bytes, scales included, int64 ``[B, L, K]``."""
        return self.lengths(store) * store.group.geometry.entry_bytes(self.entry_format)


def entries_of(offsets: Tensor, group: LayerGroup) -> Tensor:
    """Return the entries of each segment of a pool, int64 ``[B, L, K]``, from its bounds, int32 ``[B, L*K + 1]``."""
    return offsets.diff(dim=1).long().view(offsets.shape[0], group.geometry.layers, group.geometry.kv_heads)


def layer_ids(groups: Sequence[LayerGroup]) -> tuple[int, ...]:
    """Return the groups' layers as indices among all attention ops of the model, ascending."""
    return tuple(sorted(layer for group in groups for layer in group.layers))


def scatter_to_layers(
    groups: Sequence[LayerGroup], parts: Sequence[Tensor], fill: float, empty: tuple[int, ...]
) -> Tensor:
    """Join tensors ``[B, L_i, ...]`` of several groups, layers as in :func:`layer_ids`, padded with ``fill``.

    Args:
        empty: shape of the result when there are no groups: all layers have sliding windows.
    """
    if not parts:
        return torch.full(empty, fill, device="cpu")
    if len(parts) == 1:
        return parts[0]
    sizes = [max(extents) for extents in zip(*(part.shape[2:] for part in parts), strict=True)]
    padded = []
    for part in parts:
        missing = [size - extent for size, extent in zip(sizes, part.shape[2:], strict=True)]
        padded.append(pad(part, [edge for extra in reversed(missing) for edge in (0, extra)], value=fill))
    order = torch.tensor([layer for group in groups for layer in group.layers], device="cpu").argsort()
    return torch.cat(padded, 1)[:, order.to(parts[0].device)]
