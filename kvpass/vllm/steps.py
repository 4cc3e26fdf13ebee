"""What a step of an engine holds: rows that begin or have several tokens, and rows that go on with one."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from kvpass.operands import PrefillBuffers
from kvpass.vllm.admission import Prompt, Rows


@dataclass(eq=False)
class PromptRow:
    """A row with tokens of a prompt, and what was generated behind it, if it was preempted."""

    tokens: slice  # of the row in the step
    place: Tensor  # its block, on the device
    prompt: Prompt  # the whole one
    read: int  # tokens of the row that were read before this step, with those of a document
    buffers: PrefillBuffers | None = None  # what the prompt is compressed into, once the first layer has made them

    @property
    def end(self) -> int:
        """Tokens of the row that have been read after this step."""
        return self.read + self.tokens.stop - self.tokens.start

    @property
    def own(self) -> int:
        """How many of its tokens in this step are of what is compressed; those behind them are appended."""
        return min(max(self.prompt.compressed - self.read, 0), self.tokens.stop - self.tokens.start)

    @property
    def appends(self) -> bool:
        """Whether all its tokens are appended: what comes before them is compressed already."""
        return self.read >= self.prompt.compressed

    @property
    def waits(self) -> bool:
        """Whether some tokens of its prompt come in another step, so that keys and values wait until all are there."""
        return not self.appends and (self.read > 0 or self.end < self.prompt.compressed)

    @cached_property
    def block(self) -> int:
        """The block on the host: read once, when the first layer runs."""
        return int(self.place)


class Going(NamedTuple):
    """Rows that go on with one token."""

    tokens: Tensor | slice  # their index in the step
    block: Tensor  # of each row, on the device
    length: Tensor  # of each row with the token, on the device
    tail: int  # slots of the tails of all of them
    of_documents: bool = False  # whether all of them continue documents; else none does


class Step(NamedTuple):
    """Rows of a step.

    A prompt of one token may be a token that is appended to an empty cache (:attr:`BlockLayout.shortest`). A prompt
    that was begun before comes first: another may begin to wait in its place.
    """

    prompts: list[PromptRow]  # rows that begin, or have several tokens
    going: list[Going]
    empty: Tensor  # blocks of rows that go on and have no other token yet, int64 on the device


def read_step(
    starts: Tensor, lengths: Tensor, on_device: tuple[Tensor, Tensor, Tensor], prompts: Rows, shortest: int = 2
) -> Step:
    """Divide the rows of a step. Reads no value of the device on the host.

    Args:
        starts: first token of each row and the end, ``[rows + 1]`` on the host. lengths: of each row with the tokens of
            the step, ``[rows]`` on the host. on_device: starts, lengths and block of each row. prompts: of the rows.
        shortest: tokens of the shortest prompt that begins.
    """
    device_starts, device_lengths, blocks = on_device
    new = starts[1:] - starts[:-1]
    read = lengths - new
    compressed, continues, tails = prompts.of_first(len(new))
    continues = continues > 0
    begins = torch.where(continues, read == compressed, (read < compressed) & (compressed >= shortest))
    several = begins | (new > 1)
    found = [
        PromptRow(slice(int(starts[row]), int(starts[row + 1])), blocks[row], prompts[row], int(read[row]))
        for row in several.nonzero().flatten().tolist()
    ]
    found.sort(key=lambda row: row.read == 0)

    def index(chosen: Tensor) -> Tensor | slice:
        return chosen.nonzero().flatten().to(blocks.device, non_blocking=True) if chosen.any() else slice(0)

    empty = blocks[index((new == 1) & (lengths == 1) & ~begins)].long()
    kinds = {*zip(continues.tolist(), tails.tolist(), strict=True)}
    if not found and len(kinds) == 1 and not continues.any():
        # then row i has token i; rows that vLLM adds to fill a CUDA graph come last, in its block 0
        return Step(found, [Going(slice(len(new)), blocks, device_lengths, int(tails[0]))], empty)
    going = []
    for of_documents, tail in sorted(kinds):
        rows = index((new == 1) & ~begins & (continues == of_documents) & (tails == tail))
        going.append(Going(device_starts[rows].long(), blocks[rows], device_lengths[rows], tail, of_documents))
    return Step(found, [each for each in going if len(each.block)], empty)
