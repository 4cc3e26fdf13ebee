"""A decoder that numbers its own tokens is refused; one that is told its positions passes."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kvpass.errors import UnsupportedAttentionError
from kvpass.graphs.check_positions import check_positions_pass
from kvpass.graphs.find_attention import find_attention_pass

DIM, VOCABULARY, LONGEST = 16, 50, 64
PASSES = [find_attention_pass, check_positions_pass]


class OneLayer(nn.Module):
    """Embedding, whatever a test does to it, one attention call."""

    def __init__(self, change: Callable[[OneLayer, Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.change = change
        self.embed = nn.Embedding(VOCABULARY, DIM)
        self.learned = nn.Embedding(LONGEST, DIM)
        self.token_type = nn.Embedding(2, DIM)
        self.mean = nn.Parameter(torch.randn(DIM))
        self.router = nn.Linear(DIM, 4)
        self.register_buffer("table", torch.randn(LONGEST, DIM))
        self.attribute = torch.randn(1, LONGEST, DIM)
        self.register_buffer("frequencies", torch.rand(DIM))

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        x = self.change(self, self.embed(ids), ids, positions)
        q = x[:, None]
        return F.scaled_dot_product_attention(q, q, q, is_causal=True)


def sorted_experts(m: OneLayer, x: Tensor) -> Tensor:
    """Tokens sorted by expert and back: ``arange`` makes the inverse permutation, no position."""
    b, t, d = x.shape
    rows = x.reshape(b * t, d)
    order = m.router(rows).argmax(-1).argsort()
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(b * t)
    return (rows[order] * 2)[inverse].view(b, t, d)


def summed_experts(m: OneLayer, x: Tensor) -> Tensor:
    """Two copies of every token, added up again at their rows."""
    b, t, d = x.shape
    rows = x.reshape(b * t, d)
    index = torch.arange(b * t).repeat_interleave(2)
    return torch.zeros_like(rows).index_add_(0, index, rows[index] * 0.5).view(b, t, d)


def filled(x: Tensor) -> Tensor:
    bias = torch.zeros(x.shape[1], DIM)
    bias[:, 0::2] = 3.0
    return x + bias


def sinusoidal(m: OneLayer, t: int) -> Tensor:
    table = torch.zeros(t, DIM)
    order = torch.arange(t)[:, None] * m.frequencies[0::2]
    table[:, 0::2] = order.sin()
    table[:, 1::2] = order.cos()
    return table


def scattered(m: OneLayer, ids: Tensor) -> Tensor:
    """Positions that pass through a permutation before they are looked up."""
    order = ids[0].argsort()
    positions = torch.empty_like(order)
    positions[order] = torch.arange(order.shape[0])
    return m.learned(positions)


PASSING = {
    "given rotary": lambda m, x, ids, p: x * (p[..., None] * m.frequencies).cos(),
    "given learned": lambda m, x, ids, p: x + m.learned(p + 2),
    "given table": lambda m, x, ids, p: x + m.table[p],
    "token types": lambda m, x, ids, p: x + m.token_type(torch.zeros_like(ids)),
    "one vector for all": lambda m, x, ids, p: x + m.mean.expand(x.shape[0], x.shape[1], -1),
    "constant bias written in place": lambda m, x, ids, p: filled(x),
    "sorted experts": lambda m, x, ids, p: sorted_experts(m, x),
    "summed experts": lambda m, x, ids, p: summed_experts(m, x),
    "sizes in views": lambda m, x, ids, p: x.view(-1, DIM).view(x.shape[0], x.shape[1], -1)[:, -x.shape[1] :],
    "unused positions": lambda m, x, ids, p: (torch.arange(x.shape[1]), x)[1],
    "frequencies counted by dim": lambda m, x, ids, p: x * (p[..., None] * torch.arange(DIM)).cos(),
}

REFUSED = {
    "rotary": lambda m, x, ids, p: x * (torch.arange(x.shape[1])[:, None] * m.frequencies).cos(),
    "rotary from floats": lambda m, x, ids, p: x * torch.arange(0.0, x.shape[1])[:, None].cos(),
    "learned": lambda m, x, ids, p: x + m.learned(torch.arange(x.shape[1])),
    "learned, sliced weight": lambda m, x, ids, p: x + m.learned.weight[: x.shape[1]],
    "table": lambda m, x, ids, p: x + m.table[: x.shape[1]],
    "table by narrow": lambda m, x, ids, p: x + m.table.narrow(0, 0, x.shape[1]),
    "table that is no buffer": lambda m, x, ids, p: x + m.attribute[:, : x.shape[1]],
    "table by index": lambda m, x, ids, p: x + m.table[torch.arange(x.shape[1])],
    "end of a table": lambda m, x, ids, p: x + m.table[-x.shape[1] :],
    "one row by count": lambda m, x, ids, p: x + m.table[: x.shape[1]].sum(0),
    "sinusoidal in place": lambda m, x, ids, p: x + sinusoidal(m, x.shape[1]),
    "counted ones": lambda m, x, ids, p: x + m.learned(torch.ones_like(ids).cumsum(-1)),
    "counted tokens": lambda m, x, ids, p: x + m.learned((ids != 1).cumsum(-1) - 1),
    "counted tokens, dim=1": lambda m, x, ids, p: x + m.table[torch.cumsum(ids != 1, dim=1)],
    "through a permutation": lambda m, x, ids, p: x + scattered(m, ids),
    "running sum": lambda m, x, ids, p: x.cumsum(1),
    "one hot": lambda m, x, ids, p: x + F.one_hot(torch.arange(x.shape[1]), LONGEST).float() @ m.table,
    "selected tokens": lambda m, x, ids, p: torch.where((torch.arange(x.shape[1]) < 3)[:, None], x, 2 * x),
    "scaled by the length": lambda m, x, ids, p: x * x.shape[1],
    "scaled by a root of the length": lambda m, x, ids, p: x / math.sqrt(x.shape[1]),
    "after the cast": lambda m, x, ids, p: x + torch.arange(x.shape[1]).to(x.dtype)[:, None],
    "moved ids": lambda m, x, ids, p: x + m.learned(p + torch.arange(x.shape[1])),
}


@pytest.mark.parametrize("name", PASSING)
def test_a_decoder_that_is_told_its_positions_passes(name, capture, inputs) -> None:
    _, (found, changed) = capture(OneLayer(PASSING[name]).eval(), inputs(), PASSES)
    assert (found, changed) == (1, 0)


@pytest.mark.parametrize("name", REFUSED)
def test_a_decoder_that_numbers_its_tokens_is_refused(name, capture, inputs) -> None:
    with pytest.raises(UnsupportedAttentionError, match="positions are made in the graph") as refusal:
        capture(OneLayer(REFUSED[name]).eval(), inputs(), PASSES)
    assert refusal.value.node


@pytest.mark.parametrize("tokens", [1, 11])
@pytest.mark.parametrize("name", ["rotary", "learned", "learned, sliced weight", "table", "table by index"])
def test_a_fixed_length_hides_nothing(name, tokens, capture, inputs) -> None:
    with pytest.raises(UnsupportedAttentionError, match="positions are made in the graph"):
        capture(OneLayer(REFUSED[name]).eval(), inputs(tokens=tokens), PASSES, dynamic=False)


@pytest.mark.parametrize("tokens", [1, 11])
@pytest.mark.parametrize("name", ["given rotary", "given table", "token types", "one vector for all"])
def test_given_positions_pass_at_a_fixed_length(name, tokens, capture, inputs) -> None:
    capture(OneLayer(PASSING[name]).eval(), inputs(tokens=tokens), PASSES, dynamic=False)


def test_positions_that_enter_after_the_last_site_are_refused(capture, inputs) -> None:
    model = OneLayer(PASSING["given learned"]).eval()

    def late(ids: Tensor, positions: Tensor) -> Tensor:
        return model(ids, positions) + torch.arange(ids.shape[1])[:, None]

    with pytest.raises(UnsupportedAttentionError, match="positions are made in the graph, by arange"):
        capture(late, inputs(), PASSES)


def test_positions_that_only_the_mask_sees_do_not_count(capture, inputs) -> None:
    def masked(ids: Tensor, positions: Tensor) -> Tensor:
        q = F.one_hot(ids, VOCABULARY).float()[:, None]
        order = torch.arange(ids.shape[1])
        return F.scaled_dot_product_attention(q, q, q, attn_mask=order[None, :] <= order[:, None])

    capture(masked, inputs(), PASSES)
