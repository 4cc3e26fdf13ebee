"""Padding: the first real token of each row of a prompt, the real tokens of rows that continue."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvpass.cache.cache import CompressedCache
from kvpass.errors import CacheMismatchError
from kvpass.graphs.find.alibi import STEP


def first_real_column(attention_mask: Tensor | None, rows: int, columns: int) -> Tensor:
    """Return the first real column of each row, int64 ``[rows]`` on the CPU.

    Args:
        attention_mask: ``[rows, columns]``, zeros before the real tokens; None when nothing is padded.
    """
    if attention_mask is None:
        return torch.zeros(rows, dtype=torch.int64, device="cpu")
    if tuple(attention_mask.shape) != (rows, columns):
        raise ValueError(
            f"attention_mask of shape {list(attention_mask.shape)}: must be [{rows}, {columns}] for a new prompt"
        )
    real = attention_mask.cpu().bool()
    start = columns - real.sum(1)
    empty = (start == columns).nonzero()
    if empty.numel():
        raise ValueError(f"attention_mask: row {int(empty[0])} has no real token")
    wrong = (real != (torch.arange(columns, device="cpu") >= start[:, None])).any(1).nonzero()
    if wrong.numel():
        raise ValueError(
            f"attention_mask: row {int(wrong[0])} is not left-padded, and kvpass accepts padding only on the left: "
            'make the batch with tokenizer.padding_side = "left"'
        )
    return start


@dataclass(frozen=True)
class Padding:
    """What a call with padding adds to each row of a cache, and takes back from it."""

    real: Tensor  # new tokens that are no padding, bool [B, T]
    taken: Tensor  # tokens that go first, the last ones of the row, int64 [B]
    mask: Tensor  # of all columns after the call, int64 [B, columns + T]

    def groups(self) -> list[tuple[int, int, Tensor]]:
        """Return rows that are alike, int64 each, behind their numbers of tokens taken back and added."""
        each = list(zip(self.taken.tolist(), self.real.sum(1).tolist(), strict=True))
        device = self.real.device
        return [
            (*alike, torch.tensor([row for row, one in enumerate(each) if one == alike], device=device))
            for alike in sorted(set(each))
        ]


def move_keys(cache: CompressedCache, columns: int) -> None:
    """Add to the numbers of columns that keys hold, high and low part, as the rows of a cache move by so many.

    Raises:
        ValueError: the entries are codes, in which no number can be changed.
    """
    if columns and cache.entry_format != "model":
        raise ValueError(
            f"attention_mask: rows of different lengths with ALiBi and entries={cache.entry_format!r}, whose keys hold "
            'positions as codes: continue each row alone, with its own cache, or use entries="model"'
        )

    def moved(keys: Tensor) -> Tensor:
        numbers = keys[..., -2:].double().sum(-1, keepdim=True) + columns
        low = numbers % STEP
        return torch.cat([keys[..., :-2], (numbers - low).to(keys.dtype), low.to(keys.dtype)], -1)

    for store in cache.state.full_layers if columns else ():
        own = {name: moved(x) if name in ("pool_k", "tail_k") else x.clone() for name, x in store.stored.items()}
        store.buffers = store.buffers._replace(**own)  # all of them: other rows may share the pool


def read_padding(given: Tensor, cache: CompressedCache) -> Padding | None:
    """Return what a mask ``[B, columns + T]`` asks of a cache; None where every row gets all new tokens."""
    if cache.state.padded is None and bool(given.all()) and not bool(cache.state.start.any()):
        return None
    given = given.to(cache.device).bool()
    old, real = given.split([cache.columns, given.shape[1] - cache.columns], 1)
    seen = cache.attention_mask.bool()
    hidden = seen & ~old
    wrong = ((old & ~seen) | (old & (hidden.cumsum(1) > 0))).any(1).nonzero()
    if wrong.numel():
        raise CacheMismatchError(
            f"attention_mask: row {int(wrong[0])} hides other columns than the calls before did, and not only its last "
            "ones; what the cache holds cannot be hidden or shown later"
        )
    empty = (~real.any(1)).nonzero()
    if empty.numel():
        raise ValueError(
            f"attention_mask: row {int(empty[0])} has no real new token: leave the row out (cache.batch_select_indices)"
        )
    taken = hidden.sum(1)
    most = int(taken.max())
    if most == 0 and bool(real.all()):
        return None
    if most:
        where = f"attention_mask: row {int(taken.argmax())} hides its last {most} columns, "
        if not cache.state.only_appends:
            raise ValueError(
                where + "which cannot be taken back: recurrent layers, layers with a sliding window and policies that "
                "evict while decoding have overwritten what was before; continue this row alone, with its own cache"
            )
        if most > cache.state.appended:
            raise CacheMismatchError(
                where
                + f"but hides other columns than those {cache.state.appended} that were appended since the prompt or "
                "the last call with padding; what the cache holds cannot be hidden"
            )
    return Padding(real, taken, given.long())
