"""A prompt that is put back into a block that another request had."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm")

from kvpass.operands import Attention
from kvpass.vllm.backend import KVPassImpl
from kvpass.vllm.kept import Kept

LAYERS, KV_HEADS, TOKENS, DIM, WINDOW, REQUEST = 2, 2, 11, 8, 3, 1
POOL, TAIL = 10, 5


def empty_block() -> dict[str, torch.Tensor]:
    shapes = {"pool": (1, POOL), "tail": (LAYERS, 1, KV_HEADS, TAIL)}
    codes = {f"{part}_{x}": torch.zeros(*shape, DIM, dtype=torch.int8) for part, shape in shapes.items() for x in "kv"}
    return codes | {f"{part}_{x}_scale": torch.zeros(shape) for part, shape in shapes.items() for x in "kv"}


def test_keys_of_a_restored_block_are_its_codes_and_the_mean_written_with_them():
    impl = object.__new__(KVPassImpl)
    impl.layout = SimpleNamespace(kv_heads=KV_HEADS, coded=True, shortest=1)
    impl.policy, impl.softcap, impl.sinks = SimpleNamespace(window=WINDOW), None, None
    means = torch.randn(LAYERS, 3, KV_HEADS, DIM)  # those of requests before
    tables = SimpleNamespace(means=means.clone(), start=torch.zeros(3, dtype=torch.int64))
    kept = Kept(torch.tensor([0, 4, 1, 2, 5, 3, 0, 6], dtype=torch.int32), torch.tensor([0, 2, 5, 6, 8]).int())
    block, keys = empty_block(), 5 + torch.randn(LAYERS, 1, KV_HEADS, TOKENS, DIM)
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
