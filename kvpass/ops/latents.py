"""Latent attention: queries of expanded heads attend rows of which the keys and values of all heads are made.

A row holds a latent ``c`` of R columns, then a rotated part that all heads share. With ``W_k``, ``W_v`` the weights of
a head in :class:`kvpass.operands.Expansion`, its key is ``(W_k c, rotated)`` and its value ``W_v c``. Both are linear
in the latent, so the same logits and outputs come from the row itself, as from one KV head:

    q_nope . (W_k c) = (W_k^T q_nope) . c        sum_j p_j (W_v c_j) = W_v sum_j p_j c_j

Source: DeepSeek-V2 (2405.04434), section 2.1.2. A decode step takes this absorbed form and reads each row once. Many
queries take fewer multiplications with expanded keys and values.
"""

from __future__ import annotations

from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor

from kvpass.operands import Attention, Expansion

EXPANDED_BYTES = 2**28
"""Most bytes of keys and values that are expanded at a time; those of one head, if these are more."""


def _parts(up: Tensor, heads: int, nope: int) -> tuple[Tensor, Tensor]:
    """Return ``W_k`` ``[H, nope, R]`` and ``W_v`` ``[H, Dv, R]`` of all heads."""
    of_heads = up.view(heads, -1, up.shape[1])
    return of_heads[:, :nope], of_heads[:, nope:]


def absorbed_query(q: Tensor, up: Tensor, nope: int) -> Tensor:
    """Return queries of latent rows ``[B, H, T, R + S]`` for those of expanded keys ``[B, H, T, nope + S]``."""
    for_keys, _ = _parts(up, q.shape[1], nope)
    return torch.cat((torch.einsum("bhtn,hnr->bhtr", q[..., :nope], for_keys), q[..., nope:]), -1)


def expanded_output(out: Tensor, up: Tensor, nope: int) -> Tensor:
    """Return the output ``[B, H, T, Dv]`` of expanded values for that of latents ``[B, H, T, R]``."""
    _, for_values = _parts(up, out.shape[1], nope)
    return torch.einsum("bhtr,hvr->bhtv", out, for_values)


def absorbed(call: Attention, expansion: Expansion | None) -> Attention:
    """Return a call of which the queries are those of its rows."""
    return call if expansion is None else call._replace(q=absorbed_query(call.q, *expansion))


def attend_prompt(
    call: Attention,
    expansion: Expansion | None,
    start: Tensor,
    ops: ModuleType,
    sliding_window: int | None = None,
    chunked: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """As ``attend_prompt`` of an implementation, of queries of expanded heads where an expansion is given.

    Keys and values of as many heads are expanded at a time as :data:`EXPANDED_BYTES` hold; where that takes more
    multiplications, the absorbed form is attended.

    Args:
        ops: the implementation.
    """
    if expansion is None:
        return ops.attend_prompt(call, start, sliding_window, chunked)
    if not _pays(call, expansion.up):
        out, lse = ops.attend_prompt(absorbed(call, expansion), start, sliding_window, chunked)
        return expanded_output(out, *expansion), lse
    b, heads, t, dim = call.q.shape
    n, made = call.k.shape[2], len(expansion.up) // heads
    group = max(EXPANDED_BYTES // (b * n * (made + dim) * call.k.itemsize), 1)
    out = call.q.new_empty(b, t, heads, made - expansion.nope).transpose(1, 2)
    lses = list[Tensor | None]()
    for first in range(0, heads, group):
        own = slice(first, first + group)
        out[:, own], lse = ops.attend_prompt(_expanded(call, expansion, own), start, sliding_window, chunked)
        lses.append(lse)
    return out, None if lses[0] is None else torch.cat(lses, 1)  # type: ignore[arg-type]


def _pays(call: Attention, up: Tensor) -> bool:
    """Whether the queries of a block take fewer multiplications with expanded heads, causally.

    Rows are expanded for all columns and absorbed for those of the block; each costs ``R * made`` a head.
    """
    heads, t = call.q.shape[1:3]
    rank, made, before = up.shape[1], len(up) // heads, call.k.shape[2] - t
    return t * (before + t / 2) * (2 * rank - made) > before * rank * made


def _expanded(call: Attention, expansion: Expansion, heads: slice) -> Attention:
    """Return the call of some heads, with their keys and values."""
    up, nope = expansion
    every, rank = call.q.shape[1], up.shape[1]
    own = up.view(every, -1, rank)[heads]
    made = F.linear(call.k[:, 0, :, :rank], own.flatten(0, 1)).unflatten(-1, own.shape[:2]).transpose(1, 2)
    rotated = call.k[..., rank:].expand(-1, len(own), -1, -1)
    k = torch.cat((made[..., :nope], rotated), -1)
    sinks = None if call.sinks is None else call.sinks[heads]
    return call._replace(q=call.q[:, heads], k=k, v=made[..., nope:], sinks=sinks)
