"""Calls that end early; test_fault_injection.py has exceptions at lines that are drawn at random."""

import numpy as np
import pytest
import torch

import kvpass
from compiled_models import UNLIMITED, compiled_anew, failing, greedy, reloaded, two_layers
from kvpass.cache import prefill
from kvpass.compiler.backend import PhaseCompiler
from kvpass.ops import reference, sliding, slots
from tiny_models import random_ids, tiny_model


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


@pytest.mark.parametrize(
    ("recompress", "earlier", "where", "error"),
    [
        ("never", 1, (reference, "attend_cache"), KeyboardInterrupt),
        ("every_turn", 1, (reference, "attend_cache"), KeyboardInterrupt),
        ("never", 64, (torch.Tensor, "new_empty"), torch.OutOfMemoryError),  # the tail is full and grows
    ],
)
def test_a_failed_call_of_several_tokens_on_an_appending_cache_did_not_happen(recompress, earlier, where, error):
    _, fast = two_layers(recompress=recompress)
    cache = fast(random_ids(1, 50)).past_key_values
    fast(random_ids(1, earlier, seed=2), past_key_values=cache)
    new = random_ids(1, 12, seed=1)
    expected = fast(new, past_key_values=cache.clone()).logits
    with failing(*where, 2, error):
        fast(new, past_key_values=cache)
    assert cache.columns == 50 + earlier
    assert torch.equal(fast(new, past_key_values=cache).logits, expected)


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


@pytest.mark.parametrize(("family", "policy"), [("gemma3", "lava"), ("llama", "h2o")])
def test_a_half_overwritten_cache_is_refused_until_it_is_reset(tmp_path, family, policy):
    _, fast = two_layers(family, policy=policy)
    ids, token = random_ids(2, 50), random_ids(2, 1, seed=1)
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
