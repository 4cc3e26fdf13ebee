"""What an engine remembers of prompts, for requests that are preempted and come back."""

from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch

from kvpass.operands import Attention
from kvpass.vllm.admission import Continued
from kvpass.vllm.kept import Kept, Tables


def kept(number: int) -> Kept:
    return Kept(torch.full((6,), number, dtype=torch.int32), torch.tensor([0, number], dtype=torch.int32))


def tables(rows: int = 1) -> Tables:
    return Tables(4, rows, layers=1, kv_heads=1, device=torch.device("cpu"))


def test_a_prompt_is_remembered_as_long_as_it_is_in_a_block():
    found = tables()
    found.enter(3, 1, 100, b"long", kept(0))
    for number in range(1, 50):
        found.enter(number % 3, 1, number, bytes([number]), kept(number))
    assert found.before.tolist() == [48, 49, 47, 100] and found.offsets[:, 1].tolist() == [48, 49, 47, 0]
    assert b"long" in found.kept
    assert len(found.kept) == 4 + 2 * found.rows


def test_a_block_that_another_begins_in_is_forgotten_and_one_that_is_emptied_is_not():
    found = tables()
    found.enter(0, 2, 7, b"long", kept(7))
    found.enter(2, 1, 8, b"beside", kept(8))
    found.enter(1, 1, 9, b"in", kept(9))
    assert found.digests == {2: (b"beside", 3), 1: (b"in", 2)} and b"long" in found.kept
    found.enter(0, 3, 9, b"over", kept(9))
    assert found.digests == {0: (b"over", 3)} and [*found.kept] == [b"beside", b"in", b"over"]
    found.empty(torch.tensor([0]))
    assert not found.before[0].any() and not found.offsets[0].any()
    assert found.kept[found.digests[0][0]].offsets[1] == 9, "for the request that was preempted there"


def test_all_that_were_preempted_together_come_back_in_each_others_blocks_and_a_prompt_may_be_in_two():
    found = tables(rows=2)
    for number in range(50):
        found.enter(number % 4, 1, number, bytes([number]), kept(number))
    for block, number in enumerate([49, 48, 47, 46]):
        found.enter(block, 1, number, bytes([number]), found.kept[bytes([number])])
    assert found.before.tolist() == [49, 48, 47, 46]
    found = tables()
    for block in (0, 1):
        found.enter(block, 1, 7, b"same", kept(7))
    for number in range(5):
        found.enter(0, 1, number, bytes([number]), kept(number))
    assert torch.equal(found.kept[b"same"].offsets, kept(7).offsets)


def test_the_tail_behind_a_document_is_empty_and_the_mean_of_its_keys_is_subtracted_there():
    found = tables()
    found.enter(2, 1, 7, b"before", kept(7))
    found.used[2] = 5
    found.means, found.number[2] = torch.zeros(2, 4, 1, 8), 3
    found.continue_document(2, Continued("a", 90), kept(3).offsets, torch.ones(2, 1, 8))
    assert (found.before[2], found.used[2], found.offsets[2].tolist()) == (90, 0, [0, 3])
    assert b"before" in found.kept, "for the request that was preempted there"
    assert found.means[:, 3].eq(1).all() and found.means.sum() == 2 * 8


def test_means_go_along_with_the_numbers_of_requests():
    found = tables(rows=3)
    found.means, found.number[2] = torch.arange(3.0).expand(2, 1, 8, 3).movedim(3, 1).clone(), 1
    found.renumber(torch.tensor([3, 2]), torch.tensor([1, 0]))  # one that is new, and one that had number 1
    assert found.means[:, 0].eq(1).all() and found.means[:, 2].eq(2).all() and found.number[2:].tolist() == [0, 1]


LAYERS, KV_HEADS, TOKENS, DIM, WINDOW, REQUEST = 2, 2, 11, 8, 3, 1
PARTS = {"pool": (1, 10), "tail": (LAYERS, 1, KV_HEADS, 5)}


@pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM: make test-vllm")
def test_keys_of_a_restored_block_are_its_codes_and_the_mean_written_with_them():
    from kvpass.vllm.backend import KVPassImpl

    impl = object.__new__(KVPassImpl)
    impl.layout = SimpleNamespace(kv_heads=KV_HEADS, coded=True, shortest=1)
    impl.policy, impl.softcap, impl.sinks = SimpleNamespace(window=WINDOW), None, None
    means = torch.randn(LAYERS, 3, KV_HEADS, DIM)  # those of requests before
    tables = SimpleNamespace(means=means.clone(), start=torch.zeros(3, dtype=torch.int64))
    kept = Kept(torch.tensor([0, 4, 1, 2, 5, 3, 0, 6], dtype=torch.int32), torch.tensor([0, 2, 5, 6, 8]).int())
    shapes = {f"{part}_{x}": shape for part, shape in PARTS.items() for x in "kv"}
    block = {name: torch.zeros(*shape, DIM, dtype=torch.int8) for name, shape in shapes.items()}
    block |= {f"{name}_scale": torch.zeros(shape) for name, shape in shapes.items()}
    keys = 5 + torch.randn(LAYERS, 1, KV_HEADS, TOKENS, DIM)
    for site in range(LAYERS):
        prompt = Attention(keys[site], keys[site], keys[site], 1.0)
        impl._restore(prompt, block, REQUEST, site, kept, tables)
    for site in range(LAYERS):
        for head in range(KV_HEADS):
            first, last = kept.offsets[site * KV_HEADS + head :][:2].tolist()
            mean, own = tables.means[site, REQUEST, head], keys[site, 0, head]
            pool = block["pool_k"][0, first:last] * block["pool_k_scale"][0, first:last, None] + mean
            torch.testing.assert_close(pool, own[kept.positions[first:last].long()], atol=0.05, rtol=0)
            tail = block["tail_k"][site, 0, head] * block["tail_k_scale"][site, 0, head, :, None] + mean
            torch.testing.assert_close(tail[:WINDOW], own[-WINDOW:], atol=0.05, rtol=0)
    others = [0, 2]
    assert torch.equal(tables.means[:, others], means[:, others])
