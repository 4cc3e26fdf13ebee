"""The page of experiments: every part is there, figures are those of the answers, and nothing is measured twice."""

from __future__ import annotations

import json
import math

import pytest
import torch
from rich.console import Console

from kvpass import builtin, plan
from kvpass.eval.bench import measure as bench_measure
from kvpass.eval.experiments import results
from kvpass.eval.experiments.output_loss import PolicyLoss, measure_output_loss, record_attention
from kvpass.eval.experiments.results import Results, ResultsSettings
from kvpass.eval.needle.text import sample
from kvpass.eval.policy_spec import PolicySpec, parse_policies


@pytest.fixture(scope="module")
def loaded():
    return builtin.load()


def prompt(tokenizer, seed=0, tokens=160):
    text = sample("multiquery", tokens, seed)
    return tokenizer(text.ask(text.questions[0]), return_tensors="pt").input_ids


@pytest.mark.parametrize("policy", ["snapkv", "criticalkv"])
def test_output_loss_is_what_masking_the_evicted_entries_changes(loaded, policy):
    """Against softmax attention written out, with the entries that ``plan`` evicts masked."""
    model, tokenizer = loaded
    ids = prompt(tokenizer)
    spec = PolicySpec(policy, (("window", 8),))
    (found,) = measure_output_loss(model, [ids], [spec], [0.2])
    layers = record_attention(model, ids)
    columns = [torch.stack(column) for column in zip(*layers, strict=True)]
    q, k, v = (column[:, :, :, :-1] for column in columns)
    weights = [layer.self_attn.o_proj.weight for layer in model.model.layers]
    keep = plan(spec.resolve(), q, k, v, budget=0.2, output_weights=weights).keep
    for layer, (q, k, v) in enumerate(layers):
        logits = (q[0, :, -1:].double() @ k[0].double().mT)[:, 0] / math.sqrt(q.shape[-1])
        hidden = torch.cat([~keep[layer, 0], torch.zeros(keep.shape[2], 1, dtype=torch.bool)], 1)
        full, kept = logits.softmax(-1), logits.masked_fill(hidden, -math.inf).softmax(-1)
        moved = torch.einsum("hn,hnd->hd", full - kept, v[0].double()).flatten()
        loss = (weights[layer].double() @ moved).abs().sum()
        assert found.losses[0, layer].item() == pytest.approx(loss.item(), rel=1e-5)


def test_recording_leaves_the_model_as_it_was(loaded):
    model, tokenizer = loaded
    ids = prompt(tokenizer)
    before, name = model(ids).logits, model.config._attn_implementation
    assert len(record_attention(model, ids)) == model.config.num_hidden_layers
    assert model.config._attn_implementation == name
    assert torch.equal(model(ids).logits, before)


def test_a_paired_difference_has_the_interval_of_its_spread():
    ours = PolicyLoss("a", 0.1, torch.tensor([[1.0, 2.0], [2.0, 2.0], [5.0, 1.0]]))
    theirs = PolicyLoss("b", 0.1, torch.tensor([[2.0, 3.0], [3.0, 4.0], [4.0, 1.0]]))
    mean, half, share = ours.less_than(theirs)  # differences 2, 3, -1
    assert mean == pytest.approx(4 / 3)
    assert half == pytest.approx(1.96 * math.sqrt(13 / 3) / math.sqrt(3))
    assert share == pytest.approx(2 / 3)


def settings(tmp_path, micro):
    return ResultsSettings(
        output=tmp_path / "docs",
        work=tmp_path / "work",
        samples=4,
        length=160,
        policies=parse_policies("full,streaming_llm"),
        grid_samples=5,
        grid_length=256,
        loss_prompts=2,
        bench_model=micro,
        bench_context=200,
        repeats=1,
        backend="eager",
    )


@pytest.mark.exhaustive  # fifteen seconds; its parts are tested above and in test_curve.py, test_bench.py
def test_the_page_has_every_part_and_is_not_measured_twice(micro, tmp_path, monkeypatch):
    monkeypatch.setitem(bench_measure._COPY_BYTES, "cpu", 2**22)
    monkeypatch.setattr(results, "GRID_POLICIES", ("full", "streaming_llm"))
    monkeypatch.setattr(results, "GRID_BUDGET", 0.3)
    console = Console(quiet=True)
    page = Results(settings(tmp_path, micro)).run(console)
    text = page.read_text()
    for heading in ("Accuracy against budget", "Needle by length and depth", "Layer attention output loss", "costs"):
        assert heading in text
    for picture in ("curve.png", "needle_grid.png"):
        assert f"({picture})" in text and (page.parent / picture).read_bytes().startswith(b"\x89PNG")
    answered = [json.loads(line) for line in (tmp_path / "work" / "curve" / "samples.jsonl").open()]
    right = [r["score"] for r in answered if (r["label"], r["question"]["scope"]) == ("full", "prompt")]
    assert f"| `full` | {100 * sum(right) / 4:.1f} (" in text
    assert "Mean over these budgets, scope `context`:" in text

    def again(*_):
        raise AssertionError("measured twice")

    monkeypatch.setattr(results.Bench, "run", again)
    monkeypatch.setattr("kvpass.eval.runner.Runner.greedy", again)
    assert Results(settings(tmp_path, micro)).run(console).read_text() == text
