"""Cache files: tensors and JSON metadata in one safetensors file with a checksum of every byte.

The header's metadata has two entries: ``kvpass``, a JSON text, and ``sha256``, the digest of the whole file with 64
zeros in place of the digest. So the header is covered too. A file is read and written as a whole: the bytes that are
checked are the bytes that are loaded, also when the file is replaced meanwhile.

Legend: B batch, L layers of one KV geometry, K KV heads, E pool slots, C tail capacity, S slots of a line, see
:mod:`kvpass.ops.slots`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from kvpass.cache.shared_heads import of_part
from kvpass.config import Budget, EntryFormat, Layout
from kvpass.errors import CacheFileError
from kvpass.operands import BITS, BUFFERS, CODES, Buffer
from kvpass.ops.slots import ABSENT, EMPTY
from kvpass.policies.base import Policy
from kvpass.policies.decode_rules import DecodeRule
from kvpass.replace_file import replacing

FORMAT = 3
"""Version of metadata and tensors; a reader raises on newer ones. Before 3, files had no ``mask``; those of 1 also say
how many slots of the tails are in use, which is not read: the tensors say so."""
MOST_COLUMNS = 1 << 26
"""Most columns in a file, of all rows together: a mask over them must fit in memory."""

_MARK = b'"sha256":"'
_BLANK = b"0" * 64
_LENGTH_BYTES = 8


@dataclass(frozen=True, kw_only=True)
class CacheMetadata:
    """JSON metadata of a file; names as in :class:`kvpass.cache.state.KVState`.

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
    forgotten: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not 1 <= self.columns * max(len(self.entries), 1) <= MOST_COLUMNS:
            raise ValueError(f"columns={self.columns} of {len(self.entries)} rows: must be from 1 to 2**26 in all")
        if not (self.layout.pools or self.layout.rings):
            raise ValueError("layout: must have a group of layers")
        if any(not 0 <= position < self.columns for position in self.forgotten):
            raise ValueError("forgotten: must be tokens of the text")

    @property
    def text_columns(self) -> int:
        return self.columns - len({*self.forgotten})


def write_cache_file(path: str | Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, Any]) -> None:
    """Write or replace a file atomically. A new file is readable by its owner only.

    Args:
        tensors: by name, each with a storage of its own. metadata: anything JSON can represent.
    Raises:
        ValueError: JSON cannot represent the metadata.
        OSError: the file cannot be written; an existing file is unchanged.
    """
    text = _to_json({"format": FORMAT, **metadata})
    parts = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    content = save(parts, {"kvpass": text, "sha256": _BLANK.decode()})
    _, place = _header(content, Path(path))
    with replacing(path) as file:
        file.write(memoryview(content)[:place])
        file.write(hashlib.sha256(content).hexdigest().encode())
        file.write(memoryview(content)[place + len(_BLANK) :])


def read_saved(path: str | Path) -> tuple[CacheMetadata, dict[str, Tensor]]:
    """Read a file as :func:`read_cache_file`, and check the metadata; :func:`check_tensors` checks that they match."""
    import msgspec  # needed only to read a file

    metadata, tensors = read_cache_file(path)
    try:
        return msgspec.convert(metadata, CacheMetadata), tensors
    except (ValueError, RecursionError) as error:
        raise CacheFileError(path, f"holds no cache: {error}") from None


@torch.inference_mode(False)
def read_cache_file(path: str | Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read metadata and tensors of a file and verify its checksum; the tensors are on the CPU.

    Raises:
        CacheFileError: not a cache of kvpass, damaged, or written by a newer kvpass.
        OSError: the file cannot be read.
    """
    source = Path(path)
    content = source.read_bytes()
    header, place = _header(content, source)
    digest = hashlib.sha256(memoryview(content)[:place])
    digest.update(_BLANK)
    digest.update(memoryview(content)[place + len(_BLANK) :])
    if digest.hexdigest().encode() != content[place : place + len(_BLANK)]:
        raise CacheFileError(source, "is damaged or truncated: its contents do not have the checksum it states")
    try:
        metadata = _from_json(_from_json(header.decode())["__metadata__"]["kvpass"])
    except (ValueError, TypeError, KeyError, RecursionError):
        raise CacheFileError(source, "is no cache file of kvpass: its metadata is no plain JSON object") from None
    version = metadata.get("format")
    if type(version) is not int or version < 1:
        raise CacheFileError(source, "is no cache file of kvpass: its metadata states no format")
    if version > FORMAT:
        made = f"has format {version}, written by kvpass {metadata.get('kvpass_version')}"
        raise CacheFileError(source, f"{made}; this kvpass reads formats up to {FORMAT}")
    try:
        return metadata, load(content)
    except (SafetensorError, RuntimeError, KeyError) as error:  # the last two: sizes and dtypes that torch lacks
        raise CacheFileError(source, f"holds no cache: {error}") from None


def _header(content: bytes, path: Path) -> tuple[bytes, int]:
    """Return the header of a file, and where the digest is in the file."""
    length = int.from_bytes(content[:_LENGTH_BYTES], "little")
    if not 0 < length <= len(content) - _LENGTH_BYTES:
        raise CacheFileError(path, f"is no cache file, or is damaged or truncated: {len(content)} bytes")
    header = content[_LENGTH_BYTES : _LENGTH_BYTES + length]
    if header.count(_MARK) != 1:
        raise CacheFileError(path, "is no cache file of kvpass, or is damaged: its header states no checksum")
    return header, _LENGTH_BYTES + header.index(_MARK) + len(_MARK)


def _to_json(value: object) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def _from_json(text: str) -> dict[str, Any]:
    """Parse a JSON object; raise ValueError for what is none, RecursionError for one that is nested too deep."""
    value = json.loads(text, object_pairs_hook=_once)
    _to_json(value).encode()  # raises for numbers and texts that Python reads but JSON cannot represent
    if not isinstance(value, dict):
        raise ValueError("no JSON object")
    return value


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(dict(pairs)) != len(pairs):
        raise ValueError("a name stands twice in an object")
    return dict(pairs)


# -- the tensors of a cache -------------------------------------------------------------------------------------------


_OPTIONAL = ("ids", "mask", "protected", "ahead")
"""Tables of the tokens that not every cache has."""


def check_tensors(metadata: CacheMetadata, policy: Policy, tensors: Mapping[str, Tensor]) -> None:
    """Check that these are the tensors of the cache that the metadata describes; all on the CPU.

    Args:
        policy: the policy named in the metadata.
    Raises:
        ValueError: a tensor is missing or unknown, or has another dtype, shape or range.
    """
    _check_entries(metadata, policy)
    layout, entry_format, rule = metadata.layout, metadata.entry_format, policy.decode_rule()
    for group in layout.pools:
        group.geometry.check_format(entry_format, torch.device("cpu"))
    buffers, sizes = _expected(metadata, rule, "protected" in tensors)
    buffers = {name: buffer for name, buffer in buffers.items() if name not in _OPTIONAL or name in tensors}
    if tensors.keys() != buffers.keys():
        raise ValueError(f"tensors {sorted(tensors.keys() ^ buffers.keys())} are missing or unknown")
    in_floats = ("ring_k", "ring_v", *(("tail_k", "tail_v") if entry_format == "model" else ()))
    dtypes = {tensor.dtype for name, tensor in tensors.items() if name.endswith(in_floats)}
    if len(dtypes) > 1:
        raise ValueError(f"keys and values of dtypes {dtypes}: must be of one")
    entry = dtypes.pop() if dtypes else torch.float32  # of nothing, where all are codes
    for group in (*(layout.pools if entry_format == "model" else ()), *layout.rings):
        if not entry.is_floating_point or entry.itemsize != group.geometry.itemsize:
            raise ValueError(f"keys and values are {entry}: must be floats of {group.geometry.itemsize} bytes")
    for name, buffer in buffers.items():
        in_codes = buffer.packed and entry_format != "model"
        dtype = CODES[entry_format] if in_codes else buffer.dtype or entry
        _check_tensor(
            name, tensors[name], buffer, dtype, sizes[name.partition("_")[0]], BITS[entry_format] if in_codes else 8
        )
    start, mask = tensors["start"], tensors.get("mask")
    _check_range("start", start, metadata.text_columns - 1)
    if "ids" in tensors:
        _check_range("ids", tensors["ids"], torch.iinfo(torch.int32).max)
    if mask is not None and (mask.shape[1] > metadata.columns or not torch.equal((mask != 1).sum(1), start)):
        raise ValueError("mask: another number of columns is padding than start says")
    if "protected" in tensors:
        _check_range("protected", tensors["protected"], 1)
    seen = metadata.columns - start
    if "ahead" in tensors:
        _check_range("next position", seen + tensors["ahead"], torch.iinfo(torch.int32).max)
    for part in layout.names[: len(layout.pools)]:
        store = of_part(tensors, part)
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


def _expected(
    metadata: CacheMetadata, rule: DecodeRule | None, protects: bool
) -> tuple[dict[str, Buffer], dict[str, dict[str, int]]]:
    """Return the buffers of a file by name, and the sizes in each part that the metadata says, by their names.

    ``protects``: it has protected tokens, which slots that may be evicted say with one more number.
    """
    row = Buffer("batch", torch.int64)
    buffers = {"start": row, "ahead": row, "ids": Buffer("batch columns", torch.int32)}
    buffers |= {name: Buffer(f"batch {name}", torch.uint8) for name in ("mask", "protected")}
    layout, rows = metadata.layout, dict.fromkeys(("batch", "pool_batch"), len(metadata.entries))
    sizes = {name: {**rows, "columns": metadata.text_columns} for name in buffers}
    for part, group in zip(layout.names, (*layout.pools, *layout.rings), strict=False):
        g, saved = group.geometry, ["always"]
        if rule is not None:
            saved += ["evicting", "rows"] if rule.rows_per_head else ["evicting"]
        if metadata.entry_format != "model":
            saved += ["key scales"] if g.values_in_keys else ["key scales", "value scales"]
            saved += [] if g.values_in_keys or rule is not None else ["key means"]
        saved = saved if group.sliding_window is None else ["ring"]
        buffers |= {f"{part}_{name}": buffer for name, buffer in BUFFERS.items() if buffer.saved in saved}
        sizes[part] = {**rows, **g.sizes, "ring": group.sliding_window or 0}
        if rule is not None:
            sizes[part] |= {"rows_per_head": rule.rows_per_head, "numbers_per_entry": rule.numbers_per_entry + protects}
    for part, state in zip(layout.names[len(layout.names) - len(layout.states) :], layout.states, strict=True):
        buffers[f"{part}_held"] = Buffer(" ".join(map(str, ("batch", *state.shape))), getattr(torch, state.dtype))
        sizes[part] = rows | {str(size): size for size in state.shape}
    return buffers, sizes


def _check_tensor(name: str, x: Tensor, buffer: Buffer, dtype: torch.dtype, sizes: dict[str, int], bits: int) -> None:
    """Check a tensor, of codes of ``bits`` bits. Sizes that are not known are free, but equal wherever they occur."""
    fits = x.dtype == dtype and x.ndim == len(buffer.sizes)
    for size, dim in zip(x.shape, buffer.sizes, strict=False):
        fits &= 8 * size == sizes.setdefault(dim, size) * (bits if dim in ("key_dim", "value_dim") else 8)
    if not fits:
        raise ValueError(f"{name} is {x.dtype} {list(x.shape)}: must be {dtype} [{buffer.dims}] with {sizes}")


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
    taken = torch.arange(slots, device="cpu") < offsets[:, -1:]
    begins = torch.zeros(rows, slots + 1, dtype=torch.bool, device="cpu").scatter_(1, offsets, True)
    in_range = (positions >= 0) & (positions < end[:, None])
    falls = positions.diff(dim=1, prepend=positions[:, :1]) <= 0
    wrong = torch.where(taken, ~in_range | (falls & ~begins[:, :-1]), positions != EMPTY)
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
