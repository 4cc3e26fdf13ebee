"""The systems the bench compares: transformers' caches and kvpass, behind one small interface."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel, StaticCache

import kvpass
from kvpass.backend import Compiler
from kvpass.policies import POLICIES


def storage_bytes(cache: Any) -> int:
    """Bytes that the storages of a transformers cache occupy, each counted once."""
    storages = [tensor.untyped_storage() for layer in cache.layers for tensor in (layer.keys, layer.values)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


class System(ABC):
    """A way to prefill a prompt of batch 1 and to decode after it."""

    name: str
    compiled: bool = True

    @abstractmethod
    def prefill(self, ids: Tensor) -> tuple[Tensor, Cache]:
        """Logits of the last position, ``[1, 1, vocabulary]``, and a cache, from a prompt, int64 ``[1, N]``."""

    @abstractmethod
    def step(self, token: Tensor, position: int, cache: Any) -> Tensor:
        """Logits after ``token``, int64 ``[1, 1]``, whose key and value join the cache at ``position``."""

    def decoding_cache(self, cache: Any) -> Any:
        """The cache that :meth:`step` takes, made of what :meth:`prefill` gave."""
        return cache

    def nbytes(self, cache: Any) -> int:
        """Bytes the storages of the cache occupy."""
        return storage_bytes(cache)


class HfEager(System):
    """transformers as it comes: eager forward, SDPA, DynamicCache."""

    name = "hf-eager"
    compiled = False

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model

    def prefill(self, ids: Tensor) -> tuple[Tensor, Cache]:
        cache = DynamicCache(config=self.model.config)
        return self.model(ids, past_key_values=cache, logits_to_keep=1).logits, cache

    def step(self, token: Tensor, position: int, cache: Any) -> Tensor:
        return self.model(token, past_key_values=cache, logits_to_keep=1).logits


class HfStatic(System):
    """transformers compiled: the forward under ``torch.compile`` with static shapes, decoding into a StaticCache.

    The prefill is compiled with a DynamicCache, which needs no mask; its keys and values are then copied.

    Args:
        model: uncompiled. tokens: slots of the static cache, prompt and new tokens together.
        backend: of ``torch.compile``.
    """

    name = "hf-static"

    def __init__(self, model: PreTrainedModel, tokens: int, backend: Compiler) -> None:
        self.model = model
        self.cache = StaticCache(config=model.config, max_cache_len=tokens)
        self.compiled_prefill = torch.compile(model.forward, fullgraph=True, dynamic=False, backend=backend)
        self.compiled_step = torch.compile(model.forward, fullgraph=True, dynamic=False, backend=backend)
        self.takes_cache_position = "cache_position" in inspect.signature(model.forward).parameters

    def prefill(self, ids: Tensor) -> tuple[Tensor, Cache]:
        cache = DynamicCache(config=self.model.config)
        return self.compiled_prefill(ids, past_key_values=cache, logits_to_keep=1).logits, cache

    def decoding_cache(self, cache: Any) -> Any:
        self.cache.reset()
        for index, layer in enumerate(cache.layers):
            positions = torch.arange(layer.keys.shape[2])
            self.cache.update(layer.keys, layer.values, index, {"cache_position": positions})
        return self.cache

    def step(self, token: Tensor, position: int, cache: Any) -> Tensor:
        positions = torch.tensor([position])
        extra = {"cache_position": positions} if self.takes_cache_position else {}
        return self.compiled_step(
            token, position_ids=positions[None], past_key_values=cache, logits_to_keep=1, **extra
        ).logits


class Kvpass(System):
    """kvpass with one policy; ``budget`` is not used by a policy that needs none."""

    def __init__(
        self, model: PreTrainedModel, *, policy: str, budget: int | float | str, window: int, backend: Compiler
    ) -> None:
        self.name = policy
        limit = {"budget": budget} if POLICIES[policy].needs_budget else {}
        self.model = kvpass.compile(model, policy=policy, window=window, backend=backend, **limit)

    def prefill(self, ids: Tensor) -> tuple[Tensor, Cache]:
        out = self.model(ids, logits_to_keep=1)
        return out.logits, out.past_key_values

    def step(self, token: Tensor, position: int, cache: Any) -> Tensor:
        return self.model(token, past_key_values=cache, logits_to_keep=1).logits

    def nbytes(self, cache: Any) -> int:
        return cache.nbytes
