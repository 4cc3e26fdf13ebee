"""Threads that share the heads of a layer, as processes do, keep together what ``plan`` says of all heads."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

import kvpass
from kvpass.adapt.tensor_parallel import check_divided
from kvpass.cache.layers import FullAttentionLayers
from kvpass.cache.plan import plan
from kvpass.cache.prefill import PrefillLayers
from kvpass.cache.prompt_record import PromptRecord
from kvpass.cache.recompression import Recompression
from kvpass.cache.shared_heads import divided, joined, record_of_all
from kvpass.cache.state import KVState
from kvpass.config import Budget, Geometry, LayerGroup, Layout, PoolFacts
from kvpass.operands import AppendBuffers, Attention, Candidates, EvictBuffers, PolicyInputs, from_names
from kvpass.ops import evict, recompress, reference
from kvpass.ops.compress import keep_entries
from kvpass.policies import resolve
from kvpass.policies.h2o import H2O
from kvpass.policies.head_splits import AdaptiveHeads, HeadSplit
from kvpass.policies.observation import projected_norms
from kvpass.policies.replay import Replayed, most_attended
from kvpass.ranks import ONE_PROCESS, Ranks, digest
from pairwise import each_value
from tiny_models import kvzap_file, statistics_file

SIZE, LAYERS, ROWS, KV_HEADS, GROUP, TOKENS, DIM, BUDGET = 2, 3, 2, 4, 2, 60, 8, 21
NUMBERS = tuple(range(LAYERS))
OPTIONS = {
    "cake": {"tau1": 1.0, "tau2": 1.0},
    "chunkkv": {"chunk": 7, "spikes": 2},
    "pyramidkv": {"shape": "entropy"},
    "duo_attention": {"head_map": torch.rand(LAYERS, KV_HEADS).tolist(), "sinks": 3},
    "criticalkv": {"base": "ada_snapkv", "epsilon": 0.1},
    "kvzap": {"weights": kvzap_file(LAYERS, KV_HEADS, 10), "split": "file"},
    "dropkv": {"alpha": 0.2},
    "expected_attention": {"head_split": "adaptive"},
}
WEIGHTS = torch.randn(LAYERS, 12, KV_HEADS * GROUP * DIM, generator=torch.Generator().manual_seed(1))
"""Output projections."""
TURNS = (0.2 ** torch.arange(DIM // 2)).expand(LAYERS, -1)
"""Inverse frequencies of the rotary embeddings."""
ENTERING = torch.randn(LAYERS, ROWS, TOKENS + 15, 10, generator=torch.Generator().manual_seed(2))
"""What enters attention."""


@dataclass(frozen=True)
class Meeting:
    """Where threads leave tensors for each other."""

    barrier: threading.Barrier = field(default_factory=lambda: threading.Barrier(SIZE, timeout=20))
    left: dict[int, Tensor] = field(default_factory=dict)
    sent: list[int] = field(default_factory=list)
    """Bytes of each tensor that the first thread left."""


@dataclass(frozen=True)
class ThreadRanks(Ranks):
    meeting: Meeting = field(default_factory=Meeting)

    def gather(self, x: Tensor, dim: int) -> Tensor:
        self.meeting.left[self.rank] = x
        if self.rank == 0:
            self.meeting.sent.append(x.numel() * x.element_size())
        self.meeting.barrier.wait()
        found = torch.cat([self.meeting.left[rank] for rank in range(self.size)], dim)
        self.meeting.barrier.wait()
        return found


def recorded(
    policy: Any, q: Tensor, k: Tensor, v: Tensor, start: Tensor, ranks: Ranks, layers: Sequence[int] = NUMBERS
) -> tuple[FullAttentionLayers, PromptRecord]:
    """The store of the layers after the operators of compiled models read a prompt, of the heads given, and its record.

    Args:
        layers: their numbers in the model.
    """
    (weights,) = own_heads(ranks, WEIGHTS)
    heads = k.shape[2]
    geometry = Geometry(layers=LAYERS, kv_heads=heads, key_dim=DIM, value_dim=DIM, itemsize=4)
    group = LayerGroup(geometry=geometry, layers=tuple(layers))
    budgets = [BUDGET if policy.needs_budget else TOKENS] * ROWS
    state = KVState(policy=policy, budget=None, ranks=ranks, start=start, columns=TOKENS, budgets=budgets)
    prefill = PrefillLayers(group, PoolFacts(1, plain=False), state, q.dtype, q.device)
    buffers = prefill.buffers
    for layer in range(LAYERS):
        call = Attention(q[layer], k[layer], v[layer], DIM**-0.5)
        norms = projected_norms(v[layer], weights[layer], 2) if "norms" in policy.inputs else None
        most = most_attended(call.k, [replayed(call.q, call.k)], call.scale, value_norms=norms)
        asked = PolicyInputs(weights[layer], TURNS[layer], buffers.entries, replayed=most)
        if "token_scores" in policy.inputs:
            entered = policy.token_scores(ENTERING[layer, :, :TOKENS], layer, LAYERS, heads, ranks)
            asked = asked._replace(entered=entered)
        seen = reference.score_layer(call, None, start, start, layer, LAYERS, policy, asked, ranks)
        keep_entries(reference, buffers, Candidates(call.k, call.v, *seen, start), layer, policy, ranks)
    reference.pack(buffers)
    store, kept = prefill.finish()
    rows = torch.tensor([BUDGET] * ROWS)
    layers = {"full_layers": (kept,), "sliding_layers": (), "nbytes": store.nbytes, "ring_nbytes": 0, "state_nbytes": 0}
    asked = {"policy": policy, "budget": Budget.parse(BUDGET), "entries": rows, "window": rows.clamp(max=6)}
    return store, PromptRecord(start=start, columns=TOKENS, **asked, **layers)


def replayed(q: Tensor, k: Tensor) -> Replayed:
    """Ten tokens of the prompt itself, run behind it."""
    return Replayed(4, k.shape[-2], 4, q[..., 20:30, :], k[..., 20:30, :], torch.ones(*k.shape[:-3], 10))


def own_heads(ranks: Ranks, *tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(ranks.local_shard(x, 2) for x in tensors)


def kept(policy: Any, q: Tensor, k: Tensor, v: Tensor, start: Tensor, ranks: Ranks) -> Tensor:
    """What is kept of a prompt, bool ``[L, B, K, N]``; of the own heads where there are ranks."""
    q, k, v = own_heads(ranks, q, k, v)
    (store, _), heads = recorded(policy, q, k, v, start, ranks), k.shape[2]
    keep = torch.zeros(ROWS, LAYERS, heads, TOKENS + 1, dtype=torch.bool)
    positions = store.positions(TOKENS - start)
    keep.scatter_(3, torch.where(positions < 0, TOKENS, positions + start[:, None, None, None]), True)
    return keep[..., :TOKENS].transpose(0, 1)


def text(tokens: int, seed: int) -> tuple[Tensor, ...]:
    """Queries, keys and values of all layers and heads, ``[L, B, heads, tokens, D]``."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (
        torch.randn(LAYERS, ROWS, heads, tokens, DIM, generator=generator)
        for heads in (KV_HEADS * GROUP, KV_HEADS, KV_HEADS)
    )
    return q, k * torch.linspace(0.2, 3, KV_HEADS)[:, None, None], v  # heads, and so processes, differ


def in_threads(run: Callable[[Ranks], Any], meeting: Meeting | None = None) -> list[Any]:
    """What each of the threads gives, in the order of their ranks."""
    meeting = meeting or Meeting()
    with ThreadPoolExecutor(SIZE) as pool:
        threads = [pool.submit(run, ThreadRanks("", rank, SIZE, meeting)) for rank in range(SIZE)]
        return [thread.result() for thread in threads]


def sent_of_a_prompt(name: str, evictable: int) -> int:
    """Bytes that each of two processes sends for a layer of a row, by docs/tensor-parallel.md."""
    heads, queries = 4 * KV_HEADS // SIZE, 4 * KV_HEADS * GROUP // SIZE
    slots = LAYERS * KV_HEADS * (BUDGET - 6)
    more = {
        "cake": 2 * queries * evictable,
        **dict.fromkeys(("pyramidkv", "tova"), queries * evictable),
        **dict.fromkeys(("chunkkv", "criticalkv"), heads * evictable),
        "compactor": 4 * 2 * heads,
        "defensivekv": heads * (evictable + 2),
        "layer_defensivekv": heads * (evictable + 2) + 8 * slots,
        **dict.fromkeys(("kvzap", "kvzip", "kvzip_plus"), 8 * slots),
        "expected_attention": heads,
    }
    return heads * evictable + more.get(name, 0)


@each_value(name=sorted(kvpass.POLICIES), padding=[0, 9], parity=["paper", "code"])
def test_threads_keep_together_what_one_keeps(name, padding, parity):
    policy = resolve(name, window=6, parity=parity, **OPTIONS.get(name, {}))
    q, k, v = text(TOKENS, 3)
    start, meeting = torch.tensor([0, padding]), Meeting()
    found = torch.cat(in_threads(lambda ranks: kept(policy, q, k, v, start, ranks), meeting), 2)
    evictable = [TOKENS - column - policy.window for column in (0, padding)]
    assert sum(meeting.sent) == LAYERS * sum(sent_of_a_prompt(name, count) for count in evictable)
    if padding:
        assert torch.equal(found, kept(policy, q, k, v, start, ONE_PROCESS))
    else:
        read = {"output_weights": WEIGHTS, "rope_frequencies": TURNS, "replays": [replayed(q, k)]}
        read |= {"budget": BUDGET if policy.needs_budget else None, "entering": ENTERING[:, :, :TOKENS]}
        assert torch.equal(found, plan(policy, q, k, v, **read).keep)


def kept_together(policy: Any) -> Tensor:
    """What threads keep of a prompt: that which one keeps."""
    prompt, start = text(TOKENS, 3), torch.tensor([0, 9])
    found = torch.cat(in_threads(lambda ranks: kept(policy, *prompt, start, ranks)), 2)
    assert torch.equal(found, kept(policy, *prompt, start, ONE_PROCESS))
    return found


@pytest.mark.parametrize("name", ["expected_attention", "triattention"])
def test_threads_read_their_heads_of_statistics_in_a_file(name):
    path = statistics_file((LAYERS, KV_HEADS, GROUP), DIM)
    policy = resolve(name, window=6, statistics=path, **OPTIONS.get(name, {}))
    found, without = kept_together(policy), kept_together(resolve(policy, statistics=None))
    assert not torch.equal(found, without), "the file decides"


def test_threads_keep_together_what_is_above_a_threshold_and_agree_on_random_shares_of_layers():
    found = kept_together(resolve("kvzap", window=6, weights=OPTIONS["kvzap"]["weights"], threshold=4.0))
    above = found.sum((0, 2, 3))
    assert (above > LAYERS * KV_HEADS * 6).all() and (above < LAYERS * KV_HEADS * BUDGET).all()
    found = kept_together(resolve("snapkv", window=6, layer_split="random", seed=5)).sum((2, 3))
    assert found[:, 0].unique().numel() == LAYERS and (found.sum(0) == LAYERS * KV_HEADS * BUDGET).all()


def test_the_record_of_threads_is_that_of_one():
    """Also of layers beside others with a sliding window."""
    policy, start, layers = resolve("lava", window=6), torch.tensor([0, 9]), (1, 3, 4)

    def record(ranks: Ranks) -> PromptRecord:
        return recorded(policy, *own_heads(ranks, *text(TOKENS, 3)), start, ranks, layers)[1]

    (one,) = record(ONE_PROCESS).full_layers
    meeting = Meeting()

    def of_all(ranks: ThreadRanks) -> PromptRecord:
        own = record(ranks)
        meeting.barrier.wait()
        if ranks.rank == 0:
            meeting.sent.clear()
        return record_of_all(own, ranks, torch.device("cpu"))

    for found in in_threads(of_all, meeting):
        (part,) = found.full_layers
        assert part.group == one.group and torch.equal(part.kept, one.kept) and torch.equal(part.offsets, one.offsets)
        torch.testing.assert_close(part.mass, one.mass)
        used = torch.arange(part.positions.shape[1]) < one.offsets[:, -1:]
        assert torch.equal(part.positions[used], one.positions[:, : used.shape[1]][used])
    fullest = one.kept.unflatten(2, (SIZE, -1)).sum((1, 3)).amax()
    heads = ROWS * (LAYERS * KV_HEADS // SIZE)
    assert sum(meeting.sent) == 4 * ROWS * fullest + 8 * heads + 4 * ROWS + 16, "by docs/tensor-parallel.md"


def test_tensors_are_told_apart_by_their_content_in_any_layout():
    """Of one row of the same token, as ``warmup`` gives it, every other token of a row, and 16-bit numbers."""
    wide, sparse = torch.zeros(1, 1, dtype=torch.int64).expand(-1, 8), torch.arange(8)[None, ::2]
    for x in (wide, sparse, sparse.bfloat16(), sparse > 3):
        assert digest(x) == digest(x.clone(memory_format=torch.contiguous_format))
        assert digest(x) not in (digest(None), digest(~x if x.dtype == torch.bool else x + 1), digest(x[0]))


@dataclass(frozen=True, kw_only=True)
class Uneven(H2O):
    """Evicts while decoding, and heads differ in how much they hold."""

    divisible = True

    def heads(self) -> HeadSplit:
        return AdaptiveHeads(alpha=0.0)


@dataclass(frozen=True, kw_only=True)
class Undivided(H2O):
    """Its class does not say that processes may share its heads."""


def test_a_policy_whose_class_does_not_say_that_it_may_be_divided_is_refused():
    two = Ranks("", 0, 2)
    with pytest.raises(ValueError, match=r"policy 'h2o' with heads on 2 processes.*set divisible = True"):
        check_divided(Undivided(), two)
    check_divided(Undivided(), ONE_PROCESS)
    for policy in (Uneven(), *(kvpass.POLICIES[name]() for name in ("lava", "h2o", "tova"))):
        check_divided(policy, two)


def evicting(name: str) -> Any:
    options = OPTIONS.get(name, {})
    if name == "kvzap":
        options = {**options, "split": "layers", "evict_during_decode": True, "threshold": 5.0}
    return Uneven(window=6) if name == "uneven" else resolve(name, window=6, **options)


def decoded(policy: Any, start: Tensor, ranks: Ranks, steps: int = 15) -> FullAttentionLayers:
    """The store after a prompt and some new tokens."""
    prompt, new = own_heads(ranks, *text(TOKENS, 3)), own_heads(ranks, *text(steps, 4))
    store, _ = recorded(policy, *prompt, start, ranks)
    for step in range(steps):
        store.ensure_room(1)
        for layer in range(LAYERS):
            q, k, v = (x[layer, :, :, step : step + 1] for x in new)
            held = from_names(EvictBuffers, store.cached_state)
            x = ENTERING[layer, :, TOKENS + step] if "token_scores" in policy.inputs else None
            evict.attend_evict(Attention(q, k, v, DIM**-0.5), held, layer, policy, ranks=ranks, entering=x)
        store.advance(1)
    return store


def of_file(store: FullAttentionLayers, start: Tensor) -> dict[str, Tensor]:
    return {"start": start, **{f"store0_{name}": x for name, x in store.saved.items()}}


@pytest.mark.parametrize("name", ["tova", "cake", "uneven", "kvzap"])
def test_threads_evict_together_what_one_evicts_and_have_its_file(name):
    policy, start, meeting = evicting(name), torch.tensor([0, 9]), Meeting()
    parts = in_threads(lambda ranks: decoded(policy, start, ranks), meeting)
    if name == "tova":
        slots = parts[0].cached_state["slot_positions"].shape[-1]
        assert meeting.sent[-15 * LAYERS :] == [4 * ROWS * KV_HEADS * GROUP // SIZE * slots] * (15 * LAYERS)
    one = decoded(policy, start, ONE_PROCESS)
    layout = Layout(pools=(parts[0].group,), rings=())
    whole, expected = joined([of_file(part, start) for part in parts], layout), of_file(one, start)
    assert whole.keys() == expected.keys()
    for tensor, other in expected.items():
        assert torch.equal(whole[tensor], other), tensor
    own, _ = divided(whole, Layout(pools=(one.group,), rings=()), ThreadRanks("", 1, SIZE))
    own = {key.removeprefix("store0_"): x for key, x in own.items() if key != "start"}
    again = FullAttentionLayers(parts[1].group, own, policy)
    seen = TOKENS + 15 - start
    assert torch.equal(again.positions(seen), parts[1].positions(seen))


RECOMPRESSING = {"lava": {}, "cake": {"evict_during_decode": False}, "pyramidkv": {}, "ada_snapkv": {}}


def compressed_again(policy: Any, ranks: Ranks) -> tuple[FullAttentionLayers, Tensor, int, int]:
    """The store after a prompt and a turn of which it was compressed again, its layer weights, slots and bytes sent."""
    start, turn = torch.tensor([0, 9]), 17
    prompt, new = own_heads(ranks, *text(TOKENS, 3)), own_heads(ranks, *text(turn, 4))
    store, _ = recorded(policy, *prompt, start, ranks)
    store.ensure_room(turn)
    before = sum(ranks.meeting.sent) if isinstance(ranks, ThreadRanks) else 0
    again = Recompression(store, torch.full((ROWS,), policy.window))
    for layer in range(LAYERS):
        call, held = Attention(*(x[layer] for x in new), DIM**-0.5), from_names(AppendBuffers, store.cached_state)
        reference.attend_cache(call, held, layer)
        recompress.observe_held(call.q, DIM, *call[3:], held, again.buffers, layer, policy, ranks)
    store.advance(turn)
    left, record = again.finish(torch.full((ROWS,), BUDGET - policy.window), TOKENS + turn - start)
    sent = sum(ranks.meeting.sent) - before if isinstance(ranks, ThreadRanks) else 0
    return left, record.weights, again.buffers.recompress_scores.shape[-1], sent


@pytest.mark.parametrize("name", sorted(RECOMPRESSING))
def test_threads_compress_again_together_what_one_does(name):
    policy = resolve(name, window=6, **OPTIONS.get(name, {}), **RECOMPRESSING[name])
    parts = in_threads(lambda ranks: compressed_again(policy, ranks))
    one, weights, *_ = compressed_again(policy, ONE_PROCESS)
    _, _, slots, sent = parts[0]
    scores, queries = 4 * ROWS * KV_HEADS // SIZE * slots, 4 * ROWS * KV_HEADS * GROUP // SIZE * (slots - policy.window)
    most = scores + {"cake": 2, "pyramidkv": 1}.get(name, 0) * queries  # by docs/tensor-parallel.md
    assert LAYERS * scores <= sent - 8 <= LAYERS * most, "beside the number of slots"
    seen = TOKENS + 17 - torch.tensor([0, 9])
    whole = one.positions(seen)
    for rank, (part, own_weights, *_) in enumerate(parts):
        assert torch.equal(own_weights, weights)
        heads = part.geometry.kv_heads
        own, expected = part.positions(seen), whole[:, :, rank * heads : (rank + 1) * heads]
        assert torch.equal(own, expected[..., : own.shape[-1]])
        assert torch.equal(part.lengths, one.lengths[:, :, rank * heads : (rank + 1) * heads])
