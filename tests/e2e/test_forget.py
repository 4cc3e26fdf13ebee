"""Tokens whose entries are taken out of a cache: what comes later sees the text without them."""

import pytest
import torch

from compiled_models import UNLIMITED, greedy, padded, reloaded, two_layers
from kvpass import CacheMismatchError
from masked_oracle import MaskedOracle, Transcript, kept_columns
from numeric_checks import assert_close
from pairwise import quick
from tiny_models import random_ids

SPANS = [(3, 12), (30, 36)]
"""Of rows of 50 and 33 tokens, and of seven more: a part of the short row's are in its tail."""


def shown(spans, start, columns):
    """Columns that are not forgotten, bool ``[B, columns]``."""
    position = torch.arange(columns) - start[:, None]
    return torch.stack([(position < begin) | (position >= end) for begin, end in spans]).all(0)


def without(spans, ids, start):
    """Rows of ids ``[B, N]`` without the tokens of spans."""
    return ids[shown(spans, start, ids.shape[1])].view(len(ids), -1)


@pytest.mark.parametrize("family", quick(["llama", "gpt2", "gemma3", "llama4"], ["llama", "gemma3"]))
@pytest.mark.parametrize("budget", [UNLIMITED, 24])
def test_later_tokens_do_not_see_what_was_forgotten(family, budget):
    """Positions count what was forgotten, so the masked model, which has all tokens, says the same."""
    spans = [(3, 9), (10, 12)] if family in ("gemma3", "llama4") else SPANS  # what a sliding window holds stays
    model, fast = two_layers(family, budget=budget)
    ids, mask = padded(50, 50 if family == "llama4" else 33)  # the masked model knows chunks of full rows alone
    cache = fast(ids, attention_mask=mask).past_key_values
    config = model.config
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    text = Transcript(MaskedOracle(model), ids, mask, 2, heads)
    start, logits = cache.state.start, []

    def say(new):
        text.append(new, kept_columns(cache, text.ids.shape[1]) & gone[:, None, None])
        logits.append(fast(new, past_key_values=cache).logits)

    gone = torch.ones(2, 50, dtype=torch.bool)
    say(random_ids(2, 7, seed=1))
    for turn, span in enumerate(spans):
        cache.forget(*span)
        gone = shown(spans[: turn + 1], start, text.ids.shape[1])
        assert not ((cache.positions >= span[0]) & (cache.positions < span[1])).any()
        for tokens in (1, 4):
            say(random_ids(2, tokens, seed=turn))
            gone = shown(spans[: turn + 1], start, text.ids.shape[1])
    assert_close("logits", torch.cat(logits, 1), text.logits()[:, 50:], atol=1e-4)
    assert torch.equal(cache.ids.long(), without(spans, text.ids, start))
    assert torch.equal(cache.attention_mask, without(spans, text.mask, start))
    assert cache.get_seq_length() == text.ids.shape[1] - sum(end - begin for begin, end in spans)


def test_memory_of_what_was_forgotten_is_freed():
    _, fast = two_layers(budget=UNLIMITED)
    cache = fast.compress(random_ids(1, 1000))
    before = cache.nbytes
    cache.forget(10, 910)
    assert cache.lengths.unique().tolist() == [100] and cache.nbytes < before / 4


def test_biases_by_distance_go_on_after_forgetting():
    """In one layer a token depends on no other but by attention, and biases of ALiBi change nothing as all move."""
    model, fast = two_layers("bloom", layers=1, budget=UNLIMITED)
    ids, new = random_ids(1, 40), random_ids(1, 5, seed=1)
    cache = fast(ids).past_key_values
    cache.forget(0, 11)
    with torch.no_grad():
        expected = model(torch.cat([ids[:, 11:], new], 1)).logits[:, 29:]
    assert_close("logits", fast(new, past_key_values=cache).logits, expected, atol=1e-5)


def test_whole_texts_are_those_without_what_was_forgotten():
    model, fast = two_layers(budget=UNLIMITED)
    ids, question = random_ids(1, 60), random_ids(1, 5, seed=2)
    cache = fast.compress(ids)
    cache.forget(SPANS)
    short = torch.cat([without(SPANS, ids, torch.zeros(1, dtype=torch.int64)), question], 1)
    answer = greedy(fast, question, 8, past_key_values=cache)[:, 5:]
    whole = greedy(fast, short, 8, past_key_values=cache)
    assert torch.equal(whole[:, : short.shape[1]], short)
    assert torch.equal(whole[:, short.shape[1] :], answer)
    seen = shown(SPANS, torch.zeros(1), 60)[:, None, None].expand(-1, 2, 2, -1)
    told = torch.cat([ids, question, answer], 1)
    says = MaskedOracle(model).logits(told, torch.ones_like(told), seen)[:, 64:-1].argmax(-1)
    assert torch.equal(answer, says)
    barred = greedy(fast, question, 8, past_key_values=cache, no_repeat_ngram_size=1)[:, 5:]
    assert not set(barred[0].tolist()) & set(short[0].tolist())
    with pytest.raises(CacheMismatchError, match="do not begin with"):
        greedy(fast, torch.cat([ids, question], 1), past_key_values=cache)


@pytest.mark.parametrize("recompress", ["never", "every_turn"])
def test_a_cache_goes_on_after_forgetting(recompress, tmp_path):
    """Saved, with rows that are chosen, padded calls, protected spans and further compression."""
    _, fast = two_layers(budget=24, recompress=recompress)
    ids, mask = padded(50, 33)
    cache = fast(ids, attention_mask=mask, protect=[(0, 8)]).past_key_values
    cache.forget([(3, 5)])
    kept, loaded = cache.positions, reloaded(cache, fast, tmp_path)
    assert loaded.forgotten == 2 and torch.equal(loaded.positions, kept)
    question, real = random_ids(2, 6, seed=4), torch.tensor([[1] * 6, [1] * 4 + [0] * 2])
    given = {"attention_mask": torch.cat([cache.attention_mask, real], 1)}
    out = fast(question, past_key_values=loaded, **given)
    alone = cache.clone()
    alone.batch_select_indices(torch.tensor([1]))
    last = fast(question[1:, :4], past_key_values=alone).logits
    assert_close("the row alone", out.logits[1, :4], last[0], atol=1e-5)
    fast(random_ids(2, 1, seed=6), past_key_values=loaded)  # behind the padding
    loaded.forget(5, 7)
    assert loaded.attention_mask.sum(1).tolist() == [50 + 6 + 1 - 4, 33 + 4 + 1 - 4]
    assert loaded.forgotten == 4 and loaded.state.forgotten == {3, 4, 5, 6}
    held = [set(head.tolist()) for head in loaded.positions.flatten(0, 2)]
    assert all(not head & {3, 4, 5, 6} and {0, 1, 2, 7} <= head for head in held)


@pytest.mark.parametrize("entries", ["int8", "rot4"])
def test_codes_stay_as_they_are(entries):
    _, fast = two_layers(budget=20, entries=entries)
    cache = fast.compress(random_ids(1, 60))
    kept = set(cache.positions.flatten().tolist())
    dropped = next(token for token in range(60) if token not in kept)
    new = random_ids(1, 3, seed=1)
    before = fast(new, past_key_values=cache).logits
    cache.forget(dropped, dropped + 1)
    assert torch.equal(fast(new, past_key_values=cache).logits, before)


@pytest.mark.parametrize(
    ("spans", "message"),
    [
        ([(4, 4)], r"forget: the span \(4, 4\) has no token"),
        ([(-1, 4)], "begins before the text"),
        ([(30, 34)], "ends behind the text, whose shortest row has 33"),
        ([(3, 9), (8, 12)], "overlap"),
        ([3, 9], r"must be pairs \(start, stop\) of tokens$"),
        ([(0, 33)], "no token of the text is left"),
    ],
)
def test_what_cannot_be_forgotten_is_refused(spans, message):
    _, fast = two_layers()
    ids, mask = padded(33, 33)
    cache = fast(ids, attention_mask=mask).past_key_values
    before = cache.positions
    with pytest.raises(ValueError, match=message):
        cache.forget(spans)
    assert torch.equal(cache.positions, before) and cache.forgotten == 0


@pytest.mark.parametrize(
    ("family", "options", "message"),
    [
        ("llama", {"policy": "tova", "window": 0}, "evicts while decoding"),
        ("qwen3_next", {}, "recurrent layer"),
        ("gemma3", {}, "hold the last 24 tokens"),
    ],
)
def test_caches_that_cannot_forget_say_why(family, options, message):
    _, fast = two_layers(family, **{"layers": 4 if family == "qwen3_next" else 2, **options})
    cache = fast.compress(random_ids(1, 40)) if "policy" not in options else fast(random_ids(1, 40)).past_key_values
    with pytest.raises(ValueError, match=message):
        cache.forget(30, 34)
