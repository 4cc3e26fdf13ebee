"""A logits processor that changes no logit: through it vLLM tells which request is in which row."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, MoveDirectionality
from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsProcessor as LogitsProcessorV2

from kvpass.vllm import versions
from kvpass.vllm.admission import Rows
from kvpass.vllm.refusals import checked_settings


class PromptRows(LogitsProcessor, LogitsProcessorV2):
    """Made with each engine, before its model.

    vLLM has two model runners, each of which refuses processors of the other's kind. With ours the second one works
    as without kvpass; where kvpass is configured, it is refused.
    """

    def __init__(self, vllm_config: Any, *of_runner: Any) -> None:
        versions.forget_backend()
        settings = checked_settings(vllm_config)
        self.active, documents = settings is not None, None
        if settings is not None:
            from kvpass.vllm.documents import load

            versions.check_platform(vllm_config)
            documents = load(vllm_config, settings, versions.ranks())
        self.rows = Rows.latest = Rows(documents)

    def is_argmax_invariant(self) -> bool:
        return True

    def add_request(self, req_idx: int, sampling_params: Any) -> bool:
        """Tell the second model runner that no logit is changed."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        if self.active and batch_update is not None:
            moved = [(source, to, how == MoveDirectionality.SWAP) for source, to, how in batch_update.moved]
            self.rows.update(batch_update.removed, batch_update.added, moved)

    def apply(self, logits: Tensor, *of_runner: Any) -> Tensor:
        return logits
