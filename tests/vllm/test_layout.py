"""Addresses within vLLM's memory, and what a request needs of it."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvpass.config import Geometry
from kvpass.operands import CODES
from kvpass.vllm.layout import SLOTS, BlockLayout, BlockSize
from pairwise import quick

LAYOUTS = st.builds(
    BlockLayout,
    layers=st.integers(1, 5),
    kv_heads=st.integers(1, 4),
    head_dim=st.sampled_from([1, 8]),
    pool=st.integers(1, 70),
    tail=st.integers(1, 9),
)


def memory(layout: BlockLayout, blocks: int) -> list[torch.Tensor]:
    """The caches of all layers as vLLM lays them out, for some largest blocks: numbers 0, 1, ... in storage order."""
    units = blocks * layout.units(layout.largest)
    shape = (units, layout.layers, layout.kv_heads, SLOTS, 2 * layout.head_dim)
    every = torch.arange(torch.Size(shape).numel(), dtype=torch.float64).view(shape)
    return [every[:, site] for site in range(layout.layers)]


@given(LAYOUTS, st.integers(1, 3))
def test_every_layer_sees_the_same_units_and_no_number_has_two_places(layout, blocks):
    pages = memory(layout, blocks)
    keys, values = layout.arrays(pages[0], 0)
    for site, page in enumerate(pages):
        assert [x.data_ptr() for x in layout.arrays(page, site)] == [keys.data_ptr(), values.data_ptr()]
    places = torch.cat([keys.flatten(), values.flatten()])
    assert torch.equal(places.sort().values, torch.arange(places.numel(), dtype=torch.float64))


@given(LAYOUTS, st.integers(1, 3), st.data())
def test_pool_and_tails_of_a_block_of_any_size_are_disjoint_and_in_its_units(layout, blocks, data):
    size = BlockSize(data.draw(st.integers(1, layout.tail)), data.draw(st.integers(0, layout.pool)))
    for entries in layout.arrays(memory(layout, blocks)[0], 0):
        pools, tails = layout.parts(entries, size.tail)
        assert tails.shape == (layout.layers, len(pools), layout.kv_heads, size.tail, layout.head_dim)
        first = data.draw(st.integers(0, len(entries) - layout.units(layout.largest)))
        pool, tail = pools[first, : size.pool], tails[:, first]
        own = set(entries[first : first + layout.units(size)].flatten().tolist())
        both = torch.cat([pool.flatten(), tail.flatten()])
        assert both.unique().numel() == both.numel() and set(both.tolist()) <= own


@given(LAYOUTS, st.integers(0, 9), st.integers(1, 90), st.integers(1, 9), st.booleans())
def test_a_request_gets_what_it_keeps_and_may_append(layout, window, prompt, max_tokens, one_tail):
    layout = replace(layout, window=window, tail=max(window, 1) + 8, one_tail=one_tail)
    size = layout.size_of(prompt, max_tokens)
    kept = layout.layers * layout.kv_heads * max(prompt - window, 0)
    assert min(kept, layout.pool) <= size.pool <= layout.pool
    assert max(window, 1) + max_tokens - 1 <= size.tail <= layout.tail and (size.tail == layout.tail or not one_tail)


@given(st.integers(0, 512), st.integers(1, 300))
def test_few_sizes_of_tails_serve_all_answers(appended, own):
    layout = BlockLayout(layers=1, kv_heads=1, head_dim=8, pool=9, tail=32 + 512, window=32)
    tail = layout.size_of(1000, appended + 1).tail - 32
    assert appended <= tail <= max(1.5 * appended, 8)
    assert len({layout.size_of(1000, most + 1).tail for most in range(513)}) == 13
    if own <= appended:
        assert layout.size_of(900 + own, appended - own + 1, document=900) == (tail, 0)


@pytest.mark.parametrize("entry_format", quick([*CODES], ["int8", "rot3"]))
@given(LAYOUTS.filter(lambda layout: layout.head_dim == 8), st.integers(1, 3))
def test_codes_and_scales_of_all_units_fill_the_memory_and_lie_equally_far_apart(entry_format, layout, blocks):
    layout = replace(layout, entry_format=entry_format)
    units = blocks * layout.units(layout.largest)
    every = torch.zeros((units, layout.layers, layout.kv_heads, SLOTS, layout.width), dtype=CODES[entry_format])
    keys, values, k_scale, v_scale = layout.arrays(every[:, 0], 0)
    geometry = Geometry(layers=layout.layers, kv_heads=layout.kv_heads, key_dim=8, value_dim=8, itemsize=4)
    assert every.nbytes == units * layout.rows * geometry.entry_bytes(entry_format)
    for number, part in enumerate((keys, values, k_scale, v_scale), 1):
        assert not part.view(CODES[entry_format]).any(), "nothing else wrote there"
        part.view(CODES[entry_format]).fill_(number)
    assert every.all()
    held = layout.buffers(every[:, -1], layout.layers - 1, layout.tail)
    for name in ("pool_k", "pool_v", "tail_k", "tail_v"):
        codes, scale = held[name], held[f"{name}_scale"]
        assert [step * codes.shape[-1] for step in scale.stride()] == list(codes.stride()[:-1])
        assert scale.shape == codes.shape[:-1]
    assert held["tail_k"].data_ptr() == keys.data_ptr()


@pytest.mark.parametrize("entry_format", quick(["model", *CODES], ["model", "fp8", "rot4"]))
@given(LAYOUTS.filter(lambda layout: layout.head_dim == 8), st.integers(1, 40), st.booleans())
def test_a_prompt_that_waits_has_memory_that_no_block_has(entry_format, layout, tokens, one_tail):
    layout = replace(layout, entry_format=entry_format, one_tail=one_tail)
    layout = replace(layout, staged=layout.units_to_stage(tokens, 4))
    units = layout.reserved + layout.units(layout.largest)
    dtype = CODES.get(entry_format, torch.float32)
    every = torch.zeros((units, layout.layers, layout.kv_heads, SLOTS, layout.width), dtype=dtype)
    places = [x for site in range(layout.layers) for x in layout.staging(every[:, site], site, torch.float32)]
    for number, place in enumerate(places, 1):
        assert len(place) >= tokens and place.shape[1:] == (layout.kv_heads, layout.head_dim)
        place.fill_(number)
    assert all((place == number).all() for number, place in enumerate(places, 1)), "they overlap"
    for entries in layout.arrays(every[:, 0], 0):
        entries[layout.reserved - layout.staged : layout.reserved] = 0
        assert not entries.any(), "a block of a request was written"


def test_another_memory_layout_is_refused():
    layout = BlockLayout(layers=2, kv_heads=2, head_dim=4, pool=10, tail=3)
    page = torch.zeros(2, 3, 2, SLOTS, 8)[0]
    with pytest.raises(ValueError, match="the cache of layer 0 has shape"):
        layout.arrays(page, 0)
