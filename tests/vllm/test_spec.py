"""Which of vLLM's blocks a request gets; with a pool of vLLM's."""

from dataclasses import replace
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch

from kvpass.vllm.admission import DOCUMENT
from kvpass.vllm.layout import SLOTS, BlockLayout

pytestmark = pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM: make test-vllm")

LAYOUT = BlockLayout(layers=1, kv_heads=1, head_dim=8, pool=4 * SLOTS, tail=4 * SLOTS, window=2 * SLOTS)
LONG, SHORT = (1000, 2 * SLOTS + 1), (4, 4)
"""Tokens of a prompt and of its answer: the largest block, of 8 units, and one of 3 and a little more."""


def manager(units, layout=LAYOUT):
    from vllm.v1.core.block_pool import BlockPool

    from kvpass.vllm.spec import KVPassSpec, OneBlockManager

    sizes = {"num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
    spec = KVPassSpec(block_size=1024, layout=layout, **sizes)
    pool = BlockPool(units, enable_caching=False, hash_block_size=1024)
    found = OneBlockManager(spec, pool, enable_caching=False, kv_cache_group_id=0, scheduler_block_size=1024)
    found.requests = {}
    return found


def ask(manager, name, prompt, max_tokens, document=None, read=None):
    """What a request gets: numbers of blocks; None: it waits. ``read``: tokens read after this step; None: all."""
    extra = None if document is None else {DOCUMENT: ("a", document)}
    params = SimpleNamespace(max_tokens=max_tokens, extra_args=extra)
    manager.requests[name] = SimpleNamespace(num_prompt_tokens=prompt, num_tokens=prompt, sampling_params=params)
    read = prompt if read is None else read
    if manager.get_num_blocks_to_allocate(name, read) > manager.block_pool.get_num_free_blocks():
        return None
    manager.allocate_new_blocks(name, read, read)
    assert manager.get_num_blocks_to_allocate(name, prompt + 1) == 0, "it never needs more"
    return [block.block_id for block in manager.req_to_blocks[name]]


def test_short_blocks_lie_at_the_begin_and_the_largest_at_the_end():
    found = manager(1 + 8 + 8 + 5)
    assert ask(found, "a", *LONG) == [*range(14, 22)]
    assert ask(found, "b", *SHORT) == [1, 2, 3, 4]
    assert ask(found, "c", *LONG) == [*range(6, 14)]
    assert ask(found, "d", *SHORT) is None and found.block_pool.get_num_free_blocks() == 1
    found.free("b")
    assert ask(found, "d", *SHORT) == [1, 2, 3, 4]


def test_a_question_about_a_document_gets_no_more_than_its_tail_and_a_request_waits_for_blocks_side_by_side():
    assert ask(manager(20), "a", 1005, SLOTS - 4, document=1000) == [1]
    found = manager(1 + 16)
    for name in "abc":
        ask(found, name, *SHORT)
    assert ask(found, "long", *LONG) is None
    found.free("b")
    assert found.block_pool.get_num_free_blocks() == 8 and ask(found, "long", *LONG) is None
    found.free("c")
    assert ask(found, "long", *LONG) == [*range(9, 17)]
    found.free("a")
    found.free("long")
    assert found.block_pool.get_num_free_blocks() == 16 and not any(found.taken[1:])


def test_one_prompt_at_a_time_is_read_in_part():
    found = manager(40)
    assert ask(found, "a", 100, 4, read=50)
    assert ask(found, "b", 100, 4, read=30) is None, "it would wait in the place of a's"
    assert ask(found, "c", *SHORT), "it is read whole"
    found.allocate_new_blocks("a", 90, 90)
    assert ask(found, "b", 100, 4, read=30) is None
    found.allocate_new_blocks("a", 100, 100)
    assert ask(found, "b", 100, 4, read=30)
    found.free("a")
    assert ask(found, "d", 100, 4, read=30) is None, "b is still read"
    found.free("b")
    assert ask(found, "d", 100, 4, read=30)


def test_what_waits_is_counted_once_and_no_one_gets_it_or_what_a_graph_writes_for_rows_that_fill_it():
    staged = LAYOUT.units_to_stage(20, itemsize=4)
    assert staged == 3
    found = manager(1 + staged + 8 + 8, replace(LAYOUT, staged=staged))
    assert found.kv_cache_spec.max_memory_usage_bytes(None) == 12 * found.kv_cache_spec.page_size_bytes
    assert ask(found, "a", *LONG) == [*range(12, 20)] and ask(found, "b", *LONG) == [*range(4, 12)]
    assert ask(found, "c", *SHORT) is None
    found = manager(1 + 8 + 8 + 8, replace(LAYOUT, one_tail=True))
    blocks = [ask(found, name, *SHORT) for name in "abc"]
    assert blocks[0][0] == 8 and blocks[1:] == [[*range(13, 18)], None]
    assert found.kv_cache_spec.max_memory_usage_bytes(None) == 16 * found.kv_cache_spec.page_size_bytes
