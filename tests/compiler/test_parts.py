"""Graphs compiled in parts: as many parts for any depth, and the same results as the whole graph."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import kvpass
from kvpass.compiler import backend
from numeric_checks import assert_close
from pairwise import quick
from tiny_models import FAMILIES, random_ids, step_logits, tiny_model

UNLIMITED = 10**6
MOST = {"diffllama": 6, "cohere2": 5, "smollm3": 5, "deepseek_v3": 5, "llama4": 5}
"""Distinct parts of families with more than four, such as two attention ops in a layer, or layers without RoPE."""


@pytest.mark.parametrize("family", quick(FAMILIES, ["diffllama"]))
def test_parts_give_the_logits_of_the_uncompiled_model(family):
    """Of other families in every run: test_prefill_blocks.py."""
    model = tiny_model(family, layers=2)
    fast = kvpass.compile(model, budget=UNLIMITED, window=8, backend="eager", compile_regions=True)
    ids, new = random_ids(2, 61), random_ids(2, 7, seed=1)
    with torch.no_grad():
        assert_close("logits", step_logits(fast, ids, new), model(torch.cat([ids, new], 1)).logits, atol=1e-4)
    parts = {record.phase: record.parts for record in fast.report().compiled}
    assert sorted(parts) == ["decode", "extend", "prefill"]
    assert all(2 < count <= MOST.get(family, 4) for count in parts.values())


def test_a_deep_model_has_as_many_parts_as_one_of_two_layers():
    counts = []
    for layers in (2, 4):
        fast = kvpass.compile(
            tiny_model("llama", layers=layers), budget=32, window=8, backend="eager", compile_regions=True
        )
        step_logits(fast, random_ids(1, 50), random_ids(1, 7, seed=1))
        counts.append({record.phase: (record.sites, record.parts) for record in fast.report().compiled})
    assert counts == [{"prefill": (layers, 4), "decode": (layers, 3), "extend": (layers, 3)} for layers in (2, 4)]


@pytest.mark.exhaustive  # of one layer in every run: test_compile.py
@pytest.mark.parametrize(
    ("regions", "parts"),
    [
        ("auto", {"prefill": 4, "decode": 1, "extend": 3}),
        (True, {"prefill": 4, "decode": 3, "extend": 3}),
        (False, {"prefill": 1, "decode": 1, "extend": 1}),
    ],
)
def test_inductor_compiles_long_prompts_in_parts_and_one_token_of_a_small_model_whole(regions, parts):
    model, ids, new = tiny_model("llama", layers=2), random_ids(2, 61), random_ids(2, 7, seed=1)
    fast = kvpass.compile(model, budget=UNLIMITED, window=8, compile_regions=regions)
    with torch.no_grad():
        assert_close("logits", step_logits(fast, ids, new), model(torch.cat([ids, new], 1)).logits, atol=1e-4)
    assert {record.phase: record.parts for record in fast.report().compiled} == parts
    assert "attention sites rewritten, one graph" in str(fast.report())


class InPlace(nn.Module):
    """A decoder whose layers add to one tensor in place."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.layers = nn.Embedding(64, 16), nn.ModuleList(nn.Linear(16, 48) for _ in range(3))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            q, k, v = (y.unflatten(-1, (2, 8)).transpose(1, 2) for y in layer(x).chunk(3, -1))
            x += F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return x @ self.embedding.weight.T


def test_a_decoder_that_adds_in_place_is_one_graph_and_the_report_of_its_compilation_says_why(monkeypatch):
    records, make = [], backend.CompileRecord
    monkeypatch.setattr(backend, "CompileRecord", lambda **given: records.append(make(**given)) or records[-1])
    model, ids = InPlace(), random_ids(1, 40) % 64
    options = {"policy": "full", "compiler": "eager", "compile_regions": True}
    compiled = torch.compile(model, backend="kvpass", fullgraph=True, dynamic=True, options=options)
    with torch.no_grad(), kvpass.session():
        logits = torch.cat([compiled(ids[:, :30]), *(compiled(ids[:, i : i + 1]) for i in range(30, 40))], 1)
        assert_close("logits", logits, model(ids), atol=1e-5)
    assert {record.parts for record in records} == {1}
    assert all("writes into a tensor of another part" in record.shape for record in records)


@pytest.mark.parametrize("given", ["yes", 2, None])
def test_an_unknown_value_is_refused(given):
    with pytest.raises(ValueError, match=f"compile_regions={given!r}: must be True, False or 'auto'"):
        kvpass.compile(tiny_model("llama"), budget=40, compile_regions=given)
