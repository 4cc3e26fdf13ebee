"""Schemas, fake implementations and device dispatch of the ``kvpass::`` operators.

Torch only: implementations are imported when an operator first runs on its device, never at import.

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
``observe_held``       what a policy sees of pool + tail after a turn was appended: scores, attention mass, layer weight
``attend_evict``       the same for policies that evict while decoding: the loser's slot is reused
=====================  ==============================================================================================
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

_LIBRARY = torch.library.Library("kvpass", "DEF")

_LIBRARY.define(
    "site(Tensor q, Tensor k, Tensor v, float scale, int layer, int? sliding_window=None, float? softcap=None, "
    "Tensor? sinks=None, str? refusal=None) -> Tensor"
)
_LIBRARY.define(
    "observe_attention(Tensor q, Tensor k, Tensor v, Tensor start, float scale, int layer, int num_layers, "
    "str policy, float? softcap=None, Tensor? sinks=None) -> (Tensor, Tensor, Tensor, Tensor)"
)
_LIBRARY.define(
    "cascade_step(Tensor(a!) pool_k, Tensor(b!) pool_v, Tensor(c!) slots, Tensor(d!) slot_traces, Tensor(e!) ledger, "
    "Tensor(f!) window_traces, Tensor(g!) tail_k, Tensor(h!) tail_v, Tensor k, Tensor v, Tensor scores, Tensor traces, "
    "Tensor weight, Tensor entries, Tensor start, int layer, str policy) -> ()"
)
_LIBRARY.define(
    "pack(Tensor(a!) pool_k, Tensor(b!) pool_v, Tensor(c!) slots, Tensor(d!) slot_traces, Tensor(e!) offsets) -> ()"
)
_LIBRARY.define(
    "attend_cache(Tensor q, Tensor k, Tensor v, Tensor pool_k, Tensor pool_v, Tensor offsets, Tensor(a!) tail_k, "
    "Tensor(b!) tail_v, Tensor tail_start, Tensor tail_used, float scale, int layer, str impl, "
    "float? softcap=None, Tensor? sinks=None, Tensor? tiles=None, Tensor? tile_offsets=None) -> Tensor"
)
_LIBRARY.define(
    "observe_held(Tensor q, Tensor pool_k, Tensor pool_v, Tensor offsets, Tensor tail_k, Tensor tail_v, "
    "Tensor tail_start, Tensor tail_used, Tensor(a!) scores, Tensor(b!) masses, Tensor(c!) ledger, Tensor window, "
    "float scale, int layer, int num_layers, str policy, float? softcap=None, Tensor? sinks=None) -> ()"
)
_LIBRARY.define(
    "attend_evict(Tensor q, Tensor k, Tensor v, Tensor(a!) pool_k, Tensor(b!) pool_v, Tensor offsets, "
    "Tensor(c!) tail_k, Tensor(d!) tail_v, Tensor(e!) table, Tensor(f!) memory, Tensor quota, Tensor position, "
    "float scale, int layer, str policy, float? softcap=None, Tensor? sinks=None) -> Tensor"
)
_LIBRARY.define(
    "fill_ring(Tensor q, Tensor k, Tensor v, Tensor start, Tensor(a!) ring_k, Tensor(b!) ring_v, float scale, "
    "int layer, float? softcap=None, Tensor? sinks=None) -> Tensor"
)
_LIBRARY.define(
    "attend_ring(Tensor q, Tensor k, Tensor v, Tensor(a!) ring_k, Tensor(b!) ring_v, Tensor seen, Tensor first, "
    "float scale, int layer, float? softcap=None, Tensor? sinks=None) -> Tensor"
)


def _backend(tensor: Tensor) -> ModuleType:
    """Where the operators are implemented for the device of ``tensor``."""
    if tensor.is_cuda:
        from kvpass import device

        return device
    from kvpass import reference

    return reference


def _like_attention_output(q: Tensor, v: Tensor) -> Tensor:
    """Output of every attention operator: ``[B, H, T, Dv]`` stored as ``[B, T, H, Dv]``."""
    b, h, t, _ = q.shape
    return q.new_empty(b, t, h, v.shape[3]).transpose(1, 2)


@torch.library.register_fake("kvpass::site")
def _(q, k, v, scale, layer, sliding_window=None, softcap=None, sinks=None, refusal=None):  # type: ignore[no-untyped-def]
    return _like_attention_output(q, v)


@torch.library.register_fake("kvpass::observe_attention")
def _(q, k, v, start, scale, layer, num_layers, policy, softcap=None, sinks=None):  # type: ignore[no-untyped-def]
    b, kv_heads, n, _ = k.shape
    return (
        _like_attention_output(q, v),
        k.new_empty(b, kv_heads, n, dtype=torch.float32),
        k.new_empty(2, b, kv_heads, n, dtype=torch.float32),
        k.new_empty(b, dtype=torch.float64),
    )


@torch.library.register_fake("kvpass::cascade_step")
def _(*args, **kwargs):  # type: ignore[no-untyped-def]
    return None


@torch.library.register_fake("kvpass::pack")
def _(*args, **kwargs):  # type: ignore[no-untyped-def]
    return None


@torch.library.register_fake("kvpass::observe_held")
def _(*args, **kwargs):  # type: ignore[no-untyped-def]
    return None


@torch.library.register_fake("kvpass::attend_cache")
def _(q, k, v, *args, **kwargs):  # type: ignore[no-untyped-def]
    return _like_attention_output(q, v)


@torch.library.register_fake("kvpass::attend_evict")
def _(q, k, v, *args, **kwargs):  # type: ignore[no-untyped-def]
    return _like_attention_output(q, v)


@torch.library.register_fake("kvpass::fill_ring")
def _(q, k, v, *args, **kwargs):  # type: ignore[no-untyped-def]
    return _like_attention_output(q, v)


@torch.library.register_fake("kvpass::attend_ring")
def _(q, k, v, *args, **kwargs):  # type: ignore[no-untyped-def]
    return _like_attention_output(q, v)


@torch.library.impl(_LIBRARY, "site", "CompositeExplicitAutograd")
def _site(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    layer: int,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    refusal: str | None = None,
) -> Tensor:
    start = torch.zeros(q.shape[0], dtype=torch.int64)
    return _backend(q).prompt_attention(q, k, v, start, scale, softcap, sinks, sliding_window)


@torch.library.impl(_LIBRARY, "observe_attention", "CompositeExplicitAutograd")
def _observe_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    start: Tensor,
    scale: float,
    layer: int,
    num_layers: int,
    policy: str,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from kvpass.policies import from_spec

    return _backend(q).observe_attention(q, k, v, start, scale, layer, num_layers, from_spec(policy), softcap, sinks)


@torch.library.impl(_LIBRARY, "cascade_step", "CompositeExplicitAutograd")
def _cascade_step(
    pool_k: Tensor,
    pool_v: Tensor,
    slots: Tensor,
    slot_traces: Tensor,
    ledger: Tensor,
    window_traces: Tensor,
    tail_k: Tensor,
    tail_v: Tensor,
    k: Tensor,
    v: Tensor,
    scores: Tensor,
    traces: Tensor,
    weight: Tensor,
    entries: Tensor,
    start: Tensor,
    layer: int,
    policy: str,
) -> None:
    from kvpass.policies import from_spec

    _backend(k).cascade_step(
        pool_k,
        pool_v,
        slots,
        slot_traces,
        ledger,
        window_traces,
        tail_k,
        tail_v,
        k,
        v,
        scores,
        traces,
        weight,
        entries,
        start,
        layer,
        from_spec(policy),
    )


@torch.library.impl(_LIBRARY, "pack", "CompositeExplicitAutograd")
def _pack(pool_k: Tensor, pool_v: Tensor, slots: Tensor, slot_traces: Tensor, offsets: Tensor) -> None:
    _backend(pool_k).pack(pool_k, pool_v, slots, slot_traces, offsets)


@torch.library.impl(_LIBRARY, "attend_cache", "CompositeExplicitAutograd")
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
    if q.is_cuda:
        from kvpass import device

        if tiles is None or tile_offsets is None:
            raise ValueError("kvpass::attend_cache on CUDA needs the tile map of the pool: tiles and tile_offsets")
        tail = (tail_k, tail_v, tail_start, tail_used)
        return device.attend_cache(
            q, k, v, pool_k, pool_v, offsets, *tail, scale, layer, tiles, tile_offsets, softcap, sinks
        )
    if impl == "native" and q.device.type == "cpu" and q.shape[2] <= _NATIVE_MAX_TOKENS:
        from kvpass.kernels.decode_cpu import attend_decode

        return attend_decode(
            q, k, v, pool_k, pool_v, offsets, tail_k, tail_v, tail_start, tail_used, layer, scale, softcap, sinks
        )
    from kvpass import reference

    return reference.attend_cache(
        q, k, v, pool_k, pool_v, offsets, tail_k, tail_v, tail_start, tail_used, scale, layer, softcap, sinks
    )


_NATIVE_MAX_TOKENS = 8
"""More new tokens than this are matrix-matrix work, where the per-head reference on BLAS is the fast one."""


@torch.library.impl(_LIBRARY, "observe_held", "CompositeExplicitAutograd")
def _observe_held(
    q: Tensor,
    pool_k: Tensor,
    pool_v: Tensor,
    offsets: Tensor,
    tail_k: Tensor,
    tail_v: Tensor,
    tail_start: Tensor,
    tail_used: Tensor,
    scores: Tensor,
    masses: Tensor,
    ledger: Tensor,
    window: Tensor,
    scale: float,
    layer: int,
    num_layers: int,
    policy: str,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> None:
    from kvpass.policies import from_spec
    from kvpass.recompress import observe_held

    held = (pool_k, pool_v, offsets, tail_k, tail_v, tail_start, tail_used)
    found = (scores, masses, ledger, window)
    observe_held(q, *held, *found, scale, layer, num_layers, from_spec(policy), softcap, sinks)


@torch.library.impl(_LIBRARY, "attend_evict", "CompositeExplicitAutograd")
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
    policy: str,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    from kvpass.evict import attend_evict
    from kvpass.policies import from_spec

    return attend_evict(
        q,
        k,
        v,
        pool_k,
        pool_v,
        offsets,
        tail_k,
        tail_v,
        table,
        memory,
        quota,
        position,
        scale,
        layer,
        from_spec(policy),
        softcap,
        sinks,
    )


@torch.library.impl(_LIBRARY, "fill_ring", "CompositeExplicitAutograd")
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
    from kvpass import device, sliding

    return (device if q.is_cuda else sliding).fill_ring(q, k, v, start, ring_k, ring_v, scale, layer, softcap, sinks)


@torch.library.impl(_LIBRARY, "attend_ring", "CompositeExplicitAutograd")
def _attend_ring(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ring_k: Tensor,
    ring_v: Tensor,
    seen: Tensor,
    first: Tensor,
    scale: float,
    layer: int,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    from kvpass import sliding

    return sliding.attend_ring(q, k, v, ring_k, ring_v, seen, first, scale, layer, softcap, sinks)
