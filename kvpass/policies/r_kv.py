"""R-KV: attention of the newest queries against redundancy among keys, for answers that grow long."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvpass.policies.base import Policy
from kvpass.policies.decode_rules import DecodeRule, Slots, StoredByScore, evictable_slots
from kvpass.policies.observation import Observation, softcapped
from kvpass.policies.options import check_float, check_int, check_odd, option
from kvpass.policies.scores import pool_scores

_BLOCK_ELEMENTS = 1 << 24  # cosines that exist at a time
_CPU_BLOCK_ELEMENTS = 1 << 20  # the same on a CPU: what its caches hold


@dataclass(frozen=True, kw_only=True)
class RKV(Policy):
    """Keep entries of high attention and few similar keys as an answer grows: R-KV (Cai et al. 2025, arXiv 2505.24133).

    Per KV head, of n entries of which the newest ``window`` are always kept, with the queries t of these:

    ``I[i] = max over neighbours(mean over t(softmax_i(max over the group(q[t] . k[i]))))``, over the other entries;
    ``R = softmax_i(mean over j of C[j, i])``, over all n entries, C the cosines of their keys, where each row j has
    lost its diagonal and its last cosine above ``threshold``, so that the newest of similar entries is not redundant;
    ``s[i] = importance * I[i] - (1 - importance) * R[i]``.

    A prompt is cut to the budget. While decoding, ``buffer`` tokens gather beside the budget, then each head is cut to
    its budget again; so a head holds up to ``budget + buffer`` entries. Neighbours (pooling) and "last" go by position.

    The authors' code, which ``parity="code"`` reproduces, evicts in a step before which the number of tokens is a
    multiple of ``buffer``, and takes neighbours and "last" in storage order: descending score after an eviction. A row
    without a similar entry loses the cosine of its first one there, and here.

    Departures: attention sinks of the model (a further logit) are left out.

    The mean over j takes one sum of all keys. The last cosine above ``threshold`` takes up to n^2 D operations per KV
    head, of a prompt too; on a CPU fewer, the nearer to the end a key has one.

    Args:
        window: newest tokens, which observe and are always kept (the paper's alpha).
        kernel_size: odd width of the max pooling. importance: the paper's lambda, from 0 to 1; 0.07 in the authors'
            code. threshold: cosine above which keys are similar. buffer: tokens between two evictions.
    """

    name = "r_kv"
    inputs = frozenset({"question", "keys"})

    window: int = 8
    kernel_size: int = option(7, check_odd)
    importance: float = option(0.1, check_float, 0.0, 1.0)
    threshold: float = option(0.5, check_float, 0.0, 1.0)
    buffer: int = option(128, check_int, 1)

    def score(self, obs: Observation) -> Tensor:
        m, rows = obs.evictable, max(obs.window, 1)
        attention, redundant = [], []
        for head in range(obs.kv_heads):
            queries = obs.queries[:, head * obs.group : (head + 1) * obs.group, -rows:].float()
            keys = obs.keys[:, head, None].float()
            logits = softcapped(torch.einsum("bgrd,bknd->bkgrn", queries, keys[:, :, :m]) * obs.scale, obs.softcap)
            attention.append(logits.amax(2).softmax(-1).mean(2))
            redundant.append(redundancy(keys, torch.ones_like(keys[..., 0], dtype=torch.bool), self.threshold))
        pooled = pool_scores(torch.cat(attention, 1), "max", self.kernel_size)
        return self.importance * pooled - (1 - self.importance) * torch.cat(redundant, 1)[..., :m]

    def decode_rule(self) -> DecodeRule:
        return Redundancy(window=self.window, every=self.buffer, released=self.parity == "code", options=self)


@dataclass(frozen=True, kw_only=True)
class Redundancy(StoredByScore):
    """R-KV while decoding. The authors' code also evicts in other steps."""

    reads_keys = True

    options: RKV

    @property
    def rows_per_head(self) -> int:
        """The newest queries, of position p in row ``p % rows_per_head``; a head that is due holds as many entries."""
        return max(self.window, 1)

    def first_rows(self, obs: Observation) -> Tensor:
        newest = obs.queries[:, :, -self.rows_per_head :].float().unflatten(1, (obs.kv_heads, obs.group))
        row = torch.arange(obs.length - newest.shape[3], obs.length, device=newest.device) % self.rows_per_head
        rows = newest.new_zeros(*newest.shape[:3], self.rows_per_head, newest.shape[4])
        return rows.index_copy(3, row, newest)

    def next_rows(self, rows: Tensor, queries: Tensor, position: Tensor) -> Tensor:
        row = (position % self.rows_per_head)[:, None, None, None, None]
        queries = queries.float()[:, :, :, None]
        return rows.scatter(3, row.expand_as(queries), queries)

    def due(self, position: Tensor, quota: Tensor) -> Tensor | None:
        if not self.released:
            return super().due(position, quota)
        tokens_before = position.amax((1, 2))[:, None]
        return (tokens_before % self.every == 0) & ((position >= 0).sum(2) - quota >= self.window)

    def is_spared(self, scored: Tensor, entries: Tensor) -> Tensor:
        return scored < entries

    def is_stored_anew(self, slots: Slots) -> Tensor:
        assert slots.due is not None
        return slots.due

    def observe(self, attention: Tensor, slots: Slots) -> tuple[Tensor, Tensor]:
        assert slots.keys is not None and slots.rows is not None
        kernel_size, importance = self.options.kernel_size, self.options.importance
        compete = evictable_slots(slots.position, self.window)[:, :, None]
        products = torch.einsum("bkgwd,bkcd->bkgwc", slots.rows, slots.keys.float())
        logits = softcapped(products * slots.scale, slots.softcap).amax(2)
        logits = logits.masked_fill(~compete, torch.finfo(torch.float32).min)
        shares = torch.where(compete, logits.softmax(-1), 0.0).mean(2)
        stored = self.storage_order(slots)
        where = slots.position, stored
        attended = slots.pool_in_order(shares.contiguous(), *where, self.window, "max", kernel_size, "max")
        held = slots.position >= 0
        order = torch.where(held, stored, torch.iinfo(stored.dtype).max).argsort(dim=2, stable=True)
        keys = slots.keys.float().gather(2, order[..., None].expand_as(slots.keys))
        in_order = redundancy(keys, held.gather(2, order), self.options.threshold)
        redundant = torch.zeros_like(in_order).scatter(2, order, in_order)
        scores = importance * attended - (1 - importance) * redundant
        return scores, self.places(scores, slots)


def redundancy(keys: Tensor, held: Tensor, threshold: float) -> Tensor:
    """Return R of :class:`RKV` for keys in order: fp32 ``[B, K, N]``, 0 where there is no entry.

    ``keys``: fp32 ``[B, K, N, D]``; ``held``: which are entries, bool ``[B, K, N]``; they come first, and there is one.
    """
    unit = torch.where(held[..., None], keys / (keys.norm(dim=-1, keepdim=True) + 1e-8), 0.0)
    last = _last_similar(unit, threshold)
    unit = unit.double()
    total = (unit * (unit.sum(2, keepdim=True) - unit)).sum(3)
    lost = (unit * unit.gather(2, last[..., None].expand_as(unit))).sum(3)
    diagonal = last == torch.arange(keys.shape[2], device=keys.device)  # of the first row: lost already
    total = total.scatter_add(2, last, -lost.masked_fill(diagonal, 0.0))
    mean = (total / held.sum(2, keepdim=True)).float()
    return torch.where(held, mean.masked_fill(~held, float("-inf")).softmax(2), 0.0)


def _last_similar(unit: Tensor, threshold: float) -> Tensor:
    """Return for each key the last other one with a cosine above the threshold, 0 if none has: int64 ``[B, K, N]``.

    Looks at blocks of columns, the last first. On a CPU rows that have found theirs are left out of the next ones.
    ``unit``: keys of norm 1, or 0 where there is no entry, fp32 ``[B, K, N, D]``.
    """
    batch, kv_heads, n, _ = unit.shape
    last = torch.zeros(batch, kv_heads, n, dtype=torch.int64, device=unit.device)
    rows, end = torch.arange(n, device=unit.device), n
    elements = _CPU_BLOCK_ELEMENTS if unit.is_cpu else _BLOCK_ELEMENTS
    while end > 0 and rows.numel() > 0:
        first = max(end - max(elements // (batch * kv_heads * rows.numel()), 1), 0)
        cosines = unit[:, :, rows] @ unit[:, :, first:end].mT
        own = (rows - first).clamp(0, end - first - 1)[:, None]
        is_own, own = own == (rows - first)[:, None], own.expand(batch, kv_heads, -1, 1)
        cosines.scatter_(3, own, torch.where(is_own, 0.0, cosines.gather(3, own)))
        place = torch.arange(1, end - first + 1, dtype=torch.float32, device=unit.device)
        found = cosines.gt_(threshold).mul_(place).amax(3).long()  # 0: none in these columns
        last[:, :, rows] = torch.maximum(last[:, :, rows], torch.where(found > 0, first + found - 1, 0))
        if unit.is_cpu:
            rows = rows[(found == 0).any(1).any(0)]
        end = first
    return last
