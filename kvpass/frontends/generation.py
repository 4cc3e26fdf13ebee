"""``kvpass.generate``: a minimal greedy loop for compiled modules without a ``generate`` method."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvpass.frontends.arguments import check_ids
from kvpass.frontends.raw import session
from kvpass.frontends.sampling import append_tokens
from kvpass.frontends.transformers import CompressedModel


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
            a tuple that begins with them, such as ``(logits, loss)``. On CUDA perhaps once more than there are tokens.
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
    where, length = (mask.cumsum(1) - 1).clamp(min=0), ids.shape[1] + max_new_tokens
    end = -1 if eos_token_id is None else eos_token_id
    with session(attention_mask) as active:
        active.expected = length - 1  # the last one is not appended

        def forward(text: Tensor) -> Tensor:
            calls, new = active.calls, text.shape[1] - ids.shape[1]
            at = where[:, -1:] + new if new else where
            said = text[:, -1:].clone(memory_format=torch.contiguous_format) if new else text
            out = module(said, at) if positions else module(said)
            logits = out[0] if isinstance(out, tuple) else out
            if active.calls != calls + 1:
                raise RuntimeError(
                    "a call of the module ran no graph of kvpass, so nothing was compressed: compile it with "
                    'torch.compile(module, backend="kvpass", fullgraph=True, dynamic=True)'
                )
            if not isinstance(logits, Tensor):
                raise ValueError(f"module returned a {type(logits).__name__}: must be logits [B, T, vocabulary]")
            return logits[:, -1]

        return append_tokens(
            ids,
            forward(ids),
            forward,
            lambda _, logits: logits.argmax(-1),
            lambda text: (text[:, -1] == end) | (text.shape[1] == length),
            lambda: None,  # the cache goes with the session
            max_length=length,
            pad=eos_token_id,
        )
