"""Block-sparse attention of prompts, one file per paper: ``kvpass.compile(model, ..., prefill="xattention")``."""

from __future__ import annotations

import functools
from typing import Literal

from kvpass.block_sparse.base import BlockSparse
from kvpass.block_sparse.minference import MInference
from kvpass.block_sparse.xattention import XAttention
from kvpass.config import one_of
from kvpass.policies.base import name_and_options

__all__ = ["BlockSparse", "MInference", "PrefillName", "XAttention", "from_text", "resolve"]

PrefillName = Literal["full", "minference", "xattention"]

_KINDS: dict[str, type[BlockSparse]] = {kind.name: kind for kind in (MInference, XAttention)}


def resolve(prefill: str | BlockSparse) -> BlockSparse | None:
    """Return what ``prefill`` of ``kvpass.compile`` means; None: everything is computed. ValueError: unknown."""
    if isinstance(prefill, str):
        name = one_of("prefill", prefill, ("full", *_KINDS))
        return None if name == "full" else _KINDS[name]()
    if type(prefill) not in _KINDS.values():
        raise ValueError(f"prefill={prefill!r}: must be 'full', or one of {', '.join(map(repr, _KINDS))} or its class")
    return prefill


@functools.lru_cache(maxsize=256)
def from_text(text: str) -> BlockSparse:
    """Return what has this :attr:`BlockSparse.text`."""
    name, options = name_and_options(text)
    return _KINDS[name](**options)
