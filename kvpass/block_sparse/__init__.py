"""Block-sparse attention of prompts, one file per paper: ``kvpass.compile(model, ..., prefill="xattention")``."""

from __future__ import annotations

import functools
from dataclasses import fields, replace
from typing import Any, Literal

from kvpass.block_sparse.base import BlockSparse
from kvpass.block_sparse.minference import MInference
from kvpass.block_sparse.xattention import XAttention
from kvpass.config import one_of
from kvpass.policies.base import name_and_options

__all__ = ["BlockSparse", "MInference", "PrefillName", "XAttention", "from_text", "resolve"]

PrefillName = Literal["full", "minference", "xattention"]

_KINDS: dict[str, type[BlockSparse]] = {kind.name: kind for kind in (MInference, XAttention)}


def resolve(prefill: str | BlockSparse, **options: Any) -> BlockSparse | None:
    """Return what ``prefill`` of ``kvpass.compile`` means, with options by name; None: everything is computed.

    Raises:
        ValueError: it is unknown, or an option is unknown or out of range.
    """
    if isinstance(prefill, BlockSparse):
        if type(prefill) not in _KINDS.values():
            raise ValueError(
                f"prefill={prefill!r}: must be 'full', or one of {', '.join(map(repr, _KINDS))} or its class"
            )
        return replace(prefill, **options)
    name = one_of("prefill", prefill, ("full", *_KINDS))
    known = [] if name == "full" else [field.name for field in fields(_KINDS[name])]
    for option, value in options.items():
        if option not in known:
            raise ValueError(
                f"{option}={value!r}: not an option of prefill={name!r}; it has {', '.join(known) or 'none'}"
            )
    return None if name == "full" else _KINDS[name](**options)


@functools.lru_cache(maxsize=256)
def from_text(text: str) -> BlockSparse:
    """Return what has this :attr:`BlockSparse.text`."""
    name, options = name_and_options(text)
    return _KINDS[name](**options)
