"""Saved caches: loading is bit-exact, damage and mistakes are refused with the reason."""

from __future__ import annotations

import gc
import random

import pytest
import torch

import kvpass
from kvpass.cache import serialization as cache_file
from kvpass.cache.serialization import read_cache_file, write_cache_file
from pairwise import quick
from tiny_models import compiled_once, left_pad, random_ids, tiny_model

CASES = {
    "lava": ("llama", "lava", {}),
    "one budget in bytes": ("gpt2", "snapkv", {"budget": "30KiB"}),
    "full": ("llama", "full", {"budget": None}),
    "no window": ("llama", "streaming_llm", {"window": 0, "evict_during_decode": False}),
    "evicts, tables": ("llama", "cake", {"tau1": 1.0, "tau2": 1.0}),
    "evicts, accumulates": ("qwen3", "h2o", {}),
    "evicts, reads queries": ("llama", "r_kv", {"buffer": 3}),
    "evicts, statistics of queries": ("llama", "triattention", {"window": 0, "buffer": 3}),
    "evicts, no window": ("llama", "tova", {"window": 0}),
    "ring": ("gemma3", "lava", {}),
    "ring, evicts": ("gpt_oss", "h2o", {}),
    "only rings": ("mistral_sliding", "lava", {}),
}


def compiled(family="llama", policy="lava", model=None, **options):
    given = {"window": 8, "budget": 20, **options}
    return kvpass.compile(model or tiny_model(family, layers=2), policy=policy, backend="eager", **given)


def shared(family="llama", policy="lava", **options):
    """The same, shared with other tests."""
    return compiled_once(family, layers=2, policy=policy, backend="eager", **{"window": 8, "budget": 20, **options})[1]


def prompt():
    return left_pad([random_ids(1, n, seed=n)[0] for n in (50, 31)])


def continuation(fast, cache):
    """Logits of a few more steps of both kinds."""
    logits = []
    for tokens in (1, 1, 4, 1):
        out = fast(random_ids(2, tokens, seed=tokens), past_key_values=cache)
        cache = out.past_key_values
        logits.append(out.logits)
    return torch.cat(logits, 1)


@pytest.fixture
def fast():
    return shared()


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("saved") / "cache.kv"
    ids, mask = prompt()
    shared().compress(ids, mask).save(path)
    return path


@pytest.mark.parametrize(
    "case",
    quick([*CASES], ["lava", "no window", "evicts, tables", "evicts, reads queries", "ring, evicts", "only rings"]),
)
def test_a_loaded_cache_continues_bit_for_bit_like_the_live_one(case, tmp_path):
    family, policy, options = CASES[case]
    fast = shared(family, policy, **options)
    ids, mask = prompt()
    cache = fast(ids, attention_mask=mask).past_key_values
    for step in ("after the prompt", "after some tokens"):
        cache.save(tmp_path / "cache.kv")
        loaded = kvpass.load_cache(tmp_path / "cache.kv", fast)
        assert (loaded.columns, loaded.batch_size, len(loaded)) == (cache.columns, 2, len(cache))
        assert loaded.layout == cache.layout and loaded.policy == cache.policy and loaded.budget == cache.budget
        if cache.full_layers:
            assert torch.equal(loaded.positions, cache.positions) and torch.equal(loaded.lengths, cache.lengths), step
        assert loaded.nbytes <= cache.nbytes
        expected = continuation(fast, cache)
        assert torch.equal(continuation(fast, loaded), expected), step
        assert loaded.full_layers == cache.full_layers or torch.equal(loaded.positions, cache.positions)
    assert torch.equal(loaded.attention_mask, cache.attention_mask)


def test_generation_from_a_loaded_cache_is_the_same_and_leaves_it_reusable(fast, saved):
    ids, mask = prompt()
    live, loaded = fast.compress(ids, mask), kvpass.load_cache(saved, fast)
    for seed in range(2):
        question = random_ids(2, 5, seed=seed)
        answers = [
            fast.generate(question, past_key_values=cache, max_new_tokens=80, do_sample=False)
            for cache in (live, loaded)
        ]
        assert torch.equal(*answers)
    assert loaded.reusable and loaded.columns == 50


@pytest.mark.parametrize("family", quick(["bloom", "falcon_alibi", "gpt_neo", "gptj"], ["falcon_alibi", "gpt_neo"]))
def test_a_model_that_has_prefilled_nothing_continues_a_loaded_cache_by_one_token(family, tmp_path):
    """Their masks are in the graph, and one token shows nothing of a mask."""
    model = tiny_model(family, layers=2 if family == "gpt_neo" else 1)
    fast = compiled(model=model)
    cache = fast(random_ids(1, 40)).past_key_values
    cache.save(tmp_path / "cache.kv")
    new = random_ids(1, 1, seed=1)
    expected = fast(new, past_key_values=cache).logits
    later = compiled(model=model)
    assert torch.equal(later(new, past_key_values=kvpass.load_cache(tmp_path / "cache.kv", later)).logits, expected)


def test_a_cache_that_is_not_reusable_comes_back_so(fast, tmp_path):
    cache = fast(random_ids(1, 40)).past_key_values
    cache.save(tmp_path / "cache.kv")
    loaded = kvpass.load_cache(tmp_path / "cache.kv", fast)
    assert fast(random_ids(1, 1), past_key_values=loaded).past_key_values is loaded


@pytest.mark.exhaustive
def test_the_compiled_graphs_take_a_loaded_cache(tmp_path):
    fast = kvpass.compile(tiny_model("llama", layers=1), budget=20, window=8)
    cache = fast.compress(random_ids(2, 50))
    cache.save(tmp_path / "cache.kv")
    loaded = kvpass.load_cache(tmp_path / "cache.kv", fast)
    for tokens in (5, 1):
        question = random_ids(2, tokens, seed=tokens)
        assert torch.equal(fast(question, past_key_values=loaded).logits, fast(question, past_key_values=cache).logits)
    assert len(fast.report().compiled) == 3


@pytest.mark.parametrize(
    ("dtype", "policy"),
    [
        (torch.bfloat16, "lava"),
        pytest.param(torch.float16, "snapkv", marks=pytest.mark.exhaustive),
        (torch.float32, "h2o"),
    ],
)
def test_a_file_is_as_long_as_the_cache_and_less_than_one_percent(tmp_path, dtype, policy):
    fast = compiled(policy=policy, budget=1024, model=tiny_model("llama", layers=2, dtype=dtype))
    fast.compress(random_ids(1, 1400)).save(tmp_path / "cache.kv")
    loaded = kvpass.load_cache(tmp_path / "cache.kv", fast)
    size = (tmp_path / "cache.kv").stat().st_size
    assert loaded.nbytes < size < 1.01 * loaded.nbytes
    assert all(store.pool_k.dtype == dtype for store in loaded.full_layers)


def test_slots_without_an_entry_are_not_written_to_the_file(tmp_path):
    fast = shared()
    ids, mask = prompt()
    files = []
    for value in (3.0, 7.0):
        cache = fast(ids, attention_mask=mask).past_key_values
        store = cache.full_layers[0]
        store.tail_k[:, :, :, store.used :] = value
        for row in range(2):
            store.pool_v[row, int(store.offsets[row, -1]) :] = value
            store.tail_v[:, row, :, : int(store.tail_start[row])] = value
        cache.save(tmp_path / "cache.kv")
        files.append(read_cache_file(tmp_path / "cache.kv")[1])
    assert all(torch.equal(tensor, files[1][name]) for name, tensor in files[0].items())


def test_a_file_of_another_model_policy_or_budget_is_refused_with_the_reason(fast, saved, tmp_path):
    model = fast
    wrong = [
        (compiled(model=tiny_model("llama", seed=1, num_hidden_layers=2)), "other weights"),
        (compiled("mistral"), "class is LlamaForCausalLM, here it is MistralForCausalLM"),
        (compiled(model=tiny_model("llama")), r"config\.num_hidden_layers is 2, here it is 3"),
        (
            compiled(model=tiny_model("llama", dtype=torch.bfloat16)),
            r"dtype is torch\.float32, here it is torch\.bfloat16",
        ),
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
        kvpass.load_cache(tmp_path / "none.kv", model)
    assert kvpass.load_cache(saved, compiled()).columns == 50, "another copy of the same model may have it"


def test_what_cannot_be_saved_says_why(fast, tmp_path):
    cache = fast(random_ids(1, 40)).past_key_values
    cache.reset()
    with pytest.raises(ValueError, match="empty"):
        cache.save(tmp_path / "cache.kv")
    parts_of(fast, tmp_path)
    forgotten = compiled()
    orphan = kvpass.load_cache(tmp_path / "parts.kv", forgotten)
    del forgotten
    gc.collect()
    with pytest.raises(ValueError, match="the model that filled it is gone"):
        orphan.save(tmp_path / "other.kv")
    assert not (tmp_path / "other.kv").exists()


def parts_of(fast, folder):
    fast(random_ids(1, 40)).past_key_values.save(folder / "parts.kv")
    return read_cache_file(folder / "parts.kv")


def test_200_damaged_files_are_all_refused(fast, saved, tmp_path):
    whole = saved.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    tensors = len(whole) - header
    rng = random.Random(0)
    regions = [
        (0, 8),
        (8, header),
        *((header + tensors * i // 10, header + tensors * (i + 1) // 10) for i in range(10)),
    ]
    damaged = []
    for first, last in regions:
        for _ in range(9):
            place = rng.randrange(first, last)
            flipped = bytes([whole[place] ^ rng.randrange(1, 256)])
            damaged.append(whole[:place] + flipped + whole[place + 1 :])
        for _ in range(4):
            damaged.append(whole[: rng.randrange(first, last)])
        for _ in range(4):
            place, count = rng.randrange(first, last), rng.randrange(1, 100)
            damaged.append(whole[:place] + whole[place + count :])
    damaged += [whole + whole[: rng.randrange(1, 100)] for _ in range(4)]
    assert len(damaged) >= 200
    path = tmp_path / "damaged.kv"
    for number, content in enumerate(damaged):
        path.write_bytes(content)
        with pytest.raises(kvpass.CacheFileError, match=r"damaged\.kv (is|has|holds)"):
            kvpass.load_cache(path, fast)
            pytest.fail(f"case {number} was loaded")
    path.write_bytes(whole)
    assert kvpass.load_cache(path, fast).columns == 50


@pytest.mark.parametrize("policy", ["lava", "h2o"])
def test_a_file_with_a_right_checksum_and_wrong_tensors_is_refused(policy, tmp_path):
    fast = shared(policy=policy)
    path = tmp_path / "cache.kv"
    metadata, tensors = parts_of(fast, tmp_path)
    changes = {
        "a missing tensor": {"store0_pool_k": None},
        "a pool that is too small": {"store0_offsets": tensors["store0_offsets"] + 10**6},
        "offsets that fall": {"store0_offsets": tensors["store0_offsets"].flip(1)},
        "another head dim": {"store0_tail_v": tensors["store0_tail_v"][..., :-1]},
        "more rows": {"start": tensors["start"].repeat(2)},
        "another dtype": {"store0_pool_v": tensors["store0_pool_v"].double()},
        "an unknown tensor": {"store0_pool_w": torch.ones(1)},
    }
    for what, change in changes.items():
        write_cache_file(path, {k: v for k, v in {**tensors, **change}.items() if v is not None}, metadata)
        with pytest.raises(kvpass.CacheFileError, match="holds no cache"):
            kvpass.load_cache(path, fast)
            pytest.fail(what)
    facts = [{"used": 10**6, "tail_bound": -1}]
    for what, change in {"tail": {"stores": facts}, "layout": {"layout": {"pools": [], "rings": []}}}.items():
        write_cache_file(path, tensors, {**metadata, **change})
        with pytest.raises(kvpass.CacheFileError, match="holds no cache"):
            kvpass.load_cache(path, fast)
            pytest.fail(what)


def test_a_cache_of_a_newer_kvpass_is_refused(fast, tmp_path, monkeypatch):
    cache = fast(random_ids(1, 40)).past_key_values
    monkeypatch.setattr(cache_file, "FORMAT", 2)
    cache.save(tmp_path / "cache.kv")
    monkeypatch.undo()
    with pytest.raises(kvpass.CacheFileError, match=f"format 2, written by kvpass {kvpass.__version__}"):
        kvpass.load_cache(tmp_path / "cache.kv", fast)


def test_notes_are_found_again(fast, tmp_path):
    fast(random_ids(1, 40)).past_key_values.save(tmp_path / "cache.kv", notes={"source": "a book"})
    assert read_cache_file(tmp_path / "cache.kv")[0]["notes"] == {"source": "a book"}


def test_loading_in_inference_mode_gives_a_cache_that_works_outside(fast, saved):
    with torch.inference_mode():
        loaded = kvpass.load_cache(saved, fast).clone()
    fast(random_ids(2, 1), past_key_values=loaded)


@pytest.mark.parametrize("case", ["lava", "evicts, tables", "ring"])
def test_a_cache_moves_to_another_device_as_a_whole(case):
    family, policy, options = CASES[case]
    fast = shared(family, policy, **options)
    cache = fast.compress(random_ids(1, 40))
    before = cache.nbytes
    assert cache.to("cpu") is cache
    moved = cache.to("meta")
    assert moved.reusable and moved.nbytes == before and moved.device.type == "meta" and cache.device.type == "cpu"
    parts = [moved, *moved.full_layers, *moved.sliding_layers]
    tensors = {name: value for part in parts for name, value in vars(part).items() if isinstance(value, torch.Tensor)}
    assert {name for name, tensor in tensors.items() if tensor.device.type != "meta"} == set()
    with pytest.raises(kvpass.CacheMismatchError, match="cache on meta"):
        fast(random_ids(1, 1), past_key_values=moved)
    fast(random_ids(1, 1), past_key_values=cache)
