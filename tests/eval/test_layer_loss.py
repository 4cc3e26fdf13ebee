"""scripts/layer-loss: what layers lose, against the uncompressed model in which one layer sees only what was kept."""

from __future__ import annotations

import json
import runpy
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from transformers.modeling_layers import GradientCheckpointingLayer

import kvpass
from kvpass.policies import resolve
from masked_oracle import MaskedOracle, kept_columns
from numeric_checks import assert_close
from pairwise import quick
from recorded_calls import inputs_and_outputs
from tiny_models import random_ids, tiny_model

pytestmark = pytest.mark.usefixtures("captures_kept")
SCRIPT = runpy.run_path(str(Path(__file__).resolve().parents[2] / "scripts" / "layer-loss"))
CONDITIONS = [("full", None), (resolve("lava", window=4), 12), (resolve("snapkv", window=4), 20)]


def outputs_of(oracle, ids, keep, new):
    """Outputs of attention and of the layer, of the last ``new`` tokens, for each layer."""
    layers = [module for module in oracle.model.modules() if isinstance(module, GradientCheckpointingLayer)]
    attentions = [layer.self_attn if hasattr(layer, "self_attn") else layer.attn for layer in layers]
    with inputs_and_outputs([*attentions, *layers]) as found:
        oracle.logits(ids, torch.ones_like(ids), keep)
    found = [output[0] if isinstance(output, tuple) else output for _, output in found]
    return [[output[:, -new:] for output in found[first : first + 2]] for first in range(0, len(found), 2)]


@pytest.mark.parametrize("family", quick(["llama", "gpt2"], ["llama"]))
def test_losses_are_those_of_the_model_in_which_one_layer_sees_only_what_was_kept(family):
    model, prompt, following = tiny_model(family, layers=2), random_ids(1, 60), random_ids(1, 5, seed=3)
    fast = kvpass.compile(model, policy="full", backend="eager")
    full, *others = fast.compress_each(prompt, conditions=CONDITIONS)
    ids, oracle = torch.cat([prompt, following], 1), MaskedOracle(model)
    everything = kept_columns(full, 60)
    assert bool(everything.all())
    before = outputs_of(oracle, ids, everything, 5)
    for small in others:
        kept, expected = kept_columns(small, 60), []
        for layer in range(kept.shape[1]):
            seen = everything.clone()
            seen[:, layer] = kept[:, layer]
            after = outputs_of(oracle, ids, seen, 5)[layer]
            changes = [float((x - y).abs().sum() / y.abs().sum()) for x, y in zip(after, before[layer], strict=True)]
            expected.append(changes)
        found = SCRIPT["layer_losses"](model, full, small, following)
        assert_close("losses", found, torch.tensor(expected).T, atol=1e-5)
        assert bool((found > 1e-3).all())
    assert float(SCRIPT["layer_losses"](model, full, full, following).max()) == 0


@pytest.mark.parametrize(("family", "policy"), [("gemma2", "snapkv"), ("llama", "tova")])
def test_what_it_cannot_measure_is_said(family, policy):
    model = tiny_model(family, layers=2)
    fast = kvpass.compile(model, policy="full", backend="eager")
    full, small = fast.compress_each(random_ids(1, 60), conditions=[("full", None), (policy, 40)])
    with pytest.raises(ValueError, match="layers all share the budget, and policies that only append"):
        SCRIPT["layer_losses"](model, full, small, random_ids(1, 2))


@pytest.mark.exhaustive
def test_the_command_writes_losses_of_each_layer(tmp_path, capsys):
    given = {"policies": "lava:window=8", "budgets": "0.5,0.25", "length": 200, "samples": 1}
    SCRIPT["main"](Namespace(model="builtin", json=tmp_path / "losses.json", **given))
    rows = json.loads((tmp_path / "losses.json").read_text())["rows"]
    assert [row["budget"] for row in rows] == [0.5, 0.25]
    assert all(len(row["attention"]) == len(row["hidden"]) == 6 for row in rows)
    assert sum(rows[0]["hidden"]) < sum(rows[1]["hidden"])
    said = capsys.readouterr().out
    assert f"{100 * rows[1]['attention'][5]:.1f}, {100 * rows[1]['hidden'][5]:.1f}" in said
