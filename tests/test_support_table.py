"""The tables of docs/models.md say what the library does. The families' rows are held against it in test_contracts."""

import argparse
import json
import runpy
from pathlib import Path

import pytest
import transformers

from support_table import REFUSED, listed, others, others_listed, refused_row, tables
from tiny_models import FAMILIES, HYBRIDS

ROOT = Path(__file__).resolve().parents[1]
MODELS_PAGE = ROOT / "docs" / "models.md"
SLOW = {"zamba", "rwkv", "xlnet", "inkling2_text", "xlm", "dbrx", "falcon_mamba", "recurrent_gemma", "openai-gpt"}
"""Refused after seconds, for reasons that smaller tests or others of the table have too."""


@pytest.mark.parametrize(
    "model_type", [pytest.param(name, marks=pytest.mark.exhaustive if name in SLOW else []) for name in REFUSED]
)
def test_what_is_refused_is_listed_with_its_reason(model_type):
    assert refused_row(model_type) in listed(MODELS_PAGE.read_text())


def test_nothing_else_is_listed_and_decoders_of_which_the_same_is_said_share_a_row():
    rows = [name for name, *_ in listed(MODELS_PAGE.read_text())]
    assert len(rows) == len(set(rows)) == len(FAMILIES) + len(HYBRIDS) + len(REFUSED)
    made = tables([["a", "x", ""], ["b", "y", "z"], ["c", "x", ""]], [["d", "no"]])
    assert "| a, c | x |  |" in made and "| b | y | z |" in made and "| d | no |" in made


def test_types_that_the_tests_do_not_have_are_listed_with_what_the_script_recorded():
    listed_now = others_listed(MODELS_PAGE.read_text())
    if f"types of transformers {transformers.__version__} " not in listed_now:
        pytest.skip("the page lists the types of another version")
    assert listed_now == others()


def record(path, **decoders):
    path.write_text(json.dumps([{"versions": {"transformers": "1.2.3"}, "decoders": decoders}]))
    return path


def test_a_type_without_a_record_is_not_tried(tmp_path):
    refusal = "UnsupportedAttentionError: cannot compress attention in a.b (node c): it is a|b"
    made = others(record(tmp_path / "found.json", gemma=["same", "1e-06"], glm=["refused", refusal]))
    assert "| gemma | same | 1.2.3 |" in made and "| glm | refused: it is a\\|b | 1.2.3 |" in made
    (rest,) = (line for line in made.splitlines() if line.endswith("| not tried |  |"))
    assert {"afmoe", "stablelm"} < {*rest.split("|")[1].strip().split(", ")}
    assert not {"gemma", "glm", "llama", "dbrx"} & {*rest.split("|")[1].strip().split(", ")}


def test_a_run_of_some_types_leaves_what_was_found_of_others(tmp_path):
    found = record(tmp_path / "found.json", gemma=["same", "1e-06"], glm=["same", "1e-06"])
    script = runpy.run_path(str(ROOT / "scripts" / "try-decoders"))
    script["main"].__wrapped__.__globals__["tried"] = lambda model_type: ("refused", f"{model_type} no longer")
    assert script["main"](argparse.Namespace(types=["glm"], json=found)) == 0
    before, now = (run["decoders"] for run in json.loads(found.read_text()))
    assert before == {"gemma": ["same", "1e-06"]} and now == {"glm": ["refused", "glm no longer"]}
