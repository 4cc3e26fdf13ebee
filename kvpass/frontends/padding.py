"""Left padding: the first real token of each row of a prompt."""

from __future__ import annotations

import torch
from torch import Tensor


def first_real_column(attention_mask: Tensor | None, rows: int, columns: int) -> Tensor:
    """Return the first real column of each row, int64 ``[rows]`` on the CPU.

    Args:
        attention_mask: ``[rows, columns]``, zeros before the real tokens; None when nothing is padded.
    Raises:
        ValueError: another shape, a row without a real token, or padding anywhere but on the left.
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
