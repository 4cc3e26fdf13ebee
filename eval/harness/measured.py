"""What the compressed prompts of a run of lm-evaluation-harness kept."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from kvpass.report import Report


@dataclass
class Measured:
    """Sums over a run.

    Attributes:
        prompts_compressed, prompts_not_compressed: rows that were compressed, and that had nothing to compress.
        requests_truncated: requests longer than ``max_length`` allowed. entry_bytes_kept, entry_bytes_full: bytes of
            kept entries right after the prompts, and of all their entries. cache_bytes_peak: the largest cache of a
            batch, generated tokens, spare slots and indices included.
    """

    prompts_compressed: int = 0
    prompts_not_compressed: int = 0
    requests_truncated: int = 0
    entry_bytes_kept: int = 0
    entry_bytes_full: int = 0
    cache_bytes_peak: int = 0

    def add(self, report: Report) -> None:
        """Count the prompts of a report."""
        self.prompts_compressed += report.prompt_lengths.numel()
        self.entry_bytes_kept += int(report.bytes_kept.sum())
        self.entry_bytes_full += report.bytes_full
        self.cache_bytes_peak = max(self.cache_bytes_peak, report.prompt.nbytes)

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, with ``kept_fraction``: kept over all bytes of entries; None when nothing was compressed.

        It is 1 where all layers have sliding windows: nothing is under the budget, so that nothing is evicted.
        """
        fraction = self.entry_bytes_kept / self.entry_bytes_full if self.entry_bytes_full else 1.0
        return {**asdict(self), "kept_fraction": fraction if self.prompts_compressed else None}
