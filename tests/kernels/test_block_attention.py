"""Attention to selected blocks and columns, of all three implementations, against attention in double precision."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from triton import Config

from pairwise import quick

pytest.importorskip("triton")

from kvpass.kernels import cpu
from kvpass.kernels.block_attention import attend_blocks
from kvpass.operands import Attention, BlockSelection
from kvpass.ops import reference
from kvpass.ops.reference import attend_selected
from numeric_checks import Exact, PromptCase, assert_rounded, exact_attention, hidden_in_prompt, strided

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def triton(call: Attention, selection: BlockSelection, block: int):
    config = Config({"BLOCK_Q": 64, "BLOCK_K": 32}, 4, 1) if DEVICE == "cpu" else None
    return attend_blocks(call, selection, block, config)


WAYS = {"reference": reference.attend_blocks, "cpp": cpu.attend_blocks, "triton": triton}


@dataclass(frozen=True)
class Case(PromptCase):
    block: int = 64
    columns: int = 0
    share: float = 0.4

    def selection(self) -> BlockSelection:
        """Random blocks, the diagonal, and random columns, some of them none."""
        rows, count = len(self.starts), -(-self.n // self.block)
        blocks = (torch.rand(rows, self.heads, count, count) < self.share) | torch.eye(count, dtype=torch.bool)
        columns = [torch.randperm(self.n)[: self.columns].sort()[0] for _ in range(rows * self.heads)]
        return BlockSelection(blocks.tril(), torch.stack(columns).view(rows, self.heads, -1).int())


CASES = [
    Case(150, 64),
    Case(200, 64, heads=6, kv_heads=2, starts=(0, 70), columns=30),
    Case(270, 80, dv=40, heads=4, kv_heads=2, block=128, columns=50),
    Case(130, 24, starts=(129, 3), softcap=5.0, sinks=True, columns=9),
    Case(140, 64, heads=4, dtype=torch.float16, columns=40),
    Case(140, 40, heads=2, dtype=torch.bfloat16, columns=70, share=0.2),
    Case(1, 64),
]
MORE = [Case(64, 128), Case(65, 256, starts=(0, 64)), Case(333, 96, heads=2, kv_heads=2, block=128, share=1.0)]


def exact(call: Attention, start: Tensor, selection: BlockSelection, block: int) -> list[Exact]:
    column = torch.arange(call.k.shape[2])
    hidden = hidden_in_prompt(column, column, start).expand(-1, call.q.shape[1], -1, -1).clone()
    for row, first in enumerate(start.tolist()):
        own = (column[first:] - first) // block
        seen = selection.blocks[row][:, own[:, None], own]
        single = torch.zeros(len(seen), len(column) + 1, dtype=torch.bool)
        single.scatter_(1, selection.columns[row].long(), True)
        hidden[row, :, first:, first:] |= ~(seen | single[:, None, : len(own)])
    found = exact_attention(call, hidden, rounds_weights=call.q.dtype != torch.float32)
    padding = (column < start.cpu()[:, None])[:, None]
    return [found.out, Exact(found.lse.value.masked_fill(padding, float("-inf")), found.lse.error)]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", quick([*CASES, *MORE], CASES), ids=str)
def test_output_and_lse_are_those_of_a_masked_softmax(case, way):
    if way == "triton" and DEVICE == "cpu" and case.dtype == torch.bfloat16:
        pytest.skip("Triton's interpreter computes with bf16 as with integers")
    (call, start), selection = case.call(), case.selection()
    if way != "triton":
        call, start = Attention(*(x.cpu() if isinstance(x, Tensor) else x for x in call)), start.cpu()
    on_device = BlockSelection(*(x.to(call.q.device) for x in selection))
    call = call._replace(q=strided(call.q), k=strided(call.k), v=strided(call.v))
    found = attend_selected(call, start.cpu(), on_device, case.block, WAYS[way])
    assert found.out.dtype == case.dtype and found.lse.dtype == torch.float32
    assert found.out.transpose(1, 2).is_contiguous()
    for name, x, expected in zip(("out", "lse"), found, exact(call, start, selection, case.block), strict=True):
        assert_rounded(name, x, expected)


@pytest.mark.parametrize("way", ["cpp", "triton"])
def test_wrong_selections_are_refused(way):
    case = Case(150, 64, columns=4)
    (call, _), (blocks, columns) = case.call(), case.selection()
    wrong = [
        (BlockSelection(blocks[:, :1], columns), 64, "blocks is"),
        (BlockSelection(blocks.int(), columns), 64, "blocks is"),
        (BlockSelection(blocks, columns.long()), 64, "columns is"),
        (BlockSelection(blocks, columns), 96, "multiple of 64"),
    ]
    for selection, block, message in wrong:
        with pytest.raises(ValueError, match=message):
            WAYS[way](call, selection, block)
