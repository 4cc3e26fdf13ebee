"""Tensors and JSON metadata in one safetensors file that notices any damage.

The header's metadata has two entries: ``kvpass``, a JSON text, and ``sha256``, the digest of the whole file as it reads
with 64 zeros in the digest's place. So every byte is covered, the header's included. Files are written and read here,
not by the library safetensors: so that one pass writes and digests, a full disk is an ``OSError``, and what is read
are the bytes that were checked, also when the file is replaced meanwhile.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import torch
from torch import Tensor

from kvpass.errors import CacheFileError
from kvpass.replace_file import replacing

T = TypeVar("T")

FORMAT = 1
"""Version of what the metadata and the tensors mean; a reader refuses newer ones."""

_MARK = b'"sha256":"'
_BLANK = b"0" * 64
_LENGTH_BYTES = 8
_MAX_HEADER = 100_000_000
_CHUNK = 1 << 22
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
}
"""Dtypes of the tensors of a cache, by their names in safetensors."""
_MOST = 1 << 60
"""No tensor has more elements."""
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def write_cache_file(path: str | Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, Any]) -> None:
    """Write, or replace as one step: nobody ever sees half a file. A new one is readable by its owner only.

    Args:
        tensors: by name, each of a dtype of a cache. metadata: anything JSON can say.
    Raises:
        ValueError: the metadata is more than JSON can say, or larger than a header may be.
        OSError: the file cannot be written; one that was there is as before.
    """
    described: dict[str, Any] = {
        "__metadata__": {"kvpass": _to_json({"format": FORMAT, **metadata}), "sha256": _BLANK.decode()}
    }
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))  # so each begins where it may
    end = 0
    for name in names:
        tensor, begin, end = tensors[name], end, end + tensors[name].nbytes
        described[name] = {"dtype": _NAMES[tensor.dtype], "shape": tensor.shape, "data_offsets": [begin, end]}
    header = _to_json(described).encode()
    header += b" " * (-len(header) % _LENGTH_BYTES)
    if len(header) > _MAX_HEADER:
        raise ValueError(f"the metadata of a cache file takes {len(header)} bytes: must be at most {_MAX_HEADER}")
    found = hashlib.sha256()
    with replacing(path) as file:
        for part in (len(header).to_bytes(_LENGTH_BYTES, "little"), header):
            found.update(part)
            file.write(part)
        for name in names:
            content = _bytes_of(tensors[name].detach().cpu().contiguous())
            found.update(content)
            file.write(content)
        file.seek(_digest_place(header, Path(path)))
        file.write(found.hexdigest().encode())


def read_cache_file(path: str | Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Metadata and tensors of a file, all of whose bytes were found undamaged; the tensors are on the CPU.

    Raises:
        CacheFileError: not a cache of kvpass, damaged, or written by a newer kvpass.
        OSError: the file cannot be read.
    """
    source = Path(path)
    with source.open("rb") as file:
        header, described = _read_header(file, source)
        place = _digest_place(header, source)
        file.seek(place)
        stated = file.read(len(_BLANK))
        if _digest(file, place) != stated:
            raise CacheFileError(source, "is damaged: its contents do not have the checksum it states")
        text = typed(described.pop("__metadata__", {}), dict[str, str], source).get("kvpass", "{}")
        try:
            metadata = _from_json(text.encode())
        except (ValueError, RecursionError):
            raise CacheFileError(source, "is no cache file of kvpass: its metadata is no plain JSON object") from None
        _check_format(metadata, source)
        entries = typed(described, dict[str, _Entry], source)
        tensors, end = {}, 0
        file.seek(_LENGTH_BYTES + len(header))
        for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
            if entry.data_offsets[0] != end:
                raise CacheFileError(source, f"is no cache file: {name!r} does not begin where the tensor before ends")
            end = entry.data_offsets[1]
            tensors[name] = torch.empty(entry.shape, dtype=_DTYPES[entry.dtype])
            if file.readinto(_bytes_of(tensors[name])) != tensors[name].nbytes:
                raise CacheFileError(source, "is truncated: it was changed while it was read")
    return metadata, tensors


def typed(found: object, kind: type[T], path: str | Path) -> T:
    """What was read from JSON as a value of the type, dataclasses and their checks included.

    Raises:
        CacheFileError: it is none; the message says where it differs.
    """
    import msgspec  # only who reads a file needs it

    try:
        return msgspec.convert(found, kind)
    except (ValueError, RecursionError) as error:
        raise CacheFileError(path, f"holds no cache: {error}") from None


@dataclass(frozen=True)
class _Entry:
    """Where a tensor lies among the data that follow the header."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]

    def __post_init__(self) -> None:
        if self.dtype not in _DTYPES:
            raise ValueError(f"dtype {self.dtype!r}: must be one of {', '.join(_DTYPES)}")
        begin, end = self.data_offsets
        size = math.prod(self.shape) * _DTYPES[self.dtype].itemsize
        # the last two, since a tensor without elements may claim any size: torch refuses some
        if begin + size != end or min(self.shape, default=0) < 0 or math.prod(max(n, 1) for n in self.shape) > _MOST:
            raise ValueError(f"{self.dtype} {list(self.shape)} does not fit its bytes {begin} to {end}")


def _check_format(metadata: Mapping[str, Any], path: Path) -> None:
    found = metadata.get("format")
    if type(found) is not int or found < 1:
        raise CacheFileError(path, "is no cache file of kvpass: its metadata states no format")
    if found > FORMAT:
        raise CacheFileError(
            path,
            f"has format {found}, written by kvpass {metadata.get('kvpass_version')}; "
            f"this kvpass reads formats up to {FORMAT}",
        )


def _read_header(file: BinaryIO, path: Path) -> tuple[bytes, dict[str, Any]]:
    """The JSON header; the file's size is held against what it promises."""
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
    if size < _LENGTH_BYTES or not 0 < length <= min(_MAX_HEADER, size - _LENGTH_BYTES):
        raise CacheFileError(path, f"is no cache file, or is damaged or truncated: {size} bytes")
    header = file.read(length)
    try:
        described = _from_json(header)
        ends = [entry["data_offsets"][1] for name, entry in described.items() if name != "__metadata__"]
        promised = _LENGTH_BYTES + length + max(ends, default=0)
    except (ValueError, TypeError, KeyError, IndexError, RecursionError):
        raise CacheFileError(path, "is no cache file, or is damaged: its header cannot be read") from None
    if promised != size:
        state = "truncated" if isinstance(promised, int) and promised > size else "damaged"
        raise CacheFileError(path, f"is {state}: {size} bytes where its header promises {promised}")
    return header, described


def _to_json(value: object) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def _from_json(text: bytes) -> dict[str, Any]:
    """A JSON object that says everything once.

    Raises:
        ValueError: a name stands twice in an object, a number is NaN or infinite, a text is no Unicode, or this is no
            JSON object.
        RecursionError: lists or objects are nested too deep.
    """
    found = json.loads(text.decode(), object_pairs_hook=_once)
    _to_json(found).encode()  # finds numbers and texts that JSON has no words for, but Python reads
    if not isinstance(found, dict):
        raise ValueError("no JSON object")
    return found


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name stands twice in an object")
    return found


def _digest_place(header: bytes, path: Path) -> int:
    """Where in the file the digest stands."""
    if header.count(_MARK) != 1:
        raise CacheFileError(path, "is no cache file of kvpass, or is damaged: its header states no checksum")
    return _LENGTH_BYTES + header.index(_MARK) + len(_MARK)


def _digest(file: BinaryIO, place: int) -> bytes:
    """SHA-256 of the whole file with zeros for digits at ``place``, as 64 hexadecimal digits."""
    found = hashlib.sha256()
    file.seek(0)
    found.update(file.read(place))
    found.update(_BLANK)
    file.seek(place + len(_BLANK))
    while chunk := file.read(_CHUNK):
        found.update(chunk)
    return found.hexdigest().encode()


def _bytes_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the CPU, to read or to write."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data
