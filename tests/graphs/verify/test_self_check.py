"""A text in pieces that is not the whole text is refused: tokens that see others beside the sites, places in a call."""

import itertools
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kvpass.errors import UnsupportedAttentionError
from kvpass.graphs.find.sdpa import find_attention_pass
from kvpass.graphs.passes import CANONICAL_PASSES
from kvpass.graphs.verify.examples import EvaluationError, evaluate
from kvpass.graphs.verify.self_check import PIECES, self_check_pass
from pairwise import quick, quick_rows

PASSES = [find_attention_pass, self_check_pass]
WIDTH = 32
WEIGHTS = torch.randn(3, WIDTH, WIDTH, 3, generator=torch.Generator().manual_seed(0))

MIXING = {
    "padded by one": lambda x, ids: x + F.pad(x, (0, 0, 1, -1)),
    "padded by forty": lambda x, ids: x + F.pad(x, (0, 0, 40, -40)),
    "cut and joined": lambda x, ids: x + torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], 1),
    "cut and joined far away": lambda x, ids: x + torch.cat([torch.zeros_like(x[:, :9]), x[:, :-9]], 1),
    "roll": lambda x, ids: x + x.roll(1, 1),
    "flip": lambda x, ids: x + x.flip(1),
    "mean": lambda x, ids: x + x.mean(1, keepdim=True),
    "running sum": lambda x, ids: x + x.cumsum(1),
    "first token": lambda x, ids: x + x[:, :1],
    "last token": lambda x, ids: x + x[:, -1:],
    "softmax over tokens": lambda x, ids: x + x.softmax(1),
    "norm over tokens": lambda x, ids: F.instance_norm(x.transpose(1, 2)).transpose(1, 2),
    "window average": lambda x, ids: F.avg_pool1d(F.pad(x.transpose(1, 2), (2, 0)), 3, 1).transpose(1, 2),
    "conv2d": lambda x, ids: F.conv2d(F.pad(x[:, None], (0, 0, 2, 0)), WEIGHTS[:1, :1, :3, :1])[:, 0],
    "sorted": lambda x, ids: x.sort(1).values,
    "previous ids": lambda x, ids: x + F.one_hot(torch.cat([ids[:, :1], ids[:, :-1]], 1), WIDTH + 18)[..., :WIDTH],
    "written in place": lambda x, ids: shift_in_place(x.clone()),
    "einsum": lambda x, ids: x + torch.einsum("btd,bsd->btd", x, x),
    "nansum": lambda x, ids: x + x.nansum(1, keepdim=True),
    "scaled by tokens": lambda x, ids: F.normalize(x, dim=1),
    "variance": lambda x, ids: x + torch.var_mean(x, 1, keepdim=True)[0],
    "frequencies": lambda x, ids: torch.fft.fft(x, dim=1).real,
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
}


MIXED = [*((name, "before") for name in MIXING), ("cut and joined", "after"), ("mean", "after")]
IN_EVERY_RUN = [
    *("padded by one", "padded by forty", "cut and joined far away", "running sum", "last token"),
    *("sorted", "written in place", "scaled by tokens"),
]
MIXED_IN_EVERY_RUN = [*((name, "before") for name in IN_EVERY_RUN), ("mean", "after")]


@pytest.fixture
def decoder(decoder):
    """Of one layer, unless a test asks for more."""
    return partial(decoder, layers=1)


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


class Mixed(nn.Module):
    """A decoder with something between its embedding and its layers, or between its layers and its output.

    It is a function of activations and ids, or positions where they are what counts.
    """

    def __init__(self, decoder, mix, place, of_positions=False) -> None:
        super().__init__()
        self.decoder, self.mix, self.place, self.of_positions = decoder, mix, place, of_positions

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        x, given = self.decoder.embed(ids), positions if self.of_positions else ids
        x = self.mix(x, given) if self.place == "before" else x
        for layer in self.decoder.layers:
            x = x + layer(x, positions)
        return self.mix(x, given) if self.place == "after" else x


@pytest.mark.parametrize(("name", "place"), quick_rows(MIXED, MIXED_IN_EVERY_RUN))
def test_what_relates_tokens_beside_the_sites_is_refused(name, place, decoder, capture, inputs):
    ids, positions = inputs()
    reason = "no example shows .* pad fails" if "forty" in name else "outside of an attention site"
    with pytest.raises(UnsupportedAttentionError, match=reason) as refusal:
        capture(Mixed(decoder(), MIXING[name], place), (ids.clamp(max=30), positions), PASSES)
    assert refusal.value.node != "output"


@pytest.mark.parametrize("tokens", [7, 64])
def test_a_capture_of_fixed_length_is_refused(tokens, decoder, capture, inputs):
    with pytest.raises(UnsupportedAttentionError, match=f"captured for exactly {tokens} tokens"):
        capture(Mixed(decoder(), TOKEN_WISE["gated"], "before"), inputs(tokens=tokens), PASSES, dynamic=False)


TOKEN_WISE_IN_EVERY_RUN = [("gated", "before"), ("flattened", "after"), ("routed", "before"), ("by id", "after")]


@pytest.mark.parametrize(
    ("name", "place"), quick_rows([*itertools.product(TOKEN_WISE, ["before", "after"])], TOKEN_WISE_IN_EVERY_RUN)
)
def test_what_is_done_to_each_token_is_let_alone(name, place, decoder, capture, inputs):
    _, counts = capture(Mixed(decoder(), TOKEN_WISE[name], place), inputs(), PASSES)
    assert counts == [1, 0]


KEEP = [slice(-1, None), slice(-2, -1), slice(None, 1), slice(-5, None), slice(2, 4)]


@pytest.mark.parametrize("keep", quick(KEEP, KEEP[1:2]))
def test_an_output_of_some_tokens_is_let_alone(keep, decoder, capture, inputs):
    model = decoder()
    capture(lambda ids, positions: model(ids, positions)[:, keep], inputs(), CANONICAL_PASSES)


def test_tokens_that_are_the_only_axis_are_told_apart(decoder, capture, inputs):
    model = decoder()
    given = tuple(value[:1] for value in inputs())
    capture(lambda ids, positions: model(ids, positions)[0].mean(-1), given, PASSES)
    mixed = Mixed(model, MIXING["running sum"], "after")
    for over in (lambda ids, positions: mixed(ids, positions)[0].mean(-1), lambda *given: model(*given).mean()):
        with pytest.raises(UnsupportedAttentionError, match="outside of an attention site"):
            capture(over, given, PASSES)


def test_a_size_that_is_no_token_count_is_what_it_was_when_captured(decoder, capture, inputs):
    wanted = torch.zeros(5)
    torch._dynamo.mark_dynamic(wanted, 0)

    def last(ids: Tensor, positions: Tensor, wanted: Tensor) -> Tensor:
        return model(ids, positions)[:, -wanted.shape[0] :]

    model = Mixed(decoder(), TOKEN_WISE["routed by a sort"], "before")
    capture(last, (*inputs(), wanted), PASSES)
    model.mix = MIXING["sorted"]
    with pytest.raises(UnsupportedAttentionError, match="outside of an attention site"):
        capture(last, (*inputs(), wanted), PASSES)


@pytest.mark.parametrize("number", quick([2.0, 2, [2], True], [[2]]), ids=str)
def test_a_number_given_as_a_tensor_is_let_alone(number, decoder, capture, inputs):
    model, number = decoder(), torch.tensor(number)
    capture(lambda ids, positions, number: model(ids, positions) * number, (*inputs(), number), PASSES)
    with pytest.raises(UnsupportedAttentionError, match="outside of an attention site"):
        mixed = Mixed(decoder(), MIXING["mean"], "before")
        capture(lambda ids, positions, number: mixed(ids, positions) * number, (*inputs(), number), PASSES)


LOOKUPS = {
    "embedding": lambda table, types: F.embedding(types, table),
    "index": lambda table, types: table[types],
    "index_select": lambda table, types: table.index_select(0, types.flatten()).view(*types.shape, -1),
}


TRIED = [*itertools.product(LOOKUPS, [1, 2, 3, 10], ["mean", "last token", "sorted"])]


@pytest.mark.parametrize(
    ("lookup", "rows", "mixing"),
    quick_rows(TRIED, [("embedding", 2, "mean"), ("index", 1, "sorted")]),
)
def test_what_relates_tokens_is_seen_beside_a_small_table(lookup, rows, mixing, decoder, capture, inputs):
    model, table = Mixed(decoder(), MIXING[mixing], "before"), torch.randn(rows, 1)

    def typed(ids: Tensor, positions: Tensor, types: Tensor) -> Tensor:
        return model(ids, positions) + LOOKUPS[lookup](table, types)

    given = (*inputs(), torch.zeros_like(inputs()[0]))
    with pytest.raises(UnsupportedAttentionError, match="outside of an attention site"):
        capture(typed, given, PASSES)
    model.mix = TOKEN_WISE["routed"]
    capture(typed, given, PASSES)
    model.mix = lambda x, ids: x + table[ids[:, -1:] % rows] - table[ids % rows]
    if rows > 1:
        with pytest.raises(UnsupportedAttentionError, match="outside of an attention site"):
            capture(typed, given, PASSES)


def test_a_small_table_that_is_looked_up_otherwise_is_refused(decoder, capture, inputs):
    model, table = decoder(), torch.randn(2)

    def typed(ids: Tensor, positions: Tensor, types: Tensor) -> Tensor:
        return model(ids, positions) + table.take(types)[..., None]

    with pytest.raises(UnsupportedAttentionError, match=r"no example shows .* looked up among 2"):
        capture(typed, (*inputs(), torch.zeros_like(inputs()[0])), PASSES)


INDEXED = {
    "embedding": lambda table, index: F.embedding(index, table),
    "index": lambda table, index: table[index],
    "index of a later axis": lambda table, index: table.T[:, index],
    "index behind a mask": lambda table, index: table[None].expand(2, -1, -1)[torch.ones(2, dtype=bool), index],
    "index_select": lambda table, index: table.index_select(0, index),
    "index_add": lambda table, index: table.index_add(0, index, torch.ones(2, 4)),
    "index_put": lambda table, index: table.index_put((index,), torch.ones(4)),
    "gather": lambda table, index: table.gather(0, index[:, None].expand(2, 4)),
    "scatter": lambda table, index: table.scatter(0, index[:, None].expand(2, 4), 1.0),
    "take": lambda table, index: table.T[0].contiguous().take(index),
}


@pytest.mark.parametrize("name", INDEXED)
def test_an_index_out_of_range_is_seen_ahead_of_the_call(name):
    gm = torch.fx.symbolic_trace(INDEXED[name])
    table, index, *calls, output = gm.graph.nodes
    run = partial(evaluate, output, [*calls, output], sizes={})
    run({table: torch.ones(10, 4), index: torch.tensor([9, 0])})
    with pytest.raises(EvaluationError, match="one of 0 to 10 is looked up among 10"):
        run({table: torch.ones(10, 4), index: torch.tensor([10, 0])})


def test_what_no_example_shows_is_refused(decoder, capture, inputs):
    model = decoder()

    def odd(ids: Tensor, positions: Tensor) -> Tensor:
        return model(ids, positions) + (ids / ids - 1)[..., None] / 0

    with pytest.raises(UnsupportedAttentionError, match=r"no example shows whether .*: the example gives NaN"):
        capture(odd, inputs(), PASSES)


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
    "by narrow": written(lambda y: y.narrow(1, 0, 1).zero_()),
    "assigned": written(lambda y: y.__setitem__((slice(None), 0), 0.0)),
    "first half": written(lambda y: y[:, : y.shape[1] // 2].mul_(2)),
    "every other": written(lambda y: y[:, ::2].mul_(2)),
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


PLACES_IN_EVERY_RUN = [("first", "before"), ("last few", "after"), ("one feature", "before"), ("flat", "after")]
PLACES_IN_EVERY_RUN += [("select_scatter", "before")]


@pytest.mark.parametrize(
    ("name", "place"), quick_rows([*itertools.product(BY_PLACE, ["before", "after"])], PLACES_IN_EVERY_RUN)
)
def test_contract_7_a_place_in_the_call_is_refused(name, place, decoder, capture, inputs):
    with pytest.raises(UnsupportedAttentionError, match="depends on a token's place in the input") as refusal:
        capture(Mixed(decoder(), BY_PLACE[name], place, True), inputs())
    assert refusal.value.node


def test_contract_7_ids_that_are_replaced_are_refused(decoder, capture, inputs):
    model = decoder()
    with pytest.raises(UnsupportedAttentionError, match="depends on a token's place in the input"):
        capture(lambda ids, positions: model(first_ids(ids), positions), inputs())


POSITIONS_IN_EVERY_RUN = [("the first that is given", "after"), ("first feature", "before"), ("not a number", "after")]


@pytest.mark.parametrize(
    ("name", "place"), quick_rows([*itertools.product(BY_POSITION, ["before", "after"])], POSITIONS_IN_EVERY_RUN)
)
def test_what_a_position_gives_is_let_alone(name, place, decoder, capture, inputs):
    capture(Mixed(decoder(), BY_POSITION[name], place, True), inputs())


@pytest.mark.parametrize("dtype", quick([torch.bfloat16, torch.float16], [torch.bfloat16]))
def test_rounding_of_a_deep_model_is_not_taken_for_a_place_in_the_call(dtype, decoder, capture, inputs):
    model = Mixed(decoder(layers=4).to(dtype), lambda x, p: x, "before")
    capture(model, inputs(), tolerance=0.1)


@torch.library.custom_op("kvpass_tests::product", mutates_args=())
def product(x: Tensor, weight: Tensor) -> Tensor:
    """``x @ weight``, summed in another order for few tokens than for many, as BLAS libraries do."""
    slices = 1 if x.shape[1] >= sum(PIECES) else 4
    return torch.stack([a @ b for a, b in zip(x.chunk(slices, -1), weight.chunk(slices), strict=True)]).sum(0)


@product.register_fake
def _(x: Tensor, weight: Tensor) -> Tensor:
    return x @ weight


def test_a_choice_that_rounding_decides_is_the_same_in_a_piece(decoder, capture, inputs):
    def choose(x: Tensor, _: Tensor) -> Tensor:
        score = product(x, weight)
        tied = (x.double() @ weight.double()).float()
        return torch.where(score > tied, 2 * x, x)

    weight = WEIGHTS[0, :, :, 0]
    capture(Mixed(decoder(), choose, "before"), inputs())
