"""The operators on CUDA (``kvpass.ops.cuda``), kernels interpreted on the CPU, against the eager reference."""

import functools

import pytest
import torch

import kvpass
from kvpass.compiler import blocks, prompt
from kvpass.kernels import window_statistics
from kvpass.operands import AppendBuffers, Attention, Candidates, Entries, PolicyInputs
from kvpass.ops import cuda as device
from kvpass.ops import reference, schemas
from kvpass.ops.compress import keep_entries
from kvpass.policies import POLICIES, resolve
from kvpass.policies.lava import Lava
from kvpass.policies.observation import Observation
from numeric_checks import assert_close, assert_rounded, exact_attention, hidden_in_prompt, observe, prefill_buffers
from tiny_models import POLICY_OPTIONS, left_pad, random_ids, tiny_model

LAYERS, KV_HEADS, GROUP, DIM, VALUE_DIM, WINDOW = 3, 2, 2, 16, 12, 4
STARTS = torch.tensor([0, 9, 9])
TOKENS = 37
WEIGHT = torch.randn(20, KV_HEADS * GROUP * VALUE_DIM, generator=torch.Generator().manual_seed(2))
"""Output projection."""
TURNS = 0.2 ** torch.arange(DIM // 2)
"""Inverse frequencies of the rotary embedding."""


def site(seed, tokens=TOKENS, dtype=torch.float32):
    given = {"generator": torch.Generator().manual_seed(seed), "dtype": dtype}
    shapes = ((KV_HEADS * GROUP, DIM), (KV_HEADS, DIM), (KV_HEADS, VALUE_DIM))
    return [torch.randn(len(STARTS), tokens, *shape, **given).transpose(1, 2) for shape in shapes]


@pytest.mark.parametrize("backend", [reference, device], ids=["eager", "device"])
def test_column_sums_of_blocks_add_up_to_those_of_the_prompt(backend):
    call = Attention(*site(0), 0.3)
    total = torch.zeros(*call.q.shape[:3])
    for first, end in ((0, 7), (7, 20), (20, TOKENS)):
        block = Attention(call.q[:, :, first:end], call.k[:, :, :end], call.v[:, :, :end], 0.3)
        lse = backend.attend_prompt(block, STARTS)[1]
        total[..., :end] += backend.column_sums(block, lse, STARTS, STARTS)
    for row, column in enumerate(STARTS.tolist()):
        alone = call.from_column(slice(row, row + 1), column)
        expected = Observation(*alone[:4], WINDOW, 0, LAYERS).column_sum
        assert_close("sums", total[row, :, column:], expected[0], atol=1e-5)
    policy = resolve("h2o", window=WINDOW)
    last = call._replace(q=call.q[:, :, -WINDOW:])
    lse = backend.attend_prompt(last, STARTS)[1]
    found = backend.score_layer(last, lse, STARTS, STARTS, 0, LAYERS, policy, PolicyInputs(summed=total))
    for x, y in zip(found, reference.score_layer(call, None, STARTS, STARTS, 0, LAYERS, policy), strict=True):
        assert_close("h2o", x, y, atol=1e-5)


def exact_prompt(q, k, v, scale, chunk=TOKENS):
    """Attention of a prompt in float64, nothing in padding."""
    column = torch.arange(q.shape[2])
    hidden = hidden_in_prompt(column, column, STARTS, chunk, chunked=True)
    return exact_attention(Attention(q, k, v, scale), hidden).out


def state(policy, entries):
    return prefill_buffers(policy, entries, LAYERS, len(STARTS), KV_HEADS, (DIM, VALUE_DIM), TOKENS)


@functools.cache
def attended(backend, layer):
    """Output and log-sum-exp of the prompt in a layer: the same under every policy."""
    return backend.attend_prompt(Attention(*site(layer), 0.3), STARTS)


def prefill(backend, policy, entries):
    """Outputs of all layers and the packed state."""
    buffers, outputs = state(policy, entries), []
    for layer in range(LAYERS):
        call = Attention(*site(layer), 0.3)
        given = torch.rand(STARTS.numel(), KV_HEADS, TOKENS, generator=torch.Generator().manual_seed(layer))
        asked = PolicyInputs(WEIGHT, TURNS, buffers.entries, replayed=given, entered=given)
        out, lse = attended(backend, layer)
        seen = backend.score_layer(call, lse, STARTS, STARTS, layer, LAYERS, policy, asked)
        keep_entries(backend, buffers, Candidates(call.k, call.v, *seen, STARTS), layer, policy)
        outputs.append(out)
    backend.pack(buffers)
    return outputs, buffers


def appended(buffers):
    """A compressed prompt as a step finds it, its tail copied."""
    pool, tail = Entries(buffers.pool_k, buffers.pool_v), Entries(buffers.tail_k.clone(), buffers.tail_v.clone())
    arrivals = torch.zeros(STARTS.numel() * KV_HEADS, 64, dtype=torch.int32)
    return AppendBuffers(pool, buffers.offsets, tail, torch.tensor([0, 1, 2]), torch.tensor(WINDOW), arrivals)


OWN_SCORES = {"cake", "h2o", "lava", "snapkv", "streaming_llm", "vatp"}
"""Scores of the others are theirs or fewer: how they are split is the same code on every device."""


@pytest.mark.parametrize(
    ("name", "window"),
    [
        *((name, WINDOW) for name in sorted(OWN_SCORES)),
        *(pytest.param(name, WINDOW, marks=pytest.mark.exhaustive) for name in sorted(POLICIES.keys() - OWN_SCORES)),
        ("tova", 0),
        pytest.param("tova", 1, marks=pytest.mark.exhaustive),
    ],
)
def test_prefill_keeps_and_answers_the_same(name, window):
    policy = resolve(name, window=window, **POLICY_OPTIONS.get(name, {}))
    entries = 6 if policy.needs_budget else TOKENS
    _, wanted = prefill(reference, policy, entries)
    outputs, got = prefill(device, policy, entries)
    for layer, out in enumerate(outputs):
        assert_rounded(f"layer {layer}", out, exact_prompt(*site(layer), 0.3))
    assert torch.equal(got.offsets, wanted.offsets), "other numbers of entries per head"
    live = wanted.slots[reference.OWNER] >= 0
    for plane in (reference.OWNER, reference.POSITION):
        assert torch.equal(got.slots[plane][live], wanted.slots[plane][live]), f"plane {plane} of the slots"
    assert torch.equal(got.slots[reference.OWNER] >= 0, live)
    for table in ("pool_k", "pool_v"):
        assert torch.equal(getattr(got, table)[live], getattr(wanted, table)[live]), f"{table} holds other rows"
    torch.testing.assert_close(got.slot_stats[:, live], wanted.slot_stats[:, live], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(got.layer_weights, wanted.layer_weights, atol=1e-5, rtol=1e-4)
    for table in ("tail_k", "tail_v"):
        assert torch.equal(getattr(got, table)[..., :window, :], getattr(wanted, table)[..., :window, :])


@pytest.mark.parametrize(
    ("name", "window", "kernel", "passes"),
    [
        ("lava", WINDOW, "_window_kernel", 1),
        ("cake", WINDOW, "_window_kernel", 1),
        ("tova", 0, "_window_kernel", 1),
        ("tova", WINDOW, "_window_kernel", 2),
        ("vatp", WINDOW, "_column_sum_kernel", 1),
    ],
)
def test_the_keys_are_read_once_for_all_that_a_policy_asks_of_its_window_or_of_all_rows(
    name, window, kernel, passes, monkeypatch
):
    """Also for rows of the batch that begin apart."""
    launched = []
    monkeypatch.setattr(window_statistics, "launch", lambda kernel, *rest, **options: launched.append(kernel))
    policy = resolve(name, window=window, **POLICY_OPTIONS.get(name, {}))
    observe(device, Attention(*site(0), 0.3), STARTS, STARTS, 0, LAYERS, policy)
    assert launched.count(getattr(window_statistics, kernel)) == passes


DIVIDE_OTHERS = {"ada_pyramidkv", "ada_snapkv", "full", "lava_nohead", "lava_pyramid", "lava_uniform", "pyramidkv"}
"""Policies with the scores of snapkv or lava, or none: they differ in how layers and heads divide a budget."""
RAGGED = torch.tensor([0, 9, 32, 33, 35])
"""First real columns; 28, 19, 1, 0 and 0 evictable entries, the last row shorter than the window."""


@functools.cache
def attended_ragged(ops):
    """Output and log-sum-exp of one prompt in rows of different padding."""
    call = Attention(*(x[:1].repeat(len(RAGGED), 1, 1, 1) for x in site(1)), 0.3)
    return ops.attend_prompt(call, RAGGED)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, POLICY_OPTIONS.get(name, {})) for name in sorted(POLICIES.keys() - DIVIDE_OTHERS)),
        *(pytest.param(name, {}, marks=pytest.mark.exhaustive) for name in sorted(DIVIDE_OTHERS)),
        ("vatp", {"sinks": 3}),
        ("lagkv", {"sinks": 2, "lag": 5}),
        ("streaming_llm", {"window": 0, "sinks": 2}),
        ("snapkv", {"layer_split": "cake", "tau1": 1.0, "tau2": 1.0}),
        *(pytest.param("pyramidkv", {"shape": shape}, marks=pytest.mark.exhaustive) for shape in ("entropy", "gini")),
    ],
    ids=str,
)
def test_rows_of_different_padding_are_judged_as_each_alone(name, options):
    policy = resolve(name, **{"window": WINDOW, **options})
    call = Attention(*(x[:1].repeat(len(RAGGED), 1, 1, 1) for x in site(1)), 0.3)
    asked = PolicyInputs(WEIGHT, TURNS, torch.full((len(RAGGED),), 9), replayed=call.k.norm(dim=-1))
    asked = asked._replace(entered=call.k.mean(-1))
    found, expected = (
        (out, *ops.score_layer(call, lse, RAGGED, RAGGED, 0, LAYERS, policy, asked))
        for ops in (device, reference)
        for out, lse in [attended_ragged(ops)]
    )
    for what, one, other in zip(("output", "scores", "stats", "weight"), found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4, msg=lambda text, what=what: f"{what}: {text}")


def test_a_score_of_ones_own_never_sees_padding():
    class OwnScore(Lava):
        def score(self, obs):
            seen.append(obs.length)
            return torch.arange(obs.evictable).float().expand(1, obs.kv_heads, -1)

    seen = []
    call = Attention(*(x[:2] for x in site(0)), 0.3)
    starts = torch.tensor([0, 9])
    observe(device, call, starts, starts, 0, LAYERS, OwnScore(window=WINDOW))
    assert seen == [TOKENS, TOKENS - 9]


def test_any_strides():
    """Queries, keys and values whose last dim is not contiguous, and sinks cut out of a larger table."""
    policy = resolve("lava", window=WINDOW)
    sinks = torch.randn(KV_HEADS * GROUP, 3)[:, 1]
    by_column = [x.mT.contiguous().mT for x in site(0)]
    observed = [
        observe(device, Attention(*x, 0.3, sinks=given), STARTS, STARTS, 0, LAYERS, policy)
        for x, given in ((site(0), sinks.contiguous()), (by_column, sinks))
    ]
    for found, expected in zip(*observed, strict=True):
        assert torch.equal(found, expected)
    states = [state(policy, 6) for _ in range(2)]
    for x, given in zip((site(0), by_column), states, strict=True):
        keep_entries(device, given, Candidates(*x[1:], *observed[0][1:], STARTS), 0, policy)
    for one, other in zip(*states, strict=True):
        torch.testing.assert_close(other, one, atol=0, rtol=0, equal_nan=True)
    _, buffers = prefill(reference, policy, entries=6)
    for tokens in (1, 11):
        new = site(7, tokens)
        found = [
            device.attend_cache(Attention(*x, 0.3, sinks=given), appended(buffers), 1)
            for x, given in ((new, sinks.contiguous()), ([x.mT.contiguous().mT for x in new], sinks))
        ]
        assert torch.equal(*found)


@pytest.mark.parametrize("chunk", [12, 64])
def test_chunks_of_a_prompt_are_attended_the_same(chunk):
    """All tokens, and the last ones, whose first chunk began before them."""
    call = Attention(*site(3), 0.3)
    expected = exact_prompt(*call[:4], chunk=chunk)
    for name, way in (("eager", reference), ("device", device)):
        for tokens in (TOKENS, 7):
            out = way.attend_prompt(call._replace(q=call.q[:, :, -tokens:]), STARTS, chunk, True)[0]
            assert_rounded(name, out, expected.tokens(slice(-tokens, None)))


class OnTheCpu:
    """The operators on CUDA, with the counters that a cache on a CPU does not hold."""

    def __init__(self):
        self.attended = set()

    def __getattr__(self, name):
        return getattr(device, name)

    def attend_prompt(self, call, *rest):
        self.attended.add(tuple(call.k.shape[1::2]))
        return device.attend_prompt(call, *rest)

    def attend_cache(self, call, held, layer):
        arrivals = torch.zeros(call.k.shape[0] * call.k.shape[1], 64, dtype=torch.int32)
        return device.attend_cache(call, held._replace(arrivals=arrivals), layer)


@pytest.mark.exhaustive
@pytest.mark.parametrize("policy", ["lava", "h2o"])
def test_a_model_with_latent_rows_of_published_size(policy, monkeypatch):
    """Rows of 512 + 64: a prompt in blocks, of which the last attends rows, a step, and a question."""
    model = tiny_model("deepseek_v3", layers=1, kv_lora_rank=512, qk_rope_head_dim=64, num_attention_heads=2)
    fast = kvpass.compile(model, policy=policy, budget=14, window=6, backend="eager", prefill_block=32)
    ids, mask = left_pad([random_ids(1, n, seed=n)[0] for n in (35, 21)])
    new = random_ids(2, 10, seed=1)

    def run():
        cache = (out := fast(ids, attention_mask=mask)).past_key_values
        logits = [out.logits[mask.bool()]]
        for piece in new.split([1, 9], 1):
            logits.append(fast(piece, past_key_values=cache).logits.flatten(0, 1))
        return cache.positions, torch.cat(logits)

    expected = run()
    ops = OnTheCpu()
    for module in (schemas, blocks, prompt):
        monkeypatch.setattr(module, "implementation", lambda *given: ops)
    found = run()
    assert ops.attended == {(2, 80), (1, 576)}, "not both with expanded heads and with rows"
    assert torch.equal(found[0], expected[0])
    assert_close("logits", found[1], expected[1], atol=1e-4)
