"""Error in a layer's output caused by eviction, and the two published bounds on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from kvpass.policies.observation import Observation

Layers: TypeAlias = Tensor | Sequence[Tensor]  # a tensor for each layer


@dataclass(frozen=True, eq=False)
class OutputLoss:
    """Losses and bounds per layer and row, fp64 ``[L, B]``; no loss is above a bound.

    Attributes:
        loss: ``|y - y_kept|_1``, LAVa's layer attention output loss (arXiv 2509.09754, Lemma 1).
        ada_bound: ``2 * C * sum over heads of the attention that was dropped`` with
            ``C = max over heads and tokens of |v W_O|_1`` (Ada-KV, arXiv 2407.11550, Theorem 3.1).
        lava_bound: ``2 * C * sum over heads of max over tokens |v|_1 * the attention that was dropped`` with
            ``C = max over rows of W_O of their L1 norm`` (LAVa, Theorem 1).
    """

    loss: Tensor
    ada_bound: Tensor
    lava_bound: Tensor


def attention_output_loss(
    queries: Layers, keys: Layers, values: Layers, keep: Tensor, output_weights: Layers
) -> OutputLoss:
    """Measure how much the last query's attention output changes if it attends only kept entries.

    ``y = concat_h(a_h v_h) W_O`` is over the whole prompt, with logits times ``D ** -0.5``; ``y_kept`` is the same with
    a masked to the kept entries and renormalised. Both bounds follow from
    ``|a - a_kept|_1 = 2 * (dropped attention)``. Computed in fp64.

    Args:
        queries, keys, values: as for :func:`kvpass.plan`; only the last query is read.
        keep: a plan's ``keep``, bool ``[L, B, K, N]``, at least one entry per head.
        output_weights: ``o_proj.weight`` of each layer, ``[L, E, H * Dv]`` (``[out, in]`` as in ``torch.nn.Linear``).
    Raises:
        ValueError: shapes that do not fit together, or a head that kept nothing.
    """
    layers = [
        _layer_loss(layer, *tensors)
        for layer, tensors in enumerate(zip(queries, keys, values, keep, output_weights, strict=True))
    ]
    return OutputLoss(*(torch.stack(column) for column in zip(*layers, strict=True)))


def _layer_loss(
    layer: int, q: Tensor, k: Tensor, v: Tensor, keep: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return loss, Ada-KV's bound and LAVa's bound of one layer, each fp64 ``[B]``."""
    batch, kv_heads, length, dim = k.shape
    heads, value_dim = q.shape[1], v.shape[3]
    if keep.shape != (batch, kv_heads, length):
        raise ValueError(f"keep[{layer}].shape={tuple(keep.shape)}: must be {(batch, kv_heads, length)}, as keys say")
    if weight.dim() != 2 or weight.shape[1] != heads * value_dim:
        raise ValueError(f"output_weights[{layer}].shape={tuple(weight.shape)}: must be [E, {heads * value_dim}]")
    if not bool(keep.any(2).all()):
        raise ValueError(f"keep[{layer}]: every head must keep at least 1 entry")
    obs = Observation(q[:, :, -1:], k, v, dim**-0.5, 0, layer, 1)
    a = obs.last_row.double().unflatten(1, (kv_heads, heads // kv_heads))
    kept = a * keep[:, :, None]
    mass = kept.sum(3, keepdim=True)
    v = v.double()
    by_head = weight.double().T.unflatten(0, (kv_heads, heads // kv_heads, value_dim))
    moved = torch.einsum("bkgn,bknd->bkgd", a - kept / mass, v)
    loss = torch.einsum("bkgd,kgde->be", moved, by_head).abs().sum(1)
    dropped = (1 - mass / a.sum(3, keepdim=True))[..., 0]
    projected = torch.stack(
        [torch.einsum("bnd,gde->bgne", v[:, k], by_head[k]).abs().sum(3).amax((1, 2)) for k in range(kv_heads)]
    ).amax(0)
    largest = v.abs().sum(3).amax(2)
    row_norm = weight.double().abs().sum(0).amax()
    return loss, 2 * projected * dropped.sum((1, 2)), 2 * row_norm * (largest[:, :, None] * dropped).sum((1, 2))
