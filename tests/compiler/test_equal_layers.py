"""Layers of equal code are traced once; one that is not equal, or no longer, is another one in the graph too."""

import pytest
import torch
from torch import nn

import kvpass
from kvpass.torch_compat import REPEATS_LAYERS
from tiny_models import random_ids, tiny_model

LAYERS = 3
IDS = random_ids(1, 40)


def compiled(model):
    return kvpass.compile(model, policy="full", backend="eager")


def scale(layer):
    layer.self_attn.scaling *= 3


class Twice(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def other_class(layer):
    layer.mlp.up_proj.__class__ = Twice


def test_a_layer_that_is_another_one_when_compiled_and_one_that_is_changed_after_a_call():
    """The second one's graph was that of another layer."""
    model = tiny_model("llama", layers=LAYERS)
    plain = model(IDS).logits
    other_class(model.model.layers[0])
    expected, fast = model(IDS).logits, compiled(model)
    assert not torch.allclose(expected, plain, atol=1e-3)
    torch.testing.assert_close(fast(IDS).logits, expected)
    for one in (model, fast):
        scale(one.model.layers[2])
    assert not torch.allclose(model(IDS).logits, expected, atol=1e-3)
    torch.testing.assert_close(fast(IDS).logits, model(IDS).logits)


@pytest.mark.skipif(not REPEATS_LAYERS, reason="this torch traces every layer")
def test_equal_layers_are_traced_once(tmp_path, monkeypatch):
    monkeypatch.setenv("KVPASS_DUMP", str(tmp_path))
    compiled(tiny_model("llama", layers=LAYERS))(IDS)
    (captured,) = tmp_path.glob("capture.00.distinct.00.*before.txt")
    assert captured.read_text().count("invoke_subgraph(") == 1
    (written,) = tmp_path.glob("capture.00.00.*.after.txt")
    assert "invoke_subgraph(" not in written.read_text()
    assert all(f"layers_modules_{place}_modules_mlp" in written.read_text() for place in range(LAYERS))
