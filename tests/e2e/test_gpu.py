"""The same contracts on a CUDA device, and those that only a device has; skipped without one."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama import modeling_llama

import kvpass
from compiled_models import compiled_anew, greedy, padded
from kvpass.frontends import sampling
from kvpass.operands import (
    Attention,
    Candidates,
    Entries,
    PolicyInputs,
    PrefillBuffers,
    RingBuffers,
    SlotCache,
    by_name,
)
from kvpass.ops import reference, slots
from kvpass.ops.compress import keep_entries
from kvpass.ops.sliding import keep_newest
from kvpass.policies import POLICIES, resolve
from masked_oracle import kept_columns
from numeric_checks import (
    DecodeCase,
    assert_best,
    assert_close,
    decode_case,
    logits_before,
    observe,
    prefill_buffers,
)
from tiny_models import POLICY_OPTIONS, random_ids, tiny_model

if torch.cuda.is_available():  # elsewhere tests/kernels loads the kernels, when they are to be interpreted
    from kvpass.ops import cuda as device

pytestmark = pytest.mark.gpu

PLACE = "cuda"
LAYERS, KV_HEADS, GROUP, WINDOW, TOKENS = 3, 2, 4, 8, 133
STARTS = torch.tensor([0, 9, 120])
ERROR = {torch.float16: 2e-3, torch.bfloat16: 1.5e-2}
"""Norm of the difference over the norm of the fp32 reference; operands and output are rounded to the dtype."""
HALVES = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=["fp32", "fp16", "bf16"])
MARGIN = 1e-4
"""Of fp32 logits that are as good as equal."""
HUGE = 1e30
"""Above all numbers but the scores by which a policy puts the first tokens before others."""
SITES = [(dim, dim, None, False) for dim in (64, 128, 256)]
SITES += [(80, 80, 20.0, True), (128, 128, 5.0, True), (192, 128, None, True), (576, 512, None, False)]
SITES += [(576, 512, 5.0, True)]
"""Key and value dims, soft cap, and whether there are sinks."""


@contextmanager
def no_synchronisation() -> Iterator[None]:
    """The device must not be waited for inside."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def site(dtype: torch.dtype, dim: int = 64, value_dim: int = 64, tokens: int = TOKENS, seed: int = 0) -> list[Tensor]:
    """q, k and v of one site on the device, as a model hands them over."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((KV_HEADS * GROUP, dim), (KV_HEADS, dim), (KV_HEADS, value_dim))
    return [
        torch.randn(STARTS.numel(), tokens, heads, size, generator=generator).to(PLACE, dtype).transpose(1, 2)
        for heads, size in shapes
    ]


def sinks_of(with_sinks: bool) -> Tensor | None:
    return torch.linspace(-3, 3, KV_HEADS * GROUP, device=PLACE) if with_sinks else None


def exact(value: object) -> object:
    """The same for the eager reference: a tensor, or those of a tuple, on the CPU, in fp32 if it has fractions."""
    if isinstance(value, tuple):
        return type(value)(*map(exact, value))
    on_cpu = value.cpu() if isinstance(value, Tensor) else value
    return on_cpu.float() if isinstance(on_cpu, Tensor) and on_cpu.is_floating_point() else on_cpu


def policy_inputs(dtype: torch.dtype) -> PolicyInputs:
    """All that a policy may ask for of a :func:`site`, on the device; the scores that it is given are random."""
    generator = torch.Generator().manual_seed(1)
    rows, heads, dim = STARTS.numel(), KV_HEADS * GROUP, 64
    scores = torch.rand(2, rows, KV_HEADS, TOKENS, generator=generator).to(PLACE)
    return PolicyInputs(
        projection=torch.randn(40, heads * dim, generator=generator).to(PLACE, dtype),
        frequencies=(0.9 ** torch.arange(dim // 2)).to(PLACE),
        entries=torch.full((rows,), 20, device=PLACE),
        replayed=scores[0],
        entered=scores[1],
    )


def check(name: str, found: Tensor, expected: Tensor, error: float) -> None:
    """Close by the norm of the difference, infinite in the same places, nowhere NaN; huge numbers apart from others."""
    found, expected = found.cpu().double(), expected.double()
    assert not found.isnan().any(), f"{name} has NaN"
    assert torch.equal(found.isinf(), expected.isinf()), f"{name} is infinite elsewhere"
    huge = expected.abs() > HUGE
    for left_out in (huge | expected.isinf(), ~huge | expected.isinf()):
        one, other = (x.masked_fill(left_out, 0) for x in (found, expected))
        relative = float((one - other).norm() / other.norm().clamp(min=1e-12))
        assert relative <= error, f"{name}: relative error {relative:.2e} above {error:.0e}"


# -- operators are the eager reference (attention of a prompt: tests/kernels) ------------------------------------------


@HALVES
@pytest.mark.parametrize(
    ("name", "latent"), [*((name, False) for name in sorted(POLICIES)), ("cake", True), ("h2o", True), ("lava", True)]
)
def test_what_a_policy_observes_of_heads_and_of_latent_rows(dtype, name, latent):
    policy = resolve(name, window=WINDOW, **POLICY_OPTIONS.get(name, {}))
    q, k, v = site(dtype, 576, 512) if latent else site(dtype)
    call = Attention(q, k, k[..., :512], 0.05) if latent else Attention(q, k, v, 0.2)
    arguments = [call, STARTS, STARTS.to(PLACE), 1, LAYERS, policy, *([] if latent else [policy_inputs(dtype)])]
    expected = observe(reference, *map(exact, arguments))
    found = observe(device, *arguments)
    for what, one, other in zip(("output", "scores", "traces", "weight"), found, expected, strict=True):
        check(what, one, other, ERROR[dtype])


def buffers(policy, entries: int, dtype: torch.dtype, dim: int, place: str) -> PrefillBuffers:
    shape = (LAYERS, STARTS.numel(), KV_HEADS, (dim, dim), WINDOW + 24)
    return prefill_buffers(policy, entries, *shape, dtype=dtype, device=place)


def compress(backend, policy, entries: int, dtype: torch.dtype, dim: int, place: str) -> PrefillBuffers:
    """The packed state after all layers; what the layers score comes from the eager reference."""
    state = buffers(policy, entries, dtype, dim, place)
    for layer in range(LAYERS):
        call = Attention(*site(dtype, dim, dim, seed=layer), 0.2)
        _, *observed = observe(reference, exact(call), STARTS, STARTS, layer, LAYERS, policy)
        candidates = Candidates(*(x.to(place) for x in (call.k, call.v, *observed, STARTS)))
        keep_entries(backend, state, candidates, layer, policy)
    backend.pack(state)
    return state


@HALVES
@pytest.mark.parametrize("dim", [64, 80, 128])
@pytest.mark.parametrize("name", ["lava", "cake", "snapkv", "full"])
def test_the_cascade_moves_the_same_rows_into_the_same_places(dtype, dim, name):
    policy = resolve(name, window=WINDOW, **POLICY_OPTIONS.get(name, {}))
    entries = 20 if policy.needs_budget else TOKENS
    expected = compress(reference, policy, entries, dtype, dim, "cpu")
    found = compress(device, policy, entries, dtype, dim, PLACE)
    assert torch.equal(found.offsets.cpu(), expected.offsets), "other numbers of entries per head"
    live = expected.slots[reference.OWNER] >= 0
    for plane in (reference.OWNER, reference.POSITION):
        assert torch.equal(found.slots.cpu()[plane][live], expected.slots[plane][live]), f"plane {plane}"
    for table in ("pool_k", "pool_v"):
        assert torch.equal(getattr(found, table).cpu()[live], getattr(expected, table)[live]), f"{table}: other rows"
    for table in ("tail_k", "tail_v"):
        one, other = getattr(found, table).cpu(), getattr(expected, table)
        assert torch.equal(one[..., :WINDOW, :], other[..., :WINDOW, :]), table


CACHE = {"lengths": [[0, 130], [64, 65], [1, 300]], "group": GROUP, "slots": 100, "used": 63, "start": [0, 5, 62]}


def placed(case: DecodeCase) -> DecodeCase:
    """The case on the device, with counters of the programs of a KV head."""
    given = case.call._asdict() | by_name(case.held)
    given["arrivals"] = torch.zeros(case.call.k.shape[0] * case.call.k.shape[1], 64, dtype=torch.int32)
    return case.changed(**{name: x.to(PLACE, copy=True) for name, x in given.items() if isinstance(x, Tensor)})


def check_step(case: DecodeCase) -> None:
    """Output and new entries of a step on the device."""
    step = placed(case)
    found = device.attend_cache(*step.arguments)
    tails = {name: x.cpu() for name, x in by_name(step.held).items() if name.startswith("tail") and x is not None}
    appended = case.changed(**tails)
    appended.check_appended()
    check("output", found, appended.exact().value, ERROR.get(case.call.q.dtype, 1e-5))


@HALVES
@pytest.mark.parametrize(("dim", "value_dim", "softcap", "sinks"), SITES)
@pytest.mark.parametrize("tokens", [1, 8, 17])
def test_attending_the_cache(dtype, dim, value_dim, softcap, sinks, tokens):
    sizes = {"dim": dim, "value_dim": value_dim, "tokens": tokens}
    check_step(decode_case(**CACHE, **sizes, dtype=dtype, softcap=softcap, sinks=sinks))


@DTYPES
@pytest.mark.parametrize("tokens", [1, 8, 17])
def test_attending_latent_rows(dtype, tokens):
    """Values are the first columns of the keys, and stored there only."""
    check_step(decode_case(**CACHE, dim=576, value_dim=512, tokens=tokens, dtype=dtype, in_keys=True))


@DTYPES
@pytest.mark.parametrize("entry_format", ["int8", "fp8", "rot4", "rot3", "rot2"])
@pytest.mark.parametrize(("dim", "value_dim"), [(64, 96), (128, 128)])
@pytest.mark.parametrize("tokens", [1, 17])
def test_attending_a_pool_of_codes(dtype, entry_format, dim, value_dim, tokens):
    sizes = {"dim": dim, "value_dim": value_dim, "tokens": tokens}
    check_step(decode_case(**CACHE, **sizes, dtype=dtype, softcap=5.0, sinks=True).packed(entry_format))


def test_the_last_program_merges_what_all_others_stored() -> None:
    """Programs finish in any order: a replayed step gives the same bits each time, and leaves its counters at zero."""
    lengths = torch.randint(0, 900, (32, KV_HEADS), generator=torch.Generator().manual_seed(0)).tolist()
    case = decode_case(lengths, group=GROUP, dim=128, slots=300, used=290, dtype=torch.bfloat16)
    call, held, layer = placed(case).arguments
    expected = device.attend_cache(call, held, layer)
    check("output", expected, case.exact().value, ERROR[torch.bfloat16])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = device.attend_cache(call, held, layer)
    for _ in range(1000):
        found.zero_()
        graph.replay()
        assert torch.equal(found, expected)
    assert held.arrivals is not None and not held.arrivals.any()


@HALVES
@pytest.mark.parametrize(("softcap", "with_sinks"), [(None, False), (5.0, True)])
@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize(("slots", "chunked"), [(16, False), (200, False), (40, True)])
def test_a_ring_is_filled_and_attended(dtype, softcap, with_sinks, slots, chunked, tokens):
    options = (0.2, softcap, sinks_of(with_sinks))
    rings = [torch.zeros(1, STARTS.numel(), KV_HEADS, slots, 64, device=PLACE, dtype=dtype) for _ in range(2)]
    twins = [exact(ring) for ring in rings]
    prompt = Attention(*site(dtype), *options)
    attend, columns_held = torch.ops.kvpass.attend_ring.default, torch.ops.kvpass.columns_held.default
    expected = reference.attend_prompt(exact(prompt), STARTS, slots, chunked)[0]
    check("prompt", device.attend_prompt(prompt, STARTS, slots, chunked)[0], expected, ERROR[dtype])
    for call, ring in ((exact(prompt), twins), (prompt, rings)):
        keep_newest(RingBuffers(*ring), call.k, call.v, torch.arange(TOKENS, device=call.k.device), 0)
    seen, first = torch.tensor(TOKENS, device=PLACE), STARTS.to(PLACE)
    new = Attention(*site(dtype, tokens=tokens, seed=5), *options)
    held = columns_held(seen, first, slots, chunked)
    assert torch.equal(held.cpu(), columns_held(seen.cpu(), first.cpu(), slots, chunked))
    begin = first if chunked else None
    expected = attend(*exact(new), *twins, held.cpu(), seen.cpu(), 0, None if begin is None else begin.cpu(), "eager")
    check("new", attend(*new, *rings, held, seen, 0, begin, "cpp"), expected, ERROR[dtype])
    assert all(torch.equal(exact(ring), twin) for ring, twin in zip(rings, twins, strict=True))


@HALVES
@pytest.mark.parametrize(("softcap", "with_sinks"), [(None, False), (5.0, True)])
@pytest.mark.parametrize("dim", [64, 128])
def test_a_token_enters_a_cache_of_constant_size(dtype, dim, softcap, with_sinks):
    """Output and weights; who leaves is compared in fp32 with models, where it does not hang on rounding."""
    rows, capacity, width = STARTS.numel(), 40, 340
    offsets = torch.arange(LAYERS * KV_HEADS + 1, dtype=torch.int32).mul(300).expand(rows, -1).contiguous()
    generator = torch.Generator().manual_seed(1)
    shapes = [(rows, 300 * LAYERS * KV_HEADS, dim)] * 2 + [(LAYERS, rows, KV_HEADS, capacity, dim)] * 2
    entries = [torch.randn(shape, generator=generator).to(PLACE, dtype) for shape in shapes]
    held = [Entries(*entries[:2]), offsets.to(PLACE), Entries(*entries[2:])]
    line = (rows, KV_HEADS, width)
    position = torch.rand(line, generator=generator).argsort(-1).int()
    position[:, :, ::7] = slots.EMPTY
    now = torch.tensor([500, 501, 502])
    place = [x.to(PLACE, copy=True) for x in (position, now)]
    call = Attention(*site(dtype, dim, dim, tokens=1), 0.2, softcap, sinks_of(with_sinks))
    twins = [exact(x) for x in held]
    expected, weights = slots.attend_slots(exact(call), SlotCache(*twins, position, now), 1)
    found, got = device.attend_slots(call, SlotCache(*held, *place), 1)
    check("output", found, expected, ERROR[dtype])
    check("weights", got, weights, ERROR[dtype])
    kept = [*twins[0][:2], *twins[2][:2]]
    assert all(torch.equal(exact(x), twin) for x, twin in zip(entries, kept, strict=True))
    assert torch.equal(place[0].cpu(), position)


# -- contracts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["lava", "snapkv", "full", "h2o"])
@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_contract_1_identity_on_cuda(backend, policy):
    model = tiny_model("llama").cuda()
    budget = {} if policy == "full" else {"budget": 10**6}
    fast = kvpass.compile(model, policy=policy, window=8, backend=backend, **budget)
    ids = random_ids(2, 61).cuda()
    assert_close("logits", fast(ids).logits, model(ids).logits, atol=1e-4)
    said = greedy(fast, ids, 12)[:, 61:]
    assert_best("answer", said, logits_before(model, ids, said), margin=MARGIN)


@pytest.mark.parametrize("policy", ["lava", "cake", "h2o", "streaming_llm"])
def test_cuda_keeps_and_says_what_the_cpu_does(policy):
    ids, mask = padded(61, 37)
    options = {"policy": policy, "budget": 16, **POLICY_OPTIONS.get(policy, {})}
    on_device, on_cpu = (compiled_anew(tiny_model("llama").to(place), **options) for place in ("cuda", "cpu"))
    cache = on_device(ids.cuda(), attention_mask=mask.cuda()).past_key_values
    expected = on_cpu(ids, attention_mask=mask).past_key_values
    assert torch.equal(kept_columns(cache, 61).cpu(), kept_columns(expected, 61))
    said = greedy(on_device, ids.cuda(), 12, attention_mask=mask.cuda())[:, 61:].cpu()
    assert_best("answer", said, logits_before(on_cpu, ids, said, attention_mask=mask), margin=MARGIN)


@pytest.mark.parametrize("entries", ["int8", "fp8", "rot4", "rot3", "rot2"])
def test_a_cache_in_fewer_bits_answers_as_its_file_does_on_the_cpu(entries, tmp_path):
    """The same codes on both: prompts that differ by rounding could have others."""
    ids, mask = padded(100, 37)
    model, new = tiny_model("llama", head_dim=32), random_ids(2, 12, seed=3).split([1, 1, 1, 9], 1)

    def fast(place: str):
        return kvpass.compile(model.to(place), policy="lava", budget=40, window=8, entries=entries)

    on_device = fast(PLACE)
    cache = on_device(ids.to(PLACE), attention_mask=mask.to(PLACE)).past_key_values
    cache.save(tmp_path / "codes.kv")
    found = [on_device(part.to(PLACE), past_key_values=cache).logits.cpu() for part in new]
    on_cpu = fast("cpu")
    read = kvpass.load_cache(tmp_path / "codes.kv", on_cpu)
    expected = [on_cpu(part, past_key_values=read).logits for part in new]
    assert_close("logits", torch.cat(found, 1), torch.cat(expected, 1), atol=1e-4)


# -- what only a device has --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize(("family", "policy"), [("llama", "lava"), ("gemma2", "lava"), ("llama", "cake")])
def test_a_decode_step_does_not_synchronise(graphs, family, policy):
    model = tiny_model(family, dtype=torch.bfloat16).cuda()
    options = {"policy": policy, "budget": 16, "window": 8, **POLICY_OPTIONS.get(policy, {})}
    fast = kvpass.compile(model, **options, cuda_graphs=graphs)
    cache = fast(random_ids(2, 61).cuda()).past_key_values
    token = random_ids(2, 1).cuda()
    for _ in range(3):
        fast(token, past_key_values=cache)
    torch.cuda.synchronize()
    with no_synchronisation():
        out = fast(token, past_key_values=cache)
    assert out.logits.isfinite().all()


@pytest.mark.parametrize("policy", ["lava", "cake"])
def test_generate_waits_for_tokens_alone(policy, monkeypatch):
    """It gives the tokens and the cache of transformers' loop, which waits for all that is queued."""
    options = {"policy": policy, **POLICY_OPTIONS.get(policy, {}), "backend": "inductor"}
    fast, ids, answers = compiled_anew(tiny_model("llama").cuda(), **options), random_ids(2, 61).cuda(), []

    def other_tokens(text: Tensor, scores: Tensor) -> Tensor:
        if len(answers) == 1 and text.shape[1] == 64:  # steps are captured by now
            torch.cuda.set_sync_debug_mode("error")
        return scores.scatter(1, text, float("-inf"))

    answer = functools.partial(greedy, fast, ids, logits_processor=[other_tokens], return_dict_in_generate=True)
    ends = {}
    for queuing in ({"cuda"}, {"cuda"}, ()):
        monkeypatch.setattr(sampling, "QUEUING", queuing)
        try:
            answers.append(answer(9, **ends))
        finally:
            torch.cuda.set_sync_debug_mode("default")
        ends = {"eos_token_id": answers[0].sequences[:, 67].tolist(), "pad_token_id": 0}
    _, found, expected = answers
    assert found.sequences.shape[1] == 68 and torch.equal(found.sequences, expected.sequences)
    assert found.past_key_values.columns == expected.past_key_values.columns == 67


@pytest.mark.parametrize("name", ["lava", "cake", "snapkv", "full"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_no_layer_of_a_prefill_synchronises(name, dtype):
    policy = resolve(name, window=WINDOW, **POLICY_OPTIONS.get(name, {}))
    entries = 20 if policy.needs_budget else TOKENS
    call, first = Attention(*site(dtype), 0.2), STARTS.to(PLACE)

    def prefill(state: PrefillBuffers) -> None:
        for layer in range(LAYERS):
            asked = PolicyInputs(entries=state.entries)
            _, *observed = observe(device, call, STARTS, first, layer, LAYERS, policy, asked)
            keep_entries(device, state, Candidates(call.k, call.v, *observed, first), layer, policy)
        device.pack(state)

    states = [buffers(policy, entries, dtype, 64, "cuda") for _ in range(2)]
    prefill(states[0])
    torch.cuda.synchronize()
    with no_synchronisation():
        prefill(states[1])
    assert torch.equal(states[0].slots, states[1].slots)


def test_a_prefill_holds_the_pool_and_one_layer(monkeypatch):
    """Beyond the peak of a forward without a cache, by the allocator's count, at most pool + 1.1 layers of KV."""
    config = LlamaConfig(
        vocab_size=128, hidden_size=1024, intermediate_size=1024, num_hidden_layers=6, num_attention_heads=8,
        num_key_value_heads=8, max_position_embeddings=65536,
    )  # fmt: skip
    with torch.device("cuda"):
        model = LlamaForCausalLM(config).to(torch.bfloat16).eval()
    ids = torch.randint(128, (1, 32768), device="cuda")
    fast = kvpass.compile(model, policy="lava", budget=1024)
    bare = torch.compile(model.forward, fullgraph=True)
    # the mask that transformers makes while it is traced takes more than the whole cache
    monkeypatch.setattr(modeling_llama, "create_causal_mask", lambda *args, **kwargs: None)

    def peak(run) -> int:
        run()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before

    with torch.no_grad():
        without = peak(lambda: bare(ids, use_cache=False, logits_to_keep=1).logits)
        compressed = peak(lambda: fast(ids, logits_to_keep=1).logits)
        pool = fast(ids, logits_to_keep=1).past_key_values.nbytes
    layer = 2 * ids.shape[1] * config.hidden_size * 2
    assert pool < 2 * layer
    assert compressed - without <= pool + 1.1 * layer
