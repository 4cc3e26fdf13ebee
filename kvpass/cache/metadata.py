"""The metadata of a cache file, used to write and to read it, and the check of the file's tensors against it.

Legend: B batch, L layers of one KV geometry, K KV heads, E pool slots, C tail capacity, S slots of a line, see
:mod:`kvpass.ops.slots`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from kvpass.config import Budget, EntryFormat, Geometry, LayerGroup, Layout
from kvpass.operands import BITS, BUFFERS, CODES, RingBuffers
from kvpass.ops.slots import ABSENT, EMPTY
from kvpass.policies.base import Policy
from kvpass.policies.decode_rules import DecodeRule

MOST_COLUMNS = 1 << 26
"""Most columns in a file: a mask over the columns must fit in memory."""
Shapes: TypeAlias = dict[str, tuple[torch.dtype, tuple[int | str, ...]]]
"""Dtype and sizes of tensors by name; a named size is free, but equal wherever it occurs."""


@dataclass(frozen=True, kw_only=True)
class CacheMetadata:
    """JSON metadata of a file; names as in :class:`kvpass.cache.cache.CompressedCache`.

    The numbers are checked for consistency here; :func:`check_tensors` checks the tensors. Files of format 1 also say
    how many slots of the tails are in use, which is not read: the tensors say so.

    Attributes:
        model: fingerprint of the model that filled the cache, see :class:`kvpass.cache.fingerprint.ModelFingerprint`.
        policy: its ``spec``. entries: budget of each row in entries. notes: the user's. entry_format: of the entries of
            layers that share the budget.
    Raises:
        ValueError: the numbers contradict each other.
    """

    kvpass_version: str
    model: dict[str, Any]
    policy: str
    budget: Budget | None
    layout: Layout
    columns: int
    entries: tuple[int, ...]
    reusable: bool
    notes: dict[str, Any]
    entry_format: EntryFormat = "model"
    own_budget: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.columns <= MOST_COLUMNS:
            raise ValueError(f"columns={self.columns}: must be from 1 to 2**26")
        if not (self.layout.pools or self.layout.rings):
            raise ValueError("layout: must have a group of layers")


def saved_names(policy: Policy, geometry: Geometry, entry_format: EntryFormat) -> list[str]:
    """Return the buffers of a store that a file holds and a search selects rows of."""
    rule, values_in_keys = policy.decode_rule(), geometry.values_in_keys
    kinds = ["always"]
    if rule is not None:
        kinds += ["evicting", "rows"] if rule.rows_per_head else ["evicting"]
    if entry_format != "model":
        kinds += ["key scales"] if values_in_keys else ["key scales", "value scales"]
        kinds += [] if values_in_keys or rule is not None else ["key means"]
    return [name for name, buffer in BUFFERS.items() if buffer.saved in kinds]


def check_tensors(metadata: CacheMetadata, policy: Policy, tensors: Mapping[str, Tensor]) -> None:
    """Check that these are the tensors of the cache that the metadata describes; all on the CPU.

    Args:
        policy: the policy named in the metadata.
    Raises:
        ValueError: a tensor is missing or unknown, or has another dtype, shape or range.
    """
    _check_entries(metadata, policy)
    rows, rule = len(metadata.entries), policy.decode_rule()
    in_floats = ("ring_k", "ring_v", *(("tail_k", "tail_v") if metadata.entry_format == "model" else ()))
    dtypes = {tensor.dtype for name, tensor in tensors.items() if name.endswith(in_floats)}
    if len(dtypes) > 1:
        raise ValueError(f"keys and values of dtypes {dtypes}: must be of one")
    entry = dtypes.pop() if dtypes else torch.float32  # of nothing, where all are codes
    for group in metadata.layout.pools:
        group.geometry.check_format(metadata.entry_format, torch.device("cpu"))
    parts: dict[str, Shapes] = {"": {"start": (torch.int64, (rows,))}}
    if "ids" in tensors:  # files of before they were kept have none
        parts[""]["ids"] = (torch.int32, (rows, metadata.columns))
    for i, group in enumerate(metadata.layout.pools):
        saved = saved_names(policy, group.geometry, metadata.entry_format)
        parts[f"store{i}_"] = _shapes(saved, group, rows, entry, metadata.entry_format, rule)
    for i, group in enumerate(metadata.layout.rings):
        parts[f"ring{i}_"] = _shapes(RingBuffers._fields, group, rows, entry, "model")
    for i, state in enumerate(metadata.layout.states):
        parts[f"state{i}_"] = {"held": (getattr(torch, state.dtype), (rows, *state.shape))}
    names = {prefix + name for prefix, shapes in parts.items() for name in shapes}
    if tensors.keys() != names:
        raise ValueError(f"tensors {sorted(tensors.keys() ^ names)} are missing or unknown")
    for prefix, shapes in parts.items():
        _check_shapes({name: tensors[prefix + name] for name in shapes}, shapes)
    for group in (*(metadata.layout.pools if metadata.entry_format == "model" else ()), *metadata.layout.rings):
        if not entry.is_floating_point or entry.itemsize != group.geometry.itemsize:
            raise ValueError(f"keys and values are {entry}: must be floats of {group.geometry.itemsize} bytes")
    start = tensors["start"]
    _check_range("start", start, metadata.columns - 1)
    if "ids" in tensors:
        _check_range("ids", tensors["ids"], torch.iinfo(torch.int32).max)
    seen = metadata.columns - start
    for i in range(len(metadata.layout.pools)):
        store = {name: tensors[f"store{i}_{name}"] for name in parts[f"store{i}_"]}
        if rule is None:
            # the newest tokens are in the tail, older ones in the pool
            before = seen - (store["tail_k"].shape[3] - store["tail_start"])
            _check_range("first position of a tail", before, int(seen.max()))
            _check_pool(store, before)
        else:
            _check_pool(store, seen)
            _check_slots(store, seen)


def _check_entries(metadata: CacheMetadata, policy: Policy) -> None:
    """Check that the budget of each row is one of a prompt of so many columns."""
    least, most = 1, metadata.columns  # prompts are no longer
    if metadata.budget is not None and metadata.layout.pools:
        most = metadata.budget.entries(most, metadata.layout.token_bytes(metadata.entry_format))
        least = 1 if metadata.budget.kind == "fraction" else most
        most = most if metadata.budget.kind == "entries" else max(most, policy.window + 1)
    if not metadata.entries or not all(least <= entries <= most for entries in metadata.entries):
        raise ValueError(f"entries={list(metadata.entries)}: must be {least} to {most} of each row")


def _shapes(
    names: Iterable[str],
    group: LayerGroup,
    rows: int,
    entry: torch.dtype,
    entry_format: EntryFormat,
    rule: DecodeRule | None = None,
) -> Shapes:
    """Return dtypes and shapes that a file must have; sizes not in the metadata keep their letters.

    Args:
        entry: dtype of keys and values that are no codes.
    """
    g, codes = group.geometry, CODES.get(entry_format)
    sizes: dict[str, int] = {"B": rows, "Z": rows, "L": g.layers, "K": g.kv_heads}
    sizes |= {"D": g.key_dim, "V": g.stored_value_dim, "P": g.layers * g.kv_heads + 1, "R": group.sliding_window or 0}
    if rule is not None:
        sizes |= {"Q": rule.rows_per_head, "I": rule.numbers_per_entry}
    bits, found = BITS.get(entry_format, 8), {}
    for name in names:
        buffer, own = BUFFERS[name], sizes
        if codes and buffer.packed:
            own = {**sizes, "D": g.key_dim * bits // 8, "V": g.stored_value_dim * bits // 8}
        dtype = codes if codes and buffer.packed else buffer.dtype or entry
        found[name] = (dtype, tuple(own.get(size, size) for size in buffer.sizes))
    return found


def _check_shapes(tensors: Mapping[str, Tensor], shapes: Shapes) -> None:
    sizes: dict[str, int] = {}
    for name, (dtype, shape) in shapes.items():
        found = tensors[name]
        fits = found.dtype == dtype and found.ndim == len(shape)
        for size, expected in zip(found.shape, shape, strict=False):
            fits &= size == (sizes.setdefault(expected, size) if isinstance(expected, str) else expected)
        if not fits:
            raise ValueError(f"{name} is {found.dtype} {list(found.shape)}: must be {dtype} {list(shape)} with {sizes}")


def _check_range(name: str, values: Tensor, high: int) -> None:
    if values.numel() and not (int(values.min()) >= 0 and int(values.max()) <= high):
        raise ValueError(f"{name} from {int(values.min())} to {int(values.max())}: must be from 0 to {high}")


def _check_pool(store: Mapping[str, Tensor], end: Tensor) -> None:
    """Check that the pool's segments are contiguous, with ascending positions below ``end``, int64 ``[B]``."""
    _check_range("tail_start", store["tail_start"], store["tail_k"].shape[3])
    positions, offsets = store["pool_positions"].long(), store["offsets"].long()
    rows, slots = positions.shape
    if slots < 2:
        raise ValueError(f"a pool of {slots} slots: must be at least 2")
    _check_range("first offset", offsets[:, 0], 0)
    _check_range("length of a segment", offsets.diff(dim=1), slots)
    _check_range("last offset", offsets[:, -1], slots)
    held = torch.arange(slots, device="cpu") < offsets[:, -1:]
    begins = torch.zeros(rows, slots + 1, dtype=torch.bool, device="cpu").scatter_(1, offsets, True)
    in_range = (positions >= 0) & (positions < end[:, None])
    falls = positions.diff(dim=1, prepend=positions[:, :1]) <= 0
    wrong = torch.where(held, ~in_range | (falls & ~begins[:, :-1]), positions != EMPTY)
    if bool(wrong.any()):
        raise ValueError("pool_positions do not ascend among the positions that were seen before")


def _check_slots(store: Mapping[str, Tensor], seen: Tensor) -> None:
    """Check the table of a policy that evicts while decoding; ``seen``: real tokens of each row, int64 ``[B]``."""
    position, capacity = store["slot_positions"].long(), store["tail_k"].shape[3]
    layers, rows, kv_heads, width = position.shape
    lengths = store["offsets"].long().diff(dim=1).view(rows, layers, kv_heads).transpose(0, 1)
    behind = width - capacity
    if capacity < 2 or behind < int(lengths.max()):
        raise ValueError(f"lines of {width} slots, {capacity} of them in the tail: the pool does not fit")
    slot = torch.arange(width, device="cpu")
    absent = (slot >= lengths[..., None]) & (slot < behind)
    if bool(((position == ABSENT) != absent).any()):
        raise ValueError("slot_positions: other slots are absent than those behind a segment of the pool")
    in_order = position.sort(-1).values
    twice = (in_order.diff(dim=-1) == 0) & (in_order[..., 1:] >= 0)
    if bool((position < ABSENT).any()) or bool((position >= seen[None, :, None, None]).any()) or bool(twice.any()):
        raise ValueError("slot_positions: a position was not seen, or stands twice in a line")
    if not torch.equal(store["next_position"], seen):
        raise ValueError(f"next_position {store['next_position'].tolist()} after {seen.tolist()} tokens")
    _check_range("quota", store["quota"], torch.iinfo(torch.int64).max // 2)  # slots are added
