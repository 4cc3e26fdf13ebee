"""kvpass.attention: equal to scaled_dot_product_attention, and compressed in a module of one's own."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

import kvpass
from tiny_models import random_ids

VOCABULARY, HEADS, KV_HEADS, DIM = 128, 4, 2, 8


class Layer(nn.Module):
    def __init__(self, declared: bool, sliding_window: int | None) -> None:
        super().__init__()
        self.declared, self.sliding_window = declared, sliding_window
        self.qkv = nn.Linear(HEADS * DIM, (HEADS + 2 * KV_HEADS) * DIM)
        self.out = nn.Linear(HEADS * DIM, HEADS * DIM)

    def forward(self, x):
        parts = self.qkv(x).unflatten(-1, (-1, DIM)).transpose(1, 2).split([HEADS, KV_HEADS, KV_HEADS], 1)
        if self.declared:
            y = kvpass.attention(*parts, sliding_window=self.sliding_window)
        else:
            tokens = torch.arange(x.shape[1])
            distance = tokens[:, None] - tokens
            seen = (distance >= 0) & (distance < (self.sliding_window or x.shape[1]))
            y = scaled_dot_product_attention(*parts, attn_mask=seen, enable_gqa=True)
        return x + self.out(y.transpose(1, 2).flatten(2))


class Decoder(nn.Module):
    def __init__(self, declared: bool, sliding_window: int | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, HEADS * DIM)
        self.layers = nn.ModuleList(Layer(declared, sliding_window) for _ in range(2))

    def forward(self, ids):
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return x @ self.embedding.weight.T


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()


@pytest.mark.parametrize("sliding_window", [None, 5])
@torch.no_grad()
def test_a_declared_attention_op_computes_and_decodes_like_one_that_is_found(sliding_window):
    declared, plain = (Decoder(name, sliding_window).eval() for name in (True, False))
    ids = random_ids(2, 30)
    torch.testing.assert_close(declared(ids), plain(ids), atol=1e-4, rtol=1e-4)
    options = {"policy": "full", "compiler": "eager"}
    compiled = torch.compile(declared, backend="kvpass", fullgraph=True, dynamic=True, options=options)
    with kvpass.session() as session:
        logits = [compiled(ids[:, :20])] + [compiled(ids[:, i : i + 1]) for i in range(20, 30)]
    torch.testing.assert_close(torch.cat(logits, 1), plain(ids), atol=1e-4, rtol=1e-4)
    assert session.cache is not None and [ring.window for ring in session.cache.sliding_layers] == (
        [] if sliding_window is None else [sliding_window]
    )


@pytest.mark.parametrize(
    ("shapes", "options", "message"),
    [
        (((1, 4, 5, 8), (1, 2, 6, 8), (1, 2, 6, 8)), {}, r"key \(1, 2, 6, 8\)"),
        (((1, 3, 5, 8), (1, 2, 5, 8), (1, 2, 5, 8)), {}, "3 query heads: must be a multiple of the 2"),
        (((1, 4, 5, 8), (1, 2, 5, 8), (1, 2, 5, 8)), {"sliding_window": 0}, "sliding_window=0: must be at least 1"),
    ],
)
def test_operands_that_do_not_go_together_are_refused(shapes, options, message):
    with pytest.raises(ValueError, match=message):
        kvpass.attention(*(torch.zeros(shape) for shape in shapes), **options)
