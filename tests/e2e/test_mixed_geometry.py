"""A decoder whose layers differ in KV heads and head dims: one pool per geometry, all under one budget."""

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from numeric_checks import assert_close
from pairwise import quick_rows
from small_decoders import WIDTH, SmallDecoder
from tiny_models import in_session, random_ids, raw

TOKENS, NEW, WINDOW, BUDGET = 40, 6, 8, 16
SHAPES = [(4, 2, 12), (4, 4, 8), (4, 2, 12), (6, 1, 10)]
"""Query heads, KV heads and head dim of each layer."""


class Decoder(SmallDecoder):
    """``allowed`` ``[B, K, T, T]`` of each layer narrows what a token may see (for the oracle)."""

    def __init__(self):
        super().__init__(wide=2)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, (heads + 2 * kv_heads) * dim) for heads, kv_heads, dim in SHAPES)
        self.out = nn.ModuleList(nn.Linear(heads * dim, WIDTH) for heads, _, dim in SHAPES)
        self.allowed = None

    def layer(self, x, positions, i):
        heads, kv_heads, dim = SHAPES[i]
        parts = self.layers[i](nn.functional.layer_norm(x, x.shape[-1:])).unflatten(-1, (-1, dim)).transpose(1, 2)
        q, k, v = parts.split([heads, kv_heads, kv_heads], 1)
        mask = None if self.allowed is None else self.allowed[i].repeat_interleave(heads // kv_heads, 1)
        y = scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True)
        return x + self.out[i](y.transpose(1, 2).flatten(2))


@pytest.mark.parametrize(
    ("budget", "compiler"),
    quick_rows([("10KiB", "eager"), (BUDGET, "eager"), ("10KiB", "inductor")], [("10KiB", "eager")]),
)
def test_contracts_2_and_6_the_budget_is_exact_and_decoding_equals_masking_the_whole_sequence(budget, compiler):
    decoder = Decoder()
    fast = raw(decoder, {"policy": "lava", "budget": budget, "window": WINDOW, "compiler": compiler})
    ids, total = random_ids(2, TOKENS + NEW), TOKENS + NEW
    logits, cache = in_session(fast, [TOKENS, 1, 1, 1, 1, 2], ids)
    assert [store.group.layers for store in cache.state.full_layers] == [(0, 2), (1,), (3,)]
    entries = BUDGET if budget == BUDGET else 10 * 1024 // (2 * 4 * (2 * 2 * 12 + 4 * 8 + 1 * 10))
    for store in cache.state.full_layers:
        heads = store.geometry.layers * store.geometry.kv_heads
        assert store.lengths.sum((1, 2)).tolist() == [(entries + NEW) * heads] * 2
    assert cache.lengths.shape == (2, 4, 4) and int(cache.lengths[:, 3, 1:].sum()) == 0
    decoder.allowed = []
    for held, (_, kv_heads, _) in zip(cache.positions.unbind(1), SHAPES, strict=True):
        seen = torch.zeros(2, kv_heads, total + 1, dtype=torch.bool)
        seen.scatter_(2, torch.where(held[:, :kv_heads] < 0, total, held[:, :kv_heads]), True)
        causal = torch.ones(total, total, dtype=torch.bool).tril()
        is_prompt = torch.arange(total)[:, None] < TOKENS
        decoder.allowed.append(causal & (is_prompt | seen[..., :total][:, :, None]))
    assert_close("logits", logits, decoder(ids), atol=1e-4)
