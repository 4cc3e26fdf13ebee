"""KVPASS_DISABLE_PASSES leaves out graph passes by name."""

from __future__ import annotations

import pytest
import torch

import kvpass
from tiny_models import random_ids, tiny_model


def compiled():
    return kvpass.compile(tiny_model("llama", layers=1), policy="lava", budget=16, window=8, backend="eager")


def test_a_disabled_pass_does_not_run_and_is_not_in_the_report(monkeypatch):
    ids, token = random_ids(1, 40), random_ids(1, 1, seed=3)
    model, other = compiled(), compiled()
    expected = model(token, past_key_values=model(ids).past_key_values).logits
    monkeypatch.setenv("KVPASS_DISABLE_PASSES", "fold_alibi,strip_repeat_kv")
    with pytest.warns(UserWarning, match="results may be wrong"):
        found = other(token, past_key_values=other(ids).past_key_values).logits
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    ran = [{record.name for graph in each.report().compiled for record in graph.passes} for each in (model, other)]
    assert ran[0] - ran[1] == {"fold_alibi", "strip_repeat_kv"}


def test_a_pass_that_does_not_exist_is_refused(monkeypatch):
    monkeypatch.setenv("KVPASS_DISABLE_PASSES", "find_atention")
    with pytest.raises(ValueError, match=r"KVPASS_DISABLE_PASSES: \['find_atention'\] are no passes"):
        compiled()(random_ids(1, 40))
