"""Tensors and JSON metadata in one safetensors file with a checksum of every byte.

The header's metadata has two entries: ``kvpass``, a JSON text, and ``sha256``, the digest of the whole file with 64
zeros in place of the digest. So the header is covered too. A file is read and written as a whole: the bytes that are
checked are the bytes that are loaded, also when the file is replaced meanwhile.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from kvpass.errors import CacheFileError
from kvpass.operands import CODES
from kvpass.replace_file import replacing

T = TypeVar("T")

FORMAT = 2
"""Version of metadata and tensors; a reader raises on newer ones."""

_MARK = b'"sha256":"'
_BLANK = b"0" * 64
_LENGTH_BYTES = 8


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
    content = memoryview(save(parts, {"kvpass": text, "sha256": _BLANK.decode()}))
    place = _digest_place(_header_of(content, Path(path)), Path(path))
    with replacing(path) as file:
        file.write(content[:place])
        file.write(hashlib.sha256(content).hexdigest().encode())
        file.write(content[place + len(_BLANK) :])


def read_cache_file(path: str | Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read metadata and tensors of a file and verify its checksum; the tensors are on the CPU.

    Raises:
        CacheFileError: not a cache of kvpass, damaged, or written by a newer kvpass.
        OSError: the file cannot be read.
    """
    source = Path(path)
    content = source.read_bytes()
    header = _header_of(memoryview(content), source)
    described = _described(header, len(content), source)
    place = _digest_place(header, source)
    found = hashlib.sha256(memoryview(content)[:place])
    found.update(_BLANK)
    found.update(memoryview(content)[place + len(_BLANK) :])
    if found.hexdigest().encode() != content[place : place + len(_BLANK)]:
        raise CacheFileError(source, "is damaged: its contents do not have the checksum it states")
    text = typed(described.get("__metadata__", {}), dict[str, str], source).get("kvpass", "{}")
    try:
        metadata = _from_json(text.encode())
    except (ValueError, RecursionError):
        raise CacheFileError(source, "is no cache file of kvpass: its metadata is no plain JSON object") from None
    _check_format(metadata, source)
    try:
        tensors = load(content)
    except (SafetensorError, RuntimeError, KeyError) as error:  # the last two: sizes and dtypes that torch lacks
        raise CacheFileError(source, f"holds no cache: {error}") from None
    dtypes = {tensor.dtype for tensor in tensors.values()}.difference(CODES.values())
    strange = {dtype for dtype in dtypes if dtype.is_complex or dtype.itemsize < 2}
    if strange:
        raise CacheFileError(source, f"holds no cache: tensors of {', '.join(map(str, strange))}")
    return metadata, tensors


def typed(found: object, kind: type[T], path: str | Path) -> T:
    """Convert a value read from JSON to a type, dataclasses and their checks included.

    Raises:
        CacheFileError: it does not fit the type; the message says where.
    """
    import msgspec  # needed only to read a file

    try:
        return msgspec.convert(found, kind)
    except (ValueError, RecursionError) as error:
        raise CacheFileError(path, f"holds no cache: {error}") from None


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


def _header_of(content: memoryview, path: Path) -> bytes:
    length = int.from_bytes(content[:_LENGTH_BYTES], "little")
    if not 0 < length <= len(content) - _LENGTH_BYTES:
        raise CacheFileError(path, f"is no cache file, or is damaged or truncated: {len(content)} bytes")
    return bytes(content[_LENGTH_BYTES : _LENGTH_BYTES + length])


def _described(header: bytes, size: int, path: Path) -> dict[str, Any]:
    """Parse the header and compare the file's size with it."""
    try:
        described = _from_json(header)
        ends = [entry["data_offsets"][1] for name, entry in described.items() if name != "__metadata__"]
        promised = _LENGTH_BYTES + len(header) + max(ends, default=0)
    except (ValueError, TypeError, KeyError, IndexError, RecursionError):
        raise CacheFileError(path, "is no cache file, or is damaged: its header cannot be read") from None
    if promised != size:
        state = "truncated" if isinstance(promised, int) and promised > size else "damaged"
        raise CacheFileError(path, f"is {state}: {size} bytes where its header promises {promised}")
    return described


def _to_json(value: object) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def _from_json(text: bytes) -> dict[str, Any]:
    """Parse a JSON object without duplicate names.

    Raises:
        ValueError: a duplicate name, a number that is NaN or infinite, text that is no Unicode, or no JSON object.
        RecursionError: lists or objects are nested too deep.
    """
    found = json.loads(text.decode(), object_pairs_hook=_once)
    _to_json(found).encode()  # raises for numbers and texts that Python reads but JSON cannot represent
    if not isinstance(found, dict):
        raise ValueError("no JSON object")
    return found


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name stands twice in an object")
    return found


def _digest_place(header: bytes, path: Path) -> int:
    """Return the offset of the digest in the file."""
    if header.count(_MARK) != 1:
        raise CacheFileError(path, "is no cache file of kvpass, or is damaged: its header states no checksum")
    return _LENGTH_BYTES + header.index(_MARK) + len(_MARK)
