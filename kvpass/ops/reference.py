"""Short eager versions of the ``kvpass::`` operators: reference for tests, and CPU implementation.

Rows of a batch that start at different columns (left padding) are processed separately, each without its padding. So no
statistic mixes rows, and a padded row computes exactly what it computes alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from kvpass.operands import (
    NO_POLICY_INPUTS,
    AppendBuffers,
    Attention,
    BlockSelection,
    Candidates,
    PartialAttention,
    PolicyInputs,
    PrefillBuffers,
)
from kvpass.ops.entry_formats import entries_of_head, store
from kvpass.ops.slots import EMPTY, attend_slots, evict_lowest  # noqa: F401 (of this implementation, as in ops.cuda)
from kvpass.policies.base import Policy
from kvpass.policies.decode_rules import pool_in_order  # noqa: F401
from kvpass.policies.observation import Observation, attention_weights, softcapped
from kvpass.policies.scheduler import best_over_layers
from kvpass.policies.scores import PROTECTED, reduce_group
from kvpass.ranks import ONE_PROCESS, Ranks
from kvpass.rotation import rotated_output, rotated_queries

L = TypeVar("L", Tensor, None)

_ROW_BLOCK = 512
OWNER, RANK, POSITION = 0, 1, 2
"""Planes of the slot table, int32 ``[3, B, E]``: ``layer * K + head`` (-1 = empty), order of entry, true position."""
MASS, NUMBERS, SCORE = 0, 1, -1
"""Planes of the stats, fp32: attention mass, the numbers of the decode rule; where layers compete, last the score."""


def row_groups(start: Tensor) -> Iterator[tuple[slice, int]]:
    """Yield (rows, column) for neighbouring rows with the same first real column."""
    columns = start.tolist()
    first = 0
    for row in range(1, len(columns) + 1):
        if row == len(columns) or columns[row] != columns[first]:
            yield slice(first, row), columns[first]
            first = row


def causal_attention(call: Attention, sliding_window: int | None = None) -> Tensor:
    """Causal attention ``[B, H, T, Dv]`` of rows without padding, over all N keys of the call."""
    q, k, v, scale, softcap, sinks = call
    n = k.shape[2]
    bounded = sliding_window is not None and sliding_window < n
    if bounded or softcap is not None or sinks is not None:
        return _blocked_attention(call, n if sliding_window is None else sliding_window)
    dim, widest = v.shape[3], max(k.shape[3], v.shape[3])
    # zeros behind the shorter rows: torch's kernel takes equal head dims only
    q, k, v = (x if x.shape[3] == widest else F.pad(x, (0, widest - x.shape[3])) for x in (q, k, v))
    return _causal_sdpa(q, k, v, scale)[..., :dim]


def _causal_sdpa(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Attention of the last T of N tokens; what they attend before them, and among themselves, is merged."""
    before = k.shape[2] - q.shape[2]
    if before == 0:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
    attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    past = PartialAttention(*attend(q, k[:, :, :before], v[:, :, :before], scale=scale))
    own = PartialAttention(*attend(q, k[:, :, before:], v[:, :, before:], is_causal=True, scale=scale))
    return past.merged(own).out


def _blocked_attention(call: Attention, reach: int) -> Tensor:
    """As :func:`causal_attention` in plain steps, in fp32, one block of rows of one KV head at a time."""
    q, k, v, scale, softcap, sinks = call
    n, kv_heads = k.shape[2], k.shape[1]
    before = n - q.shape[2]
    group = q.shape[1] // kv_heads
    columns = torch.arange(n, device=q.device)
    out = q.new_empty(*q.shape[:3], v.shape[3])
    for kv_head in range(kv_heads):
        heads = slice(kv_head * group, (kv_head + 1) * group)
        for first in range(before, n, _ROW_BLOCK):
            last = min(first + _ROW_BLOCK, n)
            near, rows = slice(max(first - reach + 1, 0), last), slice(first - before, last - before)
            logits = q[:, heads, rows].float() @ k[:, kv_head, None, near].float().mT * scale
            distance = columns[first:last, None] - columns[near]
            hidden = (distance < 0) | (distance >= reach)
            extra = None if sinks is None else sinks[heads, None, None]
            attention = attention_weights(logits, hidden, softcap, extra)
            out[:, heads, rows] = (attention @ v[:, kv_head, None, near].float()).to(q.dtype)
    return out


def attend_prompt(
    call: Attention, start: Tensor, sliding_window: int | None = None, chunked: bool = False
) -> tuple[Tensor, None]:
    """Causal attention of the last T tokens of a left-padded prompt.

    Args:
        start: first real column of each row, int64 ``[B]``, on the CPU. chunked: ``sliding_window`` is the size of
            chunks, each of which attends to itself alone.
    Returns:
        output ``[B, H, T, Dv]`` in the dtype of q, stored as ``[B, T, H, Dv]``, zeros in padding; and what
            :func:`score_layer` needs of it, here nothing.
    """

    def attend(part: Attention, window: int | None, rows: slice) -> tuple[Tensor, None]:
        return causal_attention(part, window).transpose(1, 2).contiguous().transpose(1, 2), None

    return attend_rows(call, start, sliding_window, chunked, attend)[0], None


def attend_rows(
    call: Attention,
    start: Tensor,
    sliding_window: int | None,
    chunked: bool,
    attend: Callable[[Attention, int | None, slice], tuple[Tensor, L]],
) -> tuple[Tensor, Tensor | L]:
    """As :func:`attend_prompt`: rows that begin at the same column are one call without their padding.

    Args:
        attend: takes a call without padding, its sliding window, and which rows of the prompt it has; returns output,
            stored as ``[B, T, H, Dv]``, and log-sum-exp fp32 ``[B, H, T]``, or None.
    Returns:
        the same of the prompt; the log-sum-exp is ``-inf`` in padding.
    """
    b, h, t, _ = call.q.shape
    before = call.k.shape[2] - t
    groups = list(row_groups(start))
    if groups == [(slice(0, b), 0)] and not chunked:
        return attend(call, sliding_window, slice(0, b))
    out = call.q.new_zeros(b, t, h, call.v.shape[3]).transpose(1, 2)
    lse = call.q.new_full((b, h, t), float("-inf"), dtype=torch.float32)
    for rows, column in groups:
        end = max(column - before, 0)
        if end >= t:
            continue
        part = call.from_column(rows, column)
        for piece in part.chunks(sliding_window) if chunked and sliding_window else [part]:
            first, end = end, end + piece.q.shape[2]
            live = (rows, slice(None), slice(first, end))
            out[live], found = attend(piece, None if chunked else sliding_window, rows)
            if found is not None:
                lse[live] = found
    return out, lse


def attend_blocks(call: Attention, selection: BlockSelection, block: int) -> PartialAttention:
    """Attention of whole prompts without padding to selected blocks of ``block`` tokens, and single columns besides.

    Of a block on the diagonal, which must be selected, and of columns, each query sees those up to its own. Sinks are
    not read. The output is stored as ``[B, N, H, Dv]``.
    """
    q, k, v, scale, softcap, _ = call
    b, heads, n, _ = q.shape
    out, lse = q.new_empty(b, n, heads, v.shape[3]).transpose(1, 2), q.new_empty(b, heads, n, dtype=torch.float32)
    columns = torch.arange(n, device=q.device)
    single = selection.blocks.new_zeros(b, heads, n + 1).scatter_(-1, selection.columns.long().clamp(max=n), True)
    for index, first in enumerate(range(0, n, block)):
        rows, end = slice(first, first + block), min(first + block, n)
        queries = q[:, :, rows].float().unflatten(1, (k.shape[1], -1))
        logits = softcapped((queries @ k[:, :, None, :end].float().mT).flatten(1, 2) * scale, softcap)
        seen = selection.blocks[:, :, index].repeat_interleave(block, -1)[..., :end] | single[..., :end]
        hidden = ~seen[:, :, None] | (columns[:end] > columns[rows, None])
        logits = logits.masked_fill(hidden, float("-inf"))
        lse[:, :, rows] = logits.logsumexp(-1)
        weights = (logits - lse[:, :, rows, None]).exp_().unflatten(1, (k.shape[1], -1))
        out[:, :, rows] = (weights @ v[:, :, None, :end].float()).flatten(1, 2).to(q.dtype)
    return PartialAttention(out, lse)


def attend_selected(
    call: Attention,
    start: Tensor,
    selection: BlockSelection,
    block: int,
    attend: Callable[[Attention, BlockSelection, int], PartialAttention] = attend_blocks,
) -> PartialAttention:
    """As :func:`attend_prompt`, of all tokens of a left-padded prompt; ``attend``: as :func:`attend_blocks`."""

    def attend_part(part: Attention, window: int | None, rows: slice) -> PartialAttention:
        found = attend(part, selection.of(rows, part.q.shape[2], block), block)
        return found if part.sinks is None else found.with_sinks(part.sinks)

    return PartialAttention(*attend_rows(call, start, None, False, attend_part))


def column_sums(call: Attention, lse: None, start: Tensor, first: Tensor) -> Tensor:
    """Attention of the last T tokens of a left-padded prompt, summed over them: fp32 ``[B, H, N]``, zeros in padding.

    Args:
        lse, start, first: as in :func:`score_layer`.
    """
    b, h, _, _ = call.q.shape
    sums = call.q.new_zeros(b, h, call.k.shape[2], dtype=torch.float32)
    for rows, column in row_groups(start):
        if column < sums.shape[2]:
            q, k, v, scale, softcap, sinks = call.from_column(rows, column)
            obs = Observation(q, k, v, scale, 0, 0, 1, softcap, sinks)
            sums[rows, :, column:] = obs.recent_sum(q.shape[2])
    return sums


def score_layer(
    call: Attention,
    lse: None,
    start: Tensor,
    first: Tensor,
    layer: int,
    num_layers: int,
    policy: Policy,
    policy_inputs: PolicyInputs = NO_POLICY_INPUTS,
    ranks: Ranks = ONE_PROCESS,
    *,
    observed: Callable[[Observation, slice, int], Observation] = lambda obs, rows, column: obs,
) -> tuple[Tensor, Tensor, Tensor]:
    """The policy's scores and statistics of one layer of a prompt.

    Args:
        call: q holds the last rows, as many as the policy reads. lse: of these rows, from :func:`attend_prompt`.
        start: first real column, int64 ``[B]``, on the CPU. first: the same on the device of the call.
        policy_inputs: for the rows of the batch; ``summed`` are :func:`column_sums` of the whole prompt.
            ``rule_rows`` of the layer are written.
        ranks: processes that share the heads of the layer.
        observed: returns what the policy is given for some rows, from their first column on.
    Returns:
        scores of all heads, fp32 ``[B, K, N]``, ``-inf`` in padding and window, ``inf`` for protected entries; stats of
        the heads of this process, fp32 ``[F, B, K, N]``: the attention mass is a mean over window rows and group;
        weight fp64 ``[B]``.
    """
    b, kv_heads, n, _ = call.k.shape
    scored: list[Tensor] = []
    stats = call.k.new_zeros(policy.stat_planes, b, kv_heads, n, dtype=torch.float32)
    rule = policy.decode_rule()
    numbers = 0 if rule is None else rule.numbers_per_entry
    weight = call.k.new_zeros(b, dtype=torch.float64)
    for rows, column in row_groups(start):
        window = min(policy.window, n - column)
        q, k, v, scale, softcap, sinks = call.from_column(rows, column)
        asked = policy_inputs.of(layer, rows, column)
        alone = Observation(q, k, v, scale, window, layer, num_layers, softcap, sinks, asked, ranks)
        obs = observed(alone, rows, column)
        write_first_rows(obs, policy)
        own = policy.checked_score(obs)
        every = obs.all_heads(own)
        scored.append(F.pad(every, (column, window), value=float("-inf")))
        stats[MASS, rows, :, column:] = reduce_group(obs.mean, kv_heads, "mean")
        if rule is not None and numbers:
            scores = F.pad(own, (0, window), value=float("-inf"))
            stats[NUMBERS : NUMBERS + numbers, rows, :, column:] = rule.start(obs, scores)
        if policy.compares_layers:
            stats[SCORE, rows, :, column : n - window] = own
        layer_weight = policy.layer_weight(obs, every)
        if layer_weight is not None:
            weight[rows] = layer_weight
    every, protected = torch.cat(scored), policy_inputs.protected
    if protected is not None and protected.shape[1]:
        every.masked_fill_(protected[:, None] & (every > float("-inf")), PROTECTED)
        if policy.compares_layers:
            stats[SCORE].masked_fill_(ranks.local_shard(every, 1) == PROTECTED, PROTECTED)
    return every, stats, weight


def write_first_rows(obs: Observation, policy: Policy) -> None:
    """Write the rows of the decode rule after a prompt, where it has any.

    Raises:
        ValueError: layers of one KV shape have different numbers of query heads.
    """
    rows = obs.asked.rule_rows
    if rows is None:
        return
    rule, (kv_heads, group) = policy.decode_rule(), rows.shape[1:3]
    assert rule is not None
    if obs.group != group:
        raise ValueError(
            f"policy {policy.name!r}: layers of {kv_heads * obs.group} and of {kv_heads * group} query heads with KV "
            "heads of the same shape are not supported; take another policy"
        )
    rows.copy_(rule.first_rows(obs))


def cascade_step(
    buffers: PrefillBuffers,
    scores: Tensor,
    weight: Tensor,
    first: Tensor,
    layer: int,
    policy: Policy,
    ranks: Ranks = ONE_PROCESS,
) -> Tensor:
    """Redistribute the budget over layers 0..layer, and free the slots of entries that earlier layers give up.

    Source: CAKE (2503.12491) Algorithm 1, LAVa (2509.09754) Algorithm 1.

    Args:
        scores: of all heads, fp32 ``[B, K, N]``, and weight, fp64 ``[B]``, from :func:`score_layer`. first: first real
            column of each row, int64 ``[B]``, on the device of the scores.
    Returns:
        entries that each layer may hold over all KV heads, int64 ``[B, L]``, for :func:`gather_layer`.
    """
    slots, heads = buffers.slots, buffers.tail_k.shape[2]
    buffers.layer_weights[:, layer] = weight
    if policy.compares_layers:
        buffers.layer_weights.copy_(_best_entries(buffers, scores, layer, policy, ranks))
    budgets = fixed_shares(buffers, scores, first, layer, policy)
    owner_layer = slots[OWNER].clamp(min=0).long() // heads
    slots[OWNER].masked_fill_(slots[RANK] >= budgets.gather(1, owner_layer), EMPTY)
    return budgets


def fixed_shares(buffers: PrefillBuffers, scores: Tensor, first: Tensor, layer: int, policy: Policy) -> Tensor:
    """Return the entries that each layer may hold, as :func:`cascade_step`, where no layer gives up any."""
    kv_heads, n = scores.shape[1:]
    available, certain = (n - first - policy.window).clamp(min=0), (scores[:, 0] == PROTECTED).sum(1)
    return policy.layer_budgets(buffers.layer_weights, buffers.entries, available, kv_heads, layer + 1, certain)


def gather_layer(
    buffers: PrefillBuffers,
    candidates: Candidates,
    shares: Tensor | None,
    ranking: Tensor | None,
    layer: int,
    policy: Policy,
    ranks: Ranks = ONE_PROCESS,
    *,
    move: Callable[[Tensor, Tensor, Candidates, PrefillBuffers, int], None] | None = None,
) -> None:
    """Gather the entries of a layer that are within its share into free slots of the pool.

    With ``ranks`` the scores are those of all heads, everything else is of the heads of this process. Writes all
    buffers but offsets, entries and weights; the window's rows go into the first slots of the tail. A kept entry never
    moves.

    Args:
        shares: of each layer, int64 ``[B, L]``; None: as the policy's layer split has it without weights. ranking: the
            order of entry, int32 ``[B, K, N]``; None: the policy's.
        move: what takes the place of :func:`move_winners`.
    """
    scores = candidates.scores
    if shares is None:
        shares = fixed_shares(buffers, scores, candidates.start, layer, policy)
    rank = policy.rank(scores, buffers.entries) if ranking is None else ranking
    keep = ranks.local_shard((rank < shares[:, layer, None, None]) & (scores > float("-inf")), 1)
    source = assign_slots(keep, buffers.slots[OWNER])
    (move or move_winners)(source, ranks.local_shard(rank, 1).int().contiguous(), candidates, buffers, layer)
    window = min(policy.window, keep.shape[2])
    newest = slice(keep.shape[2] - window, None)
    buffers.tail_k[layer, :, :, :window] = candidates.k[:, :, newest]
    buffers.tail_v[layer, :, :, :window] = candidates.v[:, :, newest]
    buffers.window_stats[:, :, layer, :, :window] = candidates.stats[..., newest]


def assign_slots(keep: Tensor, owner: Tensor) -> Tensor:
    """Assign the j-th selected entry, in (head, column) order, to the j-th free slot.

    Args:
        keep: bool ``[B, K, N]``, the entries of a layer to store in the pool. owner: int32 ``[B, E]``.

    Returns:
        int32 ``[B, E]``: for each slot the flat index ``head * N + column`` of the entry that moves in, or -1.

    Raises:
        RuntimeError: more selected entries than free slots; on CUDA a device-side assertion, noticed at the next
            synchronisation.
    """
    winners = keep.flatten(1).cumsum(1, dtype=torch.int32)
    is_free = owner == EMPTY
    turn = is_free.cumsum(1, dtype=torch.int32)
    total = winners[:, -1:]
    enough = (total <= turn[:, -1:]).all()
    torch._assert_async(enough, f"pool of {owner.shape[1]} slots is full: more winners than free slots")
    # the j-th selected entry is where the running count first reaches j
    source = torch.searchsorted(winners, turn, out_int32=True)
    return torch.where(is_free & (turn <= total), source, EMPTY)


def move_winners(source: Tensor, rank: Tensor, candidates: Candidates, buffers: PrefillBuffers, layer: int) -> None:
    """Copy entries into the pool and record them in its tables.

    Args:
        source: from :func:`assign_slots`. rank: order of entry, int32 ``[B, K, N]``. layer: of the entries.
    """
    kv_heads, n = rank.shape[1:]
    row, slot = (source >= 0).nonzero(as_tuple=True)
    head, column = source[row, slot].long() // n, source[row, slot].long() % n
    buffers.pool_k[row, slot] = candidates.k[row, head, column]
    buffers.pool_v[row, slot] = candidates.v[row, head, column]
    tables = layer * kv_heads + head, rank[row, head, column], column - candidates.start[row]
    buffers.slots[:, row, slot] = torch.stack(tables).int()
    buffers.slot_stats[:, row, slot] = candidates.stats[:, row, head, column]


def _best_entries(buffers: PrefillBuffers, scores: Tensor, layer: int, policy: Policy, ranks: Ranks) -> Tensor:
    """Return how many of the best entries each layer has, of those held and those of one more layer; ``[B, L]``."""
    slots, layers = buffers.slots, buffers.layer_weights.shape[1]
    held = ranks.gather(torch.where(slots[OWNER] == EMPTY, float("-inf"), buffers.slot_stats[SCORE]), 1)
    of_layer = ranks.gather(slots[OWNER].clamp(min=0) // buffers.tail_k.shape[2], 1)
    both = torch.cat([held, scores.flatten(1)], 1)
    of_both = torch.cat([of_layer, torch.full_like(scores.flatten(1), layer, dtype=torch.int64)], 1)
    total = buffers.entries * (layers * scores.shape[1])
    return best_over_layers(both, of_both, total, layers, policy.least_score)


def pack(buffers: PrefillBuffers) -> None:
    """Permute the pool once into (layer, head, position) order, empty slots last; write the offsets.

    An eighth of the columns of a row moves at a time, so the copy takes little memory.
    """
    slots, offsets = buffers.slots, buffers.offsets
    groups, rows = offsets.shape[1] - 1, torch.arange(len(offsets), device=offsets.device)[:, None]
    owner = torch.where(slots[OWNER] == EMPTY, groups, slots[OWNER]).long()
    order = ((owner << 32) + slots[POSITION]).argsort(dim=1, stable=True)
    bounds = torch.arange(groups + 1, device=owner.device).expand(len(offsets), -1).contiguous()
    offsets.copy_(torch.searchsorted(owner.gather(1, order), bounds, out_int32=True))
    if order.is_cpu and bool((order.diff(dim=1) == 1).all()):
        return  # nothing moves, as where everything was kept
    for planes in (slots, buffers.slot_stats):
        planes.copy_(planes.gather(2, order.expand(len(planes), -1, -1)))
    for pool in (buffers.pool_k, buffers.pool_v):
        for columns in pool.split(-(-max(pool.shape[2], 1) // 8), dim=2):
            columns.copy_(columns[rows, order])


def attend_cache(call: Attention, held: AppendBuffers, layer: int) -> Tensor:
    """Append T new tokens to this layer's tail; attend pool and tail, causally among the new ones.

    Where entries are codes, new ones are attended as their codes.

    Returns:
        ``[B, H, T, Dv]`` in the dtype of q; softmax in fp32.
    Raises:
        ValueError: the tail cannot take T more tokens (nothing was written).
    """
    q, k, v, scale, softcap, sinks = rotated_queries(call, held)
    b, h, t, key_dim = q.shape
    kv_heads, value_dim = k.shape[1], v.shape[3]
    group = h // kv_heads
    rows, slots = range(b) if held.row_index is None else held.row_index.tolist(), held.tail.k.shape[3]
    used = held.tail_used.expand(held.tail.k.shape[1]).tolist()
    if any(used[row] + t > slots for row in rows):
        raise ValueError(f"appending {t} tokens to a tail with {max(used)} of {slots} slots used")
    for i, row in enumerate(rows):
        store(k[i], v[i], held.tail.at((layer, row)), slice(used[row], used[row] + t))
    out = q.new_empty(b, t, h, value_dim).transpose(1, 2)
    bounds, starts = held.offsets.tolist(), held.tail_start.tolist()
    future = torch.ones(t, t, dtype=torch.bool, device=q.device).triu(1)
    for i, row in enumerate(rows):
        for kv_head in range(kv_heads):
            segment = layer * kv_heads + kv_head
            kept = slice(bounds[row][segment], bounds[row][segment + 1])
            tail = (layer, row, kv_head, slice(starts[row], used[row] + t))
            keys, values = (x.float() for x in entries_of_head(held, row, kept, tail, key_dim, value_dim))
            heads = slice(kv_head * group, (kv_head + 1) * group)
            logits = (q[i, heads].float() @ keys.T) * scale
            extra = None if sinks is None else sinks[heads, None, None]
            out[i, heads] = (attention_weights(logits, future, softcap, extra) @ values).to(q.dtype)
    return rotated_output(out, call, held)
