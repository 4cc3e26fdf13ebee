"""The smoke check of the CUDA path, on the CPU with the eager reference."""

from __future__ import annotations

import json
import math

import pytest
import torch

import kvpass
from kvpass.eval.bench import smoke
from kvpass.eval.bench.settings import build, find_model
from kvpass.ops import reference


@pytest.fixture(scope="module")
def model():
    return build(find_model("tiny"), 0, dtype=torch.bfloat16)


@pytest.fixture(autouse=True, scope="module")
def compile_once():
    """Most of the time would go into tracing the same model again."""
    compiled, original = {}, kvpass.compile

    def remembered(model, *, policy, budget, **options):
        if policy not in compiled:
            compiled[policy] = original(model, policy=policy, budget=budget, **options)
        compiled[policy].set_budget(budget)
        return compiled[policy]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kvpass, "compile", remembered)
        yield


@pytest.fixture
def checked(monkeypatch, model):
    monkeypatch.setattr(smoke, "BUDGET", 24)

    def run():
        result, saved = {}, []
        with torch.no_grad():
            smoke.run_checks(
                model, result, lambda: saved.append(json.dumps(result)), prompt=100, window=8, backend="eager"
            )
        assert len(saved) == len(result["checks"])
        return {check["what"]: check for check in result["checks"]}

    return run


def test_a_right_path_passes(checked):
    checks = checked()
    assert list(checks) == [
        "lava, all entries: prompt",
        "lava, all entries: 8 steps",
        "lava, 24 entries: prompt",
        "lava, 24 entries: numbers in 8 steps that are not finite",
        "full, all entries: prompt",
        "full, all entries: 8 steps",
    ]
    assert all(check["ok"] for check in checks.values()), checks
    assert 0 < checks["full, all entries: 8 steps"]["allowed"] < 0.1


@pytest.mark.parametrize("factor", [1.1, math.nan])
def test_wrong_attention_to_the_cache_is_seen(checked, monkeypatch, factor):
    right = reference.attend_cache
    monkeypatch.setattr(reference, "attend_cache", lambda *given: right(*given) * factor)
    checks = checked()
    assert checks["lava, all entries: prompt"]["ok"]
    assert not checks["lava, all entries: 8 steps"]["ok"] and not checks["full, all entries: 8 steps"]["ok"]
    assert checks["lava, 24 entries: numbers in 8 steps that are not finite"]["ok"] is (factor == 1.1)


def test_a_policy_that_fails_is_named_and_the_other_is_checked(checked, monkeypatch):
    right = smoke.kvpass.compile

    def compiled(model, policy, **options):
        if policy == "lava":
            raise RuntimeError("no such kernel\nmore")
        return right(model, policy=policy, **options)

    monkeypatch.setattr(smoke.kvpass, "compile", compiled)
    checks = checked()
    assert not checks["lava: RuntimeError: no such kernel"]["ok"]
    assert checks["full, all entries: 8 steps"]["ok"]


def test_two_layers_have_the_shape_of_8b():
    config = smoke.shape_of_8b().config
    assert (config.num_hidden_layers, config.hidden_size, config.num_key_value_heads) == (2, 4096, 8)
    assert find_model("llama-3.1-8b").config.num_hidden_layers == 32


def test_without_a_gpu_the_command_says_so(tmp_path, capsys):
    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    assert smoke.main(["--json", str(tmp_path / "out.json")]) == 1
    assert "no CUDA device" in capsys.readouterr().err
