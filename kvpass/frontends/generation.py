"""``kvpass.generate``: a minimal greedy loop for compiled modules without a ``generate`` method."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvpass.frontends.arguments import check_ids
from kvpass.frontends.raw import session
from kvpass.frontends.transformers import CompressedModel

LOOK_EVERY = {"cpu": 1, "cuda": 16}
"""After how many tokens to look whether all rows have ended: on CUDA to look is to wait for the device."""


@torch.no_grad()
def generate(
    module: Any,
    ids: Tensor,
    *,
    max_new_tokens: int,
    positions: bool = False,
    attention_mask: Tensor | None = None,
    eos_token_id: int | None = None,
) -> Tensor:
    """Generate greedily with a module compiled by ``torch.compile(module, backend="kvpass")``.

    Args:
        module: called as ``module(ids)``, or ``module(ids, positions)``; returns logits ``[B, T, vocabulary]``, or
            a tuple that begins with them, such as ``(logits, loss)``.
        ids: prompts, int64 ``[B, N]``; padding only on the left.
        positions: pass true positions, int64 ``[B, T]``, as second argument.
        attention_mask: ``[B, N]``, zeros before the real tokens; needs ``positions``.
        eos_token_id: a row that has produced it is filled with it; the loop ends when all rows have.
    Returns:
        prompts and new tokens, int64 ``[B, N + new]``.
    Raises:
        ValueError: ``max_new_tokens`` is not positive, padding is not on the left, the module returns no logits, or it
            is a model of ``kvpass.compile``, which has its own ``generate``.
        RuntimeError: the module was not compiled by kvpass, or torch ran it eagerly.
    """
    if isinstance(module, CompressedModel):
        raise ValueError("module was compiled by kvpass.compile: use its own generate method")
    check_ids(ids)
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens={max_new_tokens}: must be at least 1")
    mask = torch.ones_like(ids) if attention_mask is None else attention_mask
    where = (mask.cumsum(1) - 1).clamp(min=0)
    finished = torch.zeros(ids.shape[0], dtype=torch.bool, device=ids.device)
    sequence, new = ids, ids
    with session(attention_mask) as active:
        active.expected = ids.shape[1] + max_new_tokens - 1  # the last one is not appended
        for step in range(max_new_tokens):
            out = module(new, where) if positions else module(new)
            logits = out[0] if isinstance(out, tuple) else out
            if active.calls != step + 1:
                raise RuntimeError(
                    "a call of the module ran no graph of kvpass, so nothing was compressed: compile it with "
                    'torch.compile(module, backend="kvpass", fullgraph=True, dynamic=True)'
                )
            if not isinstance(logits, Tensor):
                raise ValueError(f"module returned a {type(logits).__name__}: must be logits [B, T, vocabulary]")
            new = logits[:, -1].argmax(-1, keepdim=True)
            where = where[:, -1:] + 1
            if eos_token_id is not None:
                new = torch.where(finished[:, None], eos_token_id, new)
                finished |= new[:, 0] == eos_token_id
            sequence = torch.cat([sequence, new], 1)
            look = eos_token_id is not None and (step + 1) % LOOK_EVERY[ids.device.type] == 0
            if look and bool(finished.all()):
                break
    if eos_token_id is None:
        return sequence
    ended = (sequence[:, ids.shape[1] :] == eos_token_id).cumsum(1).gt(0).all(0)
    return sequence[:, : ids.shape[1] + int((~ended).sum()) + 1]  # to where the last row ended
