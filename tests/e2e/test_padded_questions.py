"""Rows that continue a cache with different numbers of tokens: padded questions, answers that ended early."""

import pytest
import torch

import kvpass
from compiled_models import UNLIMITED, greedy, reloaded, two_layers
from numeric_checks import assert_close
from pairwise import quick
from tiny_models import random_ids

NEW = 6
LENGTHS = 7, 3, 7, 5
CASES = [
    ("llama", {"policy": "snapkv", "budget": UNLIMITED}),
    ("gemma3", {"policy": "lava", "budget": UNLIMITED}),
    ("lfm2", {"policy": "lava", "budget": UNLIMITED}),
    ("llama", {"policy": "tova", "budget": 24, "window": 0}),
    ("bloom", {"policy": "snapkv", "budget": 24}),
    pytest.param("llama", {"policy": "lava", "budget": 24, "entries": "int8"}, marks=pytest.mark.exhaustive),
    ("llama", {"policy": "lava", "budget": 24, "recompress": "every_turn"}),
]


def padded(rows, side, width=9):
    """Ids and mask of ``rows``, of ``width`` columns: each row has padding."""
    ids, mask = torch.zeros(2, len(rows), width, dtype=torch.int64)
    for row, own in enumerate(rows):
        place = slice(width - len(own), width) if side == "left" else slice(len(own))
        ids[row, place], mask[row, place] = own, 1
    return ids, mask


LAYERS = {"bloom": 1}  # else 2


def questions(seed):
    return [random_ids(1, n, seed=seed + i)[0] for i, n in enumerate(LENGTHS)]


@pytest.mark.parametrize("side", quick(["left", "right"], ["left"]))
@pytest.mark.parametrize(("family", "options"), CASES, ids=lambda x: x if isinstance(x, str) else list(x.values())[-1])
def test_padded_questions_get_the_answers_of_each_question_alone(family, options, side):
    model, fast = two_layers(family, layers=LAYERS.get(family, 2), **options)
    document, asked = random_ids(1, 40), questions(5)
    rows = 1 if family == "llama" else len(asked)  # of other families no capture of one row is needed
    cache = fast.compress(document.expand(rows, -1))
    ids, mask = padded(asked, side)
    out = greedy(fast, ids, NEW, attention_mask=mask, past_key_values=cache)
    for row, own in enumerate(asked):
        if options["budget"] == UNLIMITED:
            expected = greedy(model, torch.cat([document, own[None]], 1), NEW)
        else:
            expected = greedy(fast, own.repeat(rows, 1), NEW, past_key_values=cache)
        assert torch.equal(out[row, -NEW:], expected[0, -NEW:]), row
    assert (cache.batch_size, cache.columns) == (rows, 40)


@pytest.mark.parametrize("family", quick(["llama", "gemma3", "bloom"], ["gemma3"]))
def test_padded_turns_have_the_logits_of_each_row_alone(family, tmp_path):
    model, fast = two_layers(family, layers=LAYERS.get(family, 2), budget=UNLIMITED)
    document = random_ids(1, 40)
    cache, seen, columns = fast.compress(document, reusable=False), [document[0]] * len(LENGTHS), torch.ones(4, 40)
    for turn, side in enumerate(("right", "left", "right")):
        asked = questions(10 * turn)
        asked = asked[turn:] + asked[:turn]
        ids, mask = padded(asked, side)
        columns = torch.cat([columns, mask], 1).long()
        out = fast(ids, attention_mask=columns, past_key_values=cache)
        cache = out.past_key_values
        for row, own in enumerate(asked):
            seen[row] = torch.cat([seen[row], own])
            expected = model(seen[row][None]).logits[0, -len(own) :]
            assert_close("logits", out.logits[row][mask[row].bool()], expected, atol=1e-4)
        assert torch.equal(cache.attention_mask, columns)
    loaded = reloaded(cache, fast, tmp_path)
    order, token = torch.tensor([3, 0]), random_ids(2, 1, seed=99)
    for held in (cache, loaded):
        held.batch_select_indices(order)
        logits = fast(token, past_key_values=held).logits[:, 0]
        for row, source in enumerate(order.tolist()):
            expected = model(torch.cat([seen[source], token[row]])[None]).logits[0, -1]
            assert_close("logits", logits[row], expected, atol=1e-4)
    assert torch.equal(cache.attention_mask[:, :-1], columns[order])
    real = [len(seen[row]) + 1 for row in order.tolist()]
    assert cache.attention_mask.sum(1).tolist() == loaded.attention_mask.sum(1).tolist() == real


def test_rows_that_ended_early_go_on_in_the_next_turn():
    model, fast = two_layers(budget=UNLIMITED)
    prompt, answer = random_ids(3, 40), random_ids(3, 5, seed=1)
    mask = torch.ones(3, 52, dtype=torch.int64)
    mask[0, 42:45] = mask[1, 44:46] = 0  # the answers have 2, 4 and 5 tokens; one column of row 1 is among the new
    turn = random_ids(3, 7, seed=2)
    cache = fast(prompt).past_key_values
    fast(answer, past_key_values=cache)
    hidden = mask.clone()
    hidden[0, 38:42] = 0
    with pytest.raises(kvpass.CacheMismatchError, match="hides other columns than those 5"):
        fast(turn, past_key_values=cache, attention_mask=hidden)
    out = fast(turn, past_key_values=cache, attention_mask=mask)
    whole = torch.cat([prompt, answer, turn], 1)
    for row in range(3):
        expected = model(whole[row][mask[row].bool()][None]).logits[0, -1]
        assert_close("logits", out.logits[row, -1], expected, atol=1e-4)
    with pytest.raises(ValueError, match="1 tokens cannot be taken back: 0 were appended"):
        cache.crop(-1)


@pytest.mark.parametrize(("family", "options"), CASES[1:4], ids=["ring", "state", "evicting"])
def test_answers_that_were_overwritten_cannot_be_taken_back(family, options):
    _, fast = two_layers(family, **options)
    cache = fast(random_ids(2, 40)).past_key_values
    fast(random_ids(2, 5, seed=1), past_key_values=cache)
    mask = torch.ones(2, 48, dtype=torch.int64)
    mask[1, 43:45] = 0
    with pytest.raises(ValueError, match="row 1 hides its last 2 columns, which cannot be taken back"):
        fast(random_ids(2, 3), past_key_values=cache, attention_mask=mask)
    assert cache.columns == 45
