"""What the prompts of running and preempted requests kept."""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

import torch
from torch import Tensor

from kvpass.operands import BUFFERS
from kvpass.vllm.admission import Continued


class Kept(NamedTuple):
    """What a prompt kept: positions int32 ``[E]`` in pool order, offsets int32 ``[P]``."""

    positions: Tensor
    offsets: Tensor


class Tables:
    """What is known of each block of an engine, by the unit at which it begins, and what each prompt kept.

    Attributes:
        rows: requests that run at once. Of prompts that are in no block twice as many digests are kept: all that run
            may be preempted together.
        arrivals: counters that kernels of a GPU need, as in :class:`kvpass.operands.AppendBuffers`, of all rows.
        offsets: int32 ``[units, P]``. before: tokens of the prompt that are not in the tails, int64 ``[units]``.
            start, used: slots of the tails in use, likewise.
        means: subtracted from the keys of each head before they become codes, fp32 ``[L, requests, K, D]``; None where
            entries are no codes. number: row of a block's in there.
        kept: by digest of the prompt, so that a request that was preempted, and comes back with its answer so far, gets
            the cache back that it had. nothing: what a prompt of one token kept. digests: of the prompt that a block
            had last, and the unit where it ends, if nothing else was entered there.
    """

    def __init__(
        self, units: int, rows: int, layers: int, kv_heads: int, device: torch.device, means: Tensor | None = None
    ) -> None:
        segments = layers * kv_heads
        self.rows, self.means = rows, means
        self.arrivals = BUFFERS["arrivals"].new({"programs": rows * kv_heads}, device)
        self.offsets = torch.zeros(units, segments + 1, dtype=torch.int32, device=device)
        self.before, self.start, self.used, self.number = torch.zeros(4, units, dtype=torch.int64, device=device)
        self.kept = OrderedDict[bytes, Kept]()
        self.nothing = Kept(self.offsets.new_empty(0), self.offsets.new_zeros(segments + 1))
        self.digests = dict[int, tuple[bytes, int]]()

    def enter(self, block: int, units: int, before: int, digest: bytes, kept: Kept) -> None:
        """Note that a prompt is in a block, and what it kept; forget the oldest of those that are in no block."""
        self.offsets[block], self.before[block] = kept.offsets, before
        for first, (previous, end) in [*self.digests.items()]:
            if first < block + units and block < end:
                self.kept.move_to_end(previous)
                del self.digests[first]
        self.digests[block], self.kept[digest] = (digest, block + units), kept
        held = {known for known, _ in self.digests.values()}
        for old in [known for known in self.kept if known not in held][: -2 * self.rows]:
            del self.kept[old]

    def renumber(self, blocks: Tensor, numbers: Tensor) -> None:
        """Note the numbers of requests, int64 on the device; one that vLLM left out of a step has its mean moved."""
        assert self.means is not None
        self.means[:, numbers] = self.means[:, self.number[blocks]]
        self.number[blocks] = numbers

    def continue_document(self, block: int, document: Continued, offsets: Tensor, mean: Tensor | None = None) -> None:
        """Note that a request continues a document; ``mean``: of the document's keys, ``[L, K, D]``, if codes."""
        self.offsets[block], self.before[block], self.used[block] = offsets, document.tokens, 0
        if self.means is not None and mean is not None:
            self.means[:, self.number[block]] = mean

    def empty(self, blocks: Tensor) -> None:
        """Note that nothing is in some blocks, int64 on the device; the host reads nothing."""
        self.offsets.index_fill_(0, blocks, 0)
        self.before.index_fill_(0, blocks, 0)
