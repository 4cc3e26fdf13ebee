"""``kvpass ask`` about a stranger's file: it loads no model that the file chooses, and believes nothing else of it."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from kvpass.cache.serialization import write_cache_file
from kvpass.cli import documents
from kvpass.cli.main import app

HUGE = 10**30


@pytest.fixture
def ask(appending, tmp_path, monkeypatch):
    """Ask a file with these parts; the models that were loaded come back with the output."""
    loaded = []

    def load_model(name, **options):
        loaded.append(name)
        raise ValueError("loaded")

    monkeypatch.setattr(documents, "load_model", load_model)
    monkeypatch.delenv("KVPASS_MODEL", raising=False)

    def run(*words, **metadata):
        path = tmp_path / "doc.kv"
        write_cache_file(path, appending.tensors, {**appending.metadata, **metadata})
        result = CliRunner().invoke(app, ["ask", str(path), "why", *words])
        assert result.exit_code == 2 and isinstance(result.exception, SystemExit), result.exception
        assert result.output.count("\n") == 1 and result.output.startswith("error: "), result.output
        assert all(char.isprintable() for char in result.output[:-1])
        return loaded, result.output

    return run


@pytest.mark.parametrize(
    "name", ["someone/else", "gpt2", "https://example.org/x", "../nowhere", "", "a" * 5000, "x\0y", "\x1b[31mred\n"]
)
def test_a_file_does_not_choose_what_is_downloaded(ask, name):
    loaded, output = ask(notes={"model": name, "dtype": "auto"})
    assert loaded == [] and "kvpass ask FILE QUESTION --model NAME" in output


def test_a_model_that_fetches_nothing_or_that_the_user_names_is_loaded(ask, tmp_path, monkeypatch):
    notes = {"model": "someone/else", "dtype": "auto"}
    assert ask(notes={**notes, "model": "builtin"})[0][-1:] == ["builtin"]
    assert ask(notes={**notes, "model": str(tmp_path)})[0][-1:] == [str(tmp_path)]
    assert ask("--model", "someone/else", notes=notes)[0][-1:] == ["someone/else"]
    monkeypatch.setenv("KVPASS_MODEL", "mine/own")
    assert ask(notes=notes)[0][-1:] == ["mine/own"]
    assert ask("--model", "builtin", notes=notes)[0][-1:] == ["builtin"]


def test_a_message_quotes_no_control_character_of_a_file(ask):
    _, output = ask(format=2, kvpass_version="\x1b[31m\nred\u202e")
    assert r"written by kvpass \x1b[31m\nred\u202e" in output


POLICIES = {
    "unknown": {"policy": "evil"},
    "none": {},
    "a list": [],
    "a number": 5,
    "a name that is a list": {"policy": ["lava"]},
    "an unknown option": {"policy": "lava", "evil": 1},
    "an argument of the function": {"policy": "lava", "self": 1},
    "a window of a text": {"policy": "lava", "window": "8"},
    "a window below 0": {"policy": "lava", "window": -8},
    "a huge window": {"policy": "lava", "window": HUGE},
    "a huge kernel": {"policy": "lava", "kernel_size": 10**9 + 1},
    "an even kernel": {"policy": "lava", "kernel_size": 4},
    "a bool for a kernel": {"policy": "lava", "kernel_size": True},
    "an unknown pool": {"policy": "lava", "pool": ["max"]},
    "a number beyond every float": {"policy": "cake", "tau1": 10**400, "tau2": 1.0},
    "no temperatures": {"policy": "cake"},
    "NaN": {"policy": "cake", "tau1": float("nan"), "tau2": 1.0},
    "sinks beyond every position": {"policy": "streaming_llm", "sinks": HUGE},
    "one that has no budget": {"policy": "full"},
}


@pytest.mark.parametrize("case", POLICIES)
def test_a_forged_policy_is_refused_before_anything_is_loaded(ask, case):
    loaded, output = ask(policy=json.dumps(POLICIES[case]))
    assert loaded == [] and "policy" in output


@pytest.mark.parametrize(
    "spec", ["", "{", "[" * 10**5, '{"policy": "lava", "window": 1e999}', "lava", "\x1b]0;title\x07"]
)
def test_a_policy_that_is_no_spec_is_refused_before_anything_is_loaded(ask, spec):
    loaded, output = ask(policy=spec)
    assert loaded == [] and "policy" in output


@pytest.mark.parametrize(
    "notes", [{}, {"model": "builtin"}, {"model": 1, "dtype": "auto"}, {"model": "builtin", "dtype": ["auto"]}]
)
def test_notes_that_are_no_document_are_refused_before_anything_is_loaded(ask, notes):
    loaded, output = ask(notes=notes)
    assert loaded == [] and "names no model" in output


def test_a_forged_dtype_is_refused(appending, tmp_path):
    path = tmp_path / "doc.kv"
    write_cache_file(path, appending.tensors, {**appending.metadata, "notes": {"model": "builtin", "dtype": "float8"}})
    result = CliRunner().invoke(app, ["ask", str(path), "why", "--backend", "eager"])
    assert result.exit_code == 2 and "dtype='float8': must be one of" in result.output
