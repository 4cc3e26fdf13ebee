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

from kvpass.operands import AppendBuffers, Attention


@functools.cache
def rotation(dim: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return an orthogonal matrix ``[dim, dim]``; ``x @ rotation`` rotates rows.

    Signs, then the Kronecker product of a Hadamard matrix (of the largest power of two that divides dim) and a cosine
    transform (of what is left: 3 of 96). The signs are the bits of SHAKE-128 of "kvpass". Files depend on them: another
    matrix is another format.
    """
    odd = dim // (dim & -dim)
    i, j = torch.meshgrid(*[torch.arange(odd, dtype=torch.float64, device="cpu")] * 2, indexing="ij")
    matrix = torch.cos(math.pi / odd * (j + 0.5) * i) * math.sqrt(2 / odd)
    matrix[0] = math.sqrt(1 / odd)
    two = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64, device="cpu") / math.sqrt(2)
    while len(matrix) < dim:
        matrix = torch.kron(two, matrix)
    hashed = int.from_bytes(hashlib.shake_128(b"kvpass").digest(-(-dim // 8)), "little")
    signs = torch.tensor([1.0 - 2.0 * (hashed >> i & 1) for i in range(dim)], dtype=torch.float64, device="cpu")
    return (matrix * signs).T.contiguous().to(device, dtype)


def is_rotated(held: AppendBuffers) -> bool:
    """Whether a cache holds its entries rotated: its pool holds codes of 4 bits or fewer."""
    return held.pool_k.dtype == torch.uint8


def rotated(x: Tensor) -> Tensor:
    """Return rows ``[.., D]`` rotated, in their dtype."""
    return x @ rotation(x.shape[-1], x.device, x.dtype)


def rotated_back(x: Tensor) -> Tensor:
    """Return the rows of which these are the rotated ones."""
    return x @ rotation(x.shape[-1], x.device, x.dtype).T


def rotated_call(call: Attention) -> Attention:
    """Return an attention op with queries, keys and values rotated; of its output, the rotated one."""
    return call._replace(q=rotated(call.q), k=rotated(call.k), v=rotated(call.v))
