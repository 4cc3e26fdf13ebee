"""Decode and extend kernels in Triton's interpreter, C++, and the eager reference. What they must not read is NaN."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from triton import Config

from kvpass.kernels import cpu, ragged_decode
from kvpass.kernels.cached_attention import HALF_TERMS, LEVEL_TERMS
from kvpass.kernels.ragged_decode import MOST_PIECES, PIECE, TILE, attend_ragged, most_pieces
from kvpass.kernels.ragged_extend import attend_extend
from kvpass.operands import LEVELS, AppendBuffers, Attention
from kvpass.ops import reference
from kvpass.rotation import rotated_call, rotated_output
from numeric_checks import DecodeCase, assert_rounded, decode_case
from pairwise import each_value, quick, quick_rows

SPLIT = Config({"BLOCK_S": 16, "BLOCK_P": 4, "BLOCK_M": 2}, 4, 2)
EXTEND = Config({"BLOCK_R": 32, "BLOCK_S": 16}, 4, 2)


def eager(case: DecodeCase) -> Tensor:
    return reference.attend_cache(*case.arguments)


def on_cpu(case: DecodeCase) -> Tensor:
    return cpu.attend_cache(*case.arguments)


def counted(case: DecodeCase) -> AppendBuffers:
    return case.held._replace(arrivals=torch.zeros(len(case.call.k) * case.call.k.shape[1], 64, dtype=torch.int32))


def ragged(case: DecodeCase, config: Config | None = SPLIT, programs: int | None = 3) -> Tensor:
    held = counted(case)
    found = turned(case, lambda call: attend_ragged(call, held, case.layer, config, programs))
    assert not held.arrivals.any(), "the counters are not ready for the next step"
    return found


def extend(case: DecodeCase, config: Config | None = EXTEND) -> Tensor:
    return turned(case, lambda call: attend_extend(call, case.held, case.layer, config))


def turned(case: DecodeCase, attend: Callable[[Attention], Tensor]) -> Tensor:
    """As ``ops.cuda`` calls kernels on a rotated cache."""
    return rotated_output(attend(rotated_call(case.call, case.held)), case.call, case.held)


BOTH = (ragged, extend)
PINNED = (lambda case: ragged(case, None, None), lambda case: extend(case, config=None))
"""In the configs of the table."""


def check(case: DecodeCase, ways: Sequence[Callable[[DecodeCase], Tensor]] = BOTH) -> None:
    """Also C++ where entries are no codes: for these it would be compiled for every format and dtype."""
    for way in (eager, *([on_cpu] if case.entry_format == "model" else []), *ways):
        case.check(way, rounds_weights=case.call.q.dtype != torch.float32)


LENGTHS = [[0, 33], [18, 1]]
THREE_HEADS = [[0, 33, 7], [70, 1, 32]]
HALF = torch.float16
CASES: dict[str, tuple[list[list[int]], dict[str, Any]]] = {
    "one head and token, other layer": (LENGTHS, {"group": 1, "layer": 0}),
    "eight heads, sinks, last layer": (LENGTHS, {"group": 8, "start": [0, 3], "sinks": True, "layer": 2}),
    "softcap": (LENGTHS, {"group": 4, "tokens": 3, "softcap": 4.0, "dim": 100}),
    "softcap and sinks, half": (LENGTHS, {"group": 4, "tokens": 2, "softcap": 30.0, "sinks": True, "dtype": HALF}),
    "values of another width": ([[19, 40]], {"dim": 192, "value_dim": 128}),
    "small heads, wide values": ([[19, 40]], {"dim": 16, "value_dim": 48, "tokens": 2}),
    "empty": ([[0, 0]], {"used": 0, "tokens": 2}),
    "empty row": ([[0, 0], [0, 60]], {"tokens": 2}),
    "large scores": (LENGTHS, {"tokens": 2, "sinks": True, "dim": 16, "scale": 60.0}),
    "more query_rows than a block": ([[20, 3]], {"group": 20, "tokens": 2, "dim": 16}),
    **{
        f"tail of {slots} to {used} from {start}, {tokens}": (
            [[20, 0]],
            {"slots": slots, "used": used, "tokens": tokens, "start": [start], "dim": 16},
        )
        for slots, used, tokens, start in (
            *((24, 23, 1, 0), (128, 60, 8, 2), (128, 64, 2, 64), (192, 190, 2, 70)),
            *((128, 63, 1, 0), (100, 0, 3, 0), (24, 16, 8, 16), (128, 64, 1, 63), (200, 130, 3, 129)),
        )
    },
    "eight tokens": (LENGTHS, {"group": 1, "tokens": 8, "start": [0, 3]}),
    "half precision": (LENGTHS, {"group": 4, "dim": 80, "tokens": 5, "dtype": HALF, "start": [2, 0]}),
    "large capped scores": (LENGTHS, {"sinks": True, "dim": 16, "scale": 60.0, "softcap": 80.0}),
    "empty tail": ([[1, 0]], {"used": 0, "tokens": 2}),
    **{f"head dim {dim}": ([[19, 40]], {"dim": dim, "tokens": 2}) for dim in (64, 80, 96, 128, 256)},
    "70 heads": ([[20, 3]], {"group": 70, "dim": 16}),
    "large groups": (LENGTHS, {"group": 8, "tokens": 8, "start": [0, 3]}),
}
QUICK = [*CASES][: [*CASES].index("tail of 128 to 63 from 0, 1")]
"""The others have what these have in other company."""


@pytest.mark.parametrize("name", quick([*CASES], QUICK))
def test_both_kernels_attend_and_append(name):
    lengths, given = CASES[name]
    check(decode_case(lengths, **given))


@pytest.mark.parametrize(
    ("lengths", "given"),
    [
        (LENGTHS, {"group": 4, "tokens": 17, "start": [0, 3]}),
        pytest.param(
            [[20, 0], [3, 40]], {"group": 1, "tokens": 70, "slots": 80, "used": 9}, marks=pytest.mark.exhaustive
        ),
    ],
    ids=["17", "70"],
)
def test_many_tokens(lengths, given):
    check(decode_case(lengths, **given), [extend])


IN_KEYS = [(4, 72, 64, 2, torch.float32), (16, 576, 512, 1, HALF)]
WIDE = [(16, 576, 512, 2, torch.float32), (128, 576, 512, 1, HALF), (5, 288, 256, 3, HALF)]


@pytest.mark.parametrize(("group", "dim", "value_dim", "tokens", "dtype"), quick_rows([*IN_KEYS, *WIDE], IN_KEYS))
def test_values_stored_in_keys(group, dim, value_dim, tokens, dtype):
    """As those of latent rows are, which all query heads read."""
    given = {"group": group, "dim": dim, "value_dim": value_dim, "tokens": tokens, "dtype": dtype, "start": [0, 2]}
    options = {"softcap": 30.0, "sinks": True} if group == 16 else {}
    check(decode_case([[19], [33]], **given, **options, in_keys=True), PINNED)


TAKEN = "kernels on CUDA take 1..256, and up to .* what 16 divides"


@pytest.mark.parametrize(
    ("dim", "value_dim", "entry_format", "message"),
    [
        (577, 64, "model", f"keys have head dim 577: {TAKEN}"),
        (576, 528, "model", f"values have head dim 528: {TAKEN}"),
        (300, 64, "model", f"keys have head dim 300: {TAKEN}"),
        (288, 256, "int8", "codes of 288 columns: kernels on CUDA read codes of at most 256"),
    ],
)
def test_wider_rows_are_refused(dim, value_dim, entry_format, message):
    case = decode_case([[3]], dim=dim, value_dim=value_dim).packed(entry_format)
    for way in BOTH:
        with pytest.raises(ValueError, match=message):
            way(case)


@each_value(entry_format=["int8", "fp8"], dtype=[torch.float32, torch.float16])
def test_codes(entry_format, dtype):
    check(decode_case(LENGTHS, group=2, dim=20, value_dim=7, tokens=2, dtype=dtype, start=[2, 0]).packed(entry_format))


FEW_BITS = [("rot4", torch.float32, 96, 32), ("rot3", torch.float32, 40, 64), ("rot2", torch.float16, 32, 64)]
WIDER = [("rot3", torch.float16, 64, 96), ("rot4", torch.float32, 128, 128)]


@pytest.mark.parametrize(("entry_format", "dtype", "dim", "value_dim"), quick_rows([*FEW_BITS, *WIDER], FEW_BITS))
def test_codes_of_few_bits(entry_format, dtype, dim, value_dim):
    given = {"group": 3, "dim": dim, "value_dim": value_dim, "tokens": 2, "dtype": dtype, "start": [2, 0]}
    case = decode_case(LENGTHS, **given).packed(entry_format)
    check(case, PINNED if entry_format == "rot4" else BOTH)


@pytest.mark.parametrize("bits", LEVELS)
def test_levels_are_polynomials(bits):
    """Up to the rounding of a few steps in fp32; in fp16, each step rounded, with the error of one rounding."""
    levels = torch.tensor(LEVELS[bits], dtype=torch.float64)
    x = (2 * torch.arange(2**bits) + 1) / 2**bits - 1

    def found(dtype: torch.dtype, terms: Sequence[float]) -> Tensor:
        slope = torch.zeros_like(levels)
        for term in reversed(terms):
            slope = (slope * (x * x).double() + torch.tensor(term, dtype=dtype)).to(dtype).double()
        return (x * slope).to(dtype).double()

    torch.testing.assert_close(found(torch.float32, LEVEL_TERMS[bits]), levels, rtol=3e-7, atol=0)
    torch.testing.assert_close(found(torch.float16, HALF_TERMS[bits]), levels, rtol=2**-11, atol=0)


@pytest.mark.parametrize("entry_format", quick(["model", "int8", "rot4"], ["rot4"]))
def test_a_pool_of_one_row_serves_all_rows(entry_format):
    case = decode_case([[0, 17], [20, 1]], group=1, start=[2, 0]).packed(entry_format)
    apart, shared = (case.with_pool_of_first_row(rows) for rows in (2, 1))
    for way in (eager, on_cpu, *BOTH):
        assert torch.equal(way(shared.copied()), way(apart.copied())), way.__name__


def test_a_tail_that_begins_behind_more_empty_tiles_than_are_merged_at_a_time():
    start = SPLIT.kwargs["BLOCK_P"] * TILE.value + 30
    check(decode_case([[0]], slots=start + 50, used=start + 20, tokens=3, start=[start], dim=16))


@pytest.mark.parametrize("programs", quick([1, 2, 9, 40], [9]))
def test_any_number_of_programs_and_the_usual_config(programs):
    case = decode_case([[0, 700], [129, 20]], tokens=2, dim=16)
    expected = case.exact()
    assert_rounded("ragged", ragged(case.copied(), programs=programs), expected)
    assert_rounded("ragged, usual config", ragged(case.copied(), None, programs), expected)
    assert_rounded("extend, usual config", extend(case.copied(), config=None), expected)


@pytest.mark.parametrize("pieces", quick([1, 3, 4, 5, 8, 17], [5]))
def test_any_number_of_pieces_is_merged_by_the_last_program_that_has_one(pieces):
    """Tails of one tile and of two; the other heads and rows are in fewer pieces, or have nothing in the pool."""
    for used in (TILE.value - 1, TILE.value):
        tail = {"slots": TILE.value + 9, "used": used, "start": [0, 60]}
        case = decode_case([[PIECE.value * pieces, 0], [1, 40]], **tail, group=3, tokens=2, dim=16, sinks=True)
        check(case, [lambda given: ragged(given, programs=pieces)])


@pytest.mark.parametrize(
    "case",
    [
        decode_case([[0, 128, 0, 0, 256, 64, 0]], dim=16),  # shares end where heads do
        # a share with several heads, a head with all shares
        decode_case([[1, 2, 3, 140, 1, 1, 0], [0, 0, 0, 0, 0, 0, 490]], dim=16),
        decode_case([[370, 0], [131, 9]], softcap=20.0, sinks=True, layer=2).packed("rot4"),
    ],
    ids=["ends", "several", "codes"],
)
@pytest.mark.parametrize("programs", quick([1, 3, 5, 64], [5]))
def test_shares_over_many_heads(case, programs):
    check(case, [lambda given: ragged(given, programs=programs)])


def test_longer_pieces(monkeypatch):
    monkeypatch.setattr(ragged_decode, "MOST_PIECES", 2)  # of 384 and of 128 entries
    check(decode_case([[0, 700], [129, 20]], tokens=2, dim=16))


@pytest.mark.parametrize(
    ("entries", "pieces"), [(0, 1), (128, 2), (129, 4), (8 * 1024, 128), (2**17, MOST_PIECES), (2**24, MOST_PIECES)]
)
def test_a_large_layer_has_longer_pieces(entries, pieces):
    assert most_pieces(entries) == pieces


def test_strided_queries_keys_and_values():
    case = decode_case(LENGTHS, tokens=3, dim=32)
    heads, kv_heads = case.call.q.shape[1], case.call.k.shape[1]
    fused = torch.randn(2, 3, heads + 2 * kv_heads, 32)
    q, k, v = (x.transpose(1, 2) for x in fused.split([heads, kv_heads, kv_heads], dim=2))
    check(case.changed(q=q, k=k, v=v))
    check(case.changed(**{name: getattr(case.call, name).mT.contiguous().mT for name in "qkv"}), [])


def test_steps_one_after_another_are_one_long_step():
    """Tokens appended one by one, read back from the tail, give what all of them at once give."""
    case = decode_case(LENGTHS, tokens=3, slots=TILE.value + 6, used=TILE.value - 1, dim=16)
    expected = case.exact()
    held = counted(case)
    for token in range(3):
        at = slice(token, token + 1)
        step = case.changed(**{name: getattr(case.call, name)[:, :, at] for name in "qkv"})
        found = extend(step) if token == 1 else attend_ragged(step.call, held, step.layer, SPLIT, 3)
        assert not held.arrivals.any(), f"token {token}: the counters are not ready for the next step"
        assert_rounded(f"token {token}", found, expected.tokens(at))
        case.held.tail_used.add_(1)


REFUSED = [
    ({"layer": 3}, "layer=3"),
    ({"k": torch.zeros(2, 3, 2, 32)}, "k is"),
    ({"v": torch.zeros(2, 3, 1, 32, dtype=torch.float16)}, "v is"),
    ({"q": torch.zeros(2, 6, 25, 32)}, "25 (tokens|entries)"),
    ({"tail_start": torch.zeros(3, dtype=torch.int64)}, "tail_start is"),
    ({"tail_used": torch.tensor([5])}, "tail_used is"),
    ({"sinks": torch.zeros(3)}, "sinks (is|has)"),
    ({"pool_v": torch.zeros(2, 500, 32)}, "pool_v is"),
    ({"tail_k": torch.zeros(3, 2, 3, 32, 24).mT}, "tail_k has strides .*must be contiguous"),
]
SCALES = dict.fromkeys(("pool_k_scale", "pool_v_scale", "tail_k_scale", "tail_v_scale"))
OF_CODES = [
    ("rot4", {"pool_v_scale": None}, "must be given together"),
    ("rot4", {"pool_v_scale": torch.zeros(2, 9)}, "pool_v_scale is torch.float32 .*expected torch.float32"),
    ("rot4", {"tail_k": torch.zeros(3, 2, 3, 24, 1, dtype=torch.uint8)}, "32 numbers must be int8 or fp8 codes, or ui"),
    ("fp8", {"tail_k_scale": torch.zeros(3, 2, 3, 24).double()}, "tail_k_scale is torch"),
    ("fp8", SCALES, "pool_k is torch"),
    ("model", dict.fromkeys(SCALES, torch.zeros(2, 9)), r"tail_k is torch\.float32 .* and has scales"),
]


@pytest.mark.parametrize(
    ("entry_format", "change", "named"), [*(("model", change, named) for change, named in REFUSED), *OF_CODES]
)
def test_bad_arguments_are_named(entry_format, change, named):
    case = decode_case(THREE_HEADS).packed(entry_format)
    before = case.held.tail.k.clone()
    for way in (on_cpu, *BOTH):
        with pytest.raises(ValueError, match=named):
            way(case.changed(**change))
    assert torch.equal(case.held.tail.k.view(torch.uint8), before.view(torch.uint8))


def test_tables_of_another_cache():
    case = decode_case(THREE_HEADS)
    with pytest.raises(ValueError, match="offsets is"):
        extend(case.changed(offsets=case.held.offsets.long()))
    with pytest.raises(ValueError, match="q has strides"):
        extend(case.changed(q=torch.zeros(2, 6, 1, 64)[..., ::2]))
    with pytest.raises(ValueError, match="arrivals are None"):
        attend_ragged(*case.arguments)
    held = counted(case)
    with pytest.raises(ValueError, match="arrivals is"):
        attend_ragged(case.call, held._replace(arrivals=held.arrivals[1:]), case.layer)


def test_more_query_rows_than_counters():
    case = decode_case(THREE_HEADS, tokens=600, slots=640, dim=16)
    with pytest.raises(ValueError, match="rows for a KV head"):
        ragged(case)
