"""Compaction: kept entries are changed so that they stand for those that were dropped.

As in Attention Matching (arXiv 2602.16284), kept entries are to give reference queries the attention outputs that all
entries give them, beside the rest that these queries attend to. The paper gives each entry a bias and solves for biases
and values. Here the keys and values themselves are found by gradient descent, which begins at the entries as they are.
So a compacted cache is a cache like any other.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from kvpass.operands import Attention
from kvpass.policies.observation import softcapped

Scaling: TypeAlias = tuple[float, float | None]  # factor and soft cap of logits
STEPS, QUERIES = 200, 256
"""Steps of the descent, and queries that are drawn for each."""
RATE = 0.05  # how far a number moves in the first steps, in standard deviations of its channel; it falls to 0
MOST_QUERIES = 4096  # reference queries of a KV head: so many of its group's queries, evenly spaced over all replays
HELD_OUT = 4  # one of so many reference queries is not fitted to, but judges the fit


class Reference(NamedTuple):
    """Queries of replays for one KV head of a layer, and what they attend to beside the entries to be fitted: the rest.

    The rest are the window, the tokens of the replay and attention sinks.
    """

    queries: Tensor  # fp32 [n, D], RoPE applied
    lse: Tensor  # log-sum-exp of their logits with the rest, fp32 [n]
    rest: Tensor  # the attention output of the rest alone, fp32 [n, Dv]

    def some(self, which: Tensor) -> Reference:
        return Reference(*(x[which] for x in self))

    def output(self, weights: Tensor, values: Tensor) -> Tensor:
        """Return attention outputs ``[n, Dv]``; ``weights``: of the entries, ``[n, S]``, the rest has what is left."""
        return weights @ values + self.rest * (1 - weights.sum(1, keepdim=True))


class Fitted(NamedTuple):
    """Keys ``[S, D]`` and values ``[S, Dv]`` of the kept entries, in the dtypes of those before.

    Of the queries that were not fitted to, errors are sums of squares over queries and numbers, fp32 ``[3]``: of the
    attention outputs, of their error with the entries as they were, and with those returned.
    """

    keys: Tensor
    values: Tensor
    errors: Tensor


def references(replayed: Sequence[tuple[Attention, int]], first: int) -> Iterator[Reference]:
    """Yield the reference of each KV head of a row; the rest begins at column ``first``.

    ``replayed``: of each replay, its attention and how many of its tokens are real. Queries ``[1, H, T, D]``; keys and
    values of prompt and replay, ``[1, K, N + T, D]``.
    """
    call = replayed[0][0]
    kv_heads = call.k.shape[1]
    group = call.q.shape[1] // kv_heads
    step = -(-sum(tokens for _, tokens in replayed) * group // MOST_QUERIES)
    for kv_head in range(kv_heads):
        heads = slice(kv_head * group, (kv_head + 1) * group)
        parts = [_reference(replay, kv_head, heads, range(0, tokens, step), first) for replay, tokens in replayed]
        yield Reference(*map(torch.cat, zip(*parts, strict=True)))


def _reference(call: Attention, kv_head: int, heads: slice, tokens: range, first: int) -> Reference:
    sampled = torch.tensor(tokens, device=call.q.device)
    queries = call.q[0, heads, sampled].float()
    keys, values = call.k[0, kv_head, first:], call.v[0, kv_head, first:].float()
    before = keys.shape[0] - call.q.shape[2]
    logits = _logits(queries, keys, (call.scale, call.softcap))
    unseen = torch.arange(keys.shape[0], device=keys.device) > (before + sampled)[:, None]
    logits = logits.masked_fill(unseen, float("-inf"))
    lse, out = logits.logsumexp(-1), logits.softmax(-1) @ values
    if call.sinks is not None:
        with_sinks = torch.logaddexp(lse, call.sinks[heads, None].float())
        lse, out = with_sinks, out * (lse - with_sinks).exp()[..., None]
    return Reference(queries.flatten(0, 1), lse.flatten(), out.flatten(0, 1))


def _logits(queries: Tensor, keys: Tensor, scaling: Scaling) -> Tensor:
    """Return logits, fp32 ``[..., n, S]``."""
    return softcapped((queries @ keys.float().T) * scaling[0], scaling[1])


def fit_entries(
    keys: Tensor, values: Tensor, kept: Tensor, reference: Reference, scale: float, softcap: float | None = None
) -> Fitted:
    """Fit the entries of one KV head at positions ``kept`` int64 ``[S]`` to the attention outputs that all give.

    The squared error is minimised by Adam. Where it comes out no lower for the queries that are held out, or a number
    is not finite, the entries stay as they were.
    """
    n, scaling = len(reference.lse), (scale, softcap)
    parts = map(reference.some, torch.arange(n, device=keys.device).split(QUERIES))
    target = torch.cat([part.output(_weights(part, keys, scaling)[0], values.float()) for part in parts])
    held_out = torch.arange(n, device=keys.device) % HELD_OUT == 0
    old, units = [x[kept] for x in (keys, values)], [x.float().std(0, correction=0) for x in (keys, values)]
    new = old
    if n > 1:
        fitted = _descent(old, units, reference.some(~held_out), target[~held_out], scaling)
        new = [x.to(before.dtype) for x, before in zip(fitted, old, strict=True)]

    judges, wanted = reference.some(held_out), target[held_out]
    outputs = (judges.output(_weights(judges, k, scaling)[0], v.float()) for k, v in (old, new))
    errors = [(output - wanted).square().sum() for output in outputs]
    better = errors[1] < errors[0]  # False for NaN
    keys, values = (torch.where(better, after, before) for after, before in zip(new, old, strict=True))
    errors[1] = torch.where(better, errors[1], errors[0])
    return Fitted(keys, values, torch.stack([wanted.square().sum(), *errors]))


def _descent(
    old: Sequence[Tensor], units: Sequence[Tensor], reference: Reference, target: Tensor, scaling: Scaling
) -> tuple[Tensor, Tensor]:
    """Return keys and values, fp32, that give the queries nearly the outputs ``target``.

    The descent begins at ``old`` keys ``[S, D]`` and values ``[S, Dv]``; both have a unit for each channel.
    """
    first_k, first_v = (x.float() for x in old)
    moved_k, moved_v = torch.zeros_like(first_k), torch.zeros_like(first_v)
    descent, (unit_k, unit_v) = torch.optim.Adam([moved_k, moved_v], betas=(0.9, 0.99)), units
    seeded = torch.Generator("cpu").manual_seed(0)
    draws = torch.randint(len(target), (STEPS, QUERIES), generator=seeded, device="cpu")
    keys, values, size = first_k, first_v, target.square().mean()
    for step, drawn in enumerate(draws.to(target.device)):
        part = reference.some(drawn)
        weights, slope = _weights(part, keys, scaling)
        out = part.output(weights, values)
        error = (out - target[drawn]) / (size * QUERIES)
        of_logits = weights * (error @ values.T - (error * out).sum(1, keepdim=True)) * slope
        moved_k.grad = scaling[0] * unit_k * (of_logits.T @ part.queries)
        moved_v.grad = unit_v * (weights.T @ error)
        descent.param_groups[0]["lr"] = RATE * (1 + math.cos(math.pi * step / STEPS)) / 2
        descent.step()
        keys, values = first_k + moved_k * unit_k, first_v + moved_v * unit_v
    return keys, values


def _weights(reference: Reference, keys: Tensor, scaling: Scaling) -> tuple[Tensor, Tensor | float]:
    """Return the share of attention that each entry has beside the rest, ``[n, S]``, and the slope of the soft cap."""
    logits = _logits(reference.queries, keys, scaling)
    total = torch.logaddexp(logits.logsumexp(1), reference.lse)
    slope = 1.0 if scaling[1] is None else 1 - (logits / scaling[1]).square()
    return (logits - total[:, None]).exp(), slope
