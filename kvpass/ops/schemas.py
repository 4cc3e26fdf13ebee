"""Schemas, implementations and fakes of the ``kvpass::`` operators, one block each; imports no kernel.

An operand ``Tensor[] pool`` or ``tail`` is :class:`kvpass.operands.Entries`: keys, values and, where these are codes,
their scales. ``Tensor(a!)[]``: a call writes all of them; Inductor takes each for a tensor of its own, and copies none.
Policies and ranks are passed as their specs. ``layer`` is the index in the pool or ring, ``impl`` "cpp" or "eager", see
:func:`implementation`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.fx.node import has_side_effect

from kvpass.operands import AppendBuffers, Attention, Entries, EvictBuffers, Expansion, RecompressBuffers, RingBuffers
from kvpass.ops import evict, latents, recompress, sliding
from kvpass.ops.entry_formats import centred
from kvpass.ops.latents import absorbed_query, expanded_output
from kvpass.ops.recurrent import delta_rule, mamba, mamba2
from kvpass.ops.sliding import columns_held
from kvpass.policies import from_spec
from kvpass.ranks import Ranks

LIB = torch.library.Library("kvpass", "DEF")

_MOST_TOKENS_IN_CPP = 8
"""Above so many new tokens the work is matrix-matrix, and the per-head reference on BLAS is faster."""

_module = cache(importlib.import_module)


def implementation(tensor: Tensor, impl: str = "eager") -> ModuleType:
    """Return the module that computes operators on ``tensor``: ``ops.cuda``, ``ops.cpu`` or ``ops.reference``.

    impl: "cpp" or "eager", for tensors on a CPU; decided when a graph is compiled.
    """
    if tensor.is_cuda:
        return _module("kvpass.ops.cuda")
    return _module("kvpass.ops.cpu" if impl == "cpp" and tensor.is_cpu else "kvpass.ops.reference")


def define_operator(schema: str, fake: Callable[..., Any] | None = None) -> Callable[[Any], Any]:
    """Define an operator, which the function below it implements; fake: for tracing, if that is another function."""

    def implement(run: Any) -> Any:
        LIB.define(schema)
        name = schema.partition("(")[0]
        LIB.impl(name, run, "CompositeExplicitAutograd")
        torch.library.register_fake(f"kvpass::{name}", fake or run)
        return run

    return implement


def _like_output(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Tensor:
    """Return an output of attention: ``[B, H, T, Dv]`` stored as ``[B, T, H, Dv]``."""
    return q.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[3]).transpose(1, 2)


def _like_site(  # type: ignore[no-untyped-def]
    q, k, v, scale, sliding_window=None, softcap=None, sinks=None, refusal=None, chunked=False, up=None, nope=0
):
    return _like_output(q, k, v if up is None else up.new_empty(1, 1, 1, len(up) // q.shape[1] - nope))


@define_operator(
    "site(Tensor q, Tensor k, Tensor v, float scale, int? sliding_window=None, float? softcap=None, Tensor? sinks=None,"
    " str? refusal=None, bool chunked=False, Tensor? up=None, int nope=0) -> Tensor",
    fake=_like_site,
)
def site(  # type: ignore[no-untyped-def]
    q, k, v, scale, sliding_window=None, softcap=None, sinks=None, refusal=None, chunked=False, up=None, nope=0
):
    """Attend causally over the tokens of this call only: the canonical attention op.

    refusal: why a traced call is unsupported; its graph is not compiled. up, nope: of Expansion, for latent rows.
    """
    call, expansion = Attention(q, k, v, scale, softcap, sinks), None if up is None else Expansion(up, nope)
    start = torch.zeros(len(q), dtype=torch.int64, device="cpu")
    return latents.attend_prompt(call, expansion, start, implementation(q), sliding_window, chunked)[0]


LIB.define("absorbed_query(Tensor q, Tensor up, int nope) -> Tensor")
LIB.impl("absorbed_query", absorbed_query, "CompositeImplicitAutograd")  # traced through by Inductor
LIB.define("expanded_output(Tensor out, Tensor up, int nope) -> Tensor")
LIB.impl("expanded_output", expanded_output, "CompositeImplicitAutograd")


@define_operator(
    "attend_cache(Tensor q, Tensor k, Tensor v, float scale, float? softcap, Tensor? sinks,"
    " Tensor[] pool, Tensor offsets, Tensor(a!)[] tail, Tensor tail_start, Tensor tail_used, Tensor? arrivals,"
    " Tensor? key_mean, int layer, str impl) -> Tensor",
    fake=_like_output,
)
def attend_cache(  # type: ignore[no-untyped-def]
    q, k, v, scale, softcap, sinks, pool, offsets, tail, tail_start, tail_used, arrivals, key_mean, layer, impl
):
    """Append new tokens to the tail, attend pool and tail."""
    call = Attention(q, k, v, scale, softcap, sinks)
    held = AppendBuffers(Entries(*pool), offsets, Entries(*tail), tail_start, tail_used, arrivals)
    if key_mean is not None:
        call = centred(call, key_mean, layer)
    few = q.shape[2] <= _MOST_TOKENS_IN_CPP
    return implementation(q, impl if few else "eager").attend_cache(call, held, layer)


@define_operator(
    "attend_evict(Tensor q, Tensor k, Tensor v, float scale, float? softcap, Tensor? sinks,"
    " Tensor(a!)[] pool, Tensor offsets, Tensor(b!)[] tail, Tensor(c!)[] slots, Tensor[] limits,"
    " int layer, str policy, str impl, str ranks, Tensor? entering) -> Tensor",
    fake=_like_output,
)
def attend_evict(  # type: ignore[no-untyped-def]
    q, k, v, scale, softcap, sinks, pool, offsets, tail, slots, limits, layer, policy, impl, ranks, entering
):
    """Append new tokens and attend, for policies that evict while decoding: the evicted entry's slot is reused.

    slots: slot_positions, decode_state and, for rules that have them, rule_rows. limits: quota, next_position.
    entering: what enters the attention layer, for rules that read it.
    """
    call, of_all = Attention(q, k, v, scale, softcap, sinks), Ranks.from_spec(ranks)
    held = EvictBuffers(Entries(*pool), offsets, Entries(*tail), *slots[:2], *limits, *slots[2:])
    return evict.attend_evict(call, held, layer, from_spec(policy), implementation(q, impl), of_all, entering)


@define_operator(
    "observe_held(Tensor q, int value_dim, float scale, float? softcap, Tensor? sinks,"
    " Tensor[] pool, Tensor offsets, Tensor[] tail, Tensor tail_start, Tensor tail_used, Tensor? key_mean,"
    " Tensor(a!)[] observed, Tensor window, int layer, str policy, str ranks) -> ()",
    fake=lambda *_: None,
)
def observe_held(  # type: ignore[no-untyped-def]
    q,
    value_dim,
    scale,
    softcap,
    sinks,
    pool,
    offsets,
    tail,
    tail_start,
    tail_used,
    key_mean,
    observed,
    window,
    layer,
    policy,
    ranks,
):
    """Observe pool and tail after an append, for recompression; observed: scores, masses, weights, which it writes."""
    held = AppendBuffers(Entries(*pool), offsets, Entries(*tail), tail_start, tail_used, None, key_mean)
    scores, masses, weights = observed
    into, of_all = RecompressBuffers(scores, masses, weights, window), Ranks.from_spec(ranks)
    recompress.observe_held(q, value_dim, scale, softcap, sinks, held, into, layer, from_spec(policy), of_all)


define_operator("columns_held(Tensor seen, Tensor first, int slots, bool chunked=False) -> Tensor")(columns_held)


@define_operator(
    "attend_ring(Tensor q, Tensor k, Tensor v, float scale, float? softcap, Tensor? sinks,"
    " Tensor(a!) ring_k, Tensor(b!) ring_v, Tensor columns, Tensor seen, int layer, Tensor? first, str impl) -> Tensor",
    fake=_like_output,
)
def attend_ring(  # type: ignore[no-untyped-def]
    q, k, v, scale, softcap, sinks, ring_k, ring_v, columns, seen, layer, first, impl
):
    """Attend ring and new tokens inside the window or chunk, put the new tokens into the ring."""
    call, ring = Attention(q, k, v, scale, softcap, sinks), RingBuffers(ring_k, ring_v)
    if q.shape[2] == 1 and (q.is_cuda or impl == "cpp"):
        return sliding.attend_ring_once(call, ring, columns, layer, implementation(q, impl))
    return sliding.attend_ring(call, ring, columns, seen, layer, first)


def _like_rule(query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, state: Tensor, *_: Any) -> Any:
    return query.new_empty(value.shape), state.new_empty(state.shape, dtype=torch.float32)


define_operator(
    "delta_rule(Tensor query, Tensor key, Tensor value, Tensor g, Tensor beta, Tensor state,"
    " str module, str chunked, str step, bool normalize) -> (Tensor, Tensor)",
    fake=_like_rule,
)(delta_rule)


def _like_scan(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, state: Tensor, *_: Any) -> Any:
    return x.new_empty(x.shape, dtype=torch.float32), state.new_empty(state.shape, dtype=torch.float32)


define_operator(
    "mamba2(Tensor x, Tensor dt, Tensor a, Tensor b, Tensor c, Tensor state, Tensor d, Tensor dt_bias,"
    " str module, int chunk, float low, float high) -> (Tensor, Tensor)",
    fake=_like_scan,
)(mamba2)
define_operator(
    "mamba(Tensor x, Tensor dt, Tensor a, Tensor b, Tensor c, Tensor state, Tensor d, Tensor z, Tensor dt_bias,"
    " str module) -> (Tensor, Tensor)",
    fake=_like_scan,
)(mamba)


@define_operator("read_state(Tensor like, int layer, str name, int[] shape, ScalarType dtype) -> Tensor")
def read_state(like: Tensor, layer: int, name: str, shape: list[int], dtype: torch.dtype) -> Tensor:
    """Return the state of a recurrent layer before the tokens of this call; zeros where no cache is bound."""
    return like.new_zeros(like.shape[0], *shape, dtype=dtype)


@define_operator("write_state(Tensor state, int layer, str name) -> ()")
def write_state(state: Tensor, layer: int, name: str) -> None:
    """Take the state after them; no cache is bound, so it is dropped."""


has_side_effect(torch.ops.kvpass.write_state.default)  # its value reaches no output of a capture


@define_operator("store_state(Tensor state, Tensor(a!) made) -> ()", fake=lambda *_: None)
def store_state(state: Tensor, made: Tensor) -> None:
    """Copy the state after them into a buffer of the cache."""
    made.copy_(state)


@define_operator("real_tokens(Tensor ids) -> Tensor")
def real_tokens(ids: Tensor) -> Tensor:
    """Return 1 for tokens, 0 for padding, of which a call without a cache knows none."""
    return torch.ones_like(ids)
