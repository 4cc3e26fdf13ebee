"""Replays: tokens that run behind a prompt, against all its entries, to show which of them they attend to."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from kvpass.policies.observation import Observation

_ROW_BLOCK = 512


@dataclass(frozen=True, eq=False)
class Replay:
    """Tokens that run behind prompts of one length, each row against all entries of its prompt."""

    ids: Tensor  # int64 [B, T]
    first: int  # they observe entries first <= i < last
    last: int
    sinks: int  # first entries, at most first, that they attend to beside those when they observe


def repetitions(
    ids: Tensor, sinks: int = 4, chunk: int = 2000, overlap: int = 8, asked: Sequence[Sequence[int]] = ((), (), ())
) -> list[Replay]:
    """Return prompts ``[B, N]`` repeated behind themselves; see options of :class:`kvpass.policies.kvzip.KVzip`.

    ``asked``: its ``prompt_ids``, ``again_ids`` and ``suffix_ids``.
    """
    rows, n = ids.shape
    replays: list[Replay] = []
    for first in range(sinks, n, chunk):
        last = min(first + chunk, n)
        before = ids[:, max(first - overlap, 0) : first] if replays else ids[:, :0]
        lead, end = (ids.new_tensor(part).expand(rows, -1) for part in (asked[1 if replays else 0], asked[2]))
        replays.append(Replay(torch.cat([lead, before, end, ids[:, first:last]], 1), first, last, sinks))
    return replays


class Replayed(NamedTuple):
    """A replay in one layer: queries ``[B, H, T, D]`` and keys ``[B, K, T, D]``, RoPE applied; see :class:`Replay`."""

    first: int
    last: int
    sinks: int
    queries: Tensor
    keys: Tensor
    norms: Tensor | None = None  # L2 norm of what enters attention, fp32 [B, T], for policies with that input


def most_attended(
    keys: Tensor,
    replays: Iterable[Replayed],
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    *,
    value_norms: Tensor | None = None,
) -> Tensor:
    """Return the most attention that any row and query head of the group pays an entry, fp32 ``[B, K, N]``.

    The softmax of a row is over the first ``sinks`` entries of its replay, the entries that it observes, and the tokens
    of the replay up to the row; the rest of the prompt is not in it. Zeros for entries that no replay observes. With
    norms, attention is divided by that of the row (rows of norm 0 pay none) and multiplied by that of the entry.

    Args:
        keys: of the prompt, ``[B, K, N, D]``. scale, softcap, sinks: as :class:`Observation` has them. value_norms: of
            the entries for each query head, fp32 ``[B, H, N]``; then all replays have norms.
    """
    attended = torch.zeros(keys.shape[:3], dtype=torch.float32, device=keys.device)
    for replay in replays:
        before, rows = replay.sinks + replay.last - replay.first, replay.queries.shape[2]
        seen = torch.cat([keys[:, :, : replay.sinks], keys[:, :, replay.first : replay.last], replay.keys], 2)
        obs = Observation(replay.queries, seen, seen, scale, rows, 0, 1, softcap, sinks)
        for kv_head in range(keys.shape[1]):
            most = attended[:, kv_head, replay.first : replay.last]
            heads = slice(kv_head * obs.group, (kv_head + 1) * obs.group)
            for row in range(before, obs.length, _ROW_BLOCK):
                end = min(row + _ROW_BLOCK, obs.length)
                paid = obs.attention(kv_head, row, end)[..., replay.sinks : before]
                if value_norms is not None:
                    assert replay.norms is not None
                    norms = replay.norms[:, None, row - before : end - before, None]
                    paid = (paid * torch.where(norms > 0, 1 / norms, 0)).amax(2)
                    paid = (paid * value_norms[:, heads, replay.first : replay.last])[:, :, None]
                torch.maximum(most, paid.amax((1, 2)), out=most)
    return attended
