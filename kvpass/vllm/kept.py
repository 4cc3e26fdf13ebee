"""What the prompts of running and preempted requests kept."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from kvpass.vllm.devices import OnCPU


class Kept(NamedTuple):
    """What a prompt kept: positions int32 ``[E]`` in pool order, offsets int32 ``[P]``."""

    positions: Tensor
    offsets: Tensor


@dataclass
class Tables:
    """What is known of each block of an engine, and what each prompt kept.

    Attributes:
        most: digests to keep of prompts that are in no block: at least as many as requests run at once, since all of
            them may be preempted together.
        offsets: int32 ``[blocks, P]``. prompt: lengths, int64 ``[blocks]``.
        kept: by digest of the prompt, so that a request that was preempted, and comes back with its answer so far, gets
            the cache back that it had. digests: of the prompt that a block had last. device: its operators.
    """

    most: int
    offsets: Tensor
    prompt: Tensor
    device: OnCPU
    kept: OrderedDict[bytes, Kept] = field(default_factory=OrderedDict)
    digests: dict[int, bytes] = field(default_factory=dict)

    @classmethod
    def empty(cls, most: int, segments: int, device: OnCPU) -> Tables:
        """Return tables of no block.

        Args:
            segments: layers times KV heads.
        """
        return cls(most, torch.zeros(0, segments + 1, dtype=torch.int32), torch.zeros(0, dtype=torch.int64), device)

    def cover(self, blocks: int, device: torch.device) -> None:
        """Make room for this number of blocks, before the first prompt."""
        if self.prompt.shape[0] < blocks:
            self.offsets = torch.zeros(blocks, self.offsets.shape[1], dtype=torch.int32, device=device)
            self.prompt = torch.zeros(blocks, dtype=torch.int64, device=device)
            self.device.cover(blocks, device)

    def enter(self, block: int, length: int, digest: bytes, kept: Kept) -> None:
        """Note that a prompt is in a block, and what it kept; forget the oldest of those that are in no block."""
        self.offsets[block], self.prompt[block] = kept.offsets, length
        self.device.enter(block, kept.offsets)
        before = self.digests.get(block)
        if before is not None:
            self.kept.move_to_end(before)
        self.digests[block], self.kept[digest] = digest, kept
        held = set(self.digests.values())
        for old in [known for known in self.kept if known not in held][: -self.most]:
            del self.kept[old]
