"""Schemas, fake implementations and device dispatch of the ``kvpass::`` operators; no kernel is imported with them.

Legend (as everywhere): B batch, T new tokens, N prompt, H query heads, K KV heads, D head dim, L layers,
E pool entries, C tail capacity.

=====================  ==============================================================================================
operator               what it does
=====================  ==============================================================================================
``site``               the canonical attention call: causal attention over the tokens of this call only; ``refusal``
                       says why a call found while tracing cannot be compressed, and no graph with one is compiled
``observe_attention``  the same over a left-padded prompt, plus what a policy saw there: scores, traces (attention mass,
                       memory of the decode rule) and layer weight
``cascade_step``       re-cut earlier layers to their share and move the winners of this layer into the pool
``pack``               permute the pool into (layer, head, position) order and write the offsets
``attend_cache``       append new tokens to the tail, attend pool + tail
``attend_evict``       append and attend for policies that evict while decoding: the loser's slot is reused
``observe_held``       what a policy sees of pool + tail after a turn was appended: scores, attention mass, layer weight
``fill_ring``          a site with a sliding window over a left-padded prompt, whose newest columns go into the ring
``columns_held``       which columns the slots of a ring hold, once a step for all layers of the ring
``attend_ring``        attend ring + new tokens inside the sliding window, put the new tokens into the ring
=====================  ==============================================================================================
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from kvpass.ops import cuda as device
from kvpass.ops import evict, recompress, reference, sliding
from kvpass.policies import from_spec
from kvpass.policies.base import Policy

_LIBRARY = torch.library.Library("kvpass", "DEF")

_NATIVE_MAX_TOKENS = 8
"""More new tokens than this are matrix-matrix work, where the per-head reference on BLAS is the fast one."""


def _define(schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """An operator of this schema that ``run`` computes, given the policy where the schema has a policy's spec.

    Both get their arguments as the dispatcher hands them over: by position, without trailing defaults.
    """
    name = _LIBRARY.define(schema)
    arguments = [argument.name for argument in getattr(torch.ops.kvpass, name).default._schema.arguments]
    if "policy" in arguments:
        run = _with_policy(run, arguments.index("policy"))
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"kvpass::{name}", fake)


def _with_policy(run: Callable[..., Any], index: int) -> Callable[..., Any]:
    """``run`` with the policy in place of its spec, the argument at ``index``."""

    def with_policy(*args: Any) -> Any:
        return run(*args[:index], from_spec(args[index]), *args[index + 1 :])

    return with_policy


def _backend(tensor: Tensor) -> ModuleType:
    """Where the operators are implemented for the device of ``tensor``."""
    return device if tensor.is_cuda else reference


def _function(name: str, module: Callable[[Tensor], ModuleType] = _backend) -> Callable[..., Any]:
    """The function of that name in the module for the first argument, looked up at each call."""

    def run(*args: Any) -> Any:
        return getattr(module(args[0]), name)(*args)

    return run


def _site(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    refusal: str | None = None,
) -> Tensor:
    start = torch.zeros(q.shape[0], dtype=torch.int64)
    return _backend(q).prompt_attention(q, k, v, start, scale, softcap, sinks, sliding_window)


def _attend_cache(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pool_k: Tensor,
    pool_v: Tensor,
    offsets: Tensor,
    tail_k: Tensor,
    tail_v: Tensor,
    tail_start: Tensor,
    tail_used: Tensor,
    scale: float,
    layer: int,
    impl: str,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    tiles: Tensor | None = None,
    tile_offsets: Tensor | None = None,
) -> Tensor:
    held = (pool_k, pool_v, offsets, tail_k, tail_v, tail_start, tail_used)
    if q.is_cuda:
        if tiles is None or tile_offsets is None:
            raise ValueError("kvpass::attend_cache on CUDA needs the tile map of the pool: tiles and tile_offsets")
        return device.attend_cache(q, k, v, *held, scale, layer, tiles, tile_offsets, softcap, sinks)
    if impl == "native" and q.is_cpu and q.shape[2] <= _NATIVE_MAX_TOKENS:
        return _native()(q, k, v, *held, layer, scale, softcap, sinks)
    return reference.attend_cache(q, k, v, *held, scale, layer, softcap, sinks)


def _attend_evict(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pool_k: Tensor,
    pool_v: Tensor,
    offsets: Tensor,
    tail_k: Tensor,
    tail_v: Tensor,
    table: Tensor,
    memory: Tensor,
    quota: Tensor,
    position: Tensor,
    scale: float,
    layer: int,
    policy: Policy,
    impl: str,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    held = (pool_k, pool_v, offsets, tail_k, tail_v, table, memory, quota, position)
    kernels = _slot_kernels(q, impl) or evict.EAGER
    return evict.attend_evict(q, k, v, *held, scale, layer, policy, softcap, sinks, kernels)


def _attend_ring(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ring_k: Tensor,
    ring_v: Tensor,
    held: Tensor,
    seen: Tensor,
    scale: float,
    layer: int,
    impl: str,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    kernels = _slot_kernels(q, impl) if q.shape[2] == 1 else None
    if kernels is None:
        return sliding.attend_ring(q, k, v, ring_k, ring_v, held, seen, scale, layer, softcap, sinks)
    return sliding.attend_ring_once(
        q, k, v, ring_k, ring_v, held, scale, layer, softcap, sinks, attend_slots=kernels.attend_slots
    )


@functools.cache
def _native() -> Callable[..., Tensor]:
    """The CPU kernel; cached, because an import statement would take some 5 % of a small decode step."""
    from kvpass.kernels.decode_cpu import attend_decode

    return attend_decode


def _slot_kernels(tensor: Tensor, impl: str) -> evict.Kernels | None:
    """What the device of ``tensor`` has for slots that change hands; None: nothing but tensor operations."""
    if tensor.is_cuda:
        return device.SLOT_KERNELS
    return _native_slots() if impl == "native" and tensor.is_cpu else None


@functools.cache
def _native_slots() -> evict.Kernels:
    from kvpass.kernels.slots_cpu import attend_slots, evict_losers, pool_in_order

    return evict.Kernels(attend_slots, evict_losers, pool_in_order)


def _fill_ring(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    start: Tensor,
    ring_k: Tensor,
    ring_v: Tensor,
    scale: float,
    layer: int,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    sliding.keep_newest(ring_k, ring_v, k, v, torch.arange(k.shape[2], device=k.device), layer)
    return _backend(q).prompt_attention(q, k, v, start, scale, softcap, sinks, ring_k.shape[3])


def _fake_output(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
    """Output of every attention operator: ``[B, H, T, Dv]`` stored as ``[B, T, H, Dv]``."""
    b, h, t, _ = q.shape
    return q.new_empty(b, t, h, v.shape[3]).transpose(1, 2)


def _fake_observation(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    b, kv_heads, n, _ = k.shape
    return (
        _fake_output(q, k, v),
        k.new_empty(b, kv_heads, n, dtype=torch.float32),
        k.new_empty(2, b, kv_heads, n, dtype=torch.float32),
        k.new_empty(b, dtype=torch.float64),
    )


def _fake_nothing(*args: Any) -> None:
    return None


_define(
    "site(Tensor q, Tensor k, Tensor v, float scale, int? sliding_window=None, float? softcap=None, "
    "Tensor? sinks=None, str? refusal=None) -> Tensor",
    _site,
    _fake_output,
)
_define(
    "observe_attention(Tensor q, Tensor k, Tensor v, Tensor start, float scale, int layer, int num_layers, "
    "str policy, float? softcap=None, Tensor? sinks=None) -> (Tensor, Tensor, Tensor, Tensor)",
    _function("observe_attention"),
    _fake_observation,
)
_define(
    "cascade_step(Tensor(a!) pool_k, Tensor(b!) pool_v, Tensor(c!) slots, Tensor(d!) slot_traces, Tensor(e!) ledger, "
    "Tensor(f!) window_traces, Tensor(g!) tail_k, Tensor(h!) tail_v, Tensor k, Tensor v, Tensor scores, Tensor traces, "
    "Tensor weight, Tensor entries, Tensor start, int layer, str policy) -> ()",
    _function("cascade_step"),
    _fake_nothing,
)
_define(
    "pack(Tensor(a!) pool_k, Tensor(b!) pool_v, Tensor(c!) slots, Tensor(d!) slot_traces, Tensor(e!) offsets) -> ()",
    _function("pack"),
    _fake_nothing,
)
_define(
    "attend_cache(Tensor q, Tensor k, Tensor v, Tensor pool_k, Tensor pool_v, Tensor offsets, Tensor(a!) tail_k, "
    "Tensor(b!) tail_v, Tensor tail_start, Tensor tail_used, float scale, int layer, str impl, "
    "float? softcap=None, Tensor? sinks=None, Tensor? tiles=None, Tensor? tile_offsets=None) -> Tensor",
    _attend_cache,
    _fake_output,
)
_define(
    "attend_evict(Tensor q, Tensor k, Tensor v, Tensor(a!) pool_k, Tensor(b!) pool_v, Tensor offsets, "
    "Tensor(c!) tail_k, Tensor(d!) tail_v, Tensor(e!) table, Tensor(f!) memory, Tensor quota, Tensor position, "
    "float scale, int layer, str policy, str impl, float? softcap=None, Tensor? sinks=None) -> Tensor",
    _attend_evict,
    _fake_output,
)
_define(
    "observe_held(Tensor q, Tensor pool_k, Tensor pool_v, Tensor offsets, Tensor tail_k, Tensor tail_v, "
    "Tensor tail_start, Tensor tail_used, Tensor(a!) scores, Tensor(b!) masses, Tensor(c!) ledger, Tensor window, "
    "float scale, int layer, int num_layers, str policy, float? softcap=None, Tensor? sinks=None) -> ()",
    _function("observe_held", lambda _: recompress),
    _fake_nothing,
)
_define(
    "fill_ring(Tensor q, Tensor k, Tensor v, Tensor start, Tensor(a!) ring_k, Tensor(b!) ring_v, float scale, "
    "int layer, float? softcap=None, Tensor? sinks=None) -> Tensor",
    _fill_ring,
    _fake_output,
)
_define(
    "columns_held(Tensor seen, Tensor first, int slots) -> Tensor",
    sliding.columns_held,
    lambda seen, first, slots: first.new_empty(first.shape[0], slots, dtype=torch.int32),
)
_define(
    "attend_ring(Tensor q, Tensor k, Tensor v, Tensor(a!) ring_k, Tensor(b!) ring_v, Tensor held, Tensor seen, "
    "float scale, int layer, str impl, float? softcap=None, Tensor? sinks=None) -> Tensor",
    _attend_ring,
    _fake_output,
)
