"""Selected blocks and columns against the papers' formulas, token by token."""

import math

import pytest
import torch

from kvpass import block_sparse
from kvpass.block_sparse import MInference, XAttention
from kvpass.operands import Attention
from kvpass.ops import prompt_operators  # noqa: F401 (registers the operators)


def call_of(n, heads=4, kv_heads=2, dim=16, rows=1):
    generator = torch.Generator().manual_seed(n)
    q, k, v = (torch.randn(rows, h, n, dim, generator=generator) for h in (heads, kv_heads, kv_heads))
    return Attention(q * 2, k, v, dim**-0.5)


def sums_of_antidiagonals(q, k, scale, stride, block):
    """Estimated attention of blocks of one head, by loops over groups."""
    n, dim = q.shape
    groups, count = math.ceil(n / stride), math.ceil(n / block)
    q, k = (torch.cat([x, torch.zeros(-n % block, dim)]).double() for x in (q, k))
    mass = torch.zeros(count, count, dtype=torch.float64)
    for i in range(groups):
        logits = [
            sum(q[i * stride + stride - 1 - s] @ k[j * stride + s] for s in range(stride)) * scale / stride
            for j in range(i + 1)
        ]
        for j, weight in enumerate(torch.stack(logits).softmax(0)):
            mass[i * stride // block, j * stride // block] += weight
    return mass


@pytest.mark.parametrize(("n", "stride", "threshold"), [(300, 16, 0.9), (384, 32, 0.5), (700, 64, 0.7), (129, 16, 1.0)])
def test_xattention_takes_the_fewest_blocks_that_hold_the_threshold(n, stride, threshold):
    call = call_of(n)
    blocks, columns = XAttention(threshold=threshold, stride=stride).select(call)
    assert columns.shape == (1, 4, 0) and blocks.shape[-1] == math.ceil(n / 128)
    for head in range(4):
        mass = sums_of_antidiagonals(call.q[0, head], call.k[0, head // 2], call.scale, stride, 128)
        for i, row in enumerate(mass):
            taken = {0, i}
            for j in sorted(set(range(i)) - taken, key=lambda j: -row[j]):
                if row[[*taken]].sum() >= threshold * row.sum() * (1 + 1e-6):
                    break
                taken.add(j)
            found = set(blocks[0, head, i, : i + 1].nonzero().flatten().tolist())
            assert found == taken or abs(row[[*taken]].sum() - threshold * row.sum()) < 1e-4, (head, i)


def test_minference_takes_columns_and_diagonals_of_the_last_queries():
    n, vertical, slash, last = 1216, 40, 103, 64
    call = call_of(n)
    blocks, columns = MInference(vertical_size=vertical, slash_size=slash, last_q=last).select(call)
    for head in range(4):
        logits = call.q[0, head, -last:].double() @ call.k[0, head // 2].double().T * call.scale
        hidden = torch.arange(n) > torch.arange(n - last, n)[:, None]
        weights = logits.masked_fill(hidden, -math.inf).softmax(-1)
        on_columns = weights.sum(0)
        on_diagonals = torch.stack([weights.diagonal(n - last - distance).sum() for distance in range(n)])
        on_columns[:30] = on_diagonals[:100] = math.inf
        assert columns[0, head].tolist() == sorted(on_columns.topk(vertical).indices.tolist())
        taken = on_diagonals.topk(slash).indices
        crossed = torch.zeros(n, n, dtype=torch.bool)
        for distance in taken.tolist():
            crossed |= torch.eye(n, dtype=torch.bool).roll(distance, 0).tril()
        expected = crossed.view(19, 64, 19, 64).any(3).any(1)
        assert torch.equal(blocks[0, head].tril(), expected) and not expected.equal(torch.ones(19, 19).tril().bool())


@pytest.mark.parametrize("prefill", [XAttention(threshold=0.05), MInference(vertical_size=30, slash_size=100)])
def test_the_first_block_the_diagonal_and_the_last_queries_are_always_computed(prefill):
    n = 1000
    blocks = prefill.selected(call_of(n), 200).blocks[0]
    count = blocks.shape[-1]
    full = torch.ones(count, count, dtype=torch.bool).tril()
    assert blocks[:, :, 0].all() and blocks[:, range(count), range(count)].all()
    first = (n - 200) // prefill.block
    assert torch.equal(blocks[:, first:], full[first:].expand(4, -1, -1))
    assert not blocks[:, first - 1].equal(full[first - 1].expand(4, -1)) and not (blocks & ~full).any()
    assert (
        prefill.selected(call_of(n), 1)
        .blocks[0, :, (n - 128) // prefill.block :]
        .equal(full[(n - 128) // prefill.block :].expand(4, -1, -1))
    )


@pytest.mark.parametrize("prefill", [XAttention(stride=32), MInference(vertical_size=50, slash_size=100)])
def test_a_padded_row_selects_what_it_selects_alone(prefill):
    call = call_of(700, rows=3)
    start = torch.tensor([0, 250, 699])
    select = torch.ops.kvpass.select_blocks.default
    blocks, columns = select([*call[:3], None, None], start, prefill.text, queries=32, scale=call.scale)
    for row, first in enumerate(start.tolist()):
        alone = prefill.selected(call.from_column(slice(row, row + 1), first), 32)
        count = alone.blocks.shape[-1]
        assert torch.equal(blocks[row, :, :count, :count], alone.blocks[0]) and not blocks[row, :, count:].any()
        real = columns[row] < 700
        assert torch.equal(columns[row][real].view(4, -1), alone.columns[0])


def test_the_operator_has_the_shapes_of_its_fake():
    call, start = call_of(300), torch.tensor([0])
    for prefill in (XAttention(), MInference(vertical_size=40)):
        torch.library.opcheck(
            torch.ops.kvpass.select_blocks.default,
            ([*call[:3], None, None], start, prefill.text),
            {"queries": 32, "scale": 0.25},
            test_utils=("test_schema", "test_faketensor"),
        )


def test_texts_and_bad_values():
    for prefill in (XAttention(), XAttention(threshold=0.5, dense_layers=2), MInference(slash_size=200)):
        assert block_sparse.from_text(prefill.text) == prefill == block_sparse.resolve(prefill)
    assert XAttention().text == "xattention" and block_sparse.resolve("full") is None
    for wrong in (True, "x", None, XAttention):
        with pytest.raises(ValueError, match="prefill="):
            block_sparse.resolve(wrong)
    for options in ({"threshold": 0.0}, {"threshold": 1.1}, {"stride": 5}, {"dense_layers": -1}):
        with pytest.raises(ValueError, match=f"{next(iter(options))}="):
            XAttention(**options)
    for options in ({"vertical_size": 1}, {"slash_size": 0}, {"last_q": 0}):
        with pytest.raises(ValueError, match=f"{next(iter(options))}="):
            MInference(**options)
    with pytest.raises(ValueError, match="thresold=1: not an option of prefill='xattention'; it has dense_layers, thr"):
        block_sparse.resolve("xattention", thresold=1)
