"""Attention of a few new tokens to rows that lie in blocks of one array, on CUDA: the decode step of an engine.

As ``ragged_decode.py``, and rounded alike: same tiles, same order of merging. What differs is where things are: each
row has a block, from which follow its entries and its tiles, and its own number of tail slots in use. The grid depends
on sizes only. A row whose block has fewer tiles than the largest leaves programs without work.

Legend as in ``ragged_decode.py``; X tiles per block and layer.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvpass.kernels.cached_attention import APPEND_BLOCK
from kvpass.kernels.checks import check_block_layout, check_heads, check_tensors
from kvpass.kernels.launch import KernelConfig, kind, launch, strides
from kvpass.kernels.prefill_attention import block_dim, check_dims, wide_case
from kvpass.kernels.ragged_decode import TAIL_TILE, attend_part, block_rows_of
from kvpass.operands import Attention, Blocks


@triton.jit(
    do_not_specialize=[
        "layer", "layers", "pool", "slots", "tokens", "row_tiles", "all_tiles", "tail_tiles", "num_tiles",
    ]
)  # fmt: skip
def _attend_block_tile(  # type: ignore[no-untyped-def]
    q, k, v, keys, values, block, used_slots, tiles, tile_offsets, arrivals, sinks, partial, partial_ml, out, stride_qb,
    stride_qh, stride_qt, stride_kb, stride_kh, stride_kt, stride_vb, stride_vh, stride_vt, stride_block, scale,
    softcap, layer, layers, pool, slots, tokens, row_tiles, all_tiles, tail_tiles, num_tiles, K: tl.constexpr,
    G: tl.constexpr, D: tl.constexpr, BDV: tl.constexpr, TAIL_TILE: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Attend one tile of a row's pool or tail; as ``_attend_tile`` of ``ragged_decode.py``.

    Programs 0..num_tiles-1 handle pool tiles, row_tiles for each row; after them come tail_tiles for each (row, head).
    The tables of a block and layer have room for all_tiles.
    """
    i_p = tl.program_id(0)
    if i_p < num_tiles:
        i_b = i_p // row_tiles
        i_tile = i_p % row_tiles
    else:
        i_b = (i_p - num_tiles) // tail_tiles // K
        i_tile = (i_p - num_tiles) % tail_tiles
    i_block = tl.load(block + i_b).to(tl.int64)
    used = tl.load(used_slots + i_b).to(tl.int32)
    p_k = keys + i_block * stride_block
    p_v = values + i_block * stride_block
    i_table = i_block * layers + layer
    if i_p < num_tiles:
        p_tile = tiles + (i_table * all_tiles + i_tile) * 4
        i_h = tl.load(p_tile + 1)
        first = tl.load(p_tile + 2)
        last = tl.load(p_tile + 3)
        is_live = i_h >= 0
        new = 0
    else:
        i_h = (i_p - num_tiles) // tail_tiles % K
        first = i_tile * TAIL_TILE
        last = tl.minimum(first + TAIL_TILE, used)
        is_live = i_tile <= used // TAIL_TILE
        new = tl.where(i_tile == used // TAIL_TILE, tokens, 0)
        i_row = (pool + (layer * K + i_h) * slots).to(tl.int64)
        p_k += i_row * D
        p_v += i_row * D
    if is_live:
        p_offsets = tile_offsets + i_table * (K + 1) + i_h
        begin = tl.load(p_offsets)
        pool_tiles = tl.load(p_offsets + 1) - begin
        first_tile = i_b * row_tiles + begin
        first_tail = num_tiles + (i_b * K + i_h) * tail_tiles - pool_tiles
        attend_part(
            q, k, v, p_k, p_v, arrivals, sinks, partial, partial_ml, out, stride_qb, stride_qh, stride_qt, stride_kb,
            stride_kh, stride_kt, stride_vb, stride_vh, stride_vt, scale, softcap, slots, tokens, i_b, i_h, first, last,
            new, used, first_tile, pool_tiles, first_tail, tail_tiles, K, G, D, D, D, BDV, TAIL_TILE, BLOCK_T,
            BLOCK_R, BLOCK_S, BLOCK_P, BLOCK_M,
        )  # fmt: skip


def attend_blocks(
    call: Attention, held: Blocks, layer: int, row_tiles: int | None = None, config: KernelConfig | None = None
) -> Tensor:
    """Append a few new entries of one layer to the tails of its rows; attend pool, tail and new tokens.

    All tensors are on one device. The caller must ensure that ``used + T <= tail`` for every row, and that ``block``
    and ``tiles`` are of blocks that exist: the device is not asked.

    Args:
        call: q, k and v with any strides but a contiguous last dim; keys and values have one head dim.
        held: with the tables of its blocks, of which arrivals are zero, and are so again afterwards.
        row_tiles: at least the tiles that this layer has in any of the blocks; None: as many as the tables hold.
        config: block sizes; None: the pinned ones.

    Returns:
        ``[B, H, T, D]`` in the dtype of q, stored as ``[B, T, H, D]``.

    Raises:
        ValueError: an argument's shape, dtype, strides or device do not fit; nothing was written.
    """
    q, k, v, scale, softcap, sinks = call
    keys, values, block, _, used, pool, slots, tiles, tile_offsets, arrivals = held
    if tiles is None or tile_offsets is None or arrivals is None:
        raise ValueError("tiles, tile_offsets or arrivals are None: kernels on CUDA need the tile maps of the blocks")
    rows, heads, tokens, dim = q.shape
    kv_heads = k.shape[1]
    check_heads(heads, kv_heads)
    check_dims(dim, dim)
    blocks, layers, all_tiles, _ = tiles.shape
    row_tiles = all_tiles if row_tiles is None else row_tiles
    if not 0 <= layer < layers:
        raise ValueError(f"layer={layer}: must be in 0..{layers - 1}")
    if not 1 <= row_tiles <= all_tiles:
        raise ValueError(f"row_tiles={row_tiles}: must be in 1..{all_tiles}")
    check_block_layout(keys, values, dim, pool + layers * kv_heads * slots)
    expected = {
        "q": (q, q.shape, q.dtype),
        "k": (k, (rows, kv_heads, tokens, dim), q.dtype),
        "v": (v, (rows, kv_heads, tokens, dim), q.dtype),
        "keys": (keys, (blocks, keys.shape[1], dim), q.dtype),
        "values": (values, (blocks, keys.shape[1], dim), q.dtype),
        "block": (block, (rows,), torch.int64),
        "used": (used, (rows,), torch.int64),
        "tiles": (tiles, (blocks, layers, all_tiles, 4), torch.int32),
        "tile_offsets": (tile_offsets, (blocks, layers, kv_heads + 1), torch.int32),
        "arrivals": (arrivals, (rows * kv_heads,), torch.int32),
    }
    if sinks is not None:
        expected["sinks"] = (sinks, (heads,), sinks.dtype)
    check_tensors(expected, q.device, strided=("q", "k", "v", "keys", "values"))
    query_rows = heads // kv_heads * tokens
    num_tiles, tail_tiles = rows * row_tiles, triton.cdiv(slots, TAIL_TILE)
    num_partials = num_tiles + rows * kv_heads * tail_tiles
    partial = torch.empty(num_partials, query_rows, dim, dtype=torch.float32, device=q.device)
    partial_ml = torch.empty(2, num_partials, query_rows, dtype=torch.float32, device=q.device)
    out = torch.empty(rows, tokens, heads, dim, dtype=q.dtype, device=q.device)
    block_rows = block_rows_of(q.dtype, dim, dim, query_rows)
    arguments = {
        "q": q, "k": k, "v": v, "keys": keys, "values": values, "block": block, "used_slots": used, "tiles": tiles,
        "tile_offsets": tile_offsets, "arrivals": arrivals, "sinks": sinks, "partial": partial,
        "partial_ml": partial_ml, "out": out, **strides("bht", q=q, k=k, v=v), "stride_block": keys.stride(0),
        "scale": scale, "softcap": softcap, "layer": layer, "layers": layers, "pool": pool, "slots": slots,
        "tokens": tokens, "row_tiles": row_tiles, "all_tiles": all_tiles, "tail_tiles": tail_tiles,
        "num_tiles": num_tiles, "K": kv_heads, "G": heads // kv_heads, "D": dim, "BDV": block_dim(dim),
        "TAIL_TILE": TAIL_TILE, "BLOCK_T": APPEND_BLOCK, "BLOCK_R": block_rows,
    }  # fmt: skip
    grid = (num_partials, triton.cdiv(query_rows, block_rows))
    launch(_attend_block_tile, grid, arguments, f"decode {kind(q.dtype)}{wide_case(dim)}", config)
    return out.transpose(1, 2)
