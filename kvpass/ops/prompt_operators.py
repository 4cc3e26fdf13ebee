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
``rule_rows``. :mod:`kvpass.ops.reference` has what an operator does, by its name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kvpass import block_sparse
from kvpass.operands import Attention, Candidates, PolicyInputs, PrefillBuffers, RingBuffers
from kvpass.ops import sliding
from kvpass.ops.reference import row_groups
from kvpass.ops.schemas import define_operator, implementation
from kvpass.policies import from_spec
from kvpass.ranks import ONE_PROCESS, Ranks

POOL_OPERANDS = PrefillBuffers._fields[:-1]
"""Names of the tensors in ``cache``; ``rule_rows``, the last, only where the policy has them."""

Tensors = Sequence[Tensor]


def _ranks(spec: str) -> Ranks:
    return Ranks.from_spec(spec) if spec else ONE_PROCESS


def _like_selection(attention, start, prefill, *, queries, scale):  # type: ignore[no-untyped-def]
    (b, heads, n, _), method = attention[0].shape, block_sparse.from_text(prefill)
    count = -(-n // method.block)
    columns = method.columns(n)
    return start.new_empty(b, heads, count, count, dtype=torch.bool), start.new_empty(b, heads, columns).int()


@define_operator(
    "select_blocks(Tensor?[] attention, Tensor start, str prefill, *, int queries, float scale)"
    " -> (Tensor blocks, Tensor columns)",
    fake=_like_selection,
)
def select_blocks(attention, start, prefill, *, queries, scale):  # type: ignore[no-untyped-def]
    """Select what is computed of the attention of all tokens: :class:`kvpass.operands.BlockSelection`.

    prefill: :attr:`kvpass.block_sparse.BlockSparse.text`. queries: how many of the last attend to everything.
    """
    (q, k, v, _, _), method = attention, block_sparse.from_text(prefill)
    (b, heads, n, _), count = q.shape, -(-q.shape[2] // method.block)
    blocks = torch.zeros(b, heads, count, count, dtype=torch.bool, device=q.device)
    columns = torch.full((b, heads, method.columns(n)), n, dtype=torch.int32, device=q.device)
    for rows, column in row_groups(start):
        if column < n:
            own = method.selected(Attention(q, k, v, scale).from_column(rows, column), queries)
            blocks[rows, :, : own.blocks.shape[-1], : own.blocks.shape[-1]] = own.blocks
            columns[rows, :, : own.columns.shape[-1]] = own.columns
    return blocks, columns


def _like_scores(  # type: ignore[no-untyped-def]
    attention, start, first, cache, layer, policy, *, ranks="", **inputs
):
    b, kv_heads, n, _ = attention[1].shape
    new = first.new_empty
    scores = new(b, kv_heads * _ranks(ranks).size, n, dtype=torch.float32)
    stats = new(from_spec(policy).stat_planes, b, kv_heads, n, dtype=torch.float32)
    return scores, stats, new(b, dtype=torch.float64)


@define_operator(
    "score_layer(Tensor?[] attention, Tensor start, Tensor first, Tensor(a!)[] cache, int layer, str policy, *,"
    " float scale, float? softcap=None, Tensor? projection=None, Tensor? frequencies=None, Tensor? summed=None,"
    " Tensor? replayed=None, Tensor? entered=None, str ranks='') -> (Tensor scores, Tensor stats, Tensor weight)",
    fake=_like_scores,
)
def score_layer(  # type: ignore[no-untyped-def]
    attention,
    start,
    first,
    cache,
    layer,
    policy,
    *,
    scale,
    softcap=None,
    projection=None,
    frequencies=None,
    summed=None,
    replayed=None,
    entered=None,
    ranks="",
):
    """Score the entries of a layer; the rows of the decode rule in ``cache`` are written."""
    (q, k, v, lse, sinks), buffers = attention, PrefillBuffers(*cache)
    inputs = PolicyInputs(
        projection, frequencies, buffers.entries, summed, replayed, buffers.rule_rows, entered, buffers.protected
    )
    call, layers = Attention(q, k, v, scale, softcap, sinks), buffers.layer_weights.shape[1]
    score = implementation(q).score_layer
    return score(call, lse, start, first, layer, layers, from_spec(policy), inputs, _ranks(ranks))


def _like_shares(cache: Tensors, *operands: Any, **options: Any) -> Tensor:
    return torch.empty_like(PrefillBuffers(*cache).layer_weights, dtype=torch.int64)


@define_operator(
    "cascade_step(Tensor(a!)[] cache, Tensor[] scored, Tensor first, int layer, str policy, *, str ranks='') -> Tensor",
    fake=_like_shares,
)
def cascade_step(cache: Tensors, scored: Tensors, first: Tensor, layer: int, policy: str, *, ranks: str = "") -> Any:
    """Redistribute the budget over the layers so far: entries that each may hold, int64 ``[B, L]``."""
    buffers, (scores, _, weight) = PrefillBuffers(*cache), scored
    step = implementation(scores).cascade_step
    return step(buffers, scores, weight, first, layer, from_spec(policy), _ranks(ranks))


@define_operator(
    "fixed_shares(Tensor[] cache, Tensor[] scored, Tensor first, int layer, str policy) -> Tensor", fake=_like_shares
)
def fixed_shares(cache: Tensors, scored: Tensors, first: Tensor, layer: int, policy: str) -> Any:
    """Return the same, where the shares of layers are known before the prompt is read."""
    buffers, scores = PrefillBuffers(*cache), scored[0]
    return implementation(scores).fixed_shares(buffers, scores, first, layer, from_spec(policy))


@define_operator(
    "rank_heads(Tensor[] cache, Tensor[] scored, str policy) -> Tensor",
    fake=lambda cache, scored, policy: scored[0].new_empty(scored[0].shape, dtype=torch.int32),
)
def rank_heads(cache: Tensors, scored: Tensors, policy: str) -> Tensor:
    """Rank the entries of all heads, int32 ``[B, K, N]``: in this order they enter as the layer's share grows."""
    return from_spec(policy).rank(scored[0], PrefillBuffers(*cache).entries).contiguous()


@define_operator(
    "gather_layer(Tensor(a!)[] cache, Tensor?[] attention, Tensor[] scored, Tensor first, int layer, str policy, *,"
    " Tensor? shares=None, Tensor? ranking=None, str ranks='') -> ()",
    fake=lambda *_, **__: None,
)
def gather_layer(  # type: ignore[no-untyped-def]
    cache, attention, scored, first, layer, policy, *, shares=None, ranking=None, ranks=""
):
    """Move the entries within the layer's share into free slots of the pool, and the window into the tail."""
    (k, v), (scores, stats, weight), buffers = attention[1:3], scored, PrefillBuffers(*cache)
    candidates = Candidates(k, v, scores, stats, weight, first).stored_in(buffers)
    gather = implementation(k).gather_layer
    gather(buffers, candidates, shares, ranking, layer, from_spec(policy), _ranks(ranks))


@define_operator("keep_newest(Tensor(a!)[] cache, Tensor?[] attention, int layer) -> ()", fake=lambda *_: None)
def keep_newest(cache: Tensors, attention: Tensors, layer: int) -> None:
    """Copy the last keys and values of a layer with a sliding window into its ring; ``cache``: RingBuffers."""
    k, v = attention[1:3]
    sliding.keep_newest(RingBuffers(*cache), k, v, torch.arange(k.shape[2], device=k.device), layer)


@define_operator("pack(Tensor(a!)[] cache) -> ()", fake=lambda *_: None)
def pack(cache: Tensors) -> None:
    """Bring the entries of a pool into the order of layers, heads and positions."""
    implementation(cache[0]).pack(PrefillBuffers(*cache))
