"""What a policy keeps, decided at once for the whole prompt and in one table of positions while decoding.

The operators of kvpass decide layer by layer, move what is kept into slots and reuse these.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvpass.policies.base import Policy
from kvpass.policies.decode_rules import DecodeRule, Slots, keep_mask
from kvpass.policies.observation import Observation
from kvpass.policies.scheduler import best_over_layers


def prompt_keep(policy: Policy, sites: Sequence[Observation], entries: int, *, cascaded: bool = True) -> Tensor:
    """Entries kept of a prompt, bool ``[L, B, K, N]``: those that every stage of the cascade has room for.

    Args:
        sites: of the layers. entries: evictable ones per KV head and layer. cascaded: else only the last stage counts.
    """
    batch, kv_heads, length, _ = sites[0].keys.shape
    layers, share = len(sites), torch.full((batch,), entries)
    available = torch.full((batch,), sites[0].evictable)
    scores = torch.full((layers, batch, kv_heads, length), float("-inf"))
    weights = torch.zeros(batch, layers, dtype=torch.float64)
    limits = torch.full((batch, layers), torch.iinfo(torch.int64).max)
    for i, obs in enumerate(sites):
        scores[i, :, :, : obs.evictable] = policy.checked_score(obs)
        weight = policy.layer_weight(obs, scores[i, :, :, : obs.evictable])
        if weight is not None:
            weights[:, i] = weight
        if policy.compares_layers:
            known = scores[: i + 1].transpose(0, 1).flatten(1)
            of_layer = torch.arange(i + 1).repeat_interleave(kv_heads * length).expand(known.shape)
            weights = best_over_layers(known, of_layer, share * (layers * kv_heads), layers, policy.least_score)
        stage = policy.layer_budgets(weights, share, available, kv_heads, i + 1)
        if cascaded or i == layers - 1:
            limits[:, : i + 1] = torch.minimum(limits, stage)[:, : i + 1]
    ranks = torch.stack([policy.rank(layer, share) for layer in scores])
    return (scores == float("-inf")) | (ranks < limits.T[:, :, None, None])


def decode_keep(
    rule: DecodeRule,
    obs: Observation,
    keep: Tensor,
    decode_state: Tensor,
    quota: Tensor,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
) -> Tensor:
    """Entries of one layer after each of S decoded tokens, bool ``[S, B, K, N + S]``; slots are positions.

    Args:
        keep: prompt entries that prefill kept, bool ``[B, K, N]``. decode_state: as ``rule.start`` gives it.
        quota: entries a head may hold besides the newest ``rule.window``, int64 ``[B, K]``.
        queries, keys, values: of the new tokens, ``[S, B, heads, D]``.
    """
    steps = queries.shape[0]
    live, state = pad(keep, (0, steps)), pad(decode_state, (0, steps))
    every = torch.arange(live.shape[2]).expand(live.shape)
    k = torch.cat([obs.keys.float(), keys.float().permute(1, 2, 0, 3)], 2)
    masks = []
    for s in range(steps):
        live = live | (every == obs.length + s)
        q = queries[s].float().unflatten(1, (obs.kv_heads, obs.group))
        logits = torch.einsum("bkgd,bknd->bkgn", q, k) * obs.scale
        attention = logits.masked_fill(~live[:, :, None], float("-inf")).softmax(-1).flatten(1, 2)
        position = torch.where(live, every, -1)
        worth, state = rule.observe(attention, Slots(position, torch.where(live, state, 0.0), quota, values[s]))
        live = keep_mask(worth, position, quota, rule.window)
        masks.append(live)
    return torch.stack(masks)
