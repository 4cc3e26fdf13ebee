"""The tile map against the definition: tiles of a segment are its entries, once each and in order."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvpass.kernels.tile_map import FEWEST_TILES, TILE, tile_map, tile_of


def make_offsets(lengths: list[list[int]]) -> Tensor:
    """``lengths[row][layer * K + head]`` -> int32 ``[B, L*K + 1]``."""
    return torch.nn.functional.pad(torch.tensor(lengths, dtype=torch.int64).cumsum(1), (1, 0)).int()


@st.composite
def segment_lengths(draw: st.DrawFn) -> tuple[list[list[int]], int]:
    rows, layers, kv_heads = (draw(st.integers(1, 3)) for _ in range(3))
    length = st.one_of(st.just(0), st.integers(0, 40), st.sampled_from([4, 8, 16, 64]))
    return [[draw(length) for _ in range(layers * kv_heads)] for _ in range(rows)], kv_heads


@settings(max_examples=150)
@given(segment_lengths(), st.sampled_from([1, 4, 16, 128]))
def test_tiles_partition_every_segment(given_lengths: tuple[list[list[int]], int], tile: int) -> None:
    lengths, kv_heads = given_lengths
    offsets = make_offsets(lengths)
    tiles, tile_offsets = tile_map(offsets, kv_heads, tile)

    rows, layers = len(lengths), len(lengths[0]) // kv_heads
    assert tiles.dtype == tile_offsets.dtype == torch.int32
    assert tile_offsets.shape == (rows, layers, kv_heads + 1)
    most = max(int(tile_offsets.max()), FEWEST_TILES)
    assert tiles.shape == (rows, layers, tiles.shape[2], 3) and most <= tiles.shape[2] <= 1.25 * most
    for row, layer in itertools.product(range(rows), range(layers)):
        expected, bounds = [], [0]
        for head in range(kv_heads):
            first = int(offsets[row, layer * kv_heads + head])
            last = int(offsets[row, layer * kv_heads + head + 1])
            expected += [[head, at, min(at + tile, last)] for at in range(first, last, tile)]
            bounds.append(len(expected))
        assert tile_offsets[row, layer].tolist() == bounds
        assert tiles[row, layer, : len(expected)].tolist() == expected
        assert (tiles[row, layer, len(expected) :] == torch.tensor([-1, 0, 0])).all()


def test_an_empty_pool_has_no_tiles() -> None:
    tiles, tile_offsets = tile_map(make_offsets([[0] * 6]), kv_heads=2)
    assert tiles.tolist() == [[[[-1, 0, 0]] * FEWEST_TILES] * 3]
    assert tile_offsets.tolist() == [[[0, 0, 0]] * 3]


def test_lists_of_like_pools_are_of_one_length() -> None:
    """A CUDA graph is captured for one length."""
    lists = {tile_map(make_offsets([[TILE * count]]), kv_heads=1)[0].shape[2] for count in range(129, 257)}
    assert lists == {160, 192, 224, 256}


def test_the_usual_tile() -> None:
    tiles, _ = tile_map(make_offsets([[TILE + 1, 3]]), kv_heads=2)
    assert tiles.tolist() == [[[[0, 0, TILE], [0, TILE, TILE + 1], [1, TILE + 1, TILE + 4]]]]


@pytest.mark.parametrize(
    ("entries", "tile"), [(0, 64), (8 * 1024, 64), (65536, 64), (65537, 128), (8 * 131072, 1024), (8 * 131073, 2048)]
)
def test_a_large_layer_has_larger_tiles(entries: int, tile: int) -> None:
    assert tile_of(entries) == tile


@pytest.mark.parametrize(
    ("kv_heads", "tile", "named"), [(2, 48, "tile=48"), (2, 0, "tile=0"), (4, 64, "4 KV heads"), (0, 64, "0 KV heads")]
)
def test_bad_arguments(kv_heads: int, tile: int, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        tile_map(make_offsets([[1] * 6]), kv_heads, tile)
