"""Compaction: kept entries are changed so that they stand for those that were dropped.

After Attention Matching (arXiv 2602.16284): each kept entry gets a bias, which carries the attention mass of dropped
ones, and the values are fitted to the attention outputs of the full cache. There the bias is one more number an entry,
added in every attention kernel. Here it is part of the key: with a vector u for which ``scale * q.u`` is near 1 for all
reference queries q of a KV head, the key ``k + bias * u`` has nearly the logit of k plus the bias. So a compacted cache
is a cache like any other.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kvpass.operands import Attention
from kvpass.policies.observation import softcapped

RIDGE = 1e-3
"""Pull towards what was there, in units of the mean diagonal of the normal equations."""
MOST_BIAS = 3.0
"""Bound of a bias: a factor of 20 in attention mass."""
MOST_QUERIES = 1024
"""Reference queries of a KV head: so many of its group's queries, evenly spaced over all replays."""
HELD_OUT = 4
"""One of so many reference queries is not fitted to, but judges the fit."""


class Reference(NamedTuple):
    """Queries of replays for one KV head of a layer, and what they attend to beside the entries to be fitted.

    Attributes:
        queries: fp32 ``[n, D]``, RoPE applied. lse: log-sum-exp of their logits with the rest: window, tokens of the
            replay, attention sinks; fp32 ``[n]``. rest: the attention output of the rest alone, fp32 ``[n, Dv]``.
    """

    queries: Tensor
    lse: Tensor
    rest: Tensor

    def merged(self, out: Tensor, lse: Tensor) -> Tensor:
        """Return the attention output ``[n, Dv]`` to the rest and to entries with this output and log-sum-exp."""
        share = torch.sigmoid(lse - self.lse)[:, None]
        return out * share + self.rest * (1 - share)


class Fitted(NamedTuple):
    """Keys ``[S, D]`` and values ``[S, Dv]`` of the kept entries, in the dtypes of those given.

    errors: of the queries that were not fitted to, sums of squares over queries and numbers, fp32 ``[3]``: of the
    attention outputs, of their error with the entries as they were, and with those returned.
    """

    keys: Tensor
    values: Tensor
    errors: Tensor


def references(replayed: Sequence[tuple[Attention, int]], first: int) -> Iterator[Reference]:
    """Yield the reference of each KV head of a row.

    Args:
        replayed: of each replay, its attention and how many of its tokens are real. Queries ``[1, H, T, D]``; keys and
            values of prompt and replay, ``[1, K, N + T, D]``. first: the first column of the rest.
    """
    call = replayed[0][0]
    kv_heads = call.k.shape[1]
    group = call.q.shape[1] // kv_heads
    step = -(-sum(tokens for _, tokens in replayed) * group // MOST_QUERIES)
    for kv_head in range(kv_heads):
        heads = slice(kv_head * group, (kv_head + 1) * group)
        parts = [_reference(one, kv_head, heads, range(0, tokens, step), first) for one, tokens in replayed]
        yield Reference(*map(torch.cat, zip(*parts, strict=True)))


def _reference(call: Attention, kv_head: int, heads: slice, tokens: range, first: int) -> Reference:
    sampled = torch.tensor(tokens, device=call.q.device)
    queries = call.q[0, heads, sampled].float()
    keys, values = call.k[0, kv_head, first:], call.v[0, kv_head, first:].float()
    before = keys.shape[0] - call.q.shape[2]
    logits = logits_of(queries, keys, call.scale, call.softcap)
    unseen = torch.arange(keys.shape[0], device=keys.device) > (before + sampled)[:, None]
    logits = logits.masked_fill(unseen, float("-inf"))
    lse, out = logits.logsumexp(-1), logits.softmax(-1) @ values
    if call.sinks is not None:
        with_sinks = torch.logaddexp(lse, call.sinks[heads, None].float())
        lse, out = with_sinks, out * (lse - with_sinks).exp()[..., None]
    return Reference(queries.flatten(0, 1), lse.flatten(), out.flatten(0, 1))


def logits_of(queries: Tensor, keys: Tensor, scale: float, softcap: float | None) -> Tensor:
    """Return logits, fp32 ``[..., n, S]``."""
    return softcapped((queries @ keys.float().T) * scale, softcap)


def fit_entries(
    keys: Tensor, values: Tensor, kept: Tensor, reference: Reference, scale: float, softcap: float | None = None
) -> Fitted:
    """Fit the kept entries of one KV head to the attention outputs that all entries give.

    First a bias for each kept entry, by least squares of the relative attention mass of all entries, which is folded
    into its key; then the values, by least squares of the outputs. Both are pulled towards what was there, so no case
    is singular, whether queries or entries outnumber the other. Where the entries as they were give a lower error for
    the queries that are held out, or a number is not finite, they stay.

    Args:
        keys, values: of all entries, ``[N, D]`` and ``[N, Dv]``. kept: positions int64 ``[S]``.
    """
    held_out = torch.arange(len(reference.lse), device=keys.device) % HELD_OUT == 0
    seen = ~held_out
    logits = logits_of(reference.queries, keys, scale, softcap)
    mass = logits.logsumexp(1)
    target = reference.merged(logits.softmax(1) @ values.float(), mass)

    def error(z: Tensor, v: Tensor) -> Tensor:
        out = reference.merged(z.softmax(1) @ v.float(), z.logsumexp(1))
        return (out - target)[held_out].square().sum()

    own_keys, own_values = keys[kept], values[kept]
    factors = _towards(1.0, (logits[:, kept] - mass[:, None])[seen].exp(), 1.0)
    bias = factors.clamp(math.exp(-MOST_BIAS), math.exp(MOST_BIAS)).log()
    direction = _towards(0.0, reference.queries[seen] * scale, 1.0)
    new_keys = (own_keys.double() + bias * direction.T).to(keys.dtype)
    z = logits_of(reference.queries, new_keys, scale, softcap)
    share = torch.sigmoid(z.logsumexp(1) - reference.lse)[:, None]
    weights, wanted = z.softmax(1) * share, target - reference.rest * (1 - share)
    new_values = _towards(own_values, weights[seen], wanted[seen]).to(values.dtype)

    before, after = error(logits[:, kept], own_values), error(z, new_values)
    better = after <= before  # False for NaN
    return Fitted(
        torch.where(better, new_keys, own_keys),
        torch.where(better, new_values, own_values),
        torch.stack([target[held_out].square().sum(), before, torch.where(better, after, before)]),
    )


def _towards(start: Tensor | float, x: Tensor, y: Tensor | float) -> Tensor:
    """Return b ``[S, V]`` near ``start`` with ``x b`` near ``y``, by ridge regression.

    Args:
        x: ``[n, S]``. start: ``[S, V]``, or a number for V = 1. y: ``[n, V]``, or a number for V = 1.
    Returns:
        fp64 ``[S, V]``.
    """
    n, s = x.shape
    x = x.double()
    start, y = (
        x.new_full((size, 1), one) if isinstance(one, float) else one.double() for size, one in ((s, start), (n, y))
    )
    normal = x @ x.T if n < s else x.T @ x
    normal.diagonal().add_((RIDGE / max(s, 1) * x.square().sum()).clamp(min=torch.finfo(x.dtype).tiny))
    residual = y - x @ start
    solved, _ = torch.linalg.solve_ex(normal, residual if n < s else x.T @ residual)
    return start + (x.T @ solved if n < s else solved)
