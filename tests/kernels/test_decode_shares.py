"""How the decode kernel divides its work: every piece once, and no program has much more than another. Counts only."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from kvpass.kernels.ragged_decode import PIECE, PROGRAMS, TILE, most_pieces, pieces_before, segment_of, share_of
from pairwise import quick

MULTIPROCESSORS = 132  # of an H100 or H200
KV_HEADS, LAYERS, USED = 8, 32, 32


@triton.jit
def _count(  # type: ignore[no-untyped-def]
    offsets, tail_start, tail_used, row_index, layer, layers, slots, most, row_partials, segments, owner, seen,
    K: tl.constexpr, SEGMENTS: tl.constexpr,
):  # fmt: skip
    """Note by which program each partial result is made, and how often."""
    tables = (offsets, tail_start, tail_used, row_index, layer, layers, slots, most, row_partials)
    begin, end, i_first, s_begin, i_last = share_of(tables, segments, K, SEGMENTS)
    for i in range(0, i_last - i_first + 1):
        _, _, _, _, _, pool_tiles, tiles, per_piece, first_partial = segment_of(i_first + i, tables, K)
        first = pieces_before(begin - s_begin, tiles, pool_tiles, per_piece)
        last = pieces_before(end - s_begin, tiles, pool_tiles, per_piece)
        s_begin += tiles
        for piece in range(first, last):
            tl.store(owner + first_partial + piece, tl.program_id(0))
            tl.atomic_add(seen + first_partial + piece, 1)


def pieces(lengths: np.ndarray, used: np.ndarray, most: int) -> list[list[int]]:
    """The tiles of the pieces of each segment of a layer: of the pool entries ``[B, K]``, then of the tail."""
    per_piece = np.maximum(-(-lengths.sum(1) // (TILE.value * most)), PIECE.value // TILE.value)
    found = []
    for row, of_row in enumerate(lengths.tolist()):
        for entries in of_row:
            tiles, size = -(-entries // TILE.value), int(per_piece[row])
            of_pool = [min(size, tiles - at) for at in range(0, tiles, size)]
            found.append(of_pool + [1] * (int(used[row]) // TILE.value + 1))
    return found


def shares(cut: list[list[int]], programs: int) -> tuple[np.ndarray, np.ndarray]:
    """The program of each piece, by where in the line of all tiles it begins, and the tiles of each program."""
    sizes = np.array([size for segment in cut for size in segment])
    begins = sizes.cumsum() - sizes
    owner = np.searchsorted(np.arange(programs + 1) * sizes.sum() // programs, begins, side="right") - 1
    return owner, np.bincount(owner, sizes, programs)


CASES = [
    [[0, 1, 63, 64, 65, 129]],
    [[0, 0, 5000, 0, 0, 0], [0, 0, 0, 0, 0, 0]],
    [[128, 256, 64, 0, 700, 1000], [31, 2, 1, 0, 0, 0], [500, 500, 500, 500, 500, 500]],
    [[0] * 6],
]


@pytest.mark.parametrize("lengths", CASES)
@pytest.mark.parametrize("programs", quick([1, 3, 16, 60], [3, 60]))
@pytest.mark.parametrize("most", [1, 2, 64])
def test_every_piece_is_attended_by_one_program(lengths, programs, most):
    """Rows in any order in an array of five, with tails of their own, and layers before and behind."""
    rows, heads, layers, layer, slots = len(lengths), len(lengths[0]), 3, 1, 200
    where, start, used = (
        torch.tensor([4, 0, 2])[:rows],
        torch.tensor([9, 0, 63, 0, 0]),
        torch.tensor([9, 0, 191, 0, 64]),
    )
    of_layers = torch.full((5, layers, heads), 7)
    of_layers[where, layer] = torch.tensor(lengths)
    offsets = torch.nn.functional.pad(of_layers.flatten(1).cumsum(1), (1, 0)).int()
    cut = pieces(np.array(lengths), (used - start)[where].numpy(), most)
    row_partials = most + heads * (slots // TILE.value + 2)
    owner, seen = torch.full((2, rows * row_partials), -1, dtype=torch.int32).unbind()
    seen.zero_()
    tables = (offsets, start, used, where, layer, layers, slots, most, row_partials)
    _count[(programs,)](*tables, rows * heads, owner, seen, K=heads, SEGMENTS=256)
    assert sorted(seen.tolist())[-1] == 1 and int(seen.sum()) == sum(map(len, cut))
    assert owner[owner >= 0].tolist() == shares(cut, programs)[0].tolist()


def lengths_of(rows: int, entries: int, ragged: bool) -> np.ndarray:
    """Pool entries of heads of all layers, ``[B, L, K]``; ragged: with log-normal shares, as in the bench."""
    if not ragged:
        return np.full((rows, LAYERS, KV_HEADS), entries)
    share = np.exp(np.random.default_rng(0).standard_normal((rows, LAYERS * KV_HEADS)))
    ends = np.round(share.cumsum(1) / share.sum(1, keepdims=True) * entries * LAYERS * KV_HEADS).astype(int)
    return np.diff(ends, axis=1, prepend=0).reshape(rows, LAYERS, KV_HEADS)


def busiest(rows: int, entries: int, ragged: bool) -> tuple[float, float, float]:
    """Mean over layers: tiles of the longest program, tiles of the busiest multiprocessor, most pieces of a head."""
    most, found = most_pieces(entries * KV_HEADS), []
    partials = rows * (most + KV_HEADS * ((USED + 64) // TILE.value + 2))
    programs = min(PROGRAMS * MULTIPROCESSORS, 2 * partials)
    for layer in np.moveaxis(lengths_of(rows, entries, ragged), 1, 0):
        cut = pieces(layer, np.full(rows, USED), most)
        tiles = shares(cut, programs)[1]
        share = sum(map(sum, cut)) / programs
        assert tiles.max() < share + max(map(max, cut)), "a program reads more than its share and a piece"
        of_multiprocessors = np.bincount(np.arange(programs) % MULTIPROCESSORS, tiles)
        found.append((tiles.max(), of_multiprocessors.max(), max(map(len, cut))))
    longest, busy, parts = np.mean(found, 0).tolist()
    return longest, busy, parts


@pytest.mark.parametrize("rows", [8, 16, 32, 64])
def test_ragged_heads_take_as_long_as_uniform_ones(rows):
    """By the tiles of the busiest multiprocessor, whose programs share its bandwidth."""
    (_, uniform, _), (_, ragged, _) = busiest(rows, 992, False), busiest(rows, 992, True)
    assert ragged <= 1.05 * uniform, (ragged, uniform)


def test_one_row_is_attended_in_pieces_of_two_tiles():
    """As it was before shares: 992 entries a head in two serial tiles, and nine results of a head to merge."""
    longest, _, parts = busiest(1, 992, False)
    assert (longest, parts) == (2, 9)
    longest, _, _ = busiest(1, 992, True)
    assert longest <= 2.2
