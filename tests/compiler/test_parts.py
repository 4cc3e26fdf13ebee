"""Graphs compiled in parts: as many parts for any depth, and the same results as the whole graph."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import kvpass
from compiled_models import in_pieces
from kvpass.compiler import backend
from numeric_checks import assert_close
from pairwise import quick
from small_decoders import DIM, WIDTH, SmallDecoder
from tiny_models import FAMILIES, in_session, random_ids, raw, tiny_model

UNLIMITED = 10**6
MOST = {"diffllama": 6, "cohere2": 5, "smollm3": 5, "deepseek_v3": 5, "llama4": 5}
"""Distinct parts of families with more than four, such as two attention ops in a layer, or layers without RoPE."""


@pytest.mark.parametrize("family", quick(FAMILIES, ["diffllama"]))
def test_parts_give_the_logits_of_the_uncompiled_model(family):
    """Of other families in every run: test_prefill_blocks.py."""
    model = tiny_model(family, layers=2)
    fast = kvpass.compile(model, budget=UNLIMITED, window=8, backend="eager", compile_regions=True)
    text = random_ids(2, 68)
    with torch.no_grad():
        assert_close("logits", in_pieces(fast, text, [61, 1, 1, 5])[0], model(text).logits, atol=1e-4)
    parts = {record.phase: record.parts for record in fast.report().compiled}
    assert sorted(parts) == ["decode", "extend", "prefill"]
    assert all(2 < count <= MOST.get(family, 4) for count in parts.values())


def test_a_deep_model_has_as_many_parts_as_one_of_two_layers():
    counts = []
    for layers in (2, 3):
        model = tiny_model("llama", layers=layers)
        fast = kvpass.compile(model, budget=32, window=8, backend="eager", compile_regions=True)
        fast(random_ids(1, 1, seed=1), past_key_values=fast(random_ids(1, 50)).past_key_values)
        counts.append({record.phase: (record.sites, record.parts) for record in fast.report().compiled})
    assert counts == [{"prefill": (layers, 4), "decode": (layers, 3)} for layers in (2, 3)]


class Adding(SmallDecoder):
    """A decoder whose layers add to one tensor in place."""

    def layer(self, x: Tensor, positions: Tensor | None, i: int) -> Tensor:
        x += self.of_attention(x, positions, i)
        return x


@pytest.mark.parametrize("compiler", quick(["eager", "inductor"], ["eager"]))
@pytest.mark.parametrize("policy", quick(["full", "lava"], ["full"]))
def test_a_decoder_that_adds_in_place_runs_over_the_prompt_at_once_and_answers_the_same(monkeypatch, policy, compiler):
    records, make = [], backend.CompileRecord
    monkeypatch.setattr(backend, "CompileRecord", lambda **given: records.append(make(**given)) or records[-1])
    options = {"policy": policy, "compiler": compiler, "compile_regions": True}
    if policy == "lava":
        options |= {"budget": 12, "window": 4}
    ids, found = random_ids(2, 40), []
    for model in (SmallDecoder(layers=3), Adding(layers=3)):
        found.append(in_session(raw(model, options), [30, 5, 1, 1, 1, 1, 1], ids)[0])
    if policy == "full":
        assert_close("of the module", found[1], model(ids), atol=1e-5)
    assert_close("in place", found[1], found[0], atol=1e-5)
    said = [record.not_in_blocks.split(" ", 1)[-1] for record in records if record.phase == "prefill"]
    assert said == ["", "writes into a tensor of another part"]
    assert all(record.parts > 1 for record in records)


class Summing(nn.Module):
    """A decoder whose last call writes into a tensor that an earlier part has made, and that it returns or is given."""

    def __init__(self, *, returns: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.returns, self.layers = returns, nn.ModuleList(nn.Linear(16, 48) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor | None:
        total = x * 2 if self.returns else x
        for layer in self.layers:
            q, k, v = (y.unflatten(-1, (2, 8)).transpose(1, 2) for y in layer(x).chunk(3, -1))
            total.add_(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return total if self.returns else None


@pytest.mark.parametrize("compiler", quick(["eager", "inductor"], ["eager"]))
@pytest.mark.parametrize("returns", [True, False])
def test_a_part_without_results_that_writes_into_an_input_runs(returns, compiler):
    model, x = Summing(returns=returns), torch.randn(2, 36, 16)
    compiled = raw(model, {"policy": "full", "compiler": compiler, "compile_regions": True})

    def summed(decoder: Any, x: Tensor) -> Tensor:
        total = decoder(x := x.clone())
        return total if returns else x

    with torch.no_grad(), kvpass.session():
        found = torch.cat([summed(compiled, piece) for piece in x.split([30, 5, 1], 1)], 1)
        assert_close("sum", found, summed(model, x), atol=1e-5)


class SharingMemory(SmallDecoder):
    """A decoder that adds in place to a tensor of which another part has made a view, which is read afterwards."""

    def layer(self, x: Tensor, positions: Tensor | None, i: int) -> Tensor:
        view = x.view(x.shape[0], -1, WIDTH)
        x += self.of_attention(x, positions, i)
        return x.cos() + view


class WritingIntoValues(SmallDecoder):
    """A decoder whose values are a view of the tensor to which it adds in place."""

    def layer(self, x: Tensor, positions: Tensor | None, i: int) -> Tensor:
        keys, values = (y.unflatten(-1, (-1, DIM)).transpose(1, 2) for y in (x.cos(), x))
        x += self.attend(keys, keys, values, i).transpose(1, 2).flatten(2)
        return x


REFUSED = {
    SharingMemory: "writes into memory that two tensors share",
    WritingIntoValues: "writes into queries, keys or values",
}


@pytest.mark.parametrize("decoder", REFUSED)
def test_a_write_into_what_is_kept_or_read_elsewhere_is_refused(decoder):
    compiled = raw(decoder(), {"policy": "full", "compiler": "eager"})
    with pytest.raises(ValueError, match=REFUSED[decoder]), torch.no_grad(), kvpass.session():
        compiled(random_ids(1, 30))


@pytest.mark.parametrize("given", ["yes", 2, 1, None])
def test_an_unknown_value_is_refused(given):
    with pytest.raises(ValueError, match=f"compile_regions={given!r}: must be one of True, False, auto"):
        kvpass.compile(tiny_model("llama"), budget=40, compile_regions=given)
