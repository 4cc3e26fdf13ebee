"""Addresses within a block of vLLM's memory."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

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


def test_another_memory_layout_is_refused():
    layout = BlockLayout(layers=2, kv_heads=2, head_dim=4, pool=10, tail=3)
    page = torch.zeros(2, 3, 2, layout.slots, 8)[0]
    with pytest.raises(ValueError, match="the cache of layer 0 has shape"):
        layout.blocks(page, 0)
