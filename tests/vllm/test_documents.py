"""Files of documents, as an engine takes them."""

import itertools
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

import kvpass
from kvpass.cache.fingerprint import weights_digest
from kvpass.ranks import ONE_PROCESS, Ranks
from kvpass.vllm import documents
from kvpass.vllm.admission import Admission
from kvpass.vllm.settings import Settings
from tiny_models import sharing_captures, tiny_model


def make(folder, **changes):
    model = tiny_model("llama", **{"layers": 2, "vocab_size": 50} | changes)
    model.save_pretrained(folder)
    return model


def compressed(model, policy="lava", budget=40, rows=1, tokens=60, **options):
    fast = kvpass.compile(model, policy=policy, budget=budget, backend="eager", **options)
    sharing_captures(fast, "documents")  # all of the model of the fixture below
    ids = torch.randint(5, 50, (rows, tokens), generator=torch.Generator().manual_seed(7))
    return fast, fast.compress(ids)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("model")


@pytest.fixture(scope="module")
def model(folder):
    return make(folder)


@pytest.fixture
def file(tmp_path):
    return tmp_path / "a.kv"


def config(folder, dtype=torch.float32, max_model_len=100):
    of_model = {"model": str(folder), "dtype": dtype, "revision": None, "trust_remote_code": False}
    return SimpleNamespace(
        model_config=SimpleNamespace(max_model_len=max_model_len, **of_model),
        device_config=SimpleNamespace(device=torch.device("cpu")),
    )


def settings(*files):
    named = [f"{name}={file}" for name, file in zip("abc", files, strict=False)]
    return Settings.read({"kvpass": {"policy": "lava", "budget": 40, "room": 8, "documents": named}})


def refused(folder, file, message):
    with pytest.raises(ValueError, match=f"document 'a': {message}"):
        documents.read(settings(file), 100)


def load(folder, *files, ranks=ONE_PROCESS, **changes):
    return documents.load(config(folder, **changes), settings(*files), ranks)


def assert_holds(found, store, heads):
    """Pools hold of document "a" the entries of these heads of both layers: those of pool and tail."""
    for name, pool in found.pools.items():
        of_pool, of_tail = getattr(store.buffers, name), getattr(store.buffers, name.replace("pool", "tail"))
        for segment, (layer, head) in enumerate(itertools.product(range(2), heads)):
            begin, end = found.offsets["a"][segment : segment + 2].tolist()
            first, last = store.buffers.offsets[0, 2 * layer + head :][:2].tolist()
            newest = of_tail[layer, 0, head, int(store.buffers.tail_start) : store.used]
            assert torch.equal(pool[0, begin:end], torch.cat([of_pool[0, first:last], newest]))


@pytest.mark.parametrize("policy", ["lava", "kvzip", "knorm", "full"])
def test_all_entries_of_a_document_lie_in_one_pool(folder, model, file, policy):
    _, cache = compressed(model, policy, None if policy == "full" else 40)
    cache.save(file)
    found = load(folder, file, file)
    entries = int(cache.lengths.sum())
    assert found.pools["pool_k"].shape == found.pools["pool_v"].shape == (1, 2 * entries, 16)
    assert found.offsets["a"].diff().tolist() == cache.lengths.flatten().tolist()
    assert torch.equal(found.offsets["b"], found.offsets["a"] + entries) and found.offsets["b"].dtype == torch.int32
    store = cache.state.full_layers[0]
    assert_holds(found, store, [0, 1])


def test_each_process_has_the_entries_of_its_heads(folder, model, file):
    _, cache = compressed(model)
    cache.save(file)
    for head in range(2):
        assert_holds(load(folder, file, ranks=Ranks("", head, 2)), cache.state.full_layers[0], [head])


@pytest.mark.parametrize("ranks", [ONE_PROCESS, Ranks("", 1, 2)], ids=["one process", "second of two"])
def test_a_document_of_codes_keeps_them_with_scales_and_mean(folder, model, file, ranks):
    _, cache = compressed(model, entries="rot4")
    cache.save(file)
    asked = settings(file)
    with pytest.raises(ValueError, match="has entries='rot4', but this engine 'model'"):
        documents.load(config(folder), asked, ranks)
    found = documents.load(config(folder), replace(asked, entry_format="rot4"), ranks)
    store, heads = cache.state.full_layers[0], [ranks.rank] if ranks.several else [0, 1]
    assert torch.equal(found.means["a"], store.buffers.key_mean[:, 0, heads])
    assert list(found.pools) == ["pool_k", "pool_v", "pool_k_scale", "pool_v_scale"]
    assert_holds(found, store, heads)


def test_a_front_end_knows_which_documents_begin_a_chat_and_what_no_question_begins_with(model, tmp_path):
    _, cache = compressed(model)
    state = {"before": "a text ", "system": None, "options": {}}
    for name, notes in (("a", {"document": state}), ("b", {"document": state | {"options": None}}), ("c", {})):
        cache.save(tmp_path / name, notes=notes)
    given = {"room": 8, "documents": [f"{name}={tmp_path / name}" for name in "abc"]}
    engine = SimpleNamespace(additional_config={"kvpass": given}, model_config=SimpleNamespace(max_model_len=100))
    first = int(cache.ids[0, 0])
    for added, begins in (({"<a>": first, "<b>": 49}, {1, first}), ({"<b>": 49}, {1})):
        tokenizer = SimpleNamespace(bos_token_id=1, get_added_vocab=lambda added=added: added, chat_template="x")
        found = Admission.of(engine, tokenizer)
        assert list(found.documents) == ["a", "b", "c"] and list(found.chats) == ["a"]
        assert found.begins == begins and found.documents["b"] == cache.ids[0].tolist()
        assert found.chat_about("a").before == "a text "
        for name in "bc":
            with pytest.raises(ValueError, match=rf"'{name}': .* \['a', 'b', 'c'\], .* \['a'\]: name one"):
                found.chat_about(name)
    assert Admission.of(engine).begins == frozenset()  # an engine without a tokenizer


def test_padding_is_no_part_of_a_document(folder, model, file):
    fast, _ = compressed(model)
    ids = torch.tensor([[0] * 5 + [*range(5, 50)]])
    fast.compress(ids, attention_mask=(ids > 0).long()).save(file)
    assert documents.read(settings(file), 100)["a"].ids == [*range(5, 50)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rows": 2}, "holds 2 texts: compress each alone"),
        ({"entries": "int8"}, "has entries='int8', but this engine 'model': give both the same"),
        ({"policy": "h2o"}, "has policy 'h2o', which evicts while decoding"),
        ({"tokens": 99}, "has 99 tokens: pass a --max-model-len above 100"),
    ],
)
def test_a_cache_that_an_engine_cannot_continue_is_refused(folder, model, file, options, message):
    compressed(model, **options)[1].save(file)
    refused(folder, file, f"{file} {message}")


def test_a_text_of_which_a_part_was_forgotten_is_refused(folder, model, file):
    _, cache = compressed(model)
    cache.forget(3, 5)
    cache.save(file)
    refused(folder, file, f"{file} has forgotten tokens")


def test_a_file_that_cannot_be_read_or_is_of_before_and_without_token_ids_is_refused(folder, model, file):
    refused(folder, file, ".*No such file")
    _, cache = compressed(model)
    cache.state.ids = None
    cache.save(file)
    refused(folder, file, ".* has no token ids")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    refused(folder, file, ".* is damaged")
    save_file({"x": torch.ones(3)}, file)
    refused(folder, file, ".* is no cache file of kvpass")


@pytest.mark.parametrize(
    ("changes", "dtype", "message"),
    [
        ({"seed": 1}, torch.float32, "one of the same configuration with other weights"),
        ({"layers": 3}, torch.float32, "its config.num_hidden_layers is 2, here it is 3"),
        ({}, torch.bfloat16, "its dtype is torch.float32, here it is torch.bfloat16"),
    ],
)
def test_a_document_of_another_model_is_refused(model, file, tmp_path, changes, dtype, message):
    compressed(model)[1].save(file)
    make(tmp_path / "other", **changes)
    with pytest.raises(ValueError, match=f"document 'a': the cache is of another model: {message}"):
        load(tmp_path / "other", file, dtype=dtype)


def test_a_policy_that_is_made_for_another_model_is_refused(folder, model, tmp_path):
    given = {"policy": "duo_attention", "head_map": [[1, 0]] * 2, "window": 8, "sinks": 2, "budget": 40, "room": 8}
    named = given | {"of_model": weights_digest(model, {}, rounded=True)}
    assert documents.load(config(folder), Settings.read({"kvpass": named}), ONE_PROCESS) is None
    make(tmp_path / "other", seed=1)
    with pytest.raises(ValueError, match="'duo_attention' was given a file that was made for another model"):
        documents.load(config(tmp_path / "other"), Settings.read({"kvpass": named}), ONE_PROCESS)
    numbers = Settings.read({"kvpass": given})  # of any model: no weights are loaded
    assert documents.load(config(tmp_path / "no folder"), numbers, ONE_PROCESS) is None
