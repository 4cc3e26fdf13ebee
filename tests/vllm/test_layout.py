"""Addresses within a block of vLLM's memory."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvpass.config import Geometry
from kvpass.operands import CODES
from kvpass.vllm.layout import BlockLayout

LAYOUTS = st.builds(
    BlockLayout,
    layers=st.integers(1, 5),
    kv_heads=st.integers(1, 4),
    head_dim=st.sampled_from([1, 8]),
    pool=st.integers(1, 70),
    tail=st.integers(1, 9),
)


def memory(layout: BlockLayout, blocks: int) -> list[torch.Tensor]:
    """The caches of all layers as vLLM lays them out: numbers 0, 1, ... in storage order."""
    shape = (blocks, layout.layers, layout.kv_heads, layout.slots, 2 * layout.head_dim)
    every = torch.arange(torch.Size(shape).numel(), dtype=torch.float64).view(shape)
    return [every[:, site] for site in range(layout.layers)]


@given(LAYOUTS, st.integers(1, 3))
def test_every_layer_sees_the_same_block_and_no_number_has_two_places(layout, blocks):
    pages = memory(layout, blocks)
    keys, values = layout.blocks(pages[0], 0)
    for site, page in enumerate(pages):
        assert [x.data_ptr() for x in layout.blocks(page, site)] == [keys.data_ptr(), values.data_ptr()]
    places = torch.cat([keys.flatten(), values.flatten()])
    assert torch.equal(places.sort().values, torch.arange(places.numel(), dtype=torch.float64))


@given(LAYOUTS, st.integers(1, 3))
def test_pool_and_tails_of_a_block_are_disjoint_views_of_it(layout, blocks):
    pages = memory(layout, blocks)
    for entries in layout.blocks(pages[0], 0):
        pool, tails = layout.parts(entries[-1:])
        assert pool.shape == (1, layout.pool, layout.head_dim)
        assert tails.shape == (layout.layers, 1, layout.kv_heads, layout.tail, layout.head_dim)
        both = torch.cat([pool.flatten(), tails.flatten()])
        assert both.unique().numel() == both.numel()
        assert set(both.tolist()) <= set(entries[-1].flatten().tolist())
        tails.fill_(-1)
        assert (entries[-1] == -1).sum() == tails.numel()


@given(LAYOUTS)
def test_a_block_wastes_less_than_one_entry_per_head(layout):
    heads = layout.layers * layout.kv_heads
    assert 0 <= layout.rows - layout.pool - heads * layout.tail < heads


@pytest.mark.parametrize("entry_format", CODES)
@given(LAYOUTS.filter(lambda layout: layout.head_dim == 8), st.integers(1, 3))
def test_codes_and_scales_of_all_blocks_fill_the_memory_and_lie_equally_far_apart(entry_format, layout, blocks):
    layout = replace(layout, entry_format=entry_format)
    shape = (blocks, layout.layers, layout.kv_heads, layout.slots, layout.width)
    every = torch.zeros(shape, dtype=CODES[entry_format])
    keys, values, k_scale, v_scale = layout.blocks(every[:, 0], 0)
    geometry = Geometry(layers=layout.layers, kv_heads=layout.kv_heads, key_dim=8, value_dim=8, itemsize=4)
    assert every.nbytes == blocks * layout.rows * geometry.entry_bytes(entry_format)
    for number, part in enumerate((keys, values, k_scale, v_scale), 1):
        assert not part.view(CODES[entry_format]).any(), "nothing else wrote there"
        part.view(CODES[entry_format]).fill_(number)
    assert every.all()
    for codes, scale in ((keys, k_scale), (values, v_scale)):
        assert [step * codes.shape[-1] for step in scale.stride()] == list(codes.stride()[:-1])
    held = layout.buffers(every[:, -1], layout.layers - 1)
    assert held["tail_v_scale"].shape == (layout.layers, blocks, layout.kv_heads, layout.tail)
    assert held["pool_k"].data_ptr() == keys.data_ptr()


def test_another_memory_layout_is_refused():
    layout = BlockLayout(layers=2, kv_heads=2, head_dim=4, pool=10, tail=3)
    page = torch.zeros(2, 3, 2, layout.slots, 8)[0]
    with pytest.raises(ValueError, match="the cache of layer 0 has shape"):
        layout.blocks(page, 0)
