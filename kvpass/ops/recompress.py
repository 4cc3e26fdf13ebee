"""Recompression after several tokens were appended: score the entries held, choose which stay.

After a prompt every head holds the same positions; here every head holds its own, so a policy scores one KV head at a
time. Layer weight, layer budgets and order of entry work as in prefill.

Legend: B batch, T appended tokens, L layers, K KV heads, D head dim, S slots of the longest head, its entries in
ascending position.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvpass.operands import AppendBuffers, RecompressBuffers
from kvpass.ops.entry_formats import entries_of_head
from kvpass.policies.base import Policy
from kvpass.policies.observation import Observation
from kvpass.policies.scores import PROTECTED
from kvpass.ranks import Ranks
from kvpass.rotation import is_rotated, rotated_back

NOT_DUE = -1
"""Window of a row that is left as it is."""


@dataclass(frozen=True, eq=False, kw_only=True)
class HeldObservation(Observation):
    """Attention op whose heads hold different numbers of entries; the last column is the newest token.

    Attributes:
        present: columns that hold an entry, bool ``[B, K, N]``; others get no attention.
    """

    present: Tensor

    def _hidden(self, kv_head: int, first: int, last: int) -> Tensor:
        absent = ~self.present[:, kv_head, None, None, :last].expand(-1, -1, last - first, -1)
        return torch.cat([absent[..., :first], absent[..., first:] | super()._hidden(kv_head, first, last)], -1)


def observe_held(
    q: Tensor,
    value_dim: int,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
    held: AppendBuffers,
    found: RecompressBuffers,
    layer: int,
    policy: Policy,
    ranks: Ranks,
) -> None:
    """Score the entries of pool and tail after new tokens were appended, before they count as used.

    The newest ``recompress_window`` tokens of a row will be kept; those of them among the new tokens observe. Rows of
    ``NOT_DUE`` are skipped. Writes scores (``-inf`` where nothing is evictable), masses (mean attention of the
    observing rows and the group) and the layer's weight.

    Args:
        q: queries of the new tokens ``[B, H, T, D]``. softcap, sinks: as in :class:`kvpass.operands.Attention`.
        ranks: processes that share the heads of the layer; scores are of all heads, masses of those of this process.
    """
    scores, masses, layer_weights, window = found
    (num_layers, _, kv_heads, _, _), (t, key_dim) = held.tail.k.shape, q.shape[2:]
    group, slots = q.shape[1] // kv_heads, scores.shape[3]
    end = int(held.tail_used) + t
    bounds, starts = held.offsets.tolist(), held.tail_start.tolist()
    for row, protected in enumerate(window.tolist()):
        if protected == NOT_DUE:
            continue
        observing = min(protected, t)
        site: dict[str, Any] = {"scale": scale, "window": observing, "layer": layer, "num_layers": num_layers}
        site["softcap"] = softcap
        queries = q[row : row + 1, :, t - max(observing, 1) :]
        keys, values, worth = [], [], scores.new_full((kv_heads, slots), float("-inf"))
        for head in range(kv_heads):
            segment = layer * kv_heads + head
            kept = slice(bounds[row][segment], bounds[row][segment + 1])
            tail = (layer, row, head, slice(starts[row], end))
            k, v = entries_of_head(held, row, kept, tail, key_dim, value_dim)
            if is_rotated(held, key_dim):
                k = rotated_back(k)
                v = rotated_back(v) if held.tail.v.shape[4] else k[:, :value_dim]
            if held.key_mean is not None:
                k = k + held.key_mean[layer, row, head]
            keys.append(k.to(q.dtype))
            values.append(v.to(q.dtype))
            heads = slice(head * group, (head + 1) * group)
            own = queries[:, heads], keys[head][None, None], values[head][None, None]
            obs = Observation(*own, sinks=None if sinks is None else sinks[heads], **site)
            evictable = obs.length - protected
            worth[head, :evictable] = policy.checked_score(obs)[0, 0, :evictable]
            masses[row, layer, head, : obs.length] = obs.mean[0].mean(0)
        of_all = ranks.gather(worth, 0)
        scores[row, layer], held_by_any = of_all, of_all > float("-inf")
        longest = protected + int(held_by_any.sum(1).max())
        present = _newest_last([torch.ones_like(k[:, 0], dtype=torch.bool) for k in keys], longest)
        k, v = _newest_last(keys, longest), _newest_last(values, longest)
        whole = HeldObservation(queries, k, v, sinks=sinks, present=present, ranks=ranks, **site)
        weight = policy.layer_weight(whole, of_all[held_by_any][None, None])
        if weight is not None:
            layer_weights[row, layer] = weight[0]


def _newest_last(heads: list[Tensor], longest: int) -> Tensor:
    """Stack the entries ``[n_k, ...]`` of each head to ``[1, K, longest, ...]``, zeros before shorter heads."""
    out = heads[0].new_zeros(1, len(heads), longest, *heads[0].shape[1:])
    for head, entries in enumerate(heads):
        out[0, head, longest - entries.shape[0] :] = entries
    return out


def select_held(scores: Tensor, layer_weights: Tensor, entries: Tensor, available: Tensor, policy: Policy) -> Tensor:
    """Return the keep mask of the evictable entries, bool ``[B, L, K, S]``.

    Keeps as many as the budget allows, or all; a share that a layer cannot fill goes to other layers.

    Args:
        scores: fp32 ``[B, L, K, S]``, ``-inf`` where there is no evictable entry, ``inf`` for protected ones.
        layer_weights: fp64 ``[B, L]``.
        entries: evictable entries per KV head per layer on average, int64 ``[B]``.
        available: evictable positions seen so far, int64 ``[B]``.
    """
    layers, kv_heads = scores.shape[1:3]
    eligible = scores > float("-inf")
    certain = (scores[:, 0, 0] == PROTECTED).sum(1)
    budgets = policy.layer_budgets(layer_weights, entries, available, kv_heads, layers, certain)
    limits = fill_shares(budgets, eligible.sum((2, 3)))
    ranks = torch.stack([policy.rank(site, entries) for site in scores.unbind(1)], 1)
    return eligible & (ranks < limits[:, :, None, None])


def fill_shares(budgets: Tensor, held: Tensor) -> Tensor:
    """Cap the budgets of layers at ``held`` entries; they add up to ``min(sum budgets, sum held)``.

    What a layer cannot fill goes to the others in proportion to their budgets. Int64 ``[B, L]`` each.
    """
    rows = [_fill(row, have) for row, have in zip(budgets.tolist(), held.tolist(), strict=True)]
    return torch.tensor(rows, dtype=torch.int64, device=budgets.device).view(budgets.shape)


def _fill(budgets: list[int], held: list[int]) -> list[int]:
    shares = [min(pair) for pair in zip(budgets, held, strict=True)]
    left = min(sum(budgets), sum(held)) - sum(shares)
    while left:
        open_layers = [layer for layer, share in enumerate(shares) if share < held[layer]]
        total = sum(max(budgets[layer], 1) for layer in open_layers)
        parts = {
            layer: min(left * max(budgets[layer], 1) // total, held[layer] - shares[layer]) for layer in open_layers
        }
        if not any(parts.values()):
            parts = dict.fromkeys(sorted(open_layers, key=lambda layer: -budgets[layer])[:left], 1)
        for layer, part in parts.items():
            shares[layer] += part
        left -= sum(parts.values())
    return shares
