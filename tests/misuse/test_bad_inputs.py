"""Inputs that compiled code would take for others: packed prompts, masks that hide columns, ids beyond a table."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import kvpass
from numeric_checks import assert_close
from tiny_models import compiled_once, left_pad, random_ids

SUPPORT = Path(__file__).resolve().parents[1] / "support"

OPTIONS = {"budget": 24, "window": 8, "backend": "eager"}


def compiled():
    """An uncompressed model and its compiled copy."""
    return compiled_once("llama", layers=2, **OPTIONS)


@pytest.mark.parametrize("use_cache", [True, False])
def test_positions_that_fall_back_or_jump_are_refused(use_cache):
    _, fast = compiled()
    ids = random_ids(2, 40)
    counted = torch.arange(40)
    packed = torch.cat([torch.arange(25), torch.arange(15)])
    gap = torch.where(counted < 30, counted, counted + 5)
    for positions, message in ((packed, "row 1 goes from 24 to 0"), (gap, "row 1 goes from 29 to 35")):
        rows = torch.stack([counted, positions])
        with pytest.raises(ValueError, match=f"position_ids: {message}.*packed sequences"):
            fast(ids, position_ids=rows, use_cache=use_cache)
    with pytest.raises(ValueError, match="row 0 goes from 24 to 0"):
        fast(ids, position_ids=packed[None], use_cache=use_cache)


def test_ascending_positions_are_taken_from_any_start_and_padding_may_have_any():
    model, fast = compiled()
    fast.set_budget(100)
    ids = random_ids(1, 40)
    later = torch.arange(7, 47)[None]
    assert_close("at 7", fast(ids, position_ids=later).logits, model(ids, position_ids=later).logits, atol=1e-4)
    ids, mask = left_pad([random_ids(1, n, seed=n)[0] for n in (40, 23)])
    positions = (mask.cumsum(1) - 1).masked_fill(mask == 0, 1)
    given = fast(ids, attention_mask=mask, position_ids=positions).logits
    assert torch.equal(given[mask.bool()], fast(ids, attention_mask=mask).logits[mask.bool()])


@pytest.mark.parametrize("tokens", [1, 3])
def test_a_mask_that_hides_columns_of_the_prompt_is_refused(tokens):
    _, fast = compiled()
    ids, mask = left_pad([random_ids(1, n, seed=n)[0] for n in (40, 23)])
    cache = fast(ids, attention_mask=mask).past_key_values
    new = random_ids(2, tokens, seed=1)
    right = torch.cat([mask, torch.ones_like(new)], 1)
    expected = fast(new, past_key_values=cache.clone(), attention_mask=right).logits
    for row, columns, message in ((0, slice(5, 20), "row 0 hides"), (1, slice(30, 31), "row 1 hides")):
        hiding = right.clone()
        hiding[row, columns] = 0
        with pytest.raises(kvpass.CacheMismatchError, match=message):
            fast(new, past_key_values=cache, attention_mask=hiding)
    with pytest.raises(kvpass.CacheMismatchError, match="row 1 hides other columns"):
        fast(new, past_key_values=cache, attention_mask=torch.ones_like(right))
    empty = right.clone()
    empty[0, 40:] = 0
    with pytest.raises(ValueError, match="row 0 has no real new token"):
        fast(new, past_key_values=cache, attention_mask=empty)
    assert torch.equal(fast(new, past_key_values=cache, attention_mask=right).logits, expected)


def test_ids_beyond_the_embedding_are_refused_and_the_cache_is_as_it_was():
    _, fast = compiled()
    ids = random_ids(1, 40)
    cache = fast(ids).past_key_values
    expected = fast(random_ids(1, 1), past_key_values=cache.clone()).logits
    for wrong in (128, -1, 10**12):
        for tokens in (1, 4):
            new = random_ids(1, tokens)
            new[0, -1] = wrong
            with pytest.raises(ValueError, match=f"input_ids has the value {wrong}, .*embed_tokens.* 128 rows"):
                fast(new, past_key_values=cache)
        bad = ids.clone()
        bad[0, 7] = wrong
        with pytest.raises(ValueError, match=f"input_ids has the value {wrong}"):
            fast(bad)
    assert torch.equal(fast(random_ids(1, 1), past_key_values=cache).logits, expected)


class Learned(nn.Module):
    """A decoder of one layer with a table of positions that the caller looks up in."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.positions = nn.Embedding(50, 16), nn.Parameter(torch.randn(64, 16))
        self.qkv, self.head = nn.Linear(16, 48), nn.Linear(16, 50)

    def forward(self, ids, where):
        x = self.tokens(ids) + self.positions[where]
        q, k, v = (part.unflatten(-1, (2, 8)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.head(x + out.transpose(1, 2).flatten(2))


def test_a_raw_module_is_not_given_numbers_beyond_its_tables():
    options = {"policy": "lava", "budget": 24, "window": 8, "compiler": "eager"}
    decoder = torch.compile(Learned(), backend="kvpass", options=options, fullgraph=True, dynamic=True)
    ids = random_ids(1, 40) % 50
    with torch.no_grad(), kvpass.session() as session:
        decoder(ids, torch.arange(40)[None])
        token = torch.tensor([[3]])
        for wrong, where, message in ((50, 40, "ids has the value 50"), (3, 64, "where has the value 64, .* 64 rows")):
            with pytest.raises(ValueError, match=message):
                decoder(token * 0 + wrong, torch.tensor([[where]]))
        decoder(token, torch.tensor([[40]]))
        assert session.cache.columns == 41 and session.calls == 2
    with torch.no_grad(), kvpass.session() as session:
        decoder(ids, torch.arange(40)[None] - 64)  # a negative index counts from the end of the table
        assert session.cache.columns == 40


@pytest.mark.exhaustive
def test_ids_beyond_the_embedding_do_not_end_the_process():
    """With several threads an exception of compiled code cannot be caught: it ends the process.

    The check is that of the test above: it is made before any compiler's code is called.
    """
    code = f"""
import sys
sys.path.append({str(SUPPORT)!r})
import kvpass
from tiny_models import random_ids, tiny_model
fast = kvpass.compile(tiny_model("llama", num_hidden_layers=1), budget=64)
ids = random_ids(2, 300)
fast(ids)
ids[0, 5], ids[1, 250] = 1000, 5000
try:
    fast(ids)
except ValueError as error:
    print("refused", error)
"""
    environment = {**os.environ, "OMP_NUM_THREADS": "2"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.startswith("refused input_ids has the value 5000")
