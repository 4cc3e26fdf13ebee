"""What a step of an engine holds: rows that begin, and rows that go on with one token."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from torch import Tensor

from kvpass.vllm.admission import Prompt, Rows


@dataclass(eq=False)
class PromptRow:
    """A row that begins.

    Attributes:
        tokens: of the row in the step. place: its block, on the device. prompt: the part that is the prompt. resumed:
            tables of the pool of a request that was preempted, once the first layer has made them.
    """

    tokens: slice
    place: Tensor
    prompt: Prompt
    resumed: tuple[Tensor, ...] | None = None

    @cached_property
    def block(self) -> int:
        """The block on the host: read once, when the first layer runs."""
        return int(self.place)


class Step(NamedTuple):
    """Rows of a step. Of those that go on: index of the token, block and length with it, int64 on the device."""

    prompts: list[PromptRow]
    tokens: Tensor
    block: Tensor
    length: Tensor


def read_step(starts: Tensor, lengths: Tensor, on_device: tuple[Tensor, Tensor, Tensor], prompts: Rows) -> Step:
    """Divide the rows of a step. Reads no value of the device on the host.

    Args:
        starts: first token of each row and the end, ``[rows + 1]`` on the host. lengths: of each row with the tokens of
            the step, ``[rows]`` on the host. on_device: starts, lengths and block of each row. prompts: of the rows.
    """
    device_starts, device_lengths, blocks = (x.long() for x in on_device)
    new = starts[1:] - starts[:-1]
    begins = (new > 0) & (new == lengths)
    on = (new > 0) & ~begins
    found = [
        PromptRow(slice(int(starts[row]), int(starts[row + 1])), blocks[row], prompts[row])
        for row in begins.nonzero().flatten().tolist()
    ]
    if on.all():
        return Step(found, device_starts[:-1], blocks, device_lengths)
    rows = on.nonzero().flatten().to(blocks.device, non_blocking=True)
    return Step(found, device_starts[rows], blocks[rows], device_lengths[rows])
