"""A model that changes while caches of it are alive: another checkpoint, other adapters, hooks on its modules."""

import copy

import pytest
import torch
from peft import LoraConfig

import kvpass
from compiled_models import compiled_anew, compiled_apart
from small_decoders import raw_decoder
from tiny_models import random_ids, tiny_model

PROMPT = random_ids(1, 60)
pytestmark = pytest.mark.filterwarnings("ignore:Already found a .peft_config. attribute")  # two adapters are meant


def prompted(model=None):
    """A compiled model, and its cache of a prompt."""
    fast = compiled_anew(model)
    return fast, fast(PROMPT).past_key_values


def with_adapters():
    model = tiny_model("llama", layers=1)
    for name in ("one", "two"):
        model.add_adapter(LoraConfig(r=2, init_lora_weights=False, target_modules=["q_proj", "v_proj"]), name)
    model.set_adapter("one")
    return model.eval()


def steps(fast, cache):
    """Logits of a token and of a turn, each on a copy of the cache."""
    return [fast(random_ids(1, t, seed=t), past_key_values=cache.clone()).logits for t in (1, 4)]


def refused(fast, cache, message):
    for tokens in (1, 4):
        columns = cache.columns
        with pytest.raises(kvpass.CacheMismatchError, match=message):
            fast(random_ids(1, tokens), past_key_values=cache)
        assert cache.columns == columns


def test_weights_written_to_after_the_prefill_are_noticed_also_where_the_cache_is_saved(tmp_path):
    fast, cache = prompted()
    before = steps(fast, cache)
    cache.save(tmp_path / "cache.kv")
    content, saved = (tmp_path / "cache.kv").read_bytes(), copy.deepcopy(fast.state_dict())
    with torch.no_grad():
        fast.model.layers[0].mlp.up_proj.weight.mul_(1.001)
    refused(fast, cache, "weights were written to or replaced")
    with pytest.raises(kvpass.CacheMismatchError, match="weights were written to or replaced"):
        cache.save(tmp_path / "cache.kv")
    assert (tmp_path / "cache.kv").read_bytes() == content
    with pytest.raises(kvpass.CacheMismatchError, match="other weights"):
        kvpass.load_cache(tmp_path / "cache.kv", fast)
    cache.reset()
    later = fast(PROMPT, past_key_values=cache).past_key_values
    assert not torch.equal(steps(fast, later)[0], before[0]), "a prompt that is prefilled again works"
    fast.load_state_dict(saved)
    refused(fast, later, "weights were written to or replaced")


def test_an_adapter_that_is_activated_after_the_prefill_is_noticed():
    fast, cache = prompted(with_adapters())
    of_one = steps(fast, cache)
    fast.set_adapter("two")
    refused(fast, cache, "other adapters are active")
    fast.disable_adapters()
    refused(fast, cache, "other adapters are active")
    fast.enable_adapters()
    fast.set_adapter("one")
    assert torch.equal(steps(fast, cache)[0], of_one[0]), "with its own adapters the cache goes on"


def test_a_file_is_refused_where_adapters_or_persistent_buffers_differ(tmp_path):
    path = tmp_path / "cache.kv"
    fast, cache = prompted(with_adapters())
    cache.save(path)
    kvpass.load_cache(path, fast)
    fast.set_adapter("two")
    with pytest.raises(kvpass.CacheMismatchError, match="other active adapters"):
        kvpass.load_cache(path, fast)

    model = tiny_model("llama", layers=1)
    model.model.norm.register_buffer("offset", torch.zeros(3))
    prompted(model)[1].save(path)
    other = copy.deepcopy(model)
    other.model.norm.offset += 1
    with pytest.raises(kvpass.CacheMismatchError, match="other weights"):
        kvpass.load_cache(path, compiled_anew(other))


def test_models_that_share_their_first_parameter_are_told_apart():
    model, other = (tiny_model("llama", layers=1, seed=seed) for seed in range(2))
    other.model.embed_tokens = model.model.embed_tokens
    one, two = compiled_apart(1, model), compiled_anew(other)
    cache = one(PROMPT).past_key_values
    assert two.model.embed_tokens.weight is one.model.embed_tokens.weight
    refused(two, cache, "weights were written to or replaced")
    twin = compiled_apart(1, model)
    assert torch.equal(steps(twin, cache)[0], steps(one, cache)[0]), "another copy of the same model may have it"


def test_a_raw_module_whose_weights_were_written_to_is_noticed():
    model, compiled = raw_decoder()
    with torch.no_grad(), kvpass.session() as session:
        compiled(random_ids(1, 40), torch.arange(40)[None])
        compiled(random_ids(1, 1), torch.tensor([[40]]))
        model.head.weight.mul_(2)
        with pytest.raises(kvpass.CacheMismatchError, match="weights were written to"):
            compiled(random_ids(1, 1), torch.tensor([[41]]))
        assert session.cache.columns == 41 and session.calls == 2
