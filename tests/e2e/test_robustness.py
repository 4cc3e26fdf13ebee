"""What users do to a model: odd sizes, dtypes, modes, and every kind of generation."""

import gc
import weakref

import pytest
import torch

from compiled_models import UNLIMITED, compiled_anew, compiled_apart, greedy, two_layers
from pairwise import each_value, quick
from tiny_models import random_ids, tiny_model


def test_the_append_buffer_grows_rarely_and_by_a_bounded_number_of_slots():
    """Each length of it is captured anew as a CUDA graph."""
    _, fast = two_layers()
    store, lengths = fast(random_ids(1, 20)).past_key_values.state.full_layers[0], set()
    for used in range(store.used, 8000):
        store.used = used
        store.ensure_room(1)
        lengths.add(length := store.buffers.tail_k.shape[3])
        assert used < length <= used + 1 + max(64, min(used // 2, 1024)) + 64
    assert len(lengths) < 20


@pytest.mark.parametrize("policy", quick(["lava", "h2o"], ["h2o"]))
def test_the_default_dtype_of_the_process_changes_nothing(policy):
    found = []
    for default, compiled in ((torch.float32, compiled_apart), (torch.bfloat16, compiled_anew)):
        fast = compiled(policy=policy, model=tiny_model("llama", layers=2))
        torch.set_default_dtype(default)
        try:
            cache = fast(random_ids(1, 50)).past_key_values
            logits = fast(random_ids(1, 5, seed=1), past_key_values=cache).logits
        finally:
            torch.set_default_dtype(torch.float32)
        found.append((cache.positions, fast.report().attention_mass, logits))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


@each_value(mode=[torch.no_grad, torch.inference_mode, torch.enable_grad], policy=["lava", "h2o"])
def test_any_grad_mode_and_changes_between_them(mode, policy):
    _, fast = two_layers("gemma3", policy=policy)
    ids, token = random_ids(2, 40), random_ids(2, 1, seed=1)
    expected = greedy(fast, ids)
    beams = greedy(fast, ids, num_beams=2)
    fast(token, past_key_values=fast(ids).past_key_values)
    compiled_before = len(fast.report().compiled)
    with mode():
        assert torch.equal(greedy(fast, ids), expected)
        assert torch.equal(greedy(fast, ids, num_beams=2), beams)
        cache = fast(ids).past_key_values
        cache.reorder_cache(torch.tensor([1, 0]))
        twin = cache.clone()
        cache.to("cpu")
    assert torch.equal(fast(token, past_key_values=twin).logits, fast(token, past_key_values=cache).logits)
    assert not fast(ids).logits.requires_grad
    assert len(fast.report().compiled) == compiled_before, "a phase was compiled again"


def test_a_state_dict_can_be_loaded_and_taken_back_and_a_model_that_nobody_holds_is_freed():
    model, other = (tiny_model("llama", seed=seed, layers=1) for seed in range(2))
    fast = compiled_anew(model, budget=UNLIMITED)
    ids = random_ids(1, 40)
    before = greedy(fast, ids)
    assert fast.state_dict().keys() == model.state_dict().keys()
    saved = {name: tensor.clone() for name, tensor in fast.state_dict().items()}
    fast.load_state_dict(other.state_dict())
    changed = greedy(fast, ids, return_dict_in_generate=True)
    assert torch.equal(changed.sequences, greedy(other, ids)) and not torch.equal(changed.sequences, before)
    fast.load_state_dict(saved)
    assert torch.equal(greedy(fast, ids), before)
    known = weakref.ref(fast), weakref.ref(changed.past_key_values)
    del fast, changed
    gc.collect()
    assert [held() for held in known] == [None, None], "nobody holds them"
