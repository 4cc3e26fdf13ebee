"""The systems the bench compares: transformers' caches and kvpass, behind one small interface."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, StaticCache

import kvpass
from kvpass.eval.bench.measure import PrefillProfile, noting_coverage, profile_prefill
from kvpass.policies import Policy
from kvpass.transformers_compat import CACHE


def entries_of(layer: Any) -> list[Tensor]:
    """Keys and values of a layer of a transformers cache; none of one with a state only."""
    return [] if getattr(layer, "keys", None) is None else [layer.keys, layer.values]


def _states_of(layer: Any) -> list[tuple[str, int, Tensor]]:
    """Name, number and tensor of the states of a recurrent layer."""
    return [
        (name, number, state)
        for name in ("conv", "recurrent")
        for number, state in getattr(layer, f"{name}_states", {}).items()
        if state is not None
    ]


def _all_states(cache: Any) -> list[Tensor]:
    return [state for layer in cache.layers for *_, state in _states_of(layer)]


def storage_bytes(cache: Any) -> int:
    """Bytes that the storages of a transformers cache occupy, each counted once."""
    tensors = [*(x for layer in cache.layers for x in entries_of(layer)), *_all_states(cache)]
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


class System:
    """A way to prefill a prompt and to decode: transformers' own unless a class says otherwise."""

    compiled = True

    def __init__(self, name: str, model: Any) -> None:
        self.name = name
        self.model = self.prefill_forward = model
        self.seen: set[bool | torch.Size] = set()
        """Whether it has run with several rows (True), with one (False), and with which shapes of prompts."""

    def prefill(self, ids: Tensor) -> tuple[Tensor, Any]:
        """Prefill ids, int64 ``[B, N]``; returns the last logits, ``[B, 1, vocabulary]``, and a cache."""
        cache = DynamicCache(config=self.model.config)
        return self.prefill_forward(ids, **{CACHE: cache}, logits_to_keep=1).logits, cache

    def step(self, token: Tensor, position: int, cache: Any) -> Tensor:
        """Logits after ``token``, int64 ``[B, 1]``, whose key and value join the cache at ``position``."""
        return self.model(token, **{CACHE: cache}, logits_to_keep=1).logits

    def decoding_cache(self, cache: Any, repeats: int) -> Any:
        """The cache that :meth:`step` takes, made of what :meth:`prefill` gave; ``repeats`` > 1: of its only row."""
        if repeats > 1:
            cache.reorder_cache(torch.zeros(repeats, dtype=torch.int64))
        return cache

    def nbytes(self, cache: Any) -> int:
        return storage_bytes(cache)

    def attended_bytes(self, cache: Any, tokens: int) -> int:
        """Bytes of the entries, and states, that a step after ``tokens`` tokens must read."""
        rows = [tensor[:, :, :tokens] for layer in cache.layers for tensor in entries_of(layer)]
        return sum(x.nbytes for x in (*rows, *_all_states(cache)))


class HfEager(System):
    """transformers as it comes: eager forward, SDPA, DynamicCache."""

    compiled = False

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__("hf-eager", model)


def _forward_of(model: PreTrainedModel) -> Callable[..., Any]:
    """The forward in its own code object: Dynamo limits compiled shapes per code object."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        return model.forward(*args, **kwargs)

    return types.FunctionType(forward.__code__.replace(), forward.__globals__, "forward", None, forward.__closure__)


class HfStatic(System):
    """transformers compiled: decode steps under ``torch.compile`` with static shapes, into a StaticCache.

    On CUDA as its documentation advises, with ``mode="reduce-overhead"`` (CUDA graphs) and, as ``generate`` does, an
    eager prefill. On the CPU the prefill is compiled too, with a DynamicCache, which needs no mask; its keys and values
    are then copied to a static cache of ``tokens`` slots.
    """

    def __init__(self, model: PreTrainedModel, tokens: int, backend: str) -> None:
        super().__init__("hf-static", model)
        self.tokens = tokens
        self.on_cuda = model.device.type == "cuda"
        options: dict[str, Any] = {"fullgraph": True, "dynamic": False, "backend": backend}
        if not self.on_cuda:
            self.prefill_forward = torch.compile(_forward_of(model), **options)
        elif backend == "inductor":
            options["mode"] = "reduce-overhead"
        self.compiled_step = torch.compile(_forward_of(model), **options)
        self.takes_cache_position = "cache_position" in inspect.signature(model.forward).parameters

    def decoding_cache(self, cache: Any, repeats: int) -> Any:
        static = StaticCache(config=self.model.config, max_cache_len=self.tokens)
        for index in range(len(cache.layers)):
            layer = cache.layers[index]
            cache.layers[index] = None  # its memory is free as soon as it is copied
            for name, number, state in _states_of(layer):
                getattr(static, f"update_{name}_state")(state.repeat_interleave(repeats, 0), index, number)
            if entries := entries_of(layer):
                keys, values = (x.repeat_interleave(repeats, 0) if repeats > 1 else x for x in entries)
                positions = torch.arange(keys.shape[2], device=keys.device)
                static.update(keys, values, index, {"cache_position": positions})
            del layer, entries
        return static

    def step(self, token: Tensor, position: int, cache: Any) -> Tensor:
        positions = torch.arange(position, position + 1, device=token.device)  # made there: nothing waits for a copy
        call = {CACHE: cache, "position_ids": positions[None], "logits_to_keep": 1}
        if self.takes_cache_position:
            call["cache_position"] = positions
        if self.on_cuda:
            torch.compiler.cudagraph_mark_step_begin()
        return self.compiled_step(token, **call).logits


class Kvpass(System):
    """kvpass with one policy; ``budget`` is not used by a policy that needs none, ``options`` are of kvpass.compile."""

    def __init__(self, model: PreTrainedModel, name: str, *, policy: Policy, budget: Any, **options: Any) -> None:
        self.profiles: dict[torch.Size, PrefillProfile] = {}
        self.prefilled: tuple[Tensor, float, Tensor, Any] | None = None
        """A prompt that further batches decode from: ids, seconds, logits and cache."""
        budget = budget if policy.needs_budget else None
        super().__init__(name, kvpass.compile(model, policy=policy, budget=budget, **options))

    def prefill(self, ids: Tensor) -> tuple[Tensor, Any]:
        out = self.model(ids, logits_to_keep=1)
        return out.logits, out[CACHE]

    def decoding_cache(self, cache: Any, repeats: int) -> Any:
        """As of every system, with a pool for each row: one that rows share would come from the device's own cache."""
        cache = super().decoding_cache(cache, repeats)
        if repeats > 1:
            state = cache.state
            stores = [
                store.holding({name: x.contiguous() for name, x in store.of_rows.items()}, store.used)
                for store in state.full_layers
            ]
            cache.state = dataclasses.replace(state, parts=[*stores, *state.parts[len(stores) :]])
        return cache

    def profile(self, ids: Tensor) -> PrefillProfile:
        """Return where the time of a prefill of ids goes; measured once for each shape."""
        if ids.shape not in self.profiles:
            profile = profile_prefill(functools.partial(self.prefill, ids), ids.device)
            covered = list[Tensor]()
            if (computed := self.model.report().prompt.computed) is not None:
                with noting_coverage(covered):
                    self.prefill(ids)
                blocks = torch.stack([*computed[1].values()]).mean().item()
                profile = profile._replace(blocks=blocks, covered=torch.stack(covered).mean().item())
            self.profiles[ids.shape] = profile
        return self.profiles[ids.shape]

    def answer(self, token: Tensor, cache: Any, new_tokens: int) -> None:
        """Generate greedily as users do. Where tokens can be taken back, the cache is then as it was."""
        self.model.generate(token, past_key_values=cache, max_new_tokens=new_tokens, do_sample=False, eos_token_id=None)
        if cache.state.only_appends:
            cache.crop(-new_tokens)

    def nbytes(self, cache: Any) -> int:
        return cache.nbytes

    def attended_bytes(self, cache: Any, tokens: int) -> int:
        stored = sum(store.entry_bytes for store in cache.state.full_layers)
        return stored + sum(
            x.nbytes for x in (*cache.state.sliding_layers, *(state.buffers.held for state in cache.state.states))
        )
