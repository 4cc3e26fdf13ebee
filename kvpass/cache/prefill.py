"""What a prompt is compressed into, and the cache that it becomes.

Legend: B batch, N prompt columns, L layers of one KV geometry, K KV heads, D head dim, E pool slots, C tail capacity.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from kvpass.cache.buffer_reuse import NO_REUSE, BufferReuse
from kvpass.cache.layers import MOST_SPARE, FullAttentionLayers, rounded_up
from kvpass.cache.part import RecurrentState, SlidingWindowLayers
from kvpass.cache.prompt_record import LayersRecord, PromptRecord, entries_of
from kvpass.cache.spans import by_column, check_room
from kvpass.cache.state import KVState, named
from kvpass.config import LayerGroup, Layout, PoolFacts
from kvpass.operands import BITS, BUFFERS, CODES, AppendBuffers, EvictBuffers, PrefillBuffers, names_of
from kvpass.ops import entry_formats
from kvpass.ops.evict import first_slots
from kvpass.ops.reference import MASS, OWNER, POSITION
from kvpass.policies.base import Policy


class PrefillLayers:
    """Entries of the layers ``group.layers`` while a prompt is read.

    Args:
        group: the layers and their geometry. facts: what the graph says of them.
        state: its conditions, and start, columns and budgets of the prompt. dtype, device: of keys and values.
        expected: further tokens that tails are reserved for.
    Attributes:
        buffers: written by the program of a prompt.
    """

    def __init__(
        self,
        group: LayerGroup,
        facts: PoolFacts,
        state: KVState,
        dtype: torch.dtype,
        device: torch.device,
        expected: int = 0,
    ) -> None:
        self._group, self._plain, self._state, self._device = group, facts.plain, state, device
        policy, self._rule = state.policy, state.policy.decode_rule()
        n, g, window = state.columns, group.geometry, policy.window
        entries = [max(budget - window, 0) for budget in state.budgets]
        most = policy.capacity(max(entries), g.layers, g.kv_heads * state.ranks.size)  # all may be of this process
        tail = min(window, n) + rounded_up(1 if self._rule else min(max(expected, 1), MOST_SPARE))
        query_rows = 0 if self._rule is None else self._rule.rows_per_head
        sizes = g.sizes | {"batch": len(entries), "tail": tail, "window": max(window, 1), "group": facts.group}
        sizes["pool"] = max(2, min(most, g.layers * g.kv_heads * max(n - window, 0) + g.layers))
        sizes |= {"rows_per_head": query_rows, "stat_planes": policy.stat_planes}
        sizes["protected"] = 0 if state.protected is None else n
        # whether the pool of a prompt may stay partly empty, so that its entries then move to one of their size
        self._leaves_slots = state.ranks.several or policy.least_score > float("-inf")
        operands = names_of(AppendBuffers if self._rule is None else EvictBuffers)

        def allocate(name: str) -> Tensor:
            buffer = BUFFERS[name]
            stays = name in operands and not (buffer.packed and state.entry_format != "model")
            memory = state.reuse if stays and not (buffer.of_pool and self._leaves_slots) else NO_REUSE
            x = memory.empty((group, name), buffer.shape(sizes), buffer.dtype or dtype, device)
            return x if buffer.initial is None else x.fill_(buffer.initial)

        optional = {"rule_rows": query_rows > 0, "output_errors": policy.compact}
        names = [name for name in PrefillBuffers._fields if optional.get(name, True)]
        self.buffers = PrefillBuffers(**{name: allocate(name) for name in names})
        self.buffers.entries.copy_(torch.tensor(entries, device="cpu"))
        if state.protected is not None:
            assert self.buffers.protected is not None
            self.buffers.protected.copy_(by_column(state.protected, state.start))

    @property
    def tensors(self) -> dict[str, Tensor]:
        return {name: x for name, x in self.buffers._asdict().items() if x is not None}

    def finish(self) -> tuple[FullAttentionLayers, LayersRecord]:
        """Return the entries that were kept, and their record; the tables that only the cascade needs are dropped."""
        b, g, state, device = self.buffers, self._group.geometry, self._state, self._device
        del self.buffers
        window = min(state.policy.window, state.columns)
        if self._leaves_slots:
            b = _without_spare_slots(b)
        tensors = {name: x for name, x in b._asdict().items() if x is not None and BUFFERS[name].saved}
        tensors["pool_positions"] = b.slots[POSITION].clone()
        tensors["tail_start"] = (state.start - (state.columns - window)).clamp(min=0).to(device)
        owner, heads = b.slots[OWNER].long(), g.layers * g.kv_heads
        mass = torch.zeros(owner.shape[0], heads + 1, dtype=torch.float32, device=device)
        mass.scatter_add_(1, torch.where(owner < 0, heads, owner), b.slot_stats[MASS])
        record = LayersRecord(
            group=self._group,
            mass=mass[:, :heads].view(-1, g.layers, g.kv_heads) + b.window_stats[MASS].sum(-1),
            weights=b.layer_weights,
            positions=tensors["pool_positions"],
            offsets=b.offsets.clone(),  # the record outlives the cache
            output_errors=b.output_errors,
        )
        if self._rule is not None:
            self._begin_evicting(tensors, b, window)
        del b
        if state.entry_format != "model":
            self._pack(tensors, window)
        reuse = state.reuse
        store = FullAttentionLayers(self._group, tensors, state.policy, state.ranks, state.entry_format, window)
        new = {name: x for name, x in store.cached_state.items() if name not in PrefillBuffers._fields}
        store.buffers = store.buffers._replace(**{name: reuse.copy((self._group, name), x) for name, x in new.items()})
        return store, record

    def _pack(self, tensors: dict[str, Tensor], used: int) -> None:
        """Quantise the entries, one buffer after the other: then only one of them is held twice."""
        bits, dtype, g = BITS[self._state.entry_format], CODES[self._state.entry_format], self._group.geometry
        offsets, start, mean = tensors["offsets"], tensors["tail_start"], None
        if self._rule is None and not g.values_in_keys:
            if self._plain:
                tail = tensors["tail_k"][..., :used, :]
                mean = tensors["key_mean"] = entry_formats.key_mean(tensors["pool_k"], offsets, tail, start)
            else:
                tensors["key_mean"] = BUFFERS["key_mean"].new(g.sizes | {"batch": len(start)}, offsets.device)
        for name in ("pool_k", "pool_v", "tail_k", "tail_v"):
            floats = tensors.pop(name)
            shape = (*floats.shape[:-1], floats.shape[-1] * bits // 8)
            codes = self._state.reuse.empty((self._group, name, "packed"), shape, dtype, floats.device)
            if shape[-1]:  # else values are stored in keys
                scale = torch.empty(floats.shape[:-1], dtype=torch.float32, device=floats.device)
                slots = slice(used if name.startswith("tail") else None)
                into = codes[..., slots, :], scale[..., slots]
                entry_formats.quantise_buffer(name, floats[..., slots, :], *into, offsets, mean)
                tensors[f"{name}_scale"] = scale
            tensors[name] = codes
            del floats

    def _begin_evicting(self, tensors: dict[str, Tensor], b: PrefillBuffers, window: int) -> None:
        """Make the tables for eviction while decoding: slots of entries, quota of each head."""
        columns, first, policy = self._state.columns, self._state.start.to(self._device), self._state.policy
        assert self._rule is not None
        position, numbers = first_slots(b, first, columns, window, self._rule.numbers_per_entry)
        if self._state.protected is not None:
            spans = self._state.protected.to(self._device)[None, :, None].expand(*position.shape[:3], -1)
            stays = spans.gather(3, position.clamp(min=0).long()) & (position >= 0)
            numbers = torch.cat([numbers, stays[None].float()])
        tensors["slot_positions"], tensors["decode_state"] = position, numbers
        kept = entries_of(b.offsets, self._group).transpose(0, 1)
        available = (columns - first - policy.window).clamp(min=0)
        tensors["quota"] = policy.decode_quota(kept, b.entries, available, self._state.ranks).contiguous()
        tensors["next_position"] = columns - first


class CachePrefill:
    """A cache while its prompt is read.

    Args:
        state: empty but for the conditions of the cache, and ``start`` of the prompt, on the CPU. columns: N.
        ids: of the prompt ``[B, N]``, where they are known.
        expected: columns that the cache will hold at most, as far as known: the tails are reserved for them.
        guide: last columns, which observe in place of the policy's window and are not kept.
    Attributes:
        computed: of :class:`PromptRecord`, written by what reads the prompt.
    """

    computed: tuple[str, Mapping[int, Tensor]] | None = None

    def __init__(self, state: KVState, columns: int, ids: Tensor | None, expected: int, guide: int = 0) -> None:
        self._guide, self._after = guide, state.policy
        state = replace(state, policy=replace(state.policy, window=guide)) if guide else state
        lengths = [columns - column for column in state.start.tolist()]
        ids = None if ids is None else ids.int()
        self._filled = replace(state, columns=columns, prompt_columns=columns, ids=ids, budgets=lengths)
        self._expected, self._device = expected, state.start.device
        self._pools: list[PrefillLayers] = []

    def buffers(
        self, layout: Layout, dtype: torch.dtype, device: torch.device, reuse: BufferReuse, pools: Sequence[PoolFacts]
    ) -> dict[str, Tensor]:
        """Return the buffers that the program of a prompt writes, on first use from ``reuse``.

        ``start`` and ``first`` int64 ``[B]`` are the first real columns, on the CPU and on the device.

        Args:
            pools: what the graph says of each pool of the layout.
        Raises:
            ValueError: the budget cannot hold window + 1 entries of some row, or what is protected of it.
            CacheMismatchError: the graph has another layout.
        """
        if not self._filled.layout.names:
            self._allocate(layout, dtype, device, reuse, pools)
        state = self._filled
        state.check_layout(layout)
        first = state.start.to(device, non_blocking=True)
        tensors = [*(pool.tensors for pool in self._pools), *(part.tensors for part in state.parts)]
        return {**named(layout, tensors), "start": state.start, "first": first}

    def _allocate(
        self, layout: Layout, dtype: torch.dtype, device: torch.device, reuse: BufferReuse, pools: Sequence[PoolFacts]
    ) -> None:
        state, rows, guide = self._filled, len(self._filled.start), self._guide
        if guide and (layout.rings or layout.states):
            raise ValueError(
                "guide: a layer with a sliding window or a recurrent layer would hold the guide in place of the text; "
                "compress without it, or with a policy that reads no question"
            )
        for group in layout.pools:
            group.geometry.check_format(state.entry_format, device)
        budgets = state.budgets
        if state.budget is not None and layout.pools:
            token_bytes = layout.token_bytes(state.entry_format) * state.ranks.size
            window = 0 if guide else state.policy.window
            budgets = [state.budget.check(length - guide, window, token_bytes) + guide for length in budgets]
            self._check_protected(budgets)
        state = replace(state, layout=layout, budgets=budgets, reuse=reuse)
        to_come = self._expected - state.columns
        groups = zip(layout.pools, pools, strict=True)
        self._pools = [PrefillLayers(group, facts, state, dtype, device, to_come) for group, facts in groups]
        rings = [SlidingWindowLayers.empty(group, rows, dtype, device, reuse) for group in layout.rings]
        states = [RecurrentState.empty(shape, rows, device, reuse) for shape in layout.states]
        self._filled, self._device = replace(state, parts=[*rings, *states]), device

    def _check_protected(self, budgets: Sequence[int]) -> None:
        """Raise ValueError if spans have more tokens than the budget keeps beside the window."""
        state, window = self._filled, self._filled.policy.window
        leaves = 0 if state.policy.decode_rule() is None else window  # the window's, when tokens follow
        for row, (budget, start) in enumerate(zip(budgets, state.start.tolist(), strict=True)):
            outside = max(state.columns - start - window + leaves, 0)
            spans = 0 if state.protected is None else int(state.protected[row, :outside].sum())
            check_room(f"protect: {spans} tokens of row {row}", spans, window, budget)

    def finish(self) -> tuple[KVState, PromptRecord]:
        """Return the cache after the program of a prompt, and the record of what was kept."""
        state, n, window = self._filled, self._filled.columns, min(self._filled.policy.window, self._filled.columns)
        kept = [pool.finish() for pool in self._pools]
        for part in state.parts:
            part.finish_prefill()
        seen = state.reuse.empty("seen", (), torch.int64, self._device).fill_(n)
        start = state.reuse.empty("start", state.start.shape, torch.int64, self._device).copy_(state.start)
        left = window - (state.start - (n - window)).clamp(min=0)
        protected = None if state.protected is None else state.protected.to(self._device)
        parts = [*(store for store, _ in kept), *state.parts]
        state = replace(state, parts=parts, seen=seen, start=start, protected=protected)
        if guide := self._guide:  # the tails hold it, and nothing else
            state.crop(guide)
            left, budgets = left - guide, [budget - guide for budget in state.budgets]
            state = replace(state, policy=self._after, budgets=budgets, prompt_columns=n - guide, appended=0)
            for store in state.full_layers:
                store.policy = self._after
        entries = torch.tensor(state.budgets, device="cpu")
        record = state.record(entries, left, [record for _, record in kept])
        return state, replace(record, computed=self.computed)

    @property
    def policy(self) -> Policy:
        """By which the prompt is compressed."""
        return self._filled.policy


def _without_spare_slots(prompt: PrefillBuffers) -> PrefillBuffers:
    """Return packed buffers whose pool has as many slots as the longest row needs."""
    slots = max(2, int(prompt.offsets[:, -1].max()))
    return prompt._replace(
        pool_k=prompt.pool_k[:, :slots].clone(),
        pool_v=prompt.pool_v[:, :slots].clone(),
        slots=prompt.slots[:, :, :slots].clone(),
        slot_stats=prompt.slot_stats[:, :, :slots].clone(),
    )
