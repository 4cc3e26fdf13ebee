"""A text in pieces that is not the whole text is refused: tokens that see others beside the sites, places in a call,
positions that cannot be counted on from the tokens seen. Those that can be: tests/e2e/test_lengths.py.

All decoders of a table are captured as one graph, since a capture is what takes time.
"""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from kvpass.errors import UnsupportedAttentionError
from kvpass.graphs.find.sdpa import find_attention_pass
from kvpass.graphs.passes import CANONICAL_PASSES
from kvpass.graphs.verify.examples import EvaluationError, evaluate
from kvpass.graphs.verify.self_check import PIECES, self_check_pass
from pairwise import quick

PASSES = [find_attention_pass, self_check_pass]
WIDTH = 32
WEIGHTS = torch.randn(3, WIDTH, WIDTH, 3, generator=torch.Generator().manual_seed(0))

MIXING = {
    "padded by one": lambda x, ids: x + F.pad(x, (0, 0, 1, -1)),
    "cut and joined far away": lambda x, ids: x + torch.cat([torch.zeros_like(x[:, :9]), x[:, :-9]], 1),
    "roll": lambda x, ids: x + x.roll(1, 1),
    "mean": lambda x, ids: x + x.mean(1, keepdim=True),
    "running sum": lambda x, ids: x + x.cumsum(1),
    "first token": lambda x, ids: x + x[:, :1],
    "last token": lambda x, ids: x + x[:, -1:],
    "norm over tokens": lambda x, ids: F.instance_norm(x.transpose(1, 2)).transpose(1, 2),
    "conv2d": lambda x, ids: F.conv2d(F.pad(x[:, None], (0, 0, 2, 0)), WEIGHTS[:1, :1, :3, :1])[:, 0],
    "sorted": lambda x, ids: x.sort(1).values,
    "previous ids": lambda x, ids: x + F.one_hot(torch.cat([ids[:, :1], ids[:, :-1]], 1), WIDTH + 18)[..., :WIDTH],
    "written in place": lambda x, ids: shift_in_place(x.clone()),
    "scaled by tokens": lambda x, ids: F.normalize(x, dim=1),
    "previous by index": lambda x, ids: x + x[:, (torch.arange(x.shape[1]) - 1).clamp(min=0)],
}
TOKEN_WISE = {
    "gated": lambda x, ids: x * torch.sigmoid(x.sum(-1, keepdim=True)),
    "softmax over features": lambda x, ids: x.softmax(-1),
    "features rolled": lambda x, ids: x.roll(1, -1),
    "features padded": lambda x, ids: F.pad(x, (1, -1)),
    "flattened": lambda x, ids: F.layer_norm(x.reshape(-1, WIDTH), (WIDTH,)).view_as(x),
    "routed": lambda x, ids: routed(x, lambda expert: expert.argsort()),
    "routed by a sort": lambda x, ids: routed(x, lambda expert: expert.sort().indices),
    "by id": lambda x, ids: x + F.one_hot(ids, WIDTH + 18)[..., :WIDTH],
    "of a type": lambda x, ids: x + F.embedding(torch.zeros_like(ids), EMBED),
    "of a stored type": lambda x, ids: x + F.embedding(TYPES[:, : x.shape[1]], EMBED),
    "one vector for all": lambda x, ids: x + EMBED[0].expand(x.shape[0], x.shape[1], -1),
    "a bias that is made in place": lambda x, ids: biased(x),
    "routed and counted back": lambda x, ids: counted_back(x),
    "two copies of each": lambda x, ids: added_up(x),
}
OF_POSITIONS = {
    "rotary": lambda x, p: x * (p[..., None] * EMBED[0]).cos(),
    "learned": lambda x, p: x + F.embedding(p + 2, EMBED),
    "frequencies counted by dim": lambda x, p: x * (p[..., None] * torch.arange(WIDTH)).cos(),
}


Change = Callable[[Tensor, Tensor], Tensor]
"""Of activations and ids, or positions where they are what counts."""
EMBED = torch.randn(WIDTH + 18, WIDTH, generator=torch.Generator().manual_seed(1))
TYPES = torch.zeros(1, WIDTH + 18, dtype=torch.long)


def attended(x: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None], is_causal=True)[:, 0]


def decoded(
    ids: Tensor, positions: Tensor, *changes: Change, after: bool = False, of_positions: bool = False
) -> Tensor:
    """A decoder of one site, with changes of activations in front of it or behind it."""
    x = F.embedding(ids, EMBED) + positions[..., None] / 100
    x = attended(x) if after else x
    for change in changes:
        x = change(x, positions if of_positions else ids)
    return x if after else attended(x)


def decoder(*changes: Change, **options: bool) -> Callable[..., Tensor]:
    """:func:`decoded` with these, which takes further inputs too."""
    return lambda ids, positions, *_: decoded(ids, positions, *changes, **options)


def shift_in_place(x: Tensor) -> Tensor:
    x[:, 1:].add_(x[:, :-1].clone())
    return x


def routed(x: Tensor, order_of: Callable[[Tensor], Tensor]) -> Tensor:
    """Two experts of four a token, tokens gathered by expert."""
    rows = x.reshape(-1, WIDTH)
    weight, expert = rows[:, :4].softmax(-1).topk(2)
    order = order_of(expert.flatten())
    token = order // 2
    scale = 1.0 + expert.flatten()[order][:, None]
    out = torch.zeros_like(rows).index_add(0, token, rows[token] * scale * weight.flatten()[order][:, None])
    return out.view_as(x)


def biased(x: Tensor) -> Tensor:
    bias = torch.zeros(x.shape[1], WIDTH)
    bias[:, ::2] = 3.0
    return x + bias


def counted_back(x: Tensor) -> Tensor:
    """Tokens sorted by expert and back: ``arange`` makes the inverse permutation, no position."""
    rows = x.reshape(-1, WIDTH)
    order = rows[:, :4].argmax(-1).argsort()
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(len(rows))
    return (rows[order] * 2)[inverse].view_as(x)


def added_up(x: Tensor) -> Tensor:
    """Two copies of every token, added up again at their rows."""
    rows = x.reshape(-1, WIDTH)
    index = torch.arange(len(rows)).repeat_interleave(2)
    return torch.zeros_like(rows).index_add_(0, index, rows[index] * 0.5).view_as(x)


LOOKUPS = {
    "embedding": lambda table, types: F.embedding(types, table),
    "index": lambda table, types: table[types],
    "index_select": lambda table, types: table.index_select(0, types.flatten()).view(*types.shape, -1),
}


def beside_a_lookup(lookup: str, rows: int, mix: Change) -> Callable[..., Tensor]:
    """A decoder that adds a number of a small table to each token."""
    table = torch.randn(rows, 1, generator=torch.Generator().manual_seed(rows))
    return lambda ids, p, types: decoded(ids, p, mix) + LOOKUPS[lookup](table, types)


def of_last_id(x: Tensor, ids: Tensor) -> Tensor:
    table = torch.arange(2.0)[:, None]
    return x + table[ids[:, -1:] % 2] - table[ids % 2]


def scattered(ids: Tensor) -> Tensor:
    """Positions that pass through a permutation."""
    order = ids[0].argsort()
    positions = torch.empty_like(order)
    positions[order] = torch.arange(order.shape[0])
    return positions


def with_first_feature(x: Tensor, value: Any) -> Tensor:
    x = x.clone()
    x[..., 0] = value
    return x


COUNTED = {
    "rotary from floats": lambda x, ids: x * torch.arange(0.0, x.shape[1])[:, None].cos(),
    "end of a table": lambda x, ids: x + EMBED[-x.shape[1] :],
    "one row by count": lambda x, ids: x + EMBED[: x.shape[1]].sum(0),
    "table by narrow": lambda x, ids: x + EMBED.narrow(0, 0, x.shape[1]),
    "counted tokens": lambda x, ids: x + F.embedding((ids != 1).cumsum(-1) - 1, EMBED),
    "counted tokens, dim=1": lambda x, ids: x + EMBED[torch.cumsum(ids != 1, dim=1)],
    "through a permutation": lambda x, ids: x + F.embedding(scattered(ids), EMBED),
    "running sum, alone": lambda x, ids: x.cumsum(1),
    "length at the end": lambda x, ids: x + EMBED[len(EMBED) - x.shape[1] :],
    "mean of the rows": lambda x, ids: x + EMBED[: x.shape[1]] - EMBED[: x.shape[1]].mean(0),
    "table that is written": lambda x, ids: x + EMBED[: x.shape[1]].mul_(0.5),
}
LENGTH_AS_A_NUMBER = {
    "scaled": lambda x, p: x * x.shape[1],
    "between two": lambda x, p: torch.lerp(x, 2 * x, 1 / x.shape[1]),
    "bounds": lambda x, p: F.hardtanh(x, -1.0, x.shape[1] / 30),
    "a bound that bites later": lambda x, p: x.clamp(min=max(x.shape[1] // 8 - 5, 0)),
    "a threshold": lambda x, p: F.threshold(x, x.shape[1] / 60, 0.0),
    "a filled place": lambda x, p: with_first_feature(x, x.shape[1]),
    "a filled tensor": lambda x, p: x * torch.full((1,), x.shape[1]),
    "an epsilon": lambda x, p: F.layer_norm(x, (WIDTH,), eps=x.shape[1] / 100),
    "positions from the end": lambda x, p: x + F.embedding(x.shape[1] - torch.arange(x.shape[1]), EMBED),
    "the last position": lambda x, p: torch.where((p == x.shape[1] - 1)[..., None], x, 2 * x),
    "the length of another input": lambda x, p: x * p.shape[1],
}
OUTSIDE = "outside of an attention site"
REFUSED: dict[str, tuple[str, Callable[..., Tensor]]] = {
    **{name: (OUTSIDE, decoder(mix)) for name, mix in MIXING.items()},
    **{f"{name} behind": (OUTSIDE, decoder(MIXING[name], after=True)) for name in ("mean", "roll")},
    **{
        f"mean beside {lookup} among {rows}": (OUTSIDE, beside_a_lookup(lookup, rows, MIXING["mean"]))
        for lookup, rows in zip(LOOKUPS, (2, 1, 10), strict=True)
    },
    "last id beside a table": (OUTSIDE, beside_a_lookup("index", 2, of_last_id)),
    "table that is looked up otherwise": (
        r"no example shows .* looked up among 2",
        lambda ids, p, types: decoded(ids, p) + torch.arange(2.0).take(types)[..., None],
    ),
    "NaN": (
        r"no example shows whether .*: the example gives NaN",
        lambda ids, p, types: decoded(ids, p) + (ids / ids - 1)[..., None] / 0,
    ),
    **{name: ("positions are made in the graph", decoder(change)) for name, change in COUNTED.items()},
    **{
        name: (r"computes with \w+, a number made from the length", decoder(change, of_positions=True))
        for name, change in LENGTH_AS_A_NUMBER.items()
    },
}


def test_what_relates_tokens_beside_the_sites_or_counts_them_otherwise_is_refused(capture_each, inputs):
    ids, positions = inputs()
    given = ids.clamp(max=30), positions, torch.zeros_like(ids)
    found = capture_each([form for _, form in REFUSED.values()], given, PASSES)
    for (name, (reason, _)), refusal in zip(REFUSED.items(), found, strict=True):
        assert refusal is not None, f"{name} is not refused"
        assert re.search(reason, str(refusal)) and refusal.node != "output", f"{name}: {refusal}"


def test_what_no_example_can_be_run_of_is_refused(capture, inputs):
    with pytest.raises(UnsupportedAttentionError, match=r"no example shows .* pad fails"):
        capture(decoder(lambda x, _: x + F.pad(x, (0, 0, 40, -40))), inputs(), PASSES)


def test_a_capture_of_fixed_length_is_refused(capture, inputs):
    with pytest.raises(UnsupportedAttentionError, match="captured for exactly 7 tokens"):
        capture(decoded, inputs(tokens=7), PASSES, dynamic=False)


@pytest.mark.parametrize("after", [False, True])
def test_what_is_done_to_each_token_is_let_alone(after, capture, inputs):
    """Also beside a small table, and a number that is given as a tensor."""

    def decode(ids: Tensor, positions: Tensor, types: Tensor, number: Tensor) -> Tensor:
        x = decoded(ids, positions, *TOKEN_WISE.values(), after=after) * number
        x = x + decoded(ids, positions, *OF_POSITIONS.values(), after=after, of_positions=True)
        return x + sum(look_up(EMBED[:rows, :1], types) for look_up in LOOKUPS.values() for rows in (1, 2, 10))

    ids, positions = inputs()
    _, counts = capture(decode, (ids, positions, torch.zeros_like(ids), torch.tensor([2])), PASSES)
    assert counts == [2, 0]


KEEP = [slice(-1, None), slice(-2, -1), slice(None, 1), slice(-5, None), slice(2, 4)]


def test_an_output_of_some_tokens_is_let_alone(capture, inputs):
    capture(lambda ids, positions: [decoded(ids, positions)[:, keep] for keep in KEEP], inputs(), CANONICAL_PASSES)


def test_tokens_that_are_the_only_axis_are_told_apart(capture_each, inputs):
    mixed = decoder(MIXING["running sum"], after=True)
    forms = [
        lambda *given: decoded(*given)[0].mean(-1),
        lambda *given: mixed(*given)[0].mean(-1),
        lambda *given: decoded(*given).mean(),
    ]
    alone, *mixed = capture_each(forms, inputs(batch=1), PASSES)
    assert alone is None and all(OUTSIDE in str(refusal) for refusal in mixed)


def test_a_size_that_is_no_token_count_is_what_it_was_when_captured(capture_each, inputs):
    wanted = torch.zeros(5)
    torch._dynamo.mark_dynamic(wanted, 0)
    forms = [
        lambda ids, positions, wanted, change=change: decoded(ids, positions, change)[:, -wanted.shape[0] :]
        for change in (TOKEN_WISE["routed by a sort"], MIXING["sorted"])
    ]
    routed, mixed = capture_each(forms, (*inputs(), wanted), PASSES)
    assert routed is None and OUTSIDE in str(mixed)


INDEXED = {
    "embedding": lambda table, index: F.embedding(index, table),
    "index": lambda table, index: table[index],
    "index behind a mask": lambda table, index: table[None].expand(2, -1, -1)[torch.ones(2, dtype=bool), index],
    "index_add": lambda table, index: table.index_add(0, index, torch.ones(2, 4)),
    "index_put": lambda table, index: table.index_put((index,), torch.ones(4)),
    "scatter": lambda table, index: table.scatter(0, index[:, None].expand(2, 4), 1.0),
}


@pytest.mark.parametrize("name", INDEXED)
def test_an_index_out_of_range_is_seen_ahead_of_the_call(name):
    gm = torch.fx.symbolic_trace(INDEXED[name])
    table, index, *calls, output = gm.graph.nodes
    run = partial(evaluate, output, [*calls, output], sizes={})
    run({table: torch.ones(10, 4), index: torch.tensor([9, 0])})
    with pytest.raises(EvaluationError, match="one of 0 to 10 is looked up among 10"):
        run({table: torch.ones(10, 4), index: torch.tensor([10, 0])})


def written(write):
    """A change of a copy in place."""

    def change(x: Tensor, positions: Tensor) -> Tensor:
        y = x.clone()
        write(y)
        return y

    return change


def first_ids(ids: Tensor) -> Tensor:
    ids = ids.clone()
    ids[:, 0] = 1
    return ids


BY_PLACE = {
    "first": written(lambda y: y[:, 0].zero_()),
    "last": written(lambda y: y[:, -1].mul_(2)),
    "last few": written(lambda y: y[:, -3:].add_(1)),
    "one feature": written(lambda y: y[:, 0, 3].zero_()),
    "index_fill": lambda x, p: x.index_fill(1, torch.tensor([0]), 0.0),
    "index_add": lambda x, p: x.index_add(1, torch.tensor([2]), torch.ones(1, 1, WIDTH).expand(x.shape[0], -1, -1)),
    "select_scatter": lambda x, p: x.select_scatter(torch.ones(WIDTH).expand(x.shape[0], -1), 1, 0),
    "flat": lambda x, p: x.reshape(-1, WIDTH).index_fill(0, torch.tensor([0]), 0.0).view_as(x),
}
BY_POSITION = {
    "nothing": lambda x, p: x,
    "from a number on": lambda x, p: torch.where((torch.arange(x.shape[1]) >= 3)[:, None], x, 2 * x),
    "the first of all": lambda x, p: torch.where((torch.arange(x.shape[1]) == 0)[:, None], 0.0, x),
    "the first that is given": lambda x, p: torch.where((p == 0)[..., None], 0.0, x),
    "counted": lambda x, p: x + torch.arange(x.shape[1])[:, None],
    "counted in place": written(lambda y: y.add_(torch.arange(y.shape[1])[:, None])),
    "first feature": written(lambda y: y[..., 0].zero_()),
    "first row": written(lambda y: y[0].zero_()),
    "hidden tokens": lambda x, p: x.masked_fill((p < 2)[..., None], float("-inf")).nan_to_num(neginf=0.0),
    "not a number": lambda x, p: x.masked_fill((p < 2)[..., None], float("nan")).nan_to_num(),
}


def test_contract_7_a_place_in_the_call_is_refused(capture_each, inputs):
    forms = {
        (name, after): decoder(change, after=after) for name, change in BY_PLACE.items() for after in (False, True)
    }
    forms["other ids", False] = lambda ids, positions: decoded(first_ids(ids), positions)
    found = capture_each([*forms.values()], inputs(), CANONICAL_PASSES)
    for name, refusal in zip(forms, found, strict=True):
        assert "depends on a token's place in the input" in str(refusal) and refusal.node, f"{name}: {refusal}"


@pytest.mark.parametrize("after", [False, True])
def test_what_a_position_gives_is_let_alone(after, capture, inputs):
    capture(decoder(*BY_POSITION.values(), after=after, of_positions=True), inputs())
    assert capture(decoder(BY_POSITION["counted"], after=after), inputs(), PASSES)[1] == [1, 1]


def test_positions_that_only_the_mask_sees_do_not_count(capture, inputs):
    def masked(ids: Tensor, positions: Tensor) -> Tensor:
        q, order = F.one_hot(ids, len(EMBED)).float()[:, None], torch.arange(ids.shape[1])
        return F.scaled_dot_product_attention(q, q, q, attn_mask=order[None, :] <= order[:, None])

    capture(masked, inputs(), PASSES)


@pytest.mark.parametrize("dtype", quick([torch.bfloat16, torch.float16], [torch.bfloat16]))
def test_rounding_of_a_deep_model_is_not_taken_for_a_place_in_the_call(dtype, decoder, capture, inputs):
    capture(decoder(layers=4).to(dtype), inputs(), tolerance=0.1)


@torch.library.custom_op("kvpass_tests::product", mutates_args=())
def product(x: Tensor, weight: Tensor) -> Tensor:
    """``x @ weight``, summed in another order for few tokens than for many, as BLAS libraries do."""
    slices = 1 if x.shape[1] >= sum(PIECES) else 4
    return torch.stack([a @ b for a, b in zip(x.chunk(slices, -1), weight.chunk(slices), strict=True)]).sum(0)


@product.register_fake
def _(x: Tensor, weight: Tensor) -> Tensor:
    return x @ weight


def test_a_choice_that_rounding_decides_is_the_same_in_a_piece(capture, inputs):
    def choose(x: Tensor, _: Tensor) -> Tensor:
        score = product(x, weight)
        tied = (x.double() @ weight.double()).float()
        return torch.where(score > tied, 2 * x, x)

    weight = WEIGHTS[0, :, :, 0]
    capture(decoder(choose), inputs())
