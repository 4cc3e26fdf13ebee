"""A logits processor that changes no logit: through it vLLM tells which request is in which row."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from vllm.platforms import current_platform
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, MoveDirectionality

from kvpass.vllm import versions
from kvpass.vllm.admission import Rows
from kvpass.vllm.refusals import checked_settings


class PromptRows(LogitsProcessor):
    """Made with each engine, before its model."""

    def __init__(self, vllm_config: Any, device: Any, is_pin_memory: bool) -> None:
        versions.forget_backend()
        self.active = checked_settings(vllm_config) is not None
        self.rows = Rows.latest = Rows()
        if self.active and not current_platform.is_cpu():
            raise ValueError("kvpass in vLLM runs on CPUs only: leave 'kvpass' out of additional_config")

    def is_argmax_invariant(self) -> bool:
        return True

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        if self.active and batch_update is not None:
            moved = [(source, to, how == MoveDirectionality.SWAP) for source, to, how in batch_update.moved]
            self.rows.update(batch_update.removed, batch_update.added, moved)

    def apply(self, logits: Tensor) -> Tensor:
        return logits
