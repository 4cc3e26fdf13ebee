"""Saved caches: loading is bit-exact, and what does not belong to the model is refused with the reason."""

import gc
from operator import attrgetter

import pytest
import torch

import kvpass
from compiled_models import compiled_anew, greedy, padded, reloaded, two_layers
from kvpass.cache.cache_file import read_cache_file, write_cache_file
from pairwise import quick, quick_rows
from tiny_models import HYBRIDS, continuation, kvzap_file, random_ids, tiny_model
from versions import before

HAS_STATES = not before("5.22")
CASES = {
    "lava": ("llama", "lava", {}),
    "one budget in bytes": ("gpt2", "snapkv", {"budget": "30KiB"}),
    "full": ("llama", "full", {"budget": None}),
    "full, codes": ("llama", "full", {"budget": None, "entries": "int8"}),
    "no window": ("llama", "streaming_llm", {"window": 0, "evict_during_decode": False}),
    "evicts, tables": ("llama", "cake", {"tau1": 1.0, "tau2": 1.0}),
    "evicts, accumulates": ("qwen3", "h2o", {}),
    "evicts, reads queries": ("llama", "r_kv", {"buffer": 3}),
    "evicts, statistics of queries": ("llama", "triattention", {"window": 0, "buffer": 3}),
    "evicts, no window": ("llama", "tova", {"window": 0}),
    "ring": ("gemma3", "lava", {}),
    "ring, evicts": ("gpt_oss", "h2o", {}),
    "only rings": ("mistral_sliding", "lava", {}),
    "chunks": ("llama4", "lava", {}),
    "compressed again": ("llama", "lava", {"recompress": "every_turn"}),
    "replays": ("gpt_oss", "kvzip", {"window": 0, "prompt_ids": (5, 6, 7), "chunk": 12, "overlap": 5}),
    "scores of tokens": ("llama", "kvzap", {"weights": kvzap_file(2), "evict_during_decode": True}),
    "two policies": ("llama", "kvzap", {"weights": kvzap_file(2), "decode_policy": "r_kv", "decode_buffer": 5}),
    **{f"states of {family}": (family, "lava", {}) for family in (HYBRIDS if HAS_STATES else ())},
}
QUICK = ["lava", "no window", "evicts, tables", "evicts, reads queries", "ring, evicts", "only rings"]
QUICK += ["compressed again", "replays", "two policies", *["states of lfm2"] * HAS_STATES]


FACTS = attrgetter("columns", "batch_size", "state.layout", "policy", "budget")


def compiled(family="llama", model=None, **options):
    return compiled_anew(model or tiny_model(family, layers=2), **options)


@pytest.fixture
def fast():
    return two_layers()[1]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("saved") / "cache.kv"
    two_layers()[1].compress(*padded(50, 31)).save(path)
    return path


@pytest.mark.parametrize("case", quick([*CASES], QUICK))
def test_a_loaded_cache_continues_bit_for_bit_like_the_live_one(case, tmp_path):
    family, policy, options = CASES[case]
    _, fast = two_layers(family, policy=policy, **options)
    cache = fast(*padded(50, 31)).past_key_values
    for step in ("after the prompt", "after some tokens"):
        loaded = reloaded(cache, fast, tmp_path)
        assert FACTS(loaded) == FACTS(cache) and len(loaded) == len(cache)
        if cache.state.full_layers:
            assert torch.equal(loaded.positions, cache.positions) and torch.equal(loaded.lengths, cache.lengths), step
        assert loaded.nbytes <= cache.nbytes
        expected = continuation(fast, cache)
        assert torch.equal(continuation(fast, loaded), expected), step
        assert loaded.state.full_layers == cache.state.full_layers or torch.equal(loaded.positions, cache.positions)
    assert torch.equal(loaded.attention_mask, cache.attention_mask)


@pytest.mark.parametrize("family", quick(["bloom", "falcon_alibi", "gpt_neo", "gptj"], ["falcon_alibi"]))
def test_a_model_that_has_prefilled_nothing_continues_a_loaded_cache_by_one_token(family, tmp_path):
    """Their masks are in the graph, and one token shows nothing of a mask."""
    model = tiny_model(family, layers=2 if family == "gpt_neo" else 1)
    fast, later = compiled(model=model), compiled(model=model)
    cache = fast(random_ids(1, 40)).past_key_values
    loaded, new = reloaded(cache, later, tmp_path), random_ids(1, 1, seed=1)
    assert torch.equal(later(new, past_key_values=loaded).logits, fast(new, past_key_values=cache).logits)


def test_padding_behind_a_row_comes_back_from_a_file(fast, tmp_path):
    cache, new = fast(*padded(50, 31)).past_key_values, random_ids(2, 4)
    behind = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
    mask = torch.cat([padded(50, 31)[1], behind, torch.ones(2, 1).long()], 1)
    fast(new, mask[:, :54], past_key_values=cache)
    fast(new[:, :1], past_key_values=cache)
    loaded = reloaded(cache, fast, tmp_path)
    assert torch.equal(loaded.attention_mask, mask) and torch.equal(cache.attention_mask, mask)
    assert torch.equal(loaded.ids, torch.cat([padded(50, 31)[0], new, new[:, :1]], 1))
    seen = {"attention_mask": torch.cat([mask, torch.ones(2, 1).long()], 1), "repetition_penalty": 2.0}
    answers = [greedy(fast, new[:, :1], past_key_values=x.clone(), **seen) for x in (cache, loaded)]
    assert torch.equal(*answers)
    metadata, tensors = read_cache_file(tmp_path / "cache.kv")
    for wrong in (tensors["mask"] * 2, 1 - tensors["mask"], tensors["mask"].repeat(1, 2), tensors["mask"][:1]):
        write_cache_file(tmp_path / "forged.kv", {**tensors, "mask": wrong}, metadata)
        with pytest.raises(kvpass.CacheFileError, match="mask"):
            kvpass.load_cache(tmp_path / "forged.kv", fast)


DTYPES = [(torch.bfloat16, "lava"), (torch.float32, "h2o"), (torch.float16, "snapkv")]


@pytest.mark.parametrize(("dtype", "policy"), quick_rows(DTYPES, DTYPES[:2]))
def test_a_file_is_as_long_as_the_cache_and_less_than_one_percent(tmp_path, dtype, policy):
    _, fast = two_layers(policy=policy, budget=1024, changes={} if dtype == torch.float32 else {"dtype": dtype})
    loaded = reloaded(fast(random_ids(2, 1100)).past_key_values, fast, tmp_path)
    size = (tmp_path / "cache.kv").stat().st_size
    assert loaded.nbytes < size < 1.01 * loaded.nbytes
    assert all(store.buffers.pool_k.dtype == dtype for store in loaded.state.full_layers)


def test_slots_without_an_entry_are_not_written_to_the_file(fast, tmp_path):
    files = []
    for value in (3.0, 7.0):
        cache = fast(*padded(50, 31)).past_key_values
        store = cache.state.full_layers[0]
        store.buffers.tail_k[:, :, :, store.used :] = value
        for row in range(2):
            store.buffers.pool_v[row, int(store.buffers.offsets[row, -1]) :] = value
            store.buffers.tail_v[:, row, :, : int(store.buffers.tail_start[row])] = value
        cache.save(tmp_path / "cache.kv")
        files.append(read_cache_file(tmp_path / "cache.kv")[1])
    assert all(torch.equal(tensor, files[1][name]) for name, tensor in files[0].items())


def test_a_file_of_another_model_policy_or_budget_is_refused_with_the_reason(fast, saved, tmp_path):
    half = tiny_model("llama", dtype=torch.bfloat16)
    turned = tiny_model("llama", layers=2, rope_parameters={"rope_type": "default", "rope_theta": 77.0})
    wrong = [
        (compiled(model=tiny_model("llama", seed=1, num_hidden_layers=2)), "other weights"),
        (compiled("mistral"), "class is LlamaForCausalLM, here it is MistralForCausalLM"),
        (compiled(model=tiny_model("llama")), r"config\.num_hidden_layers is 2, here it is 3"),
        (compiled(model=half), r"dtype is torch\.float32, here it is torch\.bfloat16"),
        (compiled(model=turned), r"config\.rope_parameters\.rope_theta is 10000\.0, here it is 77\.0"),
        (compiled(model=tiny_model("llama", layers=2, rms_norm_eps=1e-3)), r"config\.rms_norm_eps"),
        (compiled(policy="snapkv"), "has policy .*lava"),
        (compiled(window=4), "has policy"),
        (compiled(budget=21), "has budget 20, the model 21"),
        (compiled(budget=0.5), r"has budget 20, the model 0\.5"),
    ]
    for stranger, message in wrong:
        with pytest.raises(kvpass.CacheMismatchError, match=message):
            kvpass.load_cache(saved, stranger)
    with pytest.raises(ValueError, match=r"what kvpass\.compile returned"):
        kvpass.load_cache(saved, tiny_model("llama"))
    with pytest.raises(FileNotFoundError):
        kvpass.load_cache(tmp_path / "none.kv", fast)
    same = tiny_model("llama", layers=2)
    same.config.use_cache, same.config._name_or_path = False, "elsewhere"
    metadata, tensors = read_cache_file(saved)
    metadata["model"]["config"]["of_a_newer_version"] = "1"
    write_cache_file(tmp_path / "newer.kv", tensors, metadata)
    for path in (saved, tmp_path / "newer.kv"):
        assert kvpass.load_cache(path, compiled(model=same)).columns == 50, "another copy of the model may have it"
    with torch.inference_mode():
        loaded = kvpass.load_cache(saved, fast).clone()
    fast(random_ids(2, 1), past_key_values=loaded)  # outside of that mode


def test_what_cannot_be_saved_says_why(fast, tmp_path):
    cache = fast(random_ids(1, 40)).past_key_values
    cache.reset()
    with pytest.raises(ValueError, match="empty"):
        cache.save(tmp_path / "cache.kv")
    fast(random_ids(1, 40)).past_key_values.save(tmp_path / "parts.kv")
    assert read_cache_file(tmp_path / "parts.kv")[0]["kvpass_version"] == kvpass.__version__
    forgotten = compiled()
    orphan = kvpass.load_cache(tmp_path / "parts.kv", forgotten)
    del forgotten
    gc.collect()
    with pytest.raises(ValueError, match="the model that filled it is gone"):
        orphan.save(tmp_path / "other.kv")
    assert not (tmp_path / "other.kv").exists()


@pytest.mark.parametrize("case", quick(["lava", "evicts, tables", "ring"], ["evicts, tables", "ring"]))
def test_a_cache_moves_to_another_device_as_a_whole(case):
    family, policy, options = CASES[case]
    _, fast = two_layers(family, policy=policy, **options)
    cache = fast.compress(random_ids(2, 40))
    before = cache.nbytes
    assert cache.to("cpu") is cache
    moved = cache.to("meta")
    assert moved.reusable and moved.nbytes == before and moved.device.type == "meta" and cache.device.type == "cpu"
    tensors = {name: value for name, value in vars(moved.state).items() if isinstance(value, torch.Tensor)}
    tensors |= {name: value for part in moved.state.parts for name, value in part.tensors.items()}
    assert {name for name, tensor in tensors.items() if tensor.device.type != "meta"} == set()
    with pytest.raises(kvpass.CacheMismatchError, match="cache on meta"):
        fast(random_ids(2, 1), past_key_values=moved)
    fast(random_ids(2, 1), past_key_values=cache)
