"""Rows of a step: which begin, and which go on."""

import pytest
import torch

from kvpass.vllm.admission import Rows
from kvpass.vllm.steps import read_step


def given(new: list[int], lengths: list[int]) -> tuple[torch.Tensor, torch.Tensor, Rows]:
    rows = Rows()
    rows.update([], [(row, None, [row] * length, []) for row, length in enumerate(lengths)], [])
    return torch.tensor([0, *new]).cumsum(0), torch.tensor(lengths), rows


def test_rows_that_begin_and_rows_that_go_on_are_told_apart():
    starts, lengths, rows = given([1, 5, 1, 1, 0], [9, 5, 1, 30, 4])
    step = read_step(starts, lengths, (starts.int(), lengths.int(), torch.tensor([7, 3, 2, 5, 4]).int()), rows)
    begun = [(row.tokens, row.block, row.prompt.length) for row in step.prompts]
    assert begun == [(slice(1, 6), 3, 5), (slice(6, 7), 2, 1)]
    assert (step.tokens.tolist(), step.block.tolist(), step.length.tolist()) == ([0, 7], [7, 5], [9, 30])


@pytest.mark.parametrize("new", [[1, 1], [1, 6]])
def test_no_value_of_the_device_is_read_on_the_host(new):
    starts, lengths, rows = given(new, [9, 6])
    on_device = tuple(torch.empty(n, dtype=torch.int32, device="meta") for n in (3, 2, 2))
    step = read_step(starts, lengths, on_device, rows)
    assert len(step.prompts) == new.count(6)
    assert step.tokens.is_meta and step.block.shape == (2 - len(step.prompts),)
