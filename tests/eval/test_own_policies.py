"""A policy of the user's own, named by its module, in every command; an edited one never finds its old answers."""

import importlib
import sys
from importlib.metadata import EntryPoint
from types import SimpleNamespace

import pytest

import kvpass
import kvpass.policies
from compiled_models import compiled_apart
from kvpass.eval.environment import policy_digest
from kvpass.eval.options import EvalOptions
from kvpass.eval.policy_spec import parse_policies
from kvpass.eval.run import Evaluation
from kvpass.policies import from_spec, installed_policies, resolve
from tiny_models import random_ids

SOURCE = """
from dataclasses import dataclass
from typing import ClassVar
import kvpass

@dataclass(frozen=True, kw_only=True)
class Latest(kvpass.Policy):
    name: ClassVar[str] = "latest"
    sign: int = 1

    def score(self, obs):
        return self.sign * obs.keys[:, :, : obs.evictable].float().norm(dim=-1)
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Name of a module in the working directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_policies.py").write_text(SOURCE)
    yield "my_policies"
    sys.modules.pop("my_policies", None)
    kvpass.POLICIES.pop("latest", None)
    from_spec.cache_clear()


def test_compile_and_the_command_line_import_it(module):
    path = list(sys.path)
    fast = compiled_apart(policy=f"{module}:Latest", budget=40, sign=-1)
    fast(random_ids(1, 60))
    assert fast.policy.sign == -1 and fast.report().policy.name == "latest" and sys.path == path
    spec, full = parse_policies(f"{module}:Latest:sign=2,window=8,full")
    assert spec.resolve() == resolve("latest", sign=2, window=8) and full.name == "full"
    assert parse_policies(str(spec)) == (spec,)


@pytest.mark.parametrize(
    "name", ["no_such_module:Latest", "my_policies:Nothing", "my_policies:", ":Latest", "json:dumps"]
)
def test_what_cannot_be_imported_or_is_no_policy_is_an_error(module, name):
    with pytest.raises(ValueError, match=r"cannot be imported|must be a class derived from kvpass\.Policy"):
        resolve(name)


def test_a_spec_from_a_file_imports_nothing(module):
    with pytest.raises(ValueError, match="Must be one of"):
        from_spec('{"policy": "my_policies:Latest"}')
    assert module not in sys.modules


def test_policies_of_installed_packages_are_found(module, monkeypatch):
    point = EntryPoint("latest", f"{module}:Latest", "kvpass.policies")
    monkeypatch.setattr(kvpass.policies, "entry_points", lambda group: [point] if group == "kvpass.policies" else [])
    monkeypatch.syspath_prepend(".")
    assert resolve("latest", sign=3).sign == 3
    assert "latest" in installed_policies()


def test_a_policy_whose_source_cannot_be_read_has_a_digest_of_its_own():
    namespace: dict[str, type[kvpass.Policy]] = {"__name__": "typed_at_a_prompt"}
    sys.modules["typed_at_a_prompt"] = SimpleNamespace(**namespace)
    exec(SOURCE, namespace)
    unreadable = policy_digest(namespace["Latest"]())
    del sys.modules["typed_at_a_prompt"]
    assert unreadable != policy_digest(resolve("lava")) == ""


def test_an_edited_policy_is_evaluated_again(module, tmp_path):
    asked = EvalOptions(
        model="builtin", policies=f"{module}:Latest", budgets="0.25", scopes="prompt", samples=1, length=256
    )

    def keys() -> set[str]:
        sys.modules.pop(module, None)
        importlib.invalidate_caches()
        return {question.key for condition in Evaluation(asked).conditions for question in condition.questions}

    once = keys()
    assert keys() == once != set()
    (tmp_path / "my_policies.py").write_text(SOURCE.replace("obs.keys", "obs.values"))
    assert once.isdisjoint(keys())


def test_policies_are_read_with_their_options():
    read = parse_policies("full, cake:tau1=1.6,tau2=0.4,snapkv:window=8,pool=avg,h2o:evict_during_decode=False")
    assert [spec.name for spec in read] == ["full", "cake", "snapkv", "h2o"]
    assert dict(read[1].options) == {"tau1": 1.6, "tau2": 0.4}
    assert dict(read[2].options) == {"window": 8, "pool": "avg"}
    assert dict(read[3].options) == {"evict_during_decode": False}
    assert str(read[1]) == "cake:tau1=1.6,tau2=0.4"
    assert parse_policies(",".join(map(str, read))) == read
    assert read[2].resolve() == kvpass.policies.resolve("snapkv", window=8, pool="avg")


@pytest.mark.parametrize(
    ("grid", "all_of_it"),
    [
        ("snapkv:window={8,32}", "snapkv:window=8,snapkv:window=32"),
        (
            "full,snapkv:window={8,32},pool=avg,kernel_size={ 1, 7 },tova",
            "full,snapkv:window=8,pool=avg,kernel_size=1,snapkv:window=8,pool=avg,kernel_size=7,"
            "snapkv:window=32,pool=avg,kernel_size=1,snapkv:window=32,pool=avg,kernel_size=7,tova",
        ),
        (
            "my_policies:Latest:window={8},sign={1,2}",
            "my_policies:Latest:window=8,sign=1,my_policies:Latest:window=8,sign=2",
        ),
    ],
)
def test_braces_are_all_combinations_of_the_options(module, grid, all_of_it):
    assert parse_policies(grid) == parse_policies(all_of_it)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("full,snapkv:window={8,32", r"policies='full,snapkv:window=\{8,32': 'snapkv:window=\{8': several values"),
        ("snapkv:window={},pool=avg", r"policies='snapkv:window=\{\},pool=avg': 'snapkv:window=\{\}': several"),
        ("snapkv:window=8}", r"'snapkv:window=8\}': several"),
        ("snapkv:{window=8,window=9}", r"'snapkv:\{window=8,window=9\}': several"),
        ("snapkv:kernel_size={1,2}", "kernel_size=2: must be odd"),
        ("", "name at least one policy"),
        ("window=8,snapkv", "option 'window=8' has no policy"),
        ("snapkv:window", "'window' must be an option such as"),
        ("snapkw", "did you mean 'snapkv'"),
        ("snapkv:windo=8", "windo=8: not an option"),
    ],
)
def test_policies_that_cannot_be_read_are_refused(text, message):
    with pytest.raises(ValueError, match=message):
        parse_policies(text)
