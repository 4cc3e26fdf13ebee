"""Prompts as token ids: the border, the cut, padding, and which of them go together."""

from __future__ import annotations

import pytest
import torch

from kvpass.eval.prompt import Prompt, by_head, pad, rounds

TWENTY = tuple(range(20))


@pytest.mark.parametrize(
    ("held", "limit", "truncation", "ids", "head"),
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
def test_a_cut_keeps_the_ends_and_the_border_between_the_same_tokens(held, limit, truncation, ids, head):
    prompt = Prompt(TWENTY, held)
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
    prompts = [
        Prompt((7, 8, 1), 1),
        Prompt((5, 1, 2), 2),
        Prompt((7, 8, 2), 1),
        Prompt((5, 3), 1),
        Prompt((7, 8, 3), 1),
    ]
    sharing = by_head(prompts)
    assert sharing == {(7, 8): [0, 2, 4], (5,): [1, 3]}
    assert list(rounds(list(sharing.values()), [len(prompt.rest) for prompt in prompts], 3)) == [
        ([0, 0, 0], [0, 2, 4]),
        ([1], [3]),
        ([1], [1]),
    ]
