"""The rotation in front of codes of 4 bits and fewer: it makes the numbers of any vector close to normally distributed.

Source: TurboQuant (arXiv 2504.19874). A cache of such a format holds its keys and values, codes or not, rotated. Dot
products do not change when both sides are rotated: so queries, and new keys and values, are rotated when a step begins,
and outputs are rotated back when it ends.
"""

from __future__ import annotations

import functools
import hashlib
import math

import torch
from torch import Tensor

from kvpass.operands import AppendBuffers, Attention, EvictBuffers, SlotCache


@functools.cache
def parts(dim: int) -> tuple[Tensor, Tensor]:
    """Return what the rotation of vectors of ``dim`` numbers is made of, fp64.

    First they are multiplied with ``signs`` ``[dim]``: the bits of SHAKE-128 of "kvpass", over the root of two^n, the
    largest power of two that divides dim. Then come a cosine transform ``[odd, odd]`` of each ``odd = dim / two^n``
    neighbours (3 for 96), and a Hadamard transform over these. Files depend on it: another rotation is another format.
    """
    odd = dim // (dim & -dim)
    hashed = int.from_bytes(hashlib.shake_128(b"kvpass").digest(-(-dim // 8)), "little")
    size = math.sqrt(odd / dim)
    signs = [size * (1.0 - 2.0 * (hashed >> i & 1)) for i in range(dim)]
    i, j = torch.meshgrid(*[torch.arange(odd, dtype=torch.float64, device="cpu")] * 2, indexing="ij")
    cosines = torch.cos(math.pi / odd * (j + 0.5) * i) * math.sqrt(2 / odd)
    cosines[0] = math.sqrt(1 / odd)
    return torch.tensor(signs, dtype=torch.float64, device="cpu"), cosines


@functools.cache
def rotation(dim: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return the rotation as an orthogonal matrix ``[dim, dim]``; ``x @ rotation`` rotates rows."""
    signs, matrix = parts(dim)
    two = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64, device="cpu")
    while len(matrix) < dim:
        matrix = torch.kron(two, matrix)
    return (matrix * signs).T.contiguous().to(device, dtype)


@functools.cache
def rotation_parts(key_dim: int, value_dim: int) -> tuple[Tensor, Tensor]:
    """Return :func:`parts` of keys and of values, fp32, each in one tensor: C++ kernels rotate by them."""
    k, v = (torch.cat([x.flatten() for x in parts(dim)]).float() for dim in (key_dim, value_dim))
    return k, v


def is_rotated(held: AppendBuffers | EvictBuffers | SlotCache, key_dim: int) -> bool:
    """Whether a cache of keys of ``key_dim`` numbers holds its entries rotated: as codes of 4 bits or fewer."""
    return held.tail.k.shape[-1] < key_dim


def rotated(x: Tensor) -> Tensor:
    """Return rows ``[.., D]`` rotated, in their dtype."""
    return x @ rotation(x.shape[-1], x.device, x.dtype)


def rotated_back(x: Tensor, columns: int | None = None) -> Tensor:
    """Return the rows of which these are the rotated ones; of each the first ``columns`` numbers, or all."""
    return x @ rotation(x.shape[-1], x.device, x.dtype)[:columns].T


def rotated_queries(call: Attention, held: AppendBuffers | SlotCache) -> Attention:
    """Return an attention op as a rotated cache takes it: with rotated queries, in fp32. For others it stays as it is.

    Values that are stored in keys are a part of them that a rotated key does not show, so whole keys are attended as
    values; :func:`rotated_output` returns the part.
    """
    if not is_rotated(held, call.q.shape[3]):
        return call
    return call._replace(q=rotated(call.q.float()), v=call.v if held.tail.v.shape[-1] else call.k)


def rotated_call(call: Attention, held: AppendBuffers | SlotCache) -> Attention:
    """As :func:`rotated_queries`, with rotated queries, keys and values, in their dtype."""
    if not is_rotated(held, call.q.shape[3]):
        return call
    q, k = rotated(call.q), rotated(call.k)
    return call._replace(q=q, k=k, v=rotated(call.v) if held.tail.v.shape[-1] else k)


def rotated_output(out: Tensor, call: Attention, held: AppendBuffers | SlotCache) -> Tensor:
    """Return the output ``[B, H, T, Dv]`` of a call, from that of :func:`rotated_queries` or :func:`rotated_call`."""
    if not is_rotated(held, call.q.shape[3]):
        return out
    return rotated_back(out.transpose(1, 2), call.v.shape[3]).to(call.q.dtype).transpose(1, 2)
