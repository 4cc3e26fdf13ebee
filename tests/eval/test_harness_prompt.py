"""The separator in the text of a request."""

from __future__ import annotations

from kvpass.eval.harness.prompt import SEPARATOR, split_at_separator, without_separator


def test_the_last_separator_counts():
    text = f"one{SEPARATOR} two three{SEPARATOR} four"
    assert split_at_separator(text) == ("one two three", " four")
    assert without_separator(text) == "one two three four"
