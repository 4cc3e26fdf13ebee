"""A model that changes while caches of it are alive: another checkpoint, other adapters, hooks on its modules."""

import copy

import pytest
import torch
from peft import LoraConfig

import kvpass
from compiled_models import compiled_anew
from pairwise import quick
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


def refused(fast, cache, message, lengths=(1, 4)):
    for tokens in lengths:
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
        fast.model.layers[0].mlp.up_proj.weight.mul_(1.5)
    refused(fast, cache, "weights were written to or replaced")
    with pytest.raises(kvpass.CacheMismatchError, match="weights were written to or replaced"):
        cache.save(tmp_path / "cache.kv")
    assert (tmp_path / "cache.kv").read_bytes() == content
    with pytest.raises(kvpass.CacheMismatchError, match="other weights"):
        kvpass.load_cache(tmp_path / "cache.kv", fast)
    later = fast(PROMPT).past_key_values
    assert not torch.equal(steps(fast, later)[0], before[0]), "a prompt that is prefilled again works"
    fast.load_state_dict(saved)
    refused(fast, later, "weights were written to or replaced")


def test_a_replaced_module_is_noticed_by_a_call_of_several_tokens_and_a_cache_that_is_filled_again_works():
    fast, cache = prompted(tiny_model("llama", layers=2))
    steps(fast, cache)
    fast.model.layers[0].mlp = copy.deepcopy(fast.model.layers[1].mlp)
    refused(fast, cache, "weights were written to or replaced", lengths=[4, 1])
    cache.reset()
    fast(PROMPT, past_key_values=cache)
    steps(fast, cache)


def test_an_adapter_that_is_activated_after_the_prefill_is_noticed():
    fast, cache = prompted(with_adapters())
    of_one = steps(fast, cache)
    fast.set_adapter("two")
    refused(fast, cache, "other adapters are active")
    of_two = steps(fast, fast(PROMPT).past_key_values)
    assert not torch.equal(of_one[0], of_two[0])
    fast.disable_adapters()
    refused(fast, cache, "other adapters are active")
    fast.enable_adapters()
    fast.set_adapter("one")
    assert torch.equal(steps(fast, cache)[0], of_one[0]), "with its own adapters the cache goes on"
    fast.add_adapter(LoraConfig(r=2, init_lora_weights=False, target_modules=["gate_proj"]), "three")
    fast.eval()
    refused(fast, cache, "written to or replaced|other adapters are active")


def test_a_file_is_refused_where_adapters_or_persistent_buffers_differ(tmp_path):
    path = tmp_path / "cache.kv"
    fast, cache = prompted(with_adapters())
    cache.save(path)
    kvpass.load_cache(path, fast)
    fast.set_adapter("two")
    with pytest.raises(kvpass.CacheMismatchError, match="other active adapters"):
        kvpass.load_cache(path, fast)

    changes = {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2}
    model = tiny_model("deepseek_v3", layers=2, **changes)
    prompted(model)[1].save(path)
    other = copy.deepcopy(model)
    bias = next(b for name, b in other.named_buffers() if name.endswith("e_score_correction_bias"))
    bias += torch.arange(4.0)
    with pytest.raises(kvpass.CacheMismatchError, match="other weights"):
        kvpass.load_cache(path, compiled_anew(other))


def test_models_that_share_their_first_parameter_are_told_apart():
    model, other = (tiny_model("llama", layers=1, seed=seed) for seed in range(2))
    other.model.embed_tokens = model.model.embed_tokens
    (one, cache), two = prompted(model), compiled_anew(other)
    assert two.model.embed_tokens.weight is one.model.embed_tokens.weight
    refused(two, cache, "weights were written to or replaced")
    twin = compiled_anew(model)
    assert torch.equal(steps(twin, cache)[0], steps(one, cache)[0]), "another copy of the same model may have it"


@pytest.mark.parametrize(
    "kind", quick(["register_forward_hook", "register_forward_pre_hook"], ["register_forward_hook"])
)
def test_hooks_are_honoured_whenever_they_are_registered(kind):
    def doubled(module, args, output=None):
        return (args[0] * 2,) if output is None else output * 2

    early, late = (compiled_anew(tiny_model("llama", layers=1)) for _ in range(2))
    getattr(early.model.layers[0].mlp, kind)(doubled)
    expected, plain = early(PROMPT), late(PROMPT)
    handle = getattr(late.model.layers[0].mlp, kind)(doubled)
    hooked, token = late(PROMPT), random_ids(1, 1)
    assert torch.equal(hooked.logits, expected.logits) and not torch.equal(hooked.logits, plain.logits)
    steps = [one(token, past_key_values=out.past_key_values).logits for one, out in ((late, hooked), (early, expected))]
    assert torch.equal(*steps)
    handle.remove()
    assert torch.equal(late(PROMPT).logits, plain.logits)


def test_a_raw_module_whose_weights_were_written_to_is_noticed():
    model, compiled = raw_decoder()
    with torch.no_grad(), kvpass.session() as session:
        compiled(random_ids(1, 40), torch.arange(40)[None])
        compiled(random_ids(1, 1), torch.tensor([[40]]))
        model.head.weight.mul_(2)
        with pytest.raises(kvpass.CacheMismatchError, match="weights were written to"):
            compiled(random_ids(1, 1), torch.tensor([[41]]))
        assert session.cache.columns == 41 and session.calls == 2
