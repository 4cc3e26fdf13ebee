"""What runs on a device reads no value of it on the host and mixes no devices: it works on tensors that have no values.

Tensors on ``meta`` stand for those of the device. Reading one raises, and so does an operation on one of them and one
of the host; the host's own are the start columns of a prompt. Kernels are not launched, only their arguments looked at.
"""

import itertools
from collections.abc import Iterator, Sequence
from types import ModuleType

import pytest
import torch
from torch import Tensor

from kvpass.block_sparse import MInference, XAttention
from kvpass.kernels import (
    append_codes,
    block_attention,
    gather,
    prefill_attention,
    ragged_decode,
    ragged_extend,
    slot_decode,
    slot_lines,
    window_statistics,
)
from kvpass.kernels.prompt_attention import Machine
from kvpass.operands import (
    AppendBuffers,
    Attention,
    BlockSelection,
    Candidates,
    Entries,
    EvictBuffers,
    PolicyInputs,
    RingBuffers,
)
from kvpass.ops import cuda as device
from kvpass.ops import evict, prompt_operators, sliding
from kvpass.ops.compress import keep_entries
from kvpass.ops.entry_formats import packed
from kvpass.ops.reference import attend_selected
from kvpass.policies import POLICIES, resolve
from numeric_checks import observe, prefill_buffers
from pairwise import quick_rows
from policy_variants import VARIANTS
from tiny_models import POLICY_OPTIONS

LAYERS, KV_HEADS, GROUP, DIM, WINDOW, TOKENS, CAPACITY = 3, 2, 2, 16, 4, 37, 64
HEADS = KV_HEADS * GROUP
STARTS = torch.tensor([0, 9, 9])
ROWS = STARTS.numel()
PLAIN = [(name, POLICY_OPTIONS.get(name, {})) for name in sorted(POLICIES)]
WITH_OPTIONS = [variant for variant in VARIANTS if variant[1]]
EVICTING = [name for name, options in PLAIN if resolve(name, window=WINDOW, **options).decode_rule()]


def on_device(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def site(tokens: int, dtype: torch.dtype) -> list[Tensor]:
    return [on_device(ROWS, tokens, heads, DIM, dtype=dtype).transpose(1, 2) for heads in (HEADS, KV_HEADS, KV_HEADS)]


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Names of the kernels that would have been launched, all of whose tensors must be on the device."""
    names: list[str] = []

    def launch(kernel, grid, arguments, *rest, **options):
        names.append(kernel.__name__)
        elsewhere = [name for name, x in arguments.items() if isinstance(x, Tensor) and not x.is_meta]
        assert not elsewhere, f"{kernel.__name__} is given {elsewhere} of the host"

    module: ModuleType
    attend = (block_attention, prefill_attention, ragged_decode, ragged_extend, slot_decode)
    for module in (*attend, append_codes, gather, slot_lines, window_statistics):
        monkeypatch.setattr(module, "launch", launch)
    yield names


def check(name: str, tensor: Tensor, shape: Sequence[int], dtype: torch.dtype) -> None:
    assert (tensor.is_meta, tuple(tensor.shape), tensor.dtype) == (True, tuple(shape), dtype), name
    assert tensor.is_contiguous(), f"{name} has strides {tensor.stride()}"


PARITIES, DTYPES = ["paper", "code"], [torch.float32, torch.bfloat16]
PREFILLS = [*itertools.product(PLAIN + WITH_OPTIONS, PARITIES, DTYPES)]


@pytest.mark.parametrize(
    ("variant", "parity", "dtype"),
    quick_rows(PREFILLS, [*zip(PLAIN, itertools.cycle(PARITIES), itertools.cycle(DTYPES), strict=False)]),
)
def test_a_prefill_up_to_its_packed_pool(variant, parity, dtype, launched, monkeypatch):
    """By Triton's kernel, and by that of a library."""
    monkeypatch.setattr(Machine, "of", lambda device: Machine((8, 0), flash=True))
    name, options = variant
    policy = resolve(name, window=WINDOW, parity=parity, **options)
    entries = 6 if policy.needs_budget else TOKENS
    call = Attention(*site(TOKENS, dtype), 0.3)
    first, rule = on_device(ROWS, dtype=torch.int64), policy.decode_rule()
    rows = 0 if rule is None else rule.rows_per_head
    asked = PolicyInputs(
        on_device(24, HEADS * DIM, dtype=dtype),
        on_device(DIM // 2),
        on_device(ROWS, dtype=torch.int64),
        replayed=on_device(ROWS, KV_HEADS, TOKENS),
        rule_rows=on_device(LAYERS, ROWS, KV_HEADS, GROUP, rows, DIM) if rows else None,
        entered=on_device(ROWS, KV_HEADS, TOKENS),
    )
    shape = (LAYERS, ROWS, KV_HEADS, (DIM, DIM), CAPACITY)
    buffers = prefill_buffers(policy, entries, *shape, dtype=dtype, device="meta")
    for layer in (1, LAYERS - 1):
        out, scores, stats, weight = observe(device, call, STARTS, first, layer, LAYERS, policy, asked)
        assert ("_prefill_kernel" in launched) == (dtype == torch.float32)
        check("output", out.transpose(1, 2), (ROWS, TOKENS, HEADS, DIM), dtype)
        check("scores", scores, (ROWS, KV_HEADS, TOKENS), torch.float32)
        check("stats", stats, (policy.stat_planes, ROWS, KV_HEADS, TOKENS), torch.float32)
        check("weight", weight, (ROWS,), torch.float64)
        candidates = Candidates(call.k, call.v, scores, stats, weight, first)
        keep_entries(device, buffers, candidates, layer, policy)
    device.pack(buffers)
    assert "_gather_kernel" in launched


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("prefill", [XAttention(), MInference(vertical_size=30, slash_size=100)], ids=str)
def test_a_prompt_in_selected_blocks(prefill, dtype, launched):
    tokens = 300
    call, start = Attention(*site(tokens, dtype), 0.3, sinks=on_device(HEADS)), torch.tensor([0, 9, 290])
    operands = [*call[:3], None, None], start, prefill.text
    selection = BlockSelection(*prompt_operators.select_blocks(*operands, queries=32, scale=0.3))
    out, lse = attend_selected(call, start, selection, prefill.block, device.attend_blocks)
    assert launched == ["_blocks_kernel"] * 3
    check("output", out.transpose(1, 2), (ROWS, tokens, HEADS, DIM), dtype)
    check("lse", lse, (ROWS, HEADS, tokens), torch.float32)


def cached(dtype: torch.dtype) -> tuple[Entries, Tensor, Entries]:
    """Pool, offsets and tails."""
    pool = Entries(*(on_device(ROWS, 50, DIM, dtype=dtype) for _ in range(2)))
    tail = Entries(*(on_device(LAYERS, ROWS, KV_HEADS, CAPACITY, DIM, dtype=dtype) for _ in range(2)))
    return pool, on_device(ROWS, LAYERS * KV_HEADS + 1, dtype=torch.int32), tail


OPTIONAL = pytest.mark.parametrize(
    ("softcap", "sinks"), [(None, None), (5.0, on_device(HEADS))], ids=["plain", "softcap-sinks"]
)


@OPTIONAL
@pytest.mark.parametrize("entry_format", ["model", "rot3"])
@pytest.mark.parametrize(("tokens", "kernel"), [(1, "_attend_share"), (8, "_attend_share"), (9, "_attend_queries")])
def test_a_step_on_the_cache(tokens, kernel, entry_format, softcap, sinks, launched):
    used = [on_device(ROWS, dtype=torch.int64), on_device(dtype=torch.int64)]
    held = AppendBuffers(*cached(torch.bfloat16), *used, on_device(ROWS * KV_HEADS, 64, dtype=torch.int32))
    if entry_format != "model":
        held = packed(held, entry_format)
    out = device.attend_cache(Attention(*site(tokens, torch.bfloat16), 0.3, softcap, sinks), held, 1)
    check("output", out.transpose(1, 2), (ROWS, tokens, HEADS, DIM), torch.bfloat16)
    assert launched == ([kernel] if entry_format == "model" else ["_append_codes", kernel])


@OPTIONAL
@pytest.mark.parametrize("tokens", [1, 2])
@pytest.mark.parametrize("name", EVICTING)
def test_a_step_that_evicts(name, tokens, softcap, sinks, launched):
    policy = resolve(name, window=WINDOW, **POLICY_OPTIONS.get(name, {}))
    wide, numbers = (LAYERS, ROWS, KV_HEADS, CAPACITY + 20), policy.decode_rule().numbers_per_entry
    held = [on_device(*wide, dtype=torch.int32), on_device(numbers, *wide)]
    held += [on_device(LAYERS, ROWS, KV_HEADS, dtype=torch.int64), on_device(ROWS, dtype=torch.int64)]
    if rows := policy.decode_rule().rows_per_head:
        held += [on_device(LAYERS, ROWS, KV_HEADS, GROUP, rows, DIM)]
    call = Attention(*site(tokens, torch.bfloat16), 0.3, softcap, sinks)
    out = evict.attend_evict(call, EvictBuffers(*cached(torch.bfloat16), *held), 1, policy, device)
    check("output", out.transpose(1, 2), (ROWS, tokens, HEADS, DIM), torch.bfloat16)
    judge = ["_rank_kernel", "_pool_kernel"] if name in ("cake", "r_kv") else []
    assert launched == ["_attend_slots", "_finish_slots", *judge, "_evict_lowest"] * tokens


@OPTIONAL
@pytest.mark.parametrize("tokens", [1, 5, TOKENS])
@pytest.mark.parametrize("columns", [16, 64])
def test_a_step_on_a_ring(columns, tokens, softcap, sinks, launched):
    ring = RingBuffers(*(on_device(LAYERS, ROWS, KV_HEADS, columns, DIM, dtype=torch.bfloat16) for _ in range(2)))
    seen, first = on_device(dtype=torch.int64), on_device(ROWS, dtype=torch.int64)
    held = sliding.columns_held(seen, first, columns)
    check("columns", held, (ROWS, columns), torch.int32)
    call = Attention(*site(tokens, torch.bfloat16), 0.3, softcap, sinks)
    outs = [sliding.attend_ring(call, ring, held, seen, 1)]
    if tokens == 1:
        outs.append(sliding.attend_ring_once(call, ring, held, 1, device))
        assert launched == ["_attend_slots", "_finish_slots"]
    for out in outs:
        check("output", out.transpose(1, 2), (ROWS, tokens, HEADS, DIM), torch.bfloat16)
