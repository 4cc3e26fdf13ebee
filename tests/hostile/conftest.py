"""Good files of two models, out of which tests make bad ones."""

from __future__ import annotations

import pytest

import kvpass
from kvpass.cache.serialization import read_cache_file, write_cache_file
from tiny_models import left_pad, random_ids, tiny_model

REFUSED = (kvpass.CacheFileError, kvpass.CacheMismatchError)


class Base:
    """A model, a good file of it, and what is in the file."""

    def __init__(self, folder, family, policy, budget, **changes):
        model = tiny_model(family, **changes)
        self.fast = kvpass.compile(model, policy=policy, budget=budget, window=8, backend="eager")
        ids, mask = left_pad([random_ids(1, n, seed=n)[0] for n in (50, 31)])
        cache = self.fast(ids, attention_mask=mask).past_key_values
        cache = self.fast(random_ids(2, 3), past_key_values=cache).past_key_values
        self.path = folder / "cache.kv"
        cache.save(self.path, notes={"model": "builtin", "dtype": "auto"})
        self.metadata, self.tensors = read_cache_file(self.path)

    def load(self, metadata=None, tensors=None):
        """What a file of these parts gives, the good file's own where None."""
        write_cache_file(self.path, self.tensors if tensors is None else tensors, metadata or self.metadata)
        return kvpass.load_cache(self.path, self.fast)

    def refuses(self, what, metadata=None, tensors=None):
        try:
            self.load(metadata, tensors)
        except REFUSED:
            return
        pytest.fail(f"a file was loaded: {what}")


@pytest.fixture(scope="session")
def appending(tmp_path_factory):
    """Pool, tail, a ring, and a padded row."""
    return Base(
        tmp_path_factory.mktemp("appending"),
        "gemma3",
        "lava",
        20,
        num_hidden_layers=2,
        layer_types=["sliding_attention", "full_attention"],
    )


@pytest.fixture(scope="session")
def evicting(tmp_path_factory):
    """Pool, tail, and the table by which decoding evicts."""
    return Base(tmp_path_factory.mktemp("evicting"), "llama", "h2o", 0.5, num_hidden_layers=2)
