"""Calls that do not end: interrupts, and memory that runs out, on the way. Nothing is mixed up by it."""

from functools import partial

import numpy as np
import pytest
import torch

import kvpass
from compiled_models import UNLIMITED, compiled_anew, failing, greedy, reloaded, two_layers
from kvpass.cache import prefill, state
from kvpass.cache.cache import CompressedCache
from kvpass.cache.layers import FullAttentionLayers
from kvpass.compiler.backend import PhaseCompiler
from kvpass.ops import reference, sliding, slots
from tiny_models import random_ids, tiny_model


@pytest.mark.parametrize(
    ("policy", "where", "count"),
    [
        ("lava", (reference, "score_layer"), 2),
        ("lava", (reference, "cascade_step"), 2),
        ("lava", (reference, "gather_layer"), 2),
        ("lava", (reference, "pack"), 1),
        ("h2o", (prefill, "first_slots"), 1),
        ("lava", (prefill, "LayersRecord"), 1),
        ("lava", (state, "PromptRecord"), 1),
    ],
)
def test_an_interrupted_prefill_leaves_model_and_other_caches_usable(policy, where, count):
    _, fast = two_layers(policy=policy)
    ids, other, token = random_ids(1, 50), random_ids(1, 44, seed=2), random_ids(1, 1, seed=3)
    expected = fast(token, past_key_values=fast(ids).past_key_values).logits
    live = fast(other).past_key_values
    reused = fast(other).past_key_values
    reused.reset()
    expected_live = fast(token, past_key_values=live.clone()).logits
    with failing(*where, count):
        fast(ids, past_key_values=reused)
    assert reused.is_empty and reused.nbytes == len(reused) == 0 and reused.state.full_layers == []
    assert torch.equal(fast(token, past_key_values=live).logits, expected_live)
    assert fast(ids, past_key_values=reused).past_key_values is reused
    assert torch.equal(fast(token, past_key_values=reused).logits, expected)


def test_an_interrupt_or_no_memory_while_compiling_leaves_the_model_usable():
    """The first cache is allocated while the graph is compiled, where Dynamo wraps what is raised."""
    model, ids = tiny_model("llama", layers=1), random_ids(1, 50)
    fast = compiled_anew(model, budget=UNLIMITED)
    with failing(PhaseCompiler, "compile"):
        fast(ids, logits_to_keep=1)
    with failing(prefill, "PrefillLayers", error=torch.OutOfMemoryError):
        fast(ids, logits_to_keep=1)
    assert torch.equal(greedy(fast, ids), greedy(model, ids))
    with failing(reference, "attend_cache"):
        fast.warmup(prompt_tokens=20)
    assert fast.report().prompt_lengths.tolist() == [50]


@pytest.mark.parametrize("tokens", [1, 12])
@pytest.mark.parametrize(
    ("recompress", "earlier", "where", "error"),
    [
        ("never", 1, (reference, "attend_cache"), KeyboardInterrupt),
        ("every_turn", 1, (reference, "attend_cache"), KeyboardInterrupt),
        ("never", 64, (torch.Tensor, "new_empty"), torch.OutOfMemoryError),  # the tail is full and grows
    ],
)
def test_a_failed_step_on_an_appending_cache_did_not_happen(tokens, recompress, earlier, where, error):
    _, fast = two_layers(recompress=recompress)
    cache = fast(random_ids(1, 50)).past_key_values
    fast(random_ids(1, earlier, seed=2), past_key_values=cache)
    new = random_ids(1, tokens, seed=1)
    expected = fast(new, past_key_values=cache.clone()).logits
    with failing(*where, 2, error):
        fast(new, past_key_values=cache)
    assert cache.columns == 50 + earlier
    assert torch.equal(fast(new, past_key_values=cache).logits, expected)


@pytest.mark.parametrize(("family", "policy"), [("gemma3", "lava"), ("llama", "h2o")])
def test_memory_that_runs_out_while_rows_are_picked_leaves_the_cache_usable(family, policy):
    _, fast = two_layers(family, policy=policy)
    token = random_ids(2, 1, seed=1)
    for pick, argument, rows in (
        (CompressedCache.reorder_cache, torch.tensor([1, 0]), 2),
        (CompressedCache.batch_repeat_interleave, 2, 4),
        (CompressedCache.batch_select_indices, torch.tensor([1]), 1),
    ):
        cache = fast(random_ids(2, 50)).past_key_values
        expected = fast(token, past_key_values=cache.clone()).logits
        for call in (2, 6):
            with failing(torch.Tensor, "index_select", call, torch.OutOfMemoryError):
                pick(cache, argument)
            assert cache.batch_size == 2
            assert torch.equal(fast(token, past_key_values=cache.clone()).logits, expected)
        pick(cache, argument)
        assert cache.batch_size == rows


def test_an_argument_that_is_refused_changes_nothing(tmp_path):
    _, fast = two_layers()
    cache, new = fast(random_ids(2, 50)).past_key_values, random_ids(2, 3, seed=1)
    fast(new, past_key_values=cache)
    expected, nothing = fast(new, past_key_values=cache.clone()).logits, torch.tensor([], dtype=torch.int64)
    for change, argument in (
        *((cache.crop, tokens) for tokens in (-1.0, "1", -4)),
        *((change, nothing) for change in (cache.batch_select_indices, cache.reorder_cache)),
    ):
        with pytest.raises(ValueError, match=r"must be an int|cannot be taken back|no row of the cache"):
            change(argument)
        assert torch.equal(fast(new, past_key_values=reloaded(cache, fast, tmp_path)).logits, expected)
    cache.crop(np.int64(-1))
    assert reloaded(cache, fast, tmp_path).columns == 52


def test_a_cache_whose_crop_was_interrupted_is_refused_until_it_is_reset():
    _, fast = two_layers()
    cache, new = fast(random_ids(1, 50)).past_key_values, random_ids(1, 3, seed=1)
    fast(new, past_key_values=cache)
    with failing(FullAttentionLayers, "crop"):
        cache.crop(-2)
    for call in (partial(fast, new, past_key_values=cache), partial(cache.crop, -1)):
        with pytest.raises(kvpass.CacheMismatchError, match="interrupted"):
            call()
    cache.reset()
    assert fast(random_ids(1, 50), past_key_values=cache).past_key_values.columns == 50


@pytest.mark.parametrize(("family", "policy"), [("gemma3", "lava"), ("llama", "h2o")])
def test_a_half_overwritten_cache_is_refused_until_it_is_reset(tmp_path, family, policy):
    _, fast = two_layers(family, policy=policy)
    ids, token = random_ids(1, 50), random_ids(1, 1, seed=1)
    cache, other = fast(ids).past_key_values, fast(ids).past_key_values
    expected = fast(token, past_key_values=fast(ids).past_key_values).logits
    target = (sliding, "keep_newest") if family == "gemma3" else (slots, "keep_mask")
    with failing(*target):
        fast(token, past_key_values=cache)
    for broken in (cache, cache.clone()):
        with pytest.raises(kvpass.CacheMismatchError, match="interrupted"):
            fast(token, past_key_values=broken)
        with pytest.raises(ValueError, match="cannot be saved: a call on it was interrupted"):
            broken.save(tmp_path / "cache.kv")
    assert list(tmp_path.iterdir()) == []
    assert torch.equal(fast(token, past_key_values=other).logits, expected)
    cache.reset()
    fast(ids, past_key_values=cache)
    assert torch.equal(fast(token, past_key_values=cache).logits, expected)


@pytest.mark.parametrize("asked", ["assistant_model", "prompt_lookup_num_tokens"])
def test_an_interrupted_call_leaves_no_drafts(asked):
    model, fast = two_layers()
    drafts = {asked: model if asked == "assistant_model" else 4}
    document, ids = random_ids(1, 13).repeat(1, 5), random_ids(1, 13)[:, :4]
    whole = greedy(fast, ids, past_key_values=fast.compress(document), **drafts)

    def stopped(cache, calls, **more):
        def stop(_, scores):
            seen.append(scores)
            if len(seen) > calls:
                raise KeyboardInterrupt
            return scores

        seen: list[torch.Tensor] = []
        with pytest.raises(KeyboardInterrupt):
            greedy(fast, ids, past_key_values=cache, logits_processor=[stop], **more)

    for calls in (0, 1, 2, 4):
        cache = fast.compress(document, reusable=False)
        stopped(cache, calls, **drafts)
        assert cache.columns == document.shape[1] and not cache.interrupted
        assert torch.equal(greedy(fast, ids, past_key_values=cache, **drafts), whole)
    cache = fast.compress(document, reusable=False)
    cache.reset()
    with failing(reference, "attend_cache", 3):
        greedy(fast, document, past_key_values=cache, **drafts)
    assert cache.is_empty
    cache = fast.compress(document, reusable=False)
    stopped(cache, 2)  # without drafts: question and answer so far stay
    assert torch.equal(cache.ids[0, 65:], whole[0, : cache.columns - 65]) and cache.columns == 65 + 4 + 2
    cache.crop(65)
    assert torch.equal(greedy(fast, ids, past_key_values=cache), whole)
