"""Join the buffers of processes that share the heads of a model to those of one device, and divide them again.

Buffers are named as in files: ``store0_pool_k``, ``ring0_ring_k``, ``start``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvpass.cache.prompt_record import LayersRecord, PromptRecord, entries_of
from kvpass.cache.segments import POOL, TAIL, pool_of, segments_of
from kvpass.config import LayerGroup, Layout
from kvpass.operands import BUFFERS
from kvpass.ops.slots import ABSENT, EMPTY
from kvpass.ranks import Ranks


def of_part(tensors: Mapping[str, Tensor], part: str) -> dict[str, Tensor]:
    """Return the buffers of a part, which is named as in :attr:`kvpass.config.Layout.names`, by their own names."""
    return {name.removeprefix(f"{part}_"): x for name, x in tensors.items() if name.startswith(f"{part}_")}


def layout_of_all(layout: Layout, size: int) -> Layout:
    """Return the layout of all heads, from that of the heads of one of ``size`` processes."""
    return _with_heads(layout, lambda group: _group_of_all(group, size))


def joined(parts: Sequence[Mapping[str, Tensor]], layout: Layout) -> dict[str, Tensor]:
    """Return the buffers of all heads.

    Args:
        parts: those of each process, in the order of the ranks. layout: of one process.
    """
    found = _without_heads(parts[0])
    for part, group in _groups(layout):
        own = [of_part(tensors, part) for tensors in parts]
        if "slot_positions" in own[0]:
            own = _of_one_width(own)
        buffers = {name: _joined_heads(name, [held[name] for held in own]) for name in own[0]}
        if "offsets" in buffers:
            bounds = [held["offsets"] for held in own]
            buffers["offsets"] = _offsets(torch.cat([entries_of(offsets, group) for offsets in bounds], 2))
            for name in POOL & buffers.keys():
                buffers[name] = _all_heads(name, [held[name] for held in own], bounds, group)
        found |= {f"{part}_{name}": x for name, x in buffers.items()}
    return found


def record_of_all(record: PromptRecord, ranks: Ranks, device: torch.device) -> PromptRecord:
    """Return the record of all heads, on the CPU, from that of the heads of each process.

    Args:
        device: on which the processes can send tensors to each other.
    """

    def gathered(x: Tensor) -> list[Tensor]:
        return list(ranks.gather(x.to(device)[None], 0).cpu())

    def all_heads(layers: LayersRecord) -> LayersRecord:
        bounds = gathered(layers.offsets)
        offsets = _offsets(torch.cat([entries_of(other, layers.group) for other in bounds], 2))
        slots = max(2, *(int(other[:, -1].max()) for other in bounds))
        parts = gathered(pad(layers.positions, (0, slots - layers.positions.shape[1]), value=EMPTY))
        return LayersRecord(
            group=_group_of_all(layers.group, ranks.size),
            mass=torch.cat(gathered(layers.mass), 2),
            weights=layers.weights.cpu(),
            positions=_all_heads("pool_positions", parts, bounds, layers.group),
            offsets=offsets,
            output_errors=None if layers.output_errors is None else torch.cat(gathered(layers.output_errors), 3),
        )

    sizes = torch.tensor([record.nbytes, record.ring_nbytes], device="cpu")
    nbytes, ring_nbytes = torch.stack(gathered(sizes)).sum(0).tolist()
    return replace(
        record,
        start=record.start.cpu(),
        full_layers=tuple(map(all_heads, record.full_layers)),
        sliding_layers=tuple(_group_of_all(group, ranks.size) for group in record.sliding_layers),
        nbytes=nbytes,
        ring_nbytes=ring_nbytes,
    )


def divided(tensors: Mapping[str, Tensor], layout: Layout, ranks: Ranks) -> tuple[dict[str, Tensor], Layout]:
    """Return the buffers and the layout of the heads of this process.

    Args:
        tensors: the buffers of all heads. layout: of all heads.
    """
    found = _without_heads(tensors)
    for part, group in _groups(layout):
        whole = of_part(tensors, part)
        own = {name: _own_heads(name, x, ranks) for name, x in whole.items()}
        if "offsets" in whole:
            own["offsets"] = _offsets(ranks.local_shard(entries_of(whole["offsets"], group), 2))
            numbers = torch.arange(whole["offsets"].shape[1] - 1, device="cpu").view(group.geometry.layers, -1)
            mine = ranks.local_shard(numbers, 1).flatten().tolist()
            for name in POOL & whole.keys():
                rows = segments_of(whole[name], whole["offsets"])
                own[name] = pool_of(name, [[row[number] for number in mine] for row in rows])
        found |= {f"{part}_{name}": x for name, x in own.items()}
    return found, _with_heads(layout, lambda group: _of_heads(group, group.geometry.kv_heads // ranks.size))


def _without_heads(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: x for name, x in tensors.items() if name in ("start", "ids", "mask", "protected")}


def _with_heads(layout: Layout, changed: Callable[[LayerGroup], LayerGroup]) -> Layout:
    return replace(layout, pools=tuple(map(changed, layout.pools)), rings=tuple(map(changed, layout.rings)))


def _group_of_all(group: LayerGroup, size: int) -> LayerGroup:
    """The layers with all heads, from those with the heads of one of ``size`` processes."""
    return _of_heads(group, group.geometry.kv_heads * size)


def _of_heads(group: LayerGroup, kv_heads: int) -> LayerGroup:
    return replace(group, geometry=replace(group.geometry, kv_heads=kv_heads))


def _groups(layout: Layout) -> Iterator[tuple[str, LayerGroup]]:
    yield from zip(layout.names, (*layout.pools, *layout.rings), strict=False)


def _joined_heads(name: str, parts: Sequence[Tensor]) -> Tensor:
    sizes = BUFFERS[name].sizes
    return torch.cat(list(parts), sizes.index("kv_heads")) if "kv_heads" in sizes else parts[0]


def _own_heads(name: str, whole: Tensor, ranks: Ranks) -> Tensor:
    sizes = BUFFERS[name].sizes
    return ranks.local_shard(whole, sizes.index("kv_heads")).contiguous() if "kv_heads" in sizes else whole


def _of_one_width(parts: Sequence[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
    """Pad lines of slots, of the pool and of the tail, to those of the process that has most."""
    widths = [(x["slot_positions"].shape[-1] - x["tail_k"].shape[3], x["tail_k"].shape[3]) for x in parts]
    behind, capacity = map(max, zip(*widths, strict=True))
    found = []
    for part, (own_behind, own_capacity) in zip(parts, widths, strict=True):
        more = capacity - own_capacity
        tails = {name: x for name, x in part.items() if name in TAIL}
        wider = {name: pad(x, (*(0, 0) * (x.ndim - 4), 0, more)) for name, x in tails.items()}
        for name, absent, empty in (("slot_positions", ABSENT, EMPTY), ("decode_state", 0, 0)):
            of_pool, of_tail = part[name].split([own_behind, own_capacity], -1)
            of_pool = pad(of_pool, (0, behind - own_behind), value=absent)
            wider[name] = torch.cat([of_pool, pad(of_tail, (0, more), value=empty)], -1)
        found.append({**part, **wider})
    return found


def _offsets(counts: Tensor) -> Tensor:
    return pad(counts.flatten(1).cumsum(1), (1, 0)).int()


def _all_heads(name: str, pools: Sequence[Tensor], bounds: Sequence[Tensor], group: LayerGroup) -> Tensor:
    """A buffer of the pool of all heads, from those of each process and their offsets; ``group``: of one process."""
    g = group.geometry
    held = [segments_of(pool, offsets) for pool, offsets in zip(pools, bounds, strict=True)]
    layers = [slice(layer * g.kv_heads, (layer + 1) * g.kv_heads) for layer in range(g.layers)]
    rows = [[x for layer in layers for part in parts for x in part[layer]] for parts in zip(*held, strict=True)]
    return pool_of(name, rows)
