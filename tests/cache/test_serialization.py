"""The container of a saved cache: any damage is noticed, and what comes back is bit for bit what went in."""

from __future__ import annotations

import json
import os

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from kvpass.cache import serialization as cache_file
from kvpass.cache.fingerprint import ModelFingerprint, weights_digest
from kvpass.cache.serialization import read_cache_file, write_cache_file
from kvpass.errors import CacheFileError, CacheMismatchError
from tiny_models import tiny_model

METADATA = {"model": {"name": 'a "sha256":"x" b'}, "numbers": [1, 2.5, None]}


@pytest.fixture
def written(tmp_path):
    path = tmp_path / "cache.kv"
    write_cache_file(path, some_tensors(), METADATA)
    return path


def some_tensors():
    return {
        "half": torch.randn(3, 4).half(),
        "bfloat": torch.randn(2, 0, 5).bfloat16(),
        "view": torch.arange(40, dtype=torch.int32).view(5, 8)[:, ::2],
        "odd": torch.tensor([float("nan"), float("inf"), -0.0]),
        "scalar": torch.tensor(7),
    }


def bits(tensor):
    return tensor.reshape(-1).contiguous().view(torch.uint8)


def test_everything_comes_back_bit_for_bit_in_storages_of_its_own(written):
    torch.manual_seed(0)
    expected = some_tensors()
    torch.manual_seed(0)
    write_cache_file(written, some_tensors(), METADATA)
    metadata, found = read_cache_file(written)
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert tensor.dtype == expected[name].dtype
        assert tensor.shape == expected[name].shape and torch.equal(bits(tensor), bits(expected[name]))
        assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    assert metadata == {**METADATA, "format": cache_file.FORMAT}


def test_every_byte_of_the_file_counts(written):
    whole = written.read_bytes()
    for place in range(len(whole)):
        written.write_bytes(whole[:place] + bytes([whole[place] ^ 0x20]) + whole[place + 1 :])
        with pytest.raises(CacheFileError):
            read_cache_file(written)
    for length in range(len(whole)):
        written.write_bytes(whole[:length])
        with pytest.raises(CacheFileError):
            read_cache_file(written)
    written.write_bytes(whole + b"\0")
    with pytest.raises(CacheFileError):
        read_cache_file(written)
    written.write_bytes(whole)
    read_cache_file(written)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "no cache file"),
        (b"\x08\0\0\0\0\0\0\0[1, 2,3]", "header cannot be read"),
        (b"\x02\0\0\0\0\0\0\0{}", "states no checksum"),
        (b"\x02\0\0\0\0\0\0\0\xff\xff", "header cannot be read"),
        (b"\xff\xff\xff\xff\xff\xff\xff\xff{}", "no cache file"),
        (b"PK\x03\x04 a pickled thing of torch.save", "no cache file"),
    ],
)
def test_other_files_are_refused(tmp_path, content, reason):
    path = tmp_path / "other"
    path.write_bytes(content)
    with pytest.raises(CacheFileError, match=reason):
        read_cache_file(path)


def test_a_safetensors_file_that_is_no_cache_is_refused(tmp_path, written):
    path = tmp_path / "model.safetensors"
    save_file({"weight": torch.ones(3)}, path)
    with pytest.raises(CacheFileError, match="states no checksum"):
        read_cache_file(path)
    save_file({"weight": torch.ones(3)}, path, {"sha256": "0" * 64})
    with pytest.raises(CacheFileError, match="damaged"):
        read_cache_file(path)


def test_a_newer_format_is_refused_with_both_versions(tmp_path, monkeypatch):
    path = tmp_path / "cache.kv"
    monkeypatch.setattr(cache_file, "FORMAT", 3)
    write_cache_file(path, {}, {"kvpass_version": "9.9"})
    monkeypatch.undo()
    with pytest.raises(CacheFileError, match=r"format 3, written by kvpass 9\.9; this kvpass reads formats up to 1"):
        read_cache_file(path)


def test_a_failed_write_leaves_the_old_file_and_nothing_else(written, monkeypatch):
    before = written.read_bytes()

    def fail(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(KeyboardInterrupt):
        write_cache_file(written, {"x": torch.ones(2)}, {})
    assert written.read_bytes() == before and os.listdir(written.parent) == [written.name]


def test_no_pickle_in_the_file(written):
    length = int.from_bytes(written.read_bytes()[:8], "little")
    header = json.loads(written.read_bytes()[8 : 8 + length])
    assert header["__metadata__"].keys() == {"kvpass", "sha256"}
    assert json.loads(header["__metadata__"]["kvpass"])["numbers"] == [1, 2.5, None]


def test_the_identity_names_what_differs_and_ignores_what_does_not_matter():
    described = json.loads(json.dumps(ModelFingerprint(tiny_model("llama")).describe()))
    same = tiny_model("llama")
    same.config.use_cache, same.config._name_or_path = False, "elsewhere"
    ModelFingerprint(same).check({**described, "config": {**described["config"], "of_a_newer_version": "1"}})
    theta = {"rope_type": "default", "rope_theta": 77.0}
    for model, message in [
        (tiny_model("llama", seed=1), "other weights"),
        (
            tiny_model("llama", rope_parameters=theta),
            r"config\.rope_parameters\.rope_theta is 10000\.0, here it is 77\.0",
        ),
        (tiny_model("llama", rms_norm_eps=1e-3), r"config\.rms_norm_eps"),
        (tiny_model("llama", dtype=torch.float16), r"dtype is torch\.float32, here it is torch\.float16"),
        (tiny_model("mistral"), "class is LlamaForCausalLM"),
        (tiny_model("llama", num_hidden_layers=2), r"num_hidden_layers"),
    ]:
        with pytest.raises(CacheMismatchError, match=message):
            ModelFingerprint(model).check(described)


def test_the_digest_of_the_weights_sees_small_changes_everywhere():
    model = nn.Sequential(nn.Linear(300, 300), nn.Linear(3, 2))
    seen = {weights_digest(model, {})}
    for parameter in model.parameters():
        with torch.no_grad():
            parameter *= 1.001
        seen.add(weights_digest(model, {}))
    model[1].weight.data = model[1].weight.data.T.contiguous()
    seen.add(weights_digest(model, {}))
    assert len(seen) == 6
