"""Short eager implementations of the ``kvpass::`` operators: the oracle of the tests and the CPU implementation.

Rows of a batch that start at different columns (left padding) are worked on separately, each without its padding:
no statistic can mix rows, and a padded row computes exactly what it computes alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from kvpass.policies.base import Policy
from kvpass.policies.observation import Observation, attention_weights

Live = tuple[slice, slice, slice]
"""Rows of the batch that begin at the same column, all heads, and their real columns."""
_ROW_BLOCK = 512
_EMPTY = -1
OWNER, RANK, POSITION, PLACE = 0, 1, 2, 3
"""Planes of the slot table, int32 ``[4, B, E]``: ``layer * K + head`` (-1 = empty), order of entry, true position,
storage order of the decode rule."""
MASS, MEMORY = 0, 1
"""Planes of the traces, fp32: attention mass, and what the decode rule remembers of each entry."""


def row_groups(start: Tensor) -> Iterator[tuple[slice, int]]:
    """Neighbouring rows with the same first real column, as (rows, column)."""
    columns = start.tolist()
    first = 0
    for row in range(1, len(columns) + 1):
        if row == len(columns) or columns[row] != columns[first]:
            yield slice(first, row), columns[first]
            first = row


def causal_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    sliding_window: int | None = None,
) -> Tensor:
    """Causal attention of rows without padding; q ``[B, H, N, D]``, k and v un-repeated; returns ``[B, H, N, Dv]``.

    The group dimension is a stride-0 view of K and V, so nothing is repeated in memory.
    """
    kv_heads = k.shape[1]
    bounded = sliding_window is not None and sliding_window < q.shape[2]
    if bounded or softcap is not None or sinks is not None:
        return _blocked_attention(q, k, v, scale, softcap, sinks, sliding_window)
    if kv_heads == q.shape[1]:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
    group = q.shape[1] // kv_heads
    rows = [
        F.scaled_dot_product_attention(
            q_row.unflatten(0, (kv_heads, group)),
            k_row.unsqueeze(1).expand(-1, group, -1, -1),
            v_row.unsqueeze(1).expand(-1, group, -1, -1),
            is_causal=True,
            scale=scale,
        ).flatten(0, 1)
        for q_row, k_row, v_row in zip(q, k, v, strict=True)
    ]
    return torch.stack(rows)


def _blocked_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
    sliding_window: int | None,
) -> Tensor:
    """The same in plain steps, fp32 inside, a block of rows of one KV head at a time."""
    n, kv_heads = q.shape[2], k.shape[1]
    group = q.shape[1] // kv_heads
    reach = n if sliding_window is None else sliding_window
    columns = torch.arange(n, device=q.device)
    out = q.new_empty(*q.shape[:3], v.shape[3])
    for kv_head in range(kv_heads):
        heads = slice(kv_head * group, (kv_head + 1) * group)
        for first in range(0, n, _ROW_BLOCK):
            last = min(first + _ROW_BLOCK, n)
            near = slice(max(first - reach + 1, 0), last)
            logits = q[:, heads, first:last].float() @ k[:, kv_head, None, near].float().mT * scale
            distance = columns[first:last, None] - columns[near]
            hidden = (distance < 0) | (distance >= reach)
            extra = None if sinks is None else sinks[heads, None, None]
            attention = attention_weights(logits, hidden, softcap, extra)
            out[:, heads, first:last] = (attention @ v[:, kv_head, None, near].float()).to(q.dtype)
    return out


def prompt_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    start: Tensor,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    sliding_window: int | None = None,
) -> Tensor:
    """Causal attention of a left-padded prompt; rows before ``start`` come out as zeros."""
    b, h, n, _ = q.shape
    out = q.new_zeros(b, n, h, v.shape[3]).transpose(1, 2)
    for rows, column in row_groups(start):
        live = (rows, slice(None), slice(column, n))
        out[live] = causal_attention(q[live], k[live], v[live], scale, softcap, sinks, sliding_window)
    return out


def observe_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    start: Tensor,
    scale: float,
    layer: int,
    num_layers: int,
    policy: Policy,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Attention of one site over the prompt, and what the policy saw there.

    Args:
        q: ``[B, H, N, D]``. k: ``[B, K, N, D]``. v: ``[B, K, N, Dv]``. start: first real column, int64 ``[B]``.
    Returns:
        output ``[B, H, N, Dv]`` in the dtype of q (zeros in padding); scores fp32 ``[B, K, N]``, ``-inf`` in padding
        and window; traces fp32 ``[2, B, K, N]``: the mean attention of window rows and group, and the first memory of
        the decode rule; weight fp64 ``[B]``.
    """
    out = prompt_attention(q, k, v, start, scale, softcap, sinks)

    def observe(live: Live, window: int) -> Observation:
        return Observation(q[live], k[live], v[live], scale, window, layer, num_layers, softcap, sinks)

    return out, *judge_prompt(k, start, policy, observe)


def judge_prompt(
    k: Tensor, start: Tensor, policy: Policy, observe: Callable[[Live, int], Observation]
) -> tuple[Tensor, Tensor, Tensor]:
    """Scores, traces and layer weight of one site, rows that begin at the same column together.

    Args:
        observe: (where the rows' real columns are, window) -> what the policy may look at.
    """
    b, kv_heads, n, _ = k.shape
    scores = k.new_full((b, kv_heads, n), float("-inf"), dtype=torch.float32)
    traces = k.new_zeros(2, b, kv_heads, n, dtype=torch.float32)
    rule = policy.decode_rule()
    weight = k.new_zeros(b, dtype=torch.float64)
    for rows, column in row_groups(start):
        live = (rows, slice(None), slice(column, n))
        window = min(policy.window, n - column)
        obs = observe(live, window)
        site_scores = policy.checked_score(obs)
        scores[rows, :, column : n - window] = site_scores
        traces[MASS][live] = obs.mass
        if rule is not None:
            traces[MEMORY][live] = rule.start(obs)
        layer_weight = policy.checked_weight(obs, site_scores)
        if layer_weight is not None:
            weight[rows] = layer_weight
    return scores, traces, weight


def cascade_step(
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
    policy: Policy,
) -> None:
    """Re-cut layers 0..layer to their share of the budget and gather this layer's winners into freed slots.

    Mutates, all per batch row:
        pool_k ``[B, E, D]``, pool_v ``[B, E, Dv]``: winners' rows. slots int32 ``[4, B, E]``, slot_traces fp32
        ``[2, B, E]``: who sits where. ledger fp64 ``[B, L]``: layer weights seen. window_traces fp32
        ``[2, B, L, K, window]``: traces of the window itself. tail_k, tail_v ``[L, B, K, C, D]``: the window's rows,
        in the first slots.

    Source: CAKE (2503.12491) Algorithm 1, LAVa (2509.09754) Algorithm 1. A survivor never moves.
    """
    b, kv_heads, n, _ = k.shape
    keep, rank, place = recut(slots, ledger, scores, weight, entries, start, layer, policy)
    owner, order, position = slots[OWNER], slots[RANK], slots[POSITION]
    true_position = torch.arange(n, device=k.device) - start[:, None]
    for row in range(b):
        head, column = keep[row].nonzero(as_tuple=True)
        free = (owner[row] == _EMPTY).nonzero(as_tuple=True)[0]
        if head.numel() > free.numel():
            raise RuntimeError(
                f"pool of {owner.shape[1]} slots is full at layer {layer}: {head.numel()} winners, {free.numel()} free"
            )
        slot = free[: head.numel()]
        pool_k[row, slot] = k[row, head, column]
        pool_v[row, slot] = v[row, head, column]
        owner[row, slot] = (layer * kv_heads + head).int()
        order[row, slot] = rank[row, head, column]
        position[row, slot] = true_position[row, column].int()
        slots[PLACE, row, slot] = place[row, head, column].int()
        slot_traces[:, row, slot] = traces[:, row, head, column]

    keep_window(window_traces, tail_k, tail_v, k, v, traces, layer, min(policy.window, n))


def recut(
    slots: Tensor,
    ledger: Tensor,
    scores: Tensor,
    weight: Tensor,
    entries: Tensor,
    start: Tensor,
    layer: int,
    policy: Policy,
) -> tuple[Tensor, Tensor, Tensor]:
    """Free the slots that earlier layers lose and say which entries of this layer win.

    Args:
        start: on the device of the scores.
    Returns:
        winners bool ``[B, K, N]``; rank int32 ``[B, K, N]``; place in the storage order of the decode rule.
    """
    b, kv_heads, n = scores.shape
    ledger[:, layer] = weight
    available = (n - start - policy.window).clamp(min=0)
    budgets = policy.layer_budgets(ledger, entries, available, kv_heads, layer + 1)
    owner_layer = slots[OWNER].clamp(min=0).long() // kv_heads
    slots[OWNER].masked_fill_(slots[RANK] >= budgets.gather(1, owner_layer), _EMPTY)
    rank = policy.rank(scores, entries)
    place = (torch.arange(n, device=scores.device) - start[:, None])[:, None].expand(b, kv_heads, n)
    rule = policy.decode_rule()
    if rule is not None:
        place = rule.first_place(scores, place, entries)
    return (rank < budgets[:, layer, None, None]) & (scores > float("-inf")), rank, place


def keep_window(
    window_traces: Tensor,
    tail_k: Tensor,
    tail_v: Tensor,
    k: Tensor,
    v: Tensor,
    traces: Tensor,
    layer: int,
    window: int,
) -> None:
    """Copy the rows and traces of the last ``window`` columns into the first slots of the tail."""
    first = k.shape[2] - window
    tail_k[layer, :, :, :window] = k[:, :, first:]
    tail_v[layer, :, :, :window] = v[:, :, first:]
    window_traces[:, :, layer, :, :window] = traces[..., first:]


def pack(pool_k: Tensor, pool_v: Tensor, slots: Tensor, slot_traces: Tensor, offsets: Tensor) -> None:
    """Permute the pool once into (layer, head, position) order; empty slots go last.

    offsets int32 ``[B, L*K + 1]`` receives where the entries of each (layer, head) begin. A few columns move at a
    time, so the copy never takes more memory than one layer's keys.
    """
    owner, position = slots[OWNER].long(), slots[POSITION].long()
    groups = offsets.shape[1] - 1
    key = torch.where(owner < 0, groups, owner) * (1 << 32) + position
    permutation = key.argsort(dim=1)
    counts = torch.zeros(owner.shape[0], groups + 1, dtype=torch.int64, device=owner.device)
    counts.scatter_add_(1, torch.where(owner < 0, groups, owner), torch.ones_like(owner))
    offsets[:, 0] = 0
    offsets[:, 1:] = counts[:, :groups].cumsum(1)
    for row, order in enumerate(permutation):
        if torch.equal(order, torch.arange(order.numel(), device=order.device)):
            continue
        slots[:, row] = slots[:, row, order]
        slot_traces[:, row] = slot_traces[:, row, order]
        for pool in (pool_k, pool_v):
            columns = max(1, pool.shape[2] // groups)
            for block in pool[row].split(columns, dim=1):
                block.copy_(block[order])


def attend_cache(
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
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Append T new tokens to the tail of this layer and attend pool + tail, causally among the new ones.

    Args:
        q: ``[B, H, T, D]``. k: ``[B, K, T, D]``. v: ``[B, K, T, Dv]``. tail_used: slots used so far, int64 ``[]``;
        tail_start: first valid slot of each row, int64 ``[B]``.
    Returns:
        ``[B, H, T, Dv]`` in the dtype of q; softmax in fp32.
    Raises:
        ValueError: the tail cannot take T more tokens (nothing was written).
    """
    b, h, t, _ = q.shape
    kv_heads = k.shape[1]
    group = h // kv_heads
    used = int(tail_used)
    if used + t > tail_k.shape[3]:
        raise ValueError(f"appending {t} tokens to a tail with {used} of {tail_k.shape[3]} slots used")
    tail_k[layer, :, :, used : used + t] = k
    tail_v[layer, :, :, used : used + t] = v
    out = q.new_empty(b, t, h, v.shape[3]).transpose(1, 2)
    bounds, starts = offsets.tolist(), tail_start.tolist()
    future = torch.ones(t, t, dtype=torch.bool, device=q.device).triu(1)
    for row in range(b):
        for kv_head in range(kv_heads):
            segment = layer * kv_heads + kv_head
            kept = slice(bounds[row][segment], bounds[row][segment + 1])
            live = (layer, row, kv_head, slice(starts[row], used + t))
            keys = torch.cat([pool_k[row, kept], tail_k[live]]).float()
            values = torch.cat([pool_v[row, kept], tail_v[live]]).float()
            heads = slice(kv_head * group, (kv_head + 1) * group)
            logits = (q[row, heads].float() @ keys.T) * scale
            extra = None if sinks is None else sinks[heads, None, None]
            out[row, heads] = (attention_weights(logits, future, softcap, extra) @ values).to(q.dtype)
    return out
