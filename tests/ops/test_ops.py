"""The operators: schemas and fakes by opcheck, numbers against float64, the order of the pool."""

import copy

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import kvpass.ops.schemas  # noqa: F401
from kvpass.operands import Attention, Candidates, Entries, EvictBuffers
from kvpass.ops import reference, slots
from kvpass.ops.compress import keep_entries
from kvpass.policies import resolve
from kvpass.ranks import ONE_PROCESS
from numeric_checks import (
    assert_close,
    assert_rounded,
    decode_case,
    exact_attention,
    hidden_in_prompt,
    observe,
    prefill_buffers,
)

OPS = torch.ops.kvpass
SCALE = 0.3


def qkv(b=2, h=4, k=2, n=40, d=8, dv=8, seed=0, dtype=torch.float32):
    g = torch.Generator().manual_seed(seed)
    shapes = ((b, n, h, d), (b, n, k, d), (b, n, k, dv))
    return [torch.randn(shape, generator=g).to(dtype).transpose(1, 2) * 2 for shape in shapes]


def prefill_state(b, layers, k, d, dv, n, entries, policy, slots=None):
    tail = min(policy.window, n) + 4
    return prefill_buffers(policy, entries, layers, b, k, (d, dv), tail, slots=slots)


def decoding(tokens):
    """Arguments of a step: the call, and a cache without NaN, of two layers, of which the last one is attended."""
    call, held, _ = decode_case([[4, 1], [0, 3]], dim=8, tokens=tokens, slots=9, start=[0, 3], layers=2).arguments
    pool, tail = (Entries(*(x.nan_to_num() for x in side.tensors)) for side in (held.pool, held.tail))
    return call, held._replace(pool=pool, tail=tail)


def test_a_site_of_latent_rows_attends_the_heads_that_are_made_of_them():
    rows, (b, h, n, nope, shared, dv, rank) = qkv(k=1, d=24, dv=16)[1], (2, 4, 40, 5, 8, 6, 16)
    g = torch.Generator().manual_seed(1)
    q, up = torch.randn(b, h, n, nope + shared, generator=g), torch.randn(h, nope + dv, rank, generator=g) / 8
    latent = {"up": up.flatten(0, 1), "nope": nope}
    torch.library.opcheck(OPS.site.default, (q, rows, rows[..., :rank], SCALE), latent)
    made = torch.einsum("bnr,hdr->bhnd", rows[:, 0, :, :rank].double(), up.double())
    k = torch.cat([made[..., :nope], rows[..., rank:].double().expand(-1, h, -1, -1)], -1)
    hidden = torch.ones(n, n, dtype=torch.bool).triu(1)
    expected = exact_attention(Attention(q, k, made[..., nope:], SCALE), hidden).out.value.float()
    assert_close("site", OPS.site.default(q, rows, rows[..., :rank], SCALE, **latent), expected, atol=1e-5)
    query = OPS.absorbed_query(q, **latent)
    torch.library.opcheck(OPS.site.default, (query, rows, rows[..., :rank], SCALE))
    absorbed = OPS.site.default(query, rows, rows[..., :rank], SCALE)
    assert_close("absorbed", OPS.expanded_output(absorbed, **latent), expected, atol=1e-5)


@pytest.mark.parametrize("impl", ["eager", "cpp"])
def test_opcheck_attend_cache_and_attend_evict(impl):
    call, held = decoding(1)
    torch.library.opcheck(OPS.attend_cache.default, (*call, *held.operands, 1, impl))
    call, (pool, offsets, tail, *_) = decoding(2)
    lengths = offsets.diff(dim=1).view(2, 2, 2).transpose(0, 1)
    longest = int(lengths.max())
    positions = torch.full((2, 2, 2, longest + tail.k.shape[3]), slots.EMPTY, dtype=torch.int32)
    positions[..., :longest][torch.arange(longest) >= lengths[..., None]] = slots.ABSENT
    positions[..., longest : longest + 5] = torch.arange(5)
    memory = torch.zeros(1, *positions.shape)
    quota, position = torch.full((2, 2, 2), 3), torch.tensor([5, 5])
    policy = resolve("h2o", window=2).spec
    held = EvictBuffers(pool, offsets, tail, positions, memory, quota, position)
    args = (*call, *held.operands, 1, policy, impl, ONE_PROCESS.spec, None)
    torch.library.opcheck(OPS.attend_evict.default, args)


def test_opcheck_observe_held_and_the_ring_operators():
    call, held = decoding(2)
    scores, masses = torch.full((2, 2, 2, 16), float("-inf")), torch.zeros(2, 2, 2, 16)
    found = [scores, masses, torch.zeros(2, 2, dtype=torch.float64)]
    policy, asked = resolve("snapkv", window=2).spec, (call.q, call.v.shape[3], *call[3:])
    args = (*asked, *held.operands[:5], None, found, torch.tensor([2, 2]), 1, policy, ONE_PROCESS.spec)
    torch.library.opcheck(OPS.observe_held.default, args)
    rings = [torch.zeros(2, 2, 2, 7, 8) for _ in range(2)]
    seen, first = torch.tensor(40), torch.tensor([0, 3])
    torch.library.opcheck(OPS.columns_held.default, (seen, first, 7, True))
    held = OPS.columns_held.default(seen, first, 7, True)
    for tokens, impl in ((3, "eager"), (3, "cpp"), (1, "cpp")):
        new = Attention(*qkv(n=tokens), SCALE)
        torch.library.opcheck(OPS.attend_ring.default, (*new, *rings, held, seen, 1, first, impl))


def test_a_selective_scan_continues_from_its_state():
    """Pieces of a text, some longer than the operator corrects at once, give what the whole text gives."""
    module = "transformers.models.jamba.modeling_jamba"
    if not hasattr(pytest.importorskip(module), "mamba_selective_scan"):
        pytest.skip("this transformers has no function of that name")
    torch.manual_seed(0)
    n, channels, size = 150, 6, 4
    x, dt, z = (torch.randn(2, channels, n) for _ in range(3))
    b, c = (torch.randn(2, size, n) for _ in range(2))
    a, d, bias = -torch.rand(channels, size), torch.randn(channels), torch.randn(channels)
    given = torch.zeros(2, channels, size)
    whole, end = OPS.mamba.default(x, dt, a, b, c, given, d, z, bias, module)
    outs, state = [], given
    for part in (slice(0, 2), slice(2, 3), slice(3, 80), slice(80, n)):
        pieces = [value[..., part] for value in (x, dt, b, c, z)]
        out, state = OPS.mamba.default(*pieces[:2], a, *pieces[2:4], state, d, pieces[4], bias, module)
        outs.append(out)
    assert_close("output", torch.cat(outs, 2), whole, atol=1e-4)
    assert_close("state", state, end, atol=1e-4)
    assert not given.any(), "the state that comes in is not written to"


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1)])
@pytest.mark.parametrize("options", [{}, {"softcap": 2.0}, {"sinks": True}, {"window": 4}], ids=str)
@pytest.mark.parametrize("dv", [8, 6])
@pytest.mark.parametrize("last", [23, 20, 11, 1])
def test_prompt_attention_of_the_last_tokens_of_padded_rows(heads, options, dv, last):
    h, kv = heads
    q, k, v = qkv(h=h, k=kv, n=23, dv=dv)
    start, columns = torch.tensor([5, 0]), torch.arange(23)  # rows in any order
    softcap, sinks = options.get("softcap"), torch.linspace(-1, 2, h) if options.get("sinks") else None
    window = options.get("window")
    call = Attention(q, k, v, SCALE, softcap, sinks)
    expected = exact_attention(call, hidden_in_prompt(columns, columns, start, window)).out.tokens(slice(-last, None))
    assert_rounded("out", reference.attend_prompt(call._replace(q=q[:, :, -last:]), start, window)[0], expected)


PACKED = [(2, 16, 16, torch.float32), (150, 80, 80, torch.float16), (129, 100, 64, torch.bfloat16)]
PACKED += [(40, 72, 0, torch.float32)]


@pytest.mark.parametrize(("entries", "dim", "value_dim", "dtype"), PACKED)
def test_pack_orders_entries_by_layer_head_and_position(entries, dim, value_dim, dtype):
    policy, rows, groups = resolve("lava", window=2), 3, 4
    state = prefill_state(rows, 2, 2, dim, value_dim, 20, torch.zeros(rows).long(), policy, slots=entries)
    state = state._replace(pool_k=state.pool_k.to(dtype), pool_v=state.pool_v.to(dtype))
    for pool in (state.pool_k, state.pool_v):
        pool.copy_(torch.randn(pool.shape))
    state.slot_stats.copy_(torch.rand(state.slot_stats.shape))
    for row in range(rows):
        state.slots[reference.OWNER, row] = torch.randint(-1, groups - 1, (entries,))  # one segment is empty
        state.slots[reference.POSITION, row] = torch.randperm(entries * 10)[:entries]
    state.slots[:, -1, entries // 2 :] = -1  # as the cache allocates them
    state.pool_k[-1, entries // 2 :] = float("nan")
    before = copy.deepcopy(state)
    for _ in range(2):  # the second time nothing moves
        reference.pack(state)
        for row in range(rows):
            owner, _, position = before.slots[:, row].tolist()
            order = [e for _, _, e in sorted(zip(owner, position, range(entries), strict=True)) if owner[e] >= 0]
            bounds = [sum(0 <= owner[e] < group for e in order) for group in range(groups + 1)]
            assert state.offsets[row].tolist() == bounds
            used = len(order)
            assert (state.slots[reference.OWNER, row, used:] == -1).all()
            for name in ("pool_k", "pool_v"):
                assert torch.equal(getattr(state, name)[row, :used], getattr(before, name)[row, order])
            for name in ("slots", "slot_stats"):
                assert torch.equal(getattr(state, name)[:, row, :used], getattr(before, name)[:, row, order])


def test_pack_copies_an_eighth_of_the_pool_at_a_time():
    state = prefill_state(1, 2, 2, 128, 128, 20, torch.zeros(1).long(), resolve("lava", window=2), slots=64)
    state.slots[reference.POSITION, 0] = torch.arange(64).flip(0)
    state.slots[reference.OWNER] = 1
    copies = []

    class Record(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            found = func(*args, **(kwargs or {}))
            if func is torch.ops.aten.index.Tensor:
                copies.append(found.nbytes)
            return found

    for number in (16, 16):  # a pool in order stays as it is
        with Record():
            reference.pack(state)
        assert len(copies) == number
    assert max(copies) == state.pool_k.nbytes // 8


def test_winners_that_do_not_fit_and_a_full_pool_raise_instead_of_dropping_entries():
    keep = torch.ones(2, 2, 3, dtype=torch.bool)
    owner = torch.full((2, 8), slots.EMPTY, dtype=torch.int32)
    owner[1, 3:6] = 0
    with pytest.raises(RuntimeError, match="more winners than free slots"):
        reference.assign_slots(keep, owner)
    keep[1, 0, 0] = False
    assert reference.assign_slots(keep, owner)[1].tolist() == [1, 2, 3, -1, -1, -1, 4, 5]
    policy = resolve("lava", window=2)
    q, k, v = qkv(b=1, n=20)
    start, entries = torch.tensor([0]), torch.tensor([8])
    state = prefill_state(1, 1, 2, 8, 8, 20, entries, policy, slots=5)
    _, *seen = observe(reference, Attention(q, k, v, SCALE), start, start, 0, 1, policy)
    with pytest.raises(RuntimeError, match="pool of 5 slots is full"):
        keep_entries(reference, state, Candidates(k, v, *seen, start), 0, policy)
