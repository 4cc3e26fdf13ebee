"""A decoder whose layers differ in KV heads and head dims: one pool per geometry, all under one budget."""

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from numeric_checks import assert_close
from pairwise import quick_rows
from tiny_models import in_session, random_ids, raw

TOKENS, NEW, WINDOW, BUDGET = 40, 6, 8, 16
SHAPES = [(4, 2, 12), (4, 4, 8), (4, 2, 12), (6, 1, 10)]
"""Query heads, KV heads and head dim of each layer."""


class Attention(nn.Module):
    """Causal attention; ``allowed`` ``[B, K, T, T]`` narrows what a token may see (for the oracle)."""

    allowed = None

    def __init__(self, width, heads, kv_heads, dim):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(width, n * dim) for n in (heads, kv_heads, kv_heads))
        self.out, self.dim, self.group = nn.Linear(heads * dim, width), dim, heads // kv_heads

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = (part(x).view(b, t, -1, self.dim).transpose(1, 2) for part in (self.q, self.k, self.v))
        if self.allowed is None:
            y = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        else:
            mask = self.allowed.repeat_interleave(self.group, 1)
            k, v = k.repeat_interleave(self.group, 1), v.repeat_interleave(self.group, 1)
            y = scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.out(y.transpose(1, 2).reshape(b, t, -1))


class Decoder(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(128, width), nn.Embedding(256, width)
        self.blocks = nn.ModuleList(Attention(width, *shape) for shape in SHAPES)
        self.head = nn.Linear(width, 128)

    def forward(self, ids, positions):
        x = self.tokens(ids) + self.positions(positions)
        for block in self.blocks:
            x = x + block(nn.functional.layer_norm(x, x.shape[-1:]))
        return self.head(x)


@pytest.mark.parametrize(
    ("budget", "compiler"),
    quick_rows([("10KiB", "eager"), (BUDGET, "eager"), ("10KiB", "inductor")], [("10KiB", "eager")]),
)
def test_contracts_2_and_6_the_budget_is_exact_and_decoding_equals_masking_the_whole_sequence(budget, compiler):
    decoder = Decoder().eval()
    for parameter in decoder.parameters():
        parameter.data.mul_(2)
    fast = raw(decoder, {"policy": "lava", "budget": budget, "window": WINDOW, "compiler": compiler})
    ids, positions = random_ids(2, TOKENS + NEW), torch.arange(TOKENS + NEW).expand(2, -1)
    logits, cache = in_session(fast, [TOKENS, 1, 1, 1, 1, 2], ids, positions)
    assert [store.group.layers for store in cache.state.full_layers] == [(0, 2), (1,), (3,)]
    entries = BUDGET if budget == BUDGET else 10 * 1024 // (2 * 4 * (2 * 2 * 12 + 4 * 8 + 1 * 10))
    for store in cache.state.full_layers:
        heads = store.geometry.layers * store.geometry.kv_heads
        assert store.lengths.sum((1, 2)).tolist() == [(entries + NEW) * heads] * 2
    assert cache.lengths.shape == (2, 4, 4) and int(cache.lengths[:, 3, 1:].sum()) == 0
    total = TOKENS + NEW
    held = cache.positions
    for layer, (_, kv_heads, _) in enumerate(SHAPES):
        seen = torch.zeros(2, kv_heads, total + 1, dtype=torch.bool)
        seen.scatter_(2, torch.where(held[:, layer, :kv_heads] < 0, total, held[:, layer, :kv_heads]), True)
        causal = torch.ones(total, total, dtype=torch.bool).tril()
        is_prompt = torch.arange(total)[:, None] < TOKENS
        decoder.blocks[layer].allowed = causal & (is_prompt | seen[..., :total][:, :, None])
    assert_close("logits", logits, decoder(ids, positions), atol=1e-4)
