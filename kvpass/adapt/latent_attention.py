"""Latent attention: layers attend their latents, so that these and not expanded heads are cached.

Such a layer (DeepSeek-V2 and later) makes one row of ``kv_lora_rank + qk_rope_head_dim`` values a token, and
``expand_kv`` makes keys and values of all heads from it. With :mod:`kvpass.ops.latents` attention has one KV head,
whose key is that row, and whose value is the first ``kv_lora_rank`` columns of it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from kvpass.adapt.changed_class import changed_class, in_captures, once

_SIZES = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


def _rows(module: nn.Module, kv_nope: Tensor, k_rot: Tensor) -> tuple[Tensor, Tensor]:
    """Take the place of ``expand_kv``: return the row of each token, ``[B, 1, T, columns]``, and the values in it."""
    row = torch.cat((kv_nope, k_rot), -1)
    return row, row[..., : kv_nope.shape[-1]]


def attend_latents(model: nn.Module, divided: bool) -> str | None:
    """Let the layers of a model, which is changed, attend their latents, if all can; then ``attends_latents`` is True.

    Returns why they attend expanded heads; None if they do not, or the model has no latents.
    """
    layers = [
        (path, module)
        for path, module in model.named_modules()
        if callable(getattr(type(module), "expand_kv", None)) and all(hasattr(module, name) for name in _SIZES)
    ]
    if not layers:
        config: Any = getattr(model, "config", None)
        has_latents = getattr(config, "kv_lora_rank", None) is not None
        return "its layers have no expand_kv, as those of transformers before 5.16" if has_latents else None
    if divided:
        return "several processes share the heads"
    for path, module in layers:
        if (reason := cannot_absorb(module) or _expands_otherwise(module)) is not None:
            return f"{path}: {reason}"
    for _, module in layers:
        module.__class__ = _attending(type(module))
    return None


@once
def _attending(kind: Any) -> Any:
    return changed_class(kind, expand_kv=in_captures(_rows, kind.expand_kv), attends_latents=True)


def cannot_absorb(module: Any) -> str | None:
    """Return why the weights of ``kv_b_proj`` alone do not say what it computes; None if they do."""
    projection: Any = getattr(module, "kv_b_proj", None)
    # a subclass may have it too
    has_linear_forward = getattr(type(projection), "forward", None) is nn.Linear.forward
    if not has_linear_forward or "forward" in projection.__dict__ or projection.bias is not None:
        return f"kv_b_proj is a {type(projection).__name__}, not a plain nn.Linear without bias"
    has_hooks = projection._forward_hooks or projection._forward_pre_hooks
    return "kv_b_proj has forward hooks" if has_hooks else None


@torch.no_grad()
def _expands_otherwise(module: Any) -> str | None:
    """Return what ``expand_kv`` does, if it is not what the weights of ``kv_b_proj`` say."""
    weight = module.kv_b_proj.weight
    row = torch.linspace(-1, 1, module.kv_lora_rank + module.qk_rope_head_dim, device=weight.device)
    latent, rotated = row.to(weight.dtype).view(1, 1, 1, -1).split([module.kv_lora_rank, module.qk_rope_head_dim], -1)
    keys, values = module.expand_kv(latent, rotated)
    expanded = torch.cat((keys[0, :, 0, : module.qk_nope_head_dim], values[0, :, 0]), -1)
    expected = nn.functional.linear(latent, weight).view_as(expanded)
    same = torch.allclose(expanded, expected) and bool((keys[..., module.qk_nope_head_dim :] == rotated).all())
    return None if same else "expand_kv does not compute what kv_b_proj says"
