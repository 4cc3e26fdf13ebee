"""The tables of docs/models.md say what the library does. The families' rows are held against it in test_contracts."""

from pathlib import Path

import pytest

from support_table import REFUSED, listed, refused_row, tables
from tiny_models import FAMILIES, HYBRIDS, LLAMA_LIKE

MODELS_PAGE = Path(__file__).resolve().parents[1] / "docs" / "models.md"
SLOW = {"zamba", "rwkv", "xlnet"}
"""Refused after two to four seconds."""


@pytest.mark.parametrize(
    "model_type", [pytest.param(name, marks=pytest.mark.exhaustive if name in SLOW else []) for name in REFUSED]
)
def test_what_is_refused_is_listed_with_its_reason(model_type):
    assert refused_row(model_type) in listed(MODELS_PAGE.read_text())


def test_nothing_else_is_listed():
    rows = [name for name, *_ in listed(MODELS_PAGE.read_text())]
    assert len(rows) == len(set(rows)) == len(FAMILIES) + len(HYBRIDS) + len(REFUSED)


def test_decoders_of_which_the_same_is_said_share_a_row():
    made = tables([["a", "x", ""], ["b", "y", "z"], ["c", "x", ""]], [["d", "no"]])
    assert "| a, c | x |  |" in made and "| b | y | z |" in made and "| d | no |" in made


def test_a_model_that_is_not_refused_cannot_be_listed_as_such(monkeypatch):
    monkeypatch.setitem(REFUSED, "llama", LLAMA_LIKE | {"num_hidden_layers": 1})
    with pytest.raises(AssertionError, match="llama was not refused"):
        refused_row("llama")
