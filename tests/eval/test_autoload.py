"""How the harness finds the model: entry points, the hook that torch calls (see test_harness_cli), and the import."""

import importlib.metadata
import logging
import subprocess
import sys
import types
from pathlib import Path

import pytest

import kvpass_autoload

pytest.importorskip("lm_eval", reason="needs lm-evaluation-harness: pip install 'kvpass[eval]'")


def run_python(code: str, cwd: Path) -> str:
    """Standard output of ``code`` in a fresh interpreter; fails with its error."""
    result = subprocess.run([sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip() + result.stderr.strip()


@pytest.mark.parametrize(
    ("group", "name", "value"),
    [
        ("torch.backends", "kvpass", "kvpass_autoload:hook"),
        ("lm_eval.models", "kvpass", "kvpass.lm_eval:KVPassLM"),
        ("console_scripts", "kvpass-lm-eval", "kvpass.lm_eval:main"),
    ],
)
def test_the_installed_package_has_the_entry_point(group: str, name: str, value: str) -> None:
    (found,) = importlib.metadata.entry_points(group=group, name=name)
    assert found.value == value
    assert callable(found.load())


def test_torch_alone_is_not_slowed_down_by_kvpass_or_the_harness(tmp_path: Path) -> None:
    code = "import sys, kvpass_autoload; kvpass_autoload.hook(); print({'kvpass', 'lm_eval', 'torch'} & {*sys.modules})"
    assert run_python(code, tmp_path) == "set()"


@pytest.mark.exhaustive
def test_the_import_does_it_where_the_hook_may_not(tmp_path: Path) -> None:
    code = """
import os
os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
import lm_eval, torch
from lm_eval.api.registry import get_model, model_registry
assert "kvpass" not in model_registry
import kvpass.lm_eval
assert get_model("kvpass") is kvpass.lm_eval.KVPassLM
print(get_model("hf").__name__, kvpass.lm_eval.TASKS.joinpath("kvpass_needle.yaml").is_file())
"""
    assert run_python(code, tmp_path) == "HFLM True"


def test_a_harness_that_cannot_be_imported_does_not_break_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What torch calls raises nothing; that torch calls it, test_harness_cli shows."""
    (tmp_path / "models.py").write_text("raise RuntimeError('half installed')")
    harness = types.ModuleType("lm_eval")
    harness.__path__ = [str(tmp_path)]
    monkeypatch.setitem(sys.modules, "lm_eval", harness)
    monkeypatch.delitem(sys.modules, "lm_eval.models", raising=False)
    warned: list[logging.LogRecord] = []
    monkeypatch.setattr(logging.getLogger("kvpass"), "handle", warned.append)
    kvpass_autoload.hook()
    (record,) = warned
    assert record.getMessage() == "lm_eval will not know the model 'kvpass'" and record.exc_info is not None
    assert str(record.exc_info[1]) == "half installed"


def test_the_hook_names_our_model_and_one_of_the_same_name_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    from lm_eval.api.registry import get_model, model_registry
    from lm_eval.models.dummy import DummyLM
    from lm_eval.models.huggingface import HFLM

    from kvpass.lm_eval import KVPassLM

    monkeypatch.delitem(model_registry._objs, "kvpass")
    kvpass_autoload.hook()
    assert get_model("kvpass") is KVPassLM and get_model("hf") is HFLM
    monkeypatch.setitem(model_registry._objs, "kvpass", DummyLM)
    kvpass_autoload.hook()
    assert get_model("kvpass") is DummyLM
