"""Join the buffers of processes that share the heads of a model to those of one device, and divide them again.

Buffers are named as in files: ``store0_pool_k``, ``ring0_ring_k``, ``start``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvpass.cache.metadata import LayersFacts
from kvpass.cache.prompt_record import LayersRecord, PromptRecord
from kvpass.config import LayerGroup, Layout
from kvpass.operands import BUFFERS
from kvpass.ops.slots import ABSENT, EMPTY
from kvpass.ranks import Ranks

_POOL = {"pool_k", "pool_v", "pool_k_scale", "pool_v_scale", "pool_positions"}


def layout_of_all(layout: Layout, size: int) -> Layout:
    """Return the layout of all heads, from that of the heads of one of ``size`` processes."""
    return _with_heads(layout, lambda group: _group_of_all(group, size))


def joined(parts: Sequence[Mapping[str, Tensor]], layout: Layout) -> dict[str, Tensor]:
    """Return the buffers of all heads.

    Args:
        parts: those of each process, in the order of the ranks. layout: of one process.
    """
    found = {"start": parts[0]["start"]}
    for prefix, group in _groups(layout):
        own = [{name[len(prefix) :]: x for name, x in part.items() if name.startswith(prefix)} for part in parts]
        if "table" in own[0]:
            own = _of_one_width(own)
        buffers = {name: _joined_heads(name, [part[name] for part in own]) for name in own[0]}
        if "offsets" in buffers:
            bounds = [part["offsets"] for part in own]
            counts = torch.cat([_counts(offsets, group) for offsets in bounds], 2)
            buffers["offsets"] = _offsets(counts)
            for name in _POOL & buffers.keys():
                buffers[name] = _joined_pool(name, [part[name] for part in own], bounds, group)
        found |= {prefix + name: x for name, x in buffers.items()}
    return found


def joined_facts(parts: Sequence[tuple[LayersFacts, ...]]) -> tuple[LayersFacts, ...]:
    """Return the facts of the stores of all heads, from those of each process."""
    return tuple(replace(own[0], tail_bound=max(facts.tail_bound for facts in own)) for own in zip(*parts, strict=True))


def record_of_all(record: PromptRecord, ranks: Ranks, device: torch.device) -> PromptRecord:
    """Return the record of all heads, on the CPU, from that of the heads of each process.

    Args:
        device: on which the processes can send tensors to each other.
    """

    def gathered(x: Tensor) -> list[Tensor]:
        return list(ranks.gather(x.to(device)[None], 0).cpu())

    def all_heads(layers: LayersRecord) -> LayersRecord:
        kept, mass = (torch.cat(gathered(x), 2) for x in (layers.kept, layers.mass))
        slots = ranks.most(layers.positions.shape[1], device)
        parts = gathered(pad(layers.positions, (0, slots - layers.positions.shape[1]), value=EMPTY))
        positions = _joined_pool("pool_positions", parts, gathered(layers.offsets), layers.group)
        return LayersRecord(
            group=_group_of_all(layers.group, ranks.size),
            kept=kept,
            mass=mass,
            weights=layers.weights.cpu(),
            positions=positions,
            offsets=_offsets(kept),
        )

    sizes = torch.tensor([record.nbytes, record.ring_nbytes])
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
    found = {"start": tensors["start"]}
    for prefix, group in _groups(layout):
        whole = {name[len(prefix) :]: x for name, x in tensors.items() if name.startswith(prefix)}
        own = {name: _own_heads(name, x, ranks) for name, x in whole.items()}
        if "offsets" in whole:
            counts = _counts(whole["offsets"], group).chunk(ranks.size, 2)
            own["offsets"] = _offsets(counts[ranks.rank])
            heads = group.geometry.kv_heads // ranks.size
            begins = whole["offsets"][:, ranks.rank * heads : -1 : group.geometry.kv_heads]
            for name in _POOL & whole.keys():
                own[name] = _own_pool(name, whole[name], begins, counts[ranks.rank].sum(2))
        found |= {prefix + name: x for name, x in own.items()}
    return found, _with_heads(layout, lambda group: _of_heads(group, group.geometry.kv_heads // ranks.size))


def _with_heads(layout: Layout, changed: Callable[[LayerGroup], LayerGroup]) -> Layout:
    return Layout(pools=tuple(map(changed, layout.pools)), rings=tuple(map(changed, layout.rings)))


def _group_of_all(group: LayerGroup, size: int) -> LayerGroup:
    """The layers with all heads, from those with the heads of one of ``size`` processes."""
    return _of_heads(group, group.geometry.kv_heads * size)


def _of_heads(group: LayerGroup, kv_heads: int) -> LayerGroup:
    return replace(group, geometry=replace(group.geometry, kv_heads=kv_heads))


def _groups(layout: Layout) -> Iterator[tuple[str, LayerGroup]]:
    yield from ((f"store{i}_", group) for i, group in enumerate(layout.pools))
    yield from ((f"ring{i}_", group) for i, group in enumerate(layout.rings))


def _joined_heads(name: str, parts: Sequence[Tensor]) -> Tensor:
    sizes = BUFFERS[name].sizes
    return torch.cat(list(parts), sizes.index("K")) if "K" in sizes else parts[0]


def _own_heads(name: str, whole: Tensor, ranks: Ranks) -> Tensor:
    sizes = BUFFERS[name].sizes
    return ranks.own(whole, sizes.index("K")).contiguous() if "K" in sizes else whole


def _of_one_width(parts: Sequence[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
    """Pad lines of slots, of the pool and of the tail, to those of the process that has most."""
    widths = [(x["table"].shape[-1] - x["tail_k"].shape[3], x["tail_k"].shape[3]) for x in parts]
    behind, capacity = map(max, zip(*widths, strict=True))
    found = []
    for part, (own_behind, own_capacity) in zip(parts, widths, strict=True):
        wider = {name: pad(part[name], (0, 0, 0, capacity - own_capacity)) for name in ("tail_k", "tail_v")}
        for name, absent, empty in (("table", ABSENT, EMPTY), ("decode_state", 0, 0)):
            of_pool, of_tail = part[name].split([own_behind, own_capacity], -1)
            of_pool = pad(of_pool, (0, behind - own_behind), value=absent)
            wider[name] = torch.cat([of_pool, pad(of_tail, (0, capacity - own_capacity), value=empty)], -1)
        found.append({**part, **wider})
    return found


def _counts(offsets: Tensor, group: LayerGroup) -> Tensor:
    """Entries of each segment, ``[B, L, K]``."""
    return offsets.diff(dim=1).view(offsets.shape[0], group.geometry.layers, -1)


def _offsets(counts: Tensor) -> Tensor:
    return pad(counts.flatten(1).cumsum(1), (1, 0)).int()


def _joined_pool(name: str, parts: Sequence[Tensor], bounds: Sequence[Tensor], group: LayerGroup) -> Tensor:
    """The pool of all heads: of each layer, the segments of one process after those of another.

    Args:
        parts, bounds: pools and offsets of the processes.
    """
    edges = [bound[:, :: group.geometry.kv_heads].tolist() for bound in bounds]  # of the layers
    rows = []
    for row in range(len(parts[0])):
        of_row = [(part[row], edge[row]) for part, edge in zip(parts, edges, strict=True)]
        layers = range(group.geometry.layers)
        rows.append([pool[edge[layer] : edge[layer + 1]] for layer in layers for pool, edge in of_row])
    return _pool(name, rows)


def _own_pool(name: str, whole: Tensor, begins: Tensor, counts: Tensor) -> Tensor:
    """The pool of the heads of this process.

    Args:
        begins, counts: where its entries of each layer begin in the pool of all heads, and how many there are,
            ``[B, L]``.
    """
    rows = [
        [pool[begin : begin + count] for begin, count in zip(*places, strict=True)]
        for pool, *places in zip(whole, begins.tolist(), counts.tolist(), strict=True)
    ]
    return _pool(name, rows)


def _pool(name: str, rows: Sequence[Sequence[Tensor]]) -> Tensor:
    """A pool of the entries of each row, given in parts."""
    lengths, like = [sum(map(len, parts)) for parts in rows], rows[0][0]
    pool = like.new_full((len(rows), max(2, *lengths), *like.shape[1:]), EMPTY if name == "pool_positions" else 0)
    for own, length, parts in zip(pool, lengths, rows, strict=True):
        torch.cat(list(parts), out=own[:length])
    return pool
