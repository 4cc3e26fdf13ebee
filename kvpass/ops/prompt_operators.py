"""Operators of a prompt's program (:mod:`kvpass.graphs.prompt_program`): what is kept of each layer.

Legend: B batch, N prompt, H query heads, K KV heads, D head dim, L layers of one KV geometry, E pool slots.

Operands that several have in common:

* ``attention``: queries ``[B, H, R, D]`` of the last R tokens, keys and values ``[B, K, N, D]``, then the log-sum-exp
  of the queries and the attention sinks, each of them or None;
* ``cache``: the tensors of :class:`kvpass.operands.PrefillBuffers` of a pool, in their order and without output_errors;
* ``scored``: scores, statistics and weight of a layer, as ``score_layer`` returns them;
* ``shares``: evictable entries that each layer may hold over all KV heads, int64 ``[B, L]``; ``ranking``: the order in
  which entries of a layer enter, int32 ``[B, K, N]``;
* ``start``, ``first``: the first real column of each row, int64 ``[B]``, on the CPU and on the device;
* ``layer``: index among the layers of the pool; ``policy``: its :attr:`~kvpass.Policy.text`; ``ranks``: the
  :attr:`~kvpass.ranks.Ranks.spec` of processes that share the heads, "" for one process.

The other inputs of ``score_layer`` are those of :class:`kvpass.operands.PolicyInputs`; of the cache it writes
``rule_rows``. :mod:`kvpass.ops.reference` has what an operator does, by its name (``fixed_shares``: ``layer_shares``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from kvpass.operands import Attention, Candidates, PolicyInputs, PrefillBuffers, RingBuffers
from kvpass.ops import sliding
from kvpass.ops.schemas import implementation
from kvpass.policies import from_text
from kvpass.ranks import ONE_PROCESS, Ranks

POOL_OPERANDS = PrefillBuffers._fields[:-1]
"""Names of the tensors in ``cache``; ``rule_rows``, the last, only where the policy has them."""

_LIBRARY = torch.library.Library("kvpass", "FRAGMENT")

Tensors = Sequence[Tensor]
OptionalTensors = Sequence[Tensor | None]


def _define(schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> None:
    name = schema.partition("(")[0]
    _LIBRARY.define(schema)
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"kvpass::{name}", fake)


def _ranks(spec: str) -> Ranks:
    return Ranks.from_spec(spec) if spec else ONE_PROCESS


def _fake_nothing(*operands: Any, **options: Any) -> None:
    return None


# -- scores of the entries of a layer ---------------------------------------------------------------------------------


def _score_layer(
    attention: OptionalTensors,
    start: Tensor,
    first: Tensor,
    cache: Tensors,
    layer: int,
    policy: str,
    *,
    scale: float,
    softcap: float | None = None,
    projection: Tensor | None = None,
    frequencies: Tensor | None = None,
    summed: Tensor | None = None,
    replayed: Tensor | None = None,
    entered: Tensor | None = None,
    ranks: str = "",
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v, lse, sinks = attention
    assert q is not None and k is not None and v is not None
    call, buffers = Attention(q, k, v, scale, softcap, sinks), PrefillBuffers(*cache)
    inputs = PolicyInputs(projection, frequencies, buffers.entries, summed, replayed, buffers.rule_rows, entered)
    layers, score = buffers.layer_weights.shape[1], implementation(q).score_layer
    scores, stats, weight = score(call, lse, start, first, layer, layers, from_text(policy), inputs, _ranks(ranks))
    return scores, stats, weight


def _fake_scores(
    attention: OptionalTensors,
    start: Tensor,
    first: Tensor,
    cache: Tensors,
    layer: int,
    policy: str,
    *,
    ranks: str = "",
    **inputs: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    keys = attention[1]
    assert keys is not None
    b, kv_heads, n = keys.shape[:3]
    scores = keys.new_empty(b, kv_heads * _ranks(ranks).size, n, dtype=torch.float32)
    stats = keys.new_empty(from_text(policy).stat_planes, b, kv_heads, n, dtype=torch.float32)
    return scores, stats, keys.new_empty(b, dtype=torch.float64)


_define(
    "score_layer(Tensor?[] attention, Tensor start, Tensor first, Tensor(a!)[] cache, int layer, str policy, *, "
    "float scale, float? softcap=None, Tensor? projection=None, Tensor? frequencies=None, Tensor? summed=None, "
    "Tensor? replayed=None, Tensor? entered=None, str ranks='') -> (Tensor scores, Tensor stats, Tensor weight)",
    _score_layer,
    _fake_scores,
)


# -- how many entries each layer may hold: one of these, or none where all have the same ------------------------------


def _cascade_step(
    cache: Tensors, scored: Tensors, first: Tensor, layer: int, policy: str, *, ranks: str = ""
) -> Tensor:
    buffers, (scores, _, weight) = PrefillBuffers(*cache), scored
    step = implementation(scores).cascade_step
    shares: Tensor = step(buffers, scores, weight, first, layer, from_text(policy), _ranks(ranks))
    return shares


def _fixed_shares(cache: Tensors, scored: Tensors, first: Tensor, layer: int, policy: str) -> Tensor:
    buffers, scores = PrefillBuffers(*cache), scored[0]
    shares: Tensor = implementation(scores).layer_shares(buffers, scores, first, layer, from_text(policy))
    return shares


def _fake_shares(cache: Tensors, *operands: Any, **options: Any) -> Tensor:
    return torch.empty_like(PrefillBuffers(*cache).layer_weights, dtype=torch.int64)


_define(
    "cascade_step(Tensor(a!)[] cache, Tensor[] scored, Tensor first, int layer, str policy, *, str ranks='') -> Tensor",
    _cascade_step,
    _fake_shares,
)
_define(
    "fixed_shares(Tensor[] cache, Tensor[] scored, Tensor first, int layer, str policy) -> Tensor",
    _fixed_shares,
    _fake_shares,
)


# -- in which order the entries of all heads enter; none where all heads have the same number -------------------------


def _rank_heads(cache: Tensors, scored: Tensors, policy: str) -> Tensor:
    return from_text(policy).rank(scored[0], PrefillBuffers(*cache).entries).contiguous()


def _fake_ranking(cache: Tensors, scored: Tensors, policy: str) -> Tensor:
    return scored[0].new_empty(scored[0].shape, dtype=torch.int32)


_define("rank_heads(Tensor[] cache, Tensor[] scored, str policy) -> Tensor", _rank_heads, _fake_ranking)


# -- what is kept -----------------------------------------------------------------------------------------------------


def _gather_layer(
    cache: Tensors,
    attention: OptionalTensors,
    scored: Tensors,
    first: Tensor,
    layer: int,
    policy: str,
    *,
    shares: Tensor | None = None,
    ranking: Tensor | None = None,
    ranks: str = "",
) -> None:
    (k, v), (scores, stats, weight), buffers = attention[1:3], scored, PrefillBuffers(*cache)
    assert k is not None and v is not None
    candidates = Candidates(k, v, scores, stats, weight, first).stored_in(buffers)
    gather = implementation(k).gather_layer
    gather(buffers, candidates, shares, ranking, layer, from_text(policy), _ranks(ranks))


def _keep_newest(cache: Tensors, attention: OptionalTensors, layer: int) -> None:
    k, v = attention[1:3]
    assert k is not None and v is not None
    sliding.keep_newest(RingBuffers(*cache), k, v, torch.arange(k.shape[2], device=k.device), layer)


def _pack(cache: Tensors) -> None:
    implementation(cache[0]).pack(PrefillBuffers(*cache))


_define(
    "gather_layer(Tensor(a!)[] cache, Tensor?[] attention, Tensor[] scored, Tensor first, int layer, str policy, *, "
    "Tensor? shares=None, Tensor? ranking=None, str ranks='') -> ()",
    _gather_layer,
    _fake_nothing,
)
_define("keep_newest(Tensor(a!)[] cache, Tensor?[] attention, int layer) -> ()", _keep_newest, _fake_nothing)
_define("pack(Tensor(a!)[] cache) -> ()", _pack, _fake_nothing)
