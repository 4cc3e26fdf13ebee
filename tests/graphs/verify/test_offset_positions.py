"""A decoder that numbers its own tokens goes on from those seen, or is refused; one that is told them is let alone."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.nn import functional as F

from kvpass.graphs.bind_state import copy_graph
from kvpass.graphs.find.sdpa import find_attention_pass
from kvpass.graphs.verify.offset_positions import counts_positions, offset_positions_pass
from kvpass.graphs.verify.self_check import self_check_pass
from pairwise import quick

DIM, VOCABULARY, LONGEST = 16, 50, 64
PASSES = [find_attention_pass, self_check_pass]


class OneLayer(nn.Module):
    """Embedding, a change of it, one attention call; and what changes read."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, DIM)
        self.learned = nn.Embedding(LONGEST, DIM)
        self.token_type = nn.Embedding(2, DIM)
        self.mean = nn.Parameter(torch.randn(DIM))
        self.router = nn.Linear(DIM, 4)
        self.register_buffer("table", torch.randn(LONGEST, DIM))
        self.attribute = torch.randn(1, LONGEST, DIM)
        self.register_buffer("frequencies", torch.rand(DIM))
        self.register_buffer("order", torch.arange(LONGEST)[None])
        self.register_buffer("types", torch.zeros(1, LONGEST, dtype=torch.long))

    def forward(self, change: Change, ids: Tensor, positions: Tensor) -> Tensor:
        x = change(self, self.embed(ids), ids, positions)
        return F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None], is_causal=True)


Change = Callable[[OneLayer, Tensor, Tensor, Tensor], Tensor]


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


def scattered(m: OneLayer, ids: Tensor) -> Tensor:
    """Positions that pass through a permutation before they are looked up."""
    order = ids[0].argsort()
    positions = torch.empty_like(order)
    positions[order] = torch.arange(order.shape[0])
    return m.learned(positions)


PASSING = {
    "given rotary": lambda m, x, ids, p: x * (p[..., None] * m.frequencies).cos(),
    "given learned": lambda m, x, ids, p: x + m.learned(p + 2),
    "token types": lambda m, x, ids, p: x + m.token_type(torch.zeros_like(ids)),
    "stored token types": lambda m, x, ids, p: x + m.token_type(m.types[:, : x.shape[1]]),
    "one vector for all": lambda m, x, ids, p: x + m.mean.expand(x.shape[0], x.shape[1], -1),
    "constant bias written in place": lambda m, x, ids, p: filled(x),
    "sorted experts": lambda m, x, ids, p: sorted_experts(m, x),
    "summed experts": lambda m, x, ids, p: summed_experts(m, x),
    "frequencies counted by dim": lambda m, x, ids, p: x * (p[..., None] * torch.arange(DIM)).cos(),
}


def sinusoidal_rows(m: OneLayer, x: Tensor) -> Tensor:
    angles = torch.einsum("i,j->ij", torch.arange(x.shape[1], dtype=x.dtype), m.frequencies[: DIM // 2])
    return x + torch.cat([angles.sin(), angles.cos()], dim=-1)


def added_in_place(m: OneLayer, x: Tensor) -> Tensor:
    x = x.clone()
    x += m.table[: x.shape[1]]
    return x


COUNTED = {
    "rotary": lambda m, x, ids, p: x * (torch.arange(x.shape[1])[:, None] * m.frequencies).cos(),
    "sinusoidal": lambda m, x, ids, p: sinusoidal_rows(m, x),
    "added in place": lambda m, x, ids, p: added_in_place(m, x),
    "learned for every row": lambda m, x, ids, p: x + m.learned(torch.arange(x.shape[1]).expand_as(ids)),
    "learned, counted from one": lambda m, x, ids, p: x + m.learned(torch.arange(1, x.shape[1] + 1)),
    "learned, sliced weight": lambda m, x, ids, p: x + m.learned.weight[: x.shape[1]],
    "stored numbers": lambda m, x, ids, p: x + m.learned(m.order[:, : x.shape[1]]),
    "table": lambda m, x, ids, p: x + m.table[None, : x.shape[1], :],
    "table, rows of others first": lambda m, x, ids, p: x + m.table[3 : x.shape[1] + 3],
    "table that is no buffer": lambda m, x, ids, p: x + m.attribute[:, : x.shape[1]],
    "transposed table": lambda m, x, ids, p: x + m.table.T[:, : x.shape[1]].T,
    "counted ones": lambda m, x, ids, p: x + m.learned(torch.ones_like(ids).cumsum(-1)),
    "one hot": lambda m, x, ids, p: x + F.one_hot(torch.arange(x.shape[1]), LONGEST).float() @ m.table,
    "after the cast": lambda m, x, ids, p: x + torch.arange(x.shape[1]).to(x.dtype)[:, None],
    "shared with a harmless index": lambda m, x, ids, p: (lambda order: x[:, order] + m.learned(order))(
        torch.arange(x.shape[1])
    ),
    "added to those given": lambda m, x, ids, p: x + m.learned(p + torch.arange(x.shape[1])),
    "twice": lambda m, x, ids, p: (lambda rows: (x + rows) * rows.cos())(m.table[: x.shape[1]]),
}

REFUSED = {
    "rotary from floats": lambda m, x, ids, p: x * torch.arange(0.0, x.shape[1])[:, None].cos(),
    "end of a table": lambda m, x, ids, p: x + m.table[-x.shape[1] :],
    "one row by count": lambda m, x, ids, p: x + m.table[: x.shape[1]].sum(0),
    "table by narrow": lambda m, x, ids, p: x + m.table.narrow(0, 0, x.shape[1]),
    "counted tokens": lambda m, x, ids, p: x + m.learned((ids != 1).cumsum(-1) - 1),
    "counted tokens, dim=1": lambda m, x, ids, p: x + m.table[torch.cumsum(ids != 1, dim=1)],
    "through a permutation": lambda m, x, ids, p: x + scattered(m, ids),
    "running sum": lambda m, x, ids, p: x.cumsum(1),
    "length at the end": lambda m, x, ids, p: x + m.table[LONGEST - x.shape[1] :],
    "mean of the rows": lambda m, x, ids, p: x + m.table[: x.shape[1]] - m.table[: x.shape[1]].mean(0),
    "table that is written": lambda m, x, ids, p: x + m.table[: x.shape[1]].mul_(0.5),
}

LENGTH_AS_A_NUMBER = {
    "scaled": lambda m, x, ids, p: x * x.shape[1],
    "between two": lambda m, x, ids, p: torch.lerp(x, 2 * x, 1 / x.shape[1]),
    "bounds": lambda m, x, ids, p: F.hardtanh(x, -1.0, x.shape[1] / 30),
    "a bound that bites later": lambda m, x, ids, p: x.clamp(min=max(x.shape[1] // 8 - 5, 0)),
    "a threshold": lambda m, x, ids, p: F.threshold(x, x.shape[1] / 60, 0.0),
    "a filled place": lambda m, x, ids, p: with_first_feature(x, x.shape[1]),
    "a filled tensor": lambda m, x, ids, p: x * torch.full((1,), x.shape[1]),
    "an epsilon": lambda m, x, ids, p: F.layer_norm(x, (DIM,), eps=x.shape[1] / 100),
    "positions from the end": lambda m, x, ids, p: x + m.learned(x.shape[1] - torch.arange(x.shape[1])),
    "the last position": lambda m, x, ids, p: torch.where((p == x.shape[1] - 1)[..., None], x, 2 * x),
    "the length of another input": lambda m, x, ids, p: x * p.shape[1],
}


def with_first_feature(x: Tensor, value: Any) -> Tensor:
    x = x.clone()
    x[..., 0] = value
    return x


def after(changes: list[Change], ids: Tensor, sizes: tuple[int, ...]) -> Iterator[tuple[int, Tensor, Tensor]]:
    """What changes make of ``ids[:, seen:]`` in one graph that is told how many tokens went before, and of all ids.

    Yields:
        seen, of ``sizes``; one and the other, for each change.
    """
    model, found = OneLayer().eval(), []

    def layers(ids: Tensor, positions: Tensor) -> list[Tensor]:
        xs = [change(model, model.embed(ids), ids, positions) for change in changes]
        return xs + [F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None], is_causal=True) for x in xs]

    def backend(gm: GraphModule, _: list[Any]) -> Callable[..., Any]:
        shifted = copy_graph(gm)
        for graph_pass in PASSES:
            graph_pass(shifted)
        with shifted.graph.inserting_after([node for node in shifted.graph.nodes if node.op == "placeholder"][-1]):
            node = shifted.graph.placeholder("seen")
        assert counts_positions(shifted), "nothing is counted"
        offset_positions_pass(shifted, seen=node)
        shifted.graph.lint()
        shifted.recompile()

        def run(*inputs: Any) -> Any:
            for seen in sizes:
                found.append(shifted(*(rest(value, seen) for value in inputs), torch.tensor(seen)))
            return gm.forward(*inputs)

        return run

    def rest(value: Any, seen: int) -> Any:
        """What the rest of the text has for an input of the whole text."""
        if isinstance(value, int):
            return value - seen
        return value[:, seen:].contiguous() if value.shape == ids.shape else value

    torch._dynamo.reset()
    positions = torch.arange(ids.shape[1]).repeat(ids.shape[0], 1)
    for value in (ids, positions):
        torch._dynamo.mark_dynamic(value, 1)
    with torch.no_grad():
        torch.compile(layers, backend=backend, fullgraph=True)(ids, positions)
        for seen, parts in zip(sizes, found, strict=True):
            for change, part in zip(changes, parts, strict=False):
                yield seen, part, change(model, model.embed(ids), ids, positions)


@pytest.fixture
def ids() -> Tensor:
    return torch.randint(1, VOCABULARY, (2, 23), generator=torch.Generator().manual_seed(0))


def test_positions_go_on_from_the_tokens_seen(ids):
    names = itertools.cycle(COUNTED)
    for name, (seen, found, whole) in zip(names, after([*COUNTED.values()], ids, (12, 0, 22)), strict=False):
        torch.testing.assert_close(found, whole[:, seen:], msg=f"{name} after {seen} tokens")


def test_a_constant_row_is_not_taken_for_a_position(ids):
    with pytest.raises(Exception, match="nothing is counted"):
        list(after([lambda m, x, ids, p: x + m.table[:1] + m.learned(p)], ids, (5,)))


def test_a_decoder_that_is_told_its_positions_passes(capture, inputs):
    layer = OneLayer().eval()
    forms = [partial(layer, change) for change in PASSING.values()]
    _, counts = capture(lambda *given: [form(*given) for form in forms], inputs(), PASSES)
    assert counts == [len(PASSING), 0]


def test_a_decoder_that_numbers_its_tokens_or_computes_with_their_number_is_refused(capture_each, inputs):
    said = dict.fromkeys(REFUSED, "positions are made in the graph")
    said |= dict.fromkeys(LENGTH_AS_A_NUMBER, r"computes with \w+, a number made from the length")
    layer = OneLayer().eval()
    forms = [partial(layer, change) for change in (REFUSED | LENGTH_AS_A_NUMBER).values()]
    for (name, reason), refusal in zip(said.items(), capture_each(forms, inputs(), PASSES), strict=True):
        assert re.search(reason, str(refusal)) and refusal.node, f"{name}: {refusal}"


@pytest.mark.parametrize("dtype", quick([torch.float16, torch.bfloat16], [torch.bfloat16]))
def test_a_counter_in_16_bit_is_rounded_once(dtype):
    rounded = int(2 / torch.finfo(dtype).eps)  # from here on not every whole number has a value of its own
    ids = torch.randint(VOCABULARY, (1, 3 * rounded))
    counter = [lambda m, x, ids, p: x + torch.arange(x.shape[1], dtype=dtype)[:, None].float()]
    for seen, found, whole in after(counter, ids, (rounded - 5, rounded + 1, 2 * rounded + 3)):
        torch.testing.assert_close(found, whole[:, seen:])


def test_positions_that_enter_after_the_last_site_count(capture, inputs):
    layer = OneLayer().eval()

    def late(ids: Tensor, positions: Tensor) -> Tensor:
        return layer(PASSING["given learned"], ids, positions) + torch.arange(ids.shape[1])[:, None]

    assert capture(late, inputs(), PASSES)[1] == [1, 1]


def test_positions_that_only_the_mask_sees_do_not_count(capture, inputs):
    def masked(ids: Tensor, positions: Tensor) -> Tensor:
        q = F.one_hot(ids, VOCABULARY).float()[:, None]
        order = torch.arange(ids.shape[1])
        return F.scaled_dot_product_attention(q, q, q, attn_mask=order[None, :] <= order[:, None])

    capture(masked, inputs(), PASSES)
