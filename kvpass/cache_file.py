"""Tensors and JSON metadata in one safetensors file that notices any damage.

The header's metadata has two entries: ``kvpass``, a JSON text, and ``sha256``, the digest of the whole file as it reads
with 64 zeros in the digest's place. So every byte is covered, the header's included.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from kvpass.errors import CacheFileError

FORMAT = 1
"""Version of what the metadata and the tensors mean; a reader refuses newer ones."""

_MARK = b'"sha256":"'
_BLANK = b"0" * 64
_LENGTH_BYTES = 8
_MAX_HEADER = 100_000_000
_CHUNK = 1 << 22


def write_cache_file(path: str | Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, Any]) -> None:
    """Write, or replace as one step: nobody ever sees half a file.

    Args:
        tensors: by name, each with a storage of its own. metadata: anything JSON can say.
    """
    target = Path(path)
    text = json.dumps({"format": FORMAT, **metadata}, sort_keys=True)
    parts = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    with tempfile.TemporaryDirectory(dir=target.absolute().parent, prefix=f".{target.name}.") as folder:
        draft = Path(folder, "cache")
        save_file(parts, draft, {"kvpass": text, "sha256": _BLANK.decode()})
        with draft.open("r+b") as file:
            place = _digest_place(_read_header(file, target), target)
            digest = _digest(file, place)
            file.seek(place)
            file.write(digest)
            file.flush()
            os.fsync(file.fileno())
        ordinary = Path(folder, "ordinary")
        ordinary.touch()
        shutil.copymode(ordinary, draft)
        os.replace(draft, target)


def read_metadata(path: str | Path) -> dict[str, Any]:
    """The metadata of a file, all of whose bytes were found undamaged.

    Raises:
        CacheFileError: not a cache of kvpass, damaged, or written by a newer kvpass.
        OSError: the file cannot be read.
    """
    source = Path(path)
    with source.open("rb") as file:
        header = _read_header(file, source)
        place = _digest_place(header, source)
        file.seek(place)
        stated = file.read(len(_BLANK))
        if _digest(file, place) != stated:
            raise CacheFileError(source, "is damaged: its contents do not have the checksum it states")
    metadata: dict[str, Any] = json.loads(json.loads(header)["__metadata__"].get("kvpass", "{}"))
    if not isinstance(metadata.get("format"), int):
        raise CacheFileError(source, "is no cache file of kvpass: its metadata states no format")
    if metadata["format"] > FORMAT:
        raise CacheFileError(
            source,
            f"has format {metadata['format']}, written by kvpass {metadata.get('kvpass_version')}; "
            f"this kvpass reads formats up to {FORMAT}",
        )
    return metadata


def read_tensors(path: str | Path, device: torch.device | str = "cpu") -> dict[str, Tensor]:
    """The tensors of a file that :func:`read_metadata` accepted, each with a storage of its own."""
    source = Path(path)
    try:
        loaded = load_file(source, device="cpu")
    except SafetensorError as error:
        raise CacheFileError(source, f"is damaged: {error}") from None
    return {name: tensor.to(device, copy=True) for name, tensor in loaded.items()}


def _read_header(file: Any, path: Path) -> bytes:
    """The JSON header; the file's size is held against what it promises."""
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
    if size < _LENGTH_BYTES or not 0 < length <= min(_MAX_HEADER, size - _LENGTH_BYTES):
        raise CacheFileError(path, f"is no cache file, or is damaged or truncated: {size} bytes")
    header: bytes = file.read(length)
    try:
        described = json.loads(header)
        ends = [entry["data_offsets"][1] for name, entry in described.items() if name != "__metadata__"]
        promised = _LENGTH_BYTES + length + max(ends, default=0)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
        raise CacheFileError(path, "is no cache file, or is damaged: its header cannot be read") from None
    if promised != size:
        state = "truncated" if isinstance(promised, int) and promised > size else "damaged"
        raise CacheFileError(path, f"is {state}: {size} bytes where its header promises {promised}")
    return header


def _digest_place(header: bytes, path: Path) -> int:
    """Where in the file the digest stands."""
    if header.count(_MARK) != 1:
        raise CacheFileError(path, "is no cache file of kvpass, or is damaged: its header states no checksum")
    return _LENGTH_BYTES + header.index(_MARK) + len(_MARK)


def _digest(file: Any, place: int) -> bytes:
    """SHA-256 of the whole file with zeros for digits at ``place``, as 64 hexadecimal digits."""
    found = hashlib.sha256()
    file.seek(0)
    found.update(file.read(place))
    found.update(_BLANK)
    file.seek(place + len(_BLANK))
    while chunk := file.read(_CHUNK):
        found.update(chunk)
    return found.hexdigest().encode()
