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
from kvpass.ops import cpu as ops_cpu
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


@pytest.mark.parametrize(
    ("case", "queries", "window"),
    [
        (Case(200, 64, heads=6, kv_heads=2, starts=(0, 70), dtype=torch.bfloat16), 90, None),
        (Case(170, 40, dv=24, starts=(0, 99), softcap=5.0), 170, 300),
        (Case(333, 80, heads=4, kv_heads=4, starts=(0, 5), sinks=True), 77, 100),
        (Case(260, 64, starts=(9,), dtype=torch.float16), 129, 64),
        (Case(150, 64, starts=(149, 20), sinks=True, softcap=3.0), 1, 1),
        (Case(576, 576, dv=512, heads=3, dtype=torch.bfloat16), 65, None),
    ],
    ids=str,
)
def test_the_last_tokens_of_a_prompt_on_a_cpu(case, queries, window):
    call, start = case.call()
    call = Attention(*(x.cpu() if isinstance(x, Tensor) else x for x in call))
    start, column = start.cpu(), torch.arange(case.n)
    call = call._replace(q=strided(call.q[:, :, -queries:]), k=strided(call.k), v=strided(call.v))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops_cpu, "_torch_is_as_fast", lambda *_: False)
        out, _ = ops_cpu.attend_prompt(call, start, window)
    assert out.dtype == case.dtype and out.transpose(1, 2).is_contiguous()
    hidden = hidden_in_prompt(column[-queries:], column, start, window)
    expected = exact_attention(call, hidden, rounds_weights=case.dtype != torch.float32).out
    padding = (column[-queries:] < start[:, None])[:, None, :, None]
    expected = Exact(expected.value.masked_fill(padding, 0.0), expected.error)
    assert_rounded("out", out, expected)
    again, whole = call._replace(q=call.q[:, :, 1:]), ops_cpu._torch_is_as_fast(call, window)
    if not whole and queries > 1:
        assert torch.equal(ops_cpu.attend_prompt(again, start, window)[0], out[:, :, 1:]), "no query knows the others"


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
