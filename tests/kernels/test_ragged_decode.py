"""Decode and extend kernels, in Triton's interpreter, and the eager reference. What they must not read is NaN."""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from kvpass.kernels.cached_attention import HALF_TERMS, LEVEL_TERMS
from kvpass.kernels.launch import KernelConfig
from kvpass.kernels.ragged_decode import CHUNK_STEP, MOST_CHUNKS, TAIL_TILE, attend_ragged, chunks_of
from kvpass.kernels.ragged_extend import attend_extend
from kvpass.operands import LEVELS, AppendBuffers, Attention
from kvpass.ops import reference
from kvpass.rotation import rotated_call, rotated_output
from numeric_checks import DecodeCase, Exact, assert_rounded, decode_case
from pairwise import each_value, quick, quick_rows

SPLIT = KernelConfig.of(4, 2, BLOCK_S=16, BLOCK_P=4, BLOCK_M=2)
EXTEND = KernelConfig.of(4, 2, BLOCK_R=32, BLOCK_S=16)


def eager(case: DecodeCase) -> Tensor:
    return reference.attend_cache(*case.arguments)


def counted(case: DecodeCase) -> AppendBuffers:
    return case.held._replace(arrivals=torch.zeros(len(case.call.k) * case.call.k.shape[1], 64, dtype=torch.int32))


def ragged(case: DecodeCase, config: KernelConfig | None = SPLIT, chunks: int | None = 3) -> Tensor:
    held = counted(case)
    found = turned(case, lambda call: attend_ragged(call, held, case.layer, config, chunks))
    assert not held.arrivals.any(), "the counters are not ready for the next step"
    return found


def extend(case: DecodeCase, config: KernelConfig | None = EXTEND) -> Tensor:
    return turned(case, lambda call: attend_extend(call, case.held, case.layer, config))


def turned(case: DecodeCase, attend: Callable[[Attention], Tensor]) -> Tensor:
    """As ``ops.cuda`` calls kernels on a rotated cache."""
    return rotated_output(attend(rotated_call(case.call, case.held)), case.call, case.held)


BOTH = (ragged, extend)
PINNED = (lambda case: ragged(case, None, None), lambda case: extend(case, config=None))
"""In the configs of the table."""


def exact(case: DecodeCase) -> Exact:
    return case.exact(rounds_weights=case.call.q.dtype != torch.float32)


def check(case: DecodeCase, ways: Sequence[Callable[[DecodeCase], Tensor]] = BOTH) -> None:
    """Output exact but for rounding; the new entries are in the tail; nothing else changed by a bit."""
    before = case.kept
    for way in (eager, *ways):
        given = case.copied()
        found = way(given)
        assert found.shape == (*case.call.q.shape[:3], case.call.v.shape[3]) and found.dtype == case.call.q.dtype
        assert found.transpose(1, 2).is_contiguous()
        given.check_appended()
        assert_rounded(way.__name__, found, exact(given))
        assert all(map(torch.equal, given.kept, before)), way.__name__


LENGTHS = [[0, 33], [70, 1]]
THREE_HEADS = [[0, 33, 7], [70, 1, 32]]


@pytest.mark.parametrize(
    ("group", "tokens"), quick_rows([(1, 1), (1, 8), (4, 3), (4, 17), (8, 1), (8, 8)], [(1, 8), (4, 17), (8, 1)])
)
def test_tokens_and_groups(group, tokens):
    ways = [extend] if group * tokens > 64 else BOTH
    check(decode_case(LENGTHS, group=group, tokens=tokens, start=[0, 3]), ways)


DIMS = [(100, 100), (192, 128), (16, 48)]
MORE = [(64, 64), (80, 80), (96, 96), (128, 128), (256, 256)]


@pytest.mark.parametrize(("dim", "value_dim"), quick_rows([*DIMS, *MORE], DIMS))
def test_head_dims(dim, value_dim):
    check(decode_case([[19, 40]], dim=dim, value_dim=value_dim, tokens=2))


IN_KEYS = [(4, 72, 64, 2, torch.float32), (16, 576, 512, 1, torch.float16)]
WIDE = [(16, 576, 512, 2, torch.float32), (128, 576, 512, 1, torch.float16), (5, 288, 256, 3, torch.float16)]


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


@pytest.mark.parametrize("tokens", quick([1, 5], [5]))
def test_half_precision(tokens):
    check(decode_case(LENGTHS, group=4, dim=80, tokens=tokens, dtype=torch.float16, start=[2, 0]))


@each_value(entry_format=["int8", "fp8"], dtype=[torch.float32, torch.float16])
def test_codes(entry_format, dtype):
    check(decode_case(LENGTHS, group=2, dim=20, value_dim=7, tokens=2, dtype=dtype, start=[2, 0]).packed(entry_format))


FEW_BITS = [("rot4", torch.float32, 96, 32), ("rot3", torch.float32, 40, 64), ("rot2", torch.float16, 32, 64)]
WIDER = [("rot3", torch.float16, 64, 96), ("rot4", torch.float32, 128, 128)]


@pytest.mark.parametrize(("entry_format", "dtype", "dim", "value_dim"), quick_rows([*FEW_BITS, *WIDER], FEW_BITS))
def test_codes_of_few_bits(entry_format, dtype, dim, value_dim):
    given = {"group": 3, "dim": dim, "value_dim": value_dim, "tokens": 2, "dtype": dtype, "start": [2, 0]}
    case = decode_case([[0, 33], [40, 1]], **given).packed(entry_format)
    check(case, [*BOTH, *PINNED])


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


@pytest.mark.parametrize("entry_format", quick(["model", "int8", "rot4"], ["model", "rot4"]))
def test_a_pool_of_one_row_serves_all_rows(entry_format):
    case = decode_case([[0, 17], [20, 1]], tokens=2, start=[2, 0]).packed(entry_format)
    apart, shared = (case.with_pool_of_first_row(rows) for rows in (2, 1))
    for way in (eager, *BOTH):
        assert torch.equal(way(shared.copied()), way(apart.copied())), way.__name__


def test_scales_that_do_not_fit_are_refused():
    case = decode_case([[37, 0, 5]]).packed("rot4")
    assert case.held.pool.v_scale is not None
    few = case.held.tail.k[..., :1].contiguous()
    for wrong, message in (
        ({"pool_v_scale": None}, "must be given together"),
        ({"pool_v_scale": case.held.pool.v_scale.half()}, "pool_v_scale is"),
        ({"tail_k": few}, "keys of 32 numbers must be int8 or fp8 codes, or uint8"),
    ):
        for way in BOTH:
            with pytest.raises(ValueError, match=message):
                way(case.changed(**wrong))


@each_value(lengths=[[[0, 0]], [[0, 0], [0, 90]], [[1, 0]]], used=[0, 5])
def test_empty_segments(lengths, used):
    check(decode_case(lengths, used=used, tokens=2))


TAILS = [(24, 23, 1, 0), (128, 60, 8, 2), (128, 63, 1, 0), (128, 64, 2, 64), (192, 190, 2, 70), (100, 0, 3, 0)]


@pytest.mark.parametrize(
    ("slots", "used", "tokens", "start"),
    quick_rows([*TAILS, (24, 16, 8, 16), (128, 64, 1, 63), (200, 130, 3, 129)], TAILS),
)
def test_tails(slots, used, tokens, start):
    check(decode_case([[20, 0]], slots=slots, used=used, tokens=tokens, start=[start], dim=16))


@pytest.mark.parametrize("tokens", [1, 3])
def test_a_tail_that_begins_behind_more_empty_tiles_than_are_merged_at_a_time(tokens):
    start = 32 * TAIL_TILE + 30
    check(decode_case([[0]], slots=start + 50, used=start + 20, tokens=tokens, start=[start], dim=16))


@pytest.mark.parametrize("layer", [0, 2])
def test_other_layers(layer):
    check(decode_case(LENGTHS, layer=layer, tokens=2))


CAPPED = [(4.0, False, 3), (None, True, 1)]


@pytest.mark.parametrize(("softcap", "sinks", "tokens"), quick_rows([*CAPPED, (30.0, True, 6)], CAPPED))
def test_softcap_and_sinks(softcap, sinks, tokens):
    check(decode_case(LENGTHS, group=4, tokens=tokens, softcap=softcap, sinks=sinks, dim=32))


def test_large_scores_do_not_overflow():
    case = decode_case(LENGTHS, tokens=2, sinks=True, dim=16)
    check(case.changed(scale=60.0))
    check(case.changed(scale=60.0, softcap=80.0))


@pytest.mark.parametrize("chunks", quick([1, 2, 9, 40], [9]))
def test_any_number_of_chunks_and_the_usual_config(chunks):
    case = decode_case([[0, 130], [5, 64]], tokens=2, dim=32)
    expected = exact(case)
    assert_rounded("ragged", ragged(case.copied(), chunks=chunks), expected)
    assert_rounded("ragged, usual config", ragged(case.copied(), None, chunks), expected)
    assert_rounded("extend, usual config", extend(case.copied(), config=None), expected)


@pytest.mark.parametrize("chunks", quick([1, 3, 4, 5, 8, 17], [4, 5]))
def test_any_number_of_chunks_is_merged_by_the_last_of_them(chunks):
    """Tails of one tile and of two; the other heads and rows are in fewer chunks, or have nothing in the pool."""
    for used in (TAIL_TILE - 1, TAIL_TILE):
        tail = {"slots": TAIL_TILE + 9, "used": used, "start": [0, 60]}
        case = decode_case([[CHUNK_STEP * chunks, 0], [1, 40]], **tail, group=3, tokens=2, dim=16, sinks=True)
        check(case, [lambda given: ragged(given, chunks=chunks)])


@pytest.mark.parametrize(
    "case",
    [
        decode_case([[0, 16, 0, 0, 16, 16, 0]], dim=16),  # chunks end where heads do
        # a chunk with several heads, a head with all chunks
        decode_case([[1, 2, 3, 40, 1, 1, 0], [0, 0, 0, 0, 0, 0, 90]], dim=16),
        decode_case([[5, 5, 5, 5, 5, 5, 5]], dim=16),  # fewer entries than programs have room for
        decode_case([[70, 0], [31, 9]], softcap=20.0, sinks=True, layer=2).packed("rot4"),
    ],
    ids=["ends", "several", "few", "codes"],
)
@pytest.mark.parametrize("chunks", quick([1, 3, 5, 64], [5]))
def test_chunks_over_many_heads(case, chunks):
    check(case, [lambda given: ragged(given, chunks=chunks)])


def test_more_chunks_than_are_merged_at_a_time():
    check(decode_case([[1057, 0]], dim=16), [lambda given: ragged(given, chunks=40)])


@pytest.mark.parametrize(
    ("entries", "chunks"), [(0, 1), (128, 1), (129, 2), (8 * 1024, 64), (2**17, MOST_CHUNKS), (2**24, MOST_CHUNKS)]
)
def test_a_large_layer_has_longer_chunks(entries, chunks):
    assert chunks_of(entries) == chunks


@pytest.mark.parametrize(("group", "tokens"), quick_rows([(70, 1), (20, 4)], [(20, 4)]))
def test_more_query_rows_than_a_block(group, tokens):
    check(decode_case([[20, 3]], group=group, tokens=tokens, dim=16))


def test_many_tokens():
    check(decode_case([[20, 0], [3, 40]], group=1, tokens=70, slots=80, used=9, start=[0, 4], dim=16), [extend])


def test_strided_queries_keys_and_values():
    case = decode_case(LENGTHS, tokens=3, dim=32)
    heads, kv_heads = case.call.q.shape[1], case.call.k.shape[1]
    fused = torch.randn(2, 3, heads + 2 * kv_heads, 32)
    q, k, v = (x.transpose(1, 2) for x in fused.split([heads, kv_heads, kv_heads], dim=2))
    check(case.changed(q=q, k=k, v=v))


def test_steps_one_after_another_are_one_long_step():
    """Tokens appended one by one, read back from the tail, give what all of them at once give."""
    case = decode_case(LENGTHS, tokens=4, slots=TAIL_TILE + 6, used=TAIL_TILE - 2, dim=16)
    expected = exact(case)
    held = counted(case)
    for token in range(4):
        at = slice(token, token + 1)
        step = case.changed(**{name: getattr(case.call, name)[:, :, at] for name in "qkv"})
        found = extend(step) if token == 1 else attend_ragged(step.call, held, step.layer, SPLIT, 3)
        assert not held.arrivals.any(), f"token {token}: the counters are not ready for the next step"
        assert_rounded(f"token {token}", found, expected.tokens(at))
        case.held.tail_used.add_(1)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"layer": 3}, "layer=3"),
        ({"layer": -1}, "layer=-1"),
        ({"k": torch.zeros(2, 3, 2, 32)}, "k is"),
        ({"v": torch.zeros(2, 3, 1, 32, dtype=torch.float16)}, "v is"),
        ({"q": torch.zeros(2, 7, 1, 32)}, "7 heads"),
        ({"q": torch.zeros(2, 6, 25, 32)}, "25 tokens"),
        ({"q": torch.zeros(2, 6, 1, 64)[..., ::2]}, "q has strides"),
        ({"tail_start": torch.zeros(3, dtype=torch.int64)}, "tail_start is"),
        ({"tail_used": torch.tensor([5])}, "tail_used is"),
        ({"sinks": torch.zeros(3)}, "sinks is"),
        ({"pool_v": torch.zeros(2, 500, 32)}, "pool_v is"),
    ],
)
def test_bad_arguments_are_named(change, named):
    case = decode_case(THREE_HEADS)
    before = case.held.tail.k.clone()
    for way in BOTH:
        with pytest.raises(ValueError, match=named):
            way(case.changed(**change))
    assert torch.equal(case.held.tail.k.view(torch.uint8), before.view(torch.uint8))


def test_tables_of_another_cache():
    case = decode_case(THREE_HEADS)
    with pytest.raises(ValueError, match="offsets is"):
        extend(case.changed(offsets=case.held.offsets.long()))
    with pytest.raises(ValueError, match="arrivals are None"):
        attend_ragged(*case.arguments)
    held = counted(case)
    with pytest.raises(ValueError, match="arrivals is"):
        attend_ragged(case.call, held._replace(arrivals=held.arrivals[1:]), case.layer)


def test_more_query_rows_than_counters():
    case = decode_case(THREE_HEADS, tokens=600, slots=640, dim=16)
    with pytest.raises(ValueError, match="rows for a KV head"):
        ragged(case)
