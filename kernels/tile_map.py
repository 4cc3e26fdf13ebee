"""Division of a layer's packed pool segments among the programs of a decode kernel.

Legend: B batch, L layers, K KV heads, E pool slots.
"""

from __future__ import annotations

import torch
from torch import Tensor

TILE = 64
"""Default entries per tile: at budget 1024, a row and layer of an 8B model is one H200 wave."""
MOST_TILES = 1024
"""Approximate limit per row and layer: eight for each multiprocessor of an H100 or H200. More only cost merging."""
FEWEST_TILES = 2
"""Fewest tiles in the list of a layer: graphs would specialise on a first pool with one or none."""
NO_TILE = -1
"""KV head of a list element that holds no tile."""


def tile_of(entries: int) -> int:
    """Return the entries per tile, a power of two, for ``entries`` entries per row and layer.

    The size does not depend on the batch, so a row is rounded as it is alone.
    """
    fewest = -(-entries // MOST_TILES)
    return max(TILE, 1 << max(fewest - 1, 0).bit_length())


def most_tiles(entries: int, kv_heads: int, tile: int) -> int:
    """Return the most tiles of a layer that holds up to ``entries`` entries."""
    return max(-(-entries // tile) + kv_heads - 1, FEWEST_TILES)


def tile_map(offsets: Tensor, kv_heads: int, tile: int = TILE, count: int | None = None) -> tuple[Tensor, Tensor]:
    """Cut every segment of the pool into tiles of at most ``tile`` entries, for each row and layer.

    A segment of n entries has ceil(n / tile) tiles, an empty one none; only the last tile of a segment may be shorter.
    Without ``count`` the host reads one value, the most tiles of a row and layer. It is rounded up by at most a
    quarter, so that prompts of one shape mostly have lists of one length: a CUDA graph fits one.

    Args:
        offsets: int32 ``[B, L*K + 1]``, rows of the pool where each (layer, head) begins.
        kv_heads: K.
        tile: entries of a tile, a power of two.
        count: length of the list, at least :func:`most_tiles`.

    Returns:
        tiles: int32 ``[B, L, tiles, 3]``, each (KV head, first, last) with last exclusive. Tiles are ordered by head
            and position; layers with fewer tiles are padded with (-1, 0, 0).
        tile_offsets: int32 ``[B, L, K + 1]``: the tiles of a head are those from ``tile_offsets[row, layer, head]`` up
            to the next offset.

    Raises:
        ValueError: tile is not a power of two, or offsets do not fit kv_heads.
    """
    rows, segments = offsets.shape[0], offsets.shape[1] - 1
    if tile < 1 or tile & (tile - 1):
        raise ValueError(f"tile={tile}: must be a power of two")
    if kv_heads < 1 or segments % kv_heads:
        raise ValueError(f"offsets has {segments} segments: must be a multiple of the {kv_heads} KV heads")
    layers = segments // kv_heads
    first, last = (bounds.reshape(rows, layers, kv_heads) for bounds in (offsets[:, :-1], offsets[:, 1:]))
    counts = (last - first + (tile - 1)) // tile
    tile_offsets = torch.nn.functional.pad(counts.cumsum(2, dtype=torch.int32), (1, 0))
    total = tile_offsets[..., -1:]

    if count is None:
        count = max(int(total.max()), FEWEST_TILES)
        step = 1 << max(count.bit_length() - 3, 0)
        count = -(-count // step) * step
    index = torch.arange(count, dtype=torch.int32, device=offsets.device).expand(rows, layers, -1).contiguous()
    head = torch.searchsorted(tile_offsets[..., 1:].contiguous(), index, right=True).clamp(max=kv_heads - 1)
    tile_first = first.gather(2, head) + (index - tile_offsets.gather(2, head)) * tile
    tile_last = torch.minimum(tile_first + tile, last.gather(2, head))
    tiles = torch.stack([head, tile_first, tile_last], -1).int()
    nothing = tiles.new_tensor([NO_TILE, 0, 0])
    return torch.where((index < total)[..., None], tiles, nothing), tile_offsets
