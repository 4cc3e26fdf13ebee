"""Prompts as token ids: the border, the cut, padding, and which of them go together."""

from __future__ import annotations

import pytest
import torch

from kvpass.eval.prompt import SEPARATOR, Prompt, pad, split_at_separator, without_separator
from kvpass.eval.runner import rounds

TWENTY = tuple(range(20))


@pytest.mark.parametrize(
    ("left", "limit", "truncation", "ids", "head"),
    [
        (3, 20, "left", TWENTY, 17),
        (3, 8, "left", TWENTY[12:], 5),
        (3, 8, "middle", (*TWENTY[:4], *TWENTY[16:]), 5),
        (3, 9, "middle", (*TWENTY[:4], *TWENTY[15:]), 6),
        (7, 9, "middle", (*TWENTY[:4], *TWENTY[15:]), 4),  # the question loses its first two tokens
        (18, 9, "middle", (*TWENTY[:4], *TWENTY[15:]), 2),
        (20, 9, "middle", (*TWENTY[:4], *TWENTY[15:]), 0),
        (10, 9, "left", TWENTY[11:], 0),
        (0, 9, "left", TWENTY[11:], 9),
        (5, 1, "middle", TWENTY[19:], 0),
    ],
)
def test_a_cut_keeps_the_ends_and_the_border_between_the_same_tokens(left, limit, truncation, ids, head):
    prompt = Prompt(TWENTY, left)
    cut = prompt.cut(limit, truncation)
    assert cut.ids == ids
    assert cut.head == ids[:head] == tuple(token for token in ids if token in prompt.head)
    assert cut.rest == ids[head:]


def test_head_and_rest_of_short_prompts():
    assert (Prompt((1, 2), 5).head, Prompt((1, 2), 5).rest, len(Prompt((1, 2), 5))) == ((), (1, 2), 2)
    assert (Prompt((1, 2), 0).head, Prompt((1, 2), 0).rest) == ((1, 2), ())


def test_a_scope_moves_the_border():
    prompt = Prompt((1, 2, 3, 4), 2)
    assert prompt.scoped("context", 1) == prompt
    assert prompt.scoped("prompt", 1).rest == (4,)
    assert prompt.scoped("prompt", 0).head == (1, 2, 3, 4)


def test_padding():
    ids, mask = pad([(1, 2, 3), (4,)], "left", 9)
    assert ids.tolist() == [[1, 2, 3], [9, 9, 4]] and mask.tolist() == [[1, 1, 1], [0, 0, 1]]
    assert pad([(1, 2, 3), (4,)], "right", 9)[0].tolist() == [[1, 2, 3], [4, 9, 9]]
    assert pad([(4,)], "left", 9, columns=3)[0].tolist() == [[9, 9, 4]]
    assert pad([(1, 2)], "left", 9, columns=1)[1].equal(torch.ones(1, 2, dtype=torch.int64))


def test_every_prompt_is_in_one_round_with_others_of_its_kind_beside_the_row_it_continues():
    lengths = [1, 2, 1, 1, 1]
    assert list(rounds([[0, 2, 4], [1, 3]], lengths, 3)) == [([0, 0, 0], [0, 2, 4]), ([1], [3]), ([1], [1])]


def test_the_last_separator_counts():
    text = f"one{SEPARATOR} two three{SEPARATOR} four"
    assert split_at_separator(text) == ("one two three", " four")
    assert without_separator(text) == "one two three four"
