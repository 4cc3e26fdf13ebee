"""Pools in host memory beside a model on a device: a call copies those of one layer at a time."""

from __future__ import annotations

import torch

from kvpass.operands import AppendBuffers

POOL = ("pool_k", "pool_v")
"""Buffers that may stay in host memory: no call writes them, where a policy only appends."""


def layer_on_device(held: AppendBuffers, layer: int, device: torch.device) -> AppendBuffers:
    """Return the buffers of one layer, as if it were the only one, with a copy of its pool on the device.

    Waits for the device, to know where the layer's segments begin and end. The tail is a view: what is appended to it
    is in the cache.

    Args:
        held: entries in the dtype of the model; all but the pool on the device.
    """
    heads = held.tail_k.shape[2]
    bounds = held.offsets[:, layer * heads : (layer + 1) * heads + 1]
    first, end = int(bounds[:, 0].min()), int(bounds[:, -1].max())
    pool_k, pool_v = (
        pool[:, first:end].to(device, non_blocking=True, copy=True, memory_format=torch.contiguous_format)
        for pool in (held.pool_k, held.pool_v)
    )
    return held._replace(
        pool_k=pool_k,
        pool_v=pool_v,
        offsets=(bounds - first).contiguous(),
        tail_k=held.tail_k[layer : layer + 1],
        tail_v=held.tail_v[layer : layer + 1],
    )
