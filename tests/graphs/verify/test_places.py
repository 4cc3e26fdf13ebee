"""What a module gives to a token for its place in the call is refused; what it gives for its position is not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from kvpass.errors import UnsupportedAttentionError

WIDTH = 32


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


class Changed(nn.Module):
    """A decoder with a change between its embedding and its layers, or of its logits."""

    def __init__(self, decoder, change, place) -> None:
        super().__init__()
        self.decoder, self.change, self.place = decoder, change, place

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        x = self.decoder.embed(ids)
        x = self.change(x, positions) if self.place == "before" else x
        for layer in self.decoder.layers:
            x = x + layer(x, positions)
        return self.change(x, positions) if self.place == "after" else x


@pytest.mark.parametrize("place", ["before", "after"])
@pytest.mark.parametrize("name", BY_PLACE)
def test_contract_7_a_place_in_the_call_is_refused(name, place, decoder, capture, inputs) -> None:
    with pytest.raises(UnsupportedAttentionError, match="depends on a token's place in the input") as refusal:
        capture(Changed(decoder(), BY_PLACE[name], place), inputs())
    assert refusal.value.node


@pytest.mark.parametrize("name", ["first", "index_add"])
def test_a_capture_of_fixed_length_is_refused_too(name, decoder, capture, inputs) -> None:
    with pytest.raises(UnsupportedAttentionError, match="depends on a token's place in the input"):
        capture(Changed(decoder(), BY_PLACE[name], "before"), inputs(), dynamic=False)


def test_contract_7_ids_that_are_replaced_are_refused(decoder, capture, inputs) -> None:
    model = decoder()
    with pytest.raises(UnsupportedAttentionError, match="depends on a token's place in the input"):
        capture(lambda ids, positions: model(first_ids(ids), positions), inputs())


@pytest.mark.parametrize("place", ["before", "after"])
@pytest.mark.parametrize("name", BY_POSITION)
def test_what_a_position_gives_is_let_alone(name, place, decoder, capture, inputs) -> None:
    capture(Changed(decoder(), BY_POSITION[name], place), inputs())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounding_is_no_place(dtype, decoder, capture, inputs) -> None:
    model = Changed(decoder(layers=12).to(dtype), lambda x, p: x, "before")
    capture(model, inputs(), tolerance=0.1)
