"""Spans of a prompt that every head of every layer keeps, whatever the policy is."""

from dataclasses import dataclass, fields

import pytest
import torch

import kvpass
from compiled_models import padded
from kvpass.policies import POLICIES
from kvpass.policies.head_splits import AdaptiveHeads, UniformHeads
from kvpass.policies.layer_splits import EntropyLayers, GlobalLayers, UniformLayers
from kvpass.policies.scores import hashed
from numeric_checks import assert_close
from policy_variants import BUILT_IN, TAUS
from tiny_models import compiled_once, random_ids

N, BUDGET, WINDOW, LAYERS, HEADS = 120, 40, 8, 3, 2
SPANS = [(0, 5), (50, 61)]
TOKENS = {token for begin, end in SPANS for token in range(begin, end)}
OTHERS = BUDGET - WINDOW - len(TOKENS)
CANNOT = ("full", "r_kv", "expected_attention", "triattention")
"""The first drops nothing, the second always evicts while decoding, the others need statistics of the model."""


@dataclass(frozen=True, kw_only=True)
class Drawn(kvpass.Policy):
    """Scores that the test knows: a hash of layer, head and position. ``split`` says what is divided."""

    name = "drawn"
    inputs = frozenset()
    split: str = "uniform"

    def score(self, obs):
        places = torch.arange(obs.evictable)
        scores = hashed(0, torch.tensor(obs.layer), torch.arange(obs.kv_heads)[:, None], places)
        return scores.expand(len(obs.keys), -1, -1)

    def heads(self):
        return UniformHeads() if self.split == "uniform" else AdaptiveHeads(0.0)

    def layers(self):
        return {"cascade": ByNumber(), "global": GlobalLayers()}.get(self.split, UniformLayers())


class ByNumber(EntropyLayers):
    """Layer i gets ``i + 1`` shares."""

    def weight(self, obs, scores):
        return torch.full((len(scores),), obs.layer + 1.0, dtype=torch.float64)


def drawn_entries(split, tokens, others):
    """Positions that are kept beside the protected ones, for each layer and head, by sorting in Python."""
    scores = {
        (layer, head, place): float(hashed(0, *map(torch.tensor, (layer, head, place))))
        for layer in range(LAYERS)
        for head in range(HEADS)
        for place in range(tokens - WINDOW)
        if place not in TOKENS
    }
    best = sorted(scores, key=lambda entry: (-scores[entry], entry[2], entry[1]))
    shares = {"cascade": [others * HEADS * LAYERS * (layer + 1) // 6 for layer in range(LAYERS)]}
    shares = shares.get(split, [others * HEADS] * LAYERS)
    if split == "global":
        chosen = sorted(scores, key=lambda entry: (-scores[entry], entry))[: others * HEADS * LAYERS]
    elif split == "uniform":
        lines = ([e for e in best if e[:2] == (x, y)] for x in range(LAYERS) for y in range(HEADS))
        chosen = [entry for line in lines for entry in line[:others]]
    else:
        lines = ([entry for entry in best if entry[0] == layer] for layer in range(LAYERS))
        chosen = [entry for line, share in zip(lines, shares, strict=True) for entry in line[:share]]
    return [{p for x, y, p in chosen if (x, y) == (a, b)} for a in range(LAYERS) for b in range(HEADS)]


@pytest.fixture(scope="module", autouse=True)
def registered():
    kvpass.register_policy(Drawn)
    yield
    del POLICIES["drawn"]


def compiled(policy, budget=BUDGET, **options):
    """A compiled model that is shared with other tests."""
    return compiled_once("llama", layers=LAYERS, backend="eager", policy=policy, budget=budget, **options)[1]


@pytest.fixture
def fast():
    return compiled("full", None)


def kept_by_head(cache, row=0, window=WINDOW):
    """Positions before the window, as a set for each layer and head."""
    last = cache.columns - int(cache.state.start[row]) - window
    return [{int(p) for p in head if 0 <= int(p) < last} for layer in cache.positions[row] for head in layer]


@pytest.mark.parametrize("entries", ["model", "rot4"])
@pytest.mark.parametrize("split", ["uniform", "adaptive", "cascade", "global"])
def test_protected_entries_and_the_best_of_the_others_are_kept(split, entries):
    fast = compiled(Drawn(split=split, window=WINDOW), entries=entries)
    lengths = (N, N - 30)
    ids, mask = padded(*lengths)
    cache = fast.compress(ids, mask, protect=SPANS)
    by_mask = torch.zeros(2, N, dtype=torch.bool)
    for row, start in enumerate((0, 30)):
        by_mask[row, [start + token for token in TOKENS]] = True
    for row, tokens in enumerate(lengths):
        expected = [TOKENS | others for others in drawn_entries(split, tokens, OTHERS)]
        assert kept_by_head(cache, row) == expected
        assert kept_by_head(fast.compress(ids, mask, protect=by_mask), row) == expected


@pytest.mark.parametrize("policy", [name for name in BUILT_IN if name not in CANNOT])
def test_every_policy_keeps_what_is_protected_within_its_budget(fast, policy):
    options = {"window": WINDOW, **(TAUS if policy == "cake" else {})}
    if "evict_during_decode" in {field.name for field in fields(POLICIES[policy])}:
        options["evict_during_decode"] = False
    fast.set_policy(policy, BUDGET, **options)
    ids = random_ids(1, N)
    cache, free = fast.compress(ids, protect=SPANS), fast.compress(ids)
    heads, without = kept_by_head(cache), kept_by_head(free)
    assert all(head >= TOKENS for head in heads)
    assert sum(map(len, heads)) <= max(sum(map(len, without)), len(heads) * (BUDGET - WINDOW))


EVICTING = {"h2o": {}, "tova": {}, "streaming_llm": {}, "cake": TAUS, "r_kv": {"buffer": 4}}


@pytest.mark.parametrize("policy", EVICTING)
def test_policies_that_evict_while_decoding_leave_them(fast, policy, tmp_path):
    options = EVICTING[policy] | {"window": WINDOW}
    fast.set_policy(policy, BUDGET, **options)
    prompt = torch.cat([random_ids(2, N), random_ids(2, 90, seed=3)], 1)
    spans, caches = [*SPANS, (N - 4, N)], {}
    for protect in (None, spans):
        cache = fast(prompt[:, :N], protect=protect).past_key_values
        for place in range(N, N + 60):
            fast(prompt[:, place : place + 1], past_key_values=cache)
        cache.save(tmp_path / "cache.kv")
        cache = kvpass.load_cache(tmp_path / "cache.kv", fast)
        fast(prompt[:, N + 60 :], past_key_values=cache)  # several at once
        caches[protect is None] = cache
    assert torch.equal(*(caches[free].lengths.sum((1, 2)) for free in (True, False))), "within the same budget"
    tokens = TOKENS | {*range(N - 4, N)}
    for row in range(2):
        assert all(head >= tokens for head in kept_by_head(caches[False], row, window=0))
    assert not all(head >= tokens for head in kept_by_head(caches[True], window=0)), "they would else be evicted"


def test_compiled_steps_serve_caches_with_and_without_them():
    ids, new, logits = random_ids(2, N), random_ids(2, 8, seed=1), {}
    for backend in ("eager", "inductor"):
        _, fast = compiled_once(layers=1, backend=backend, policy="h2o", budget=BUDGET, window=WINDOW)
        for protect in (None, SPANS):
            cache = fast(ids, protect=protect).past_key_values
            logits[backend, protect is None] = torch.cat(
                [fast(token, past_key_values=cache).logits for token in new.split(1, 1)], 1
            )
    for free in (True, False):
        assert_close("logits", logits["inductor", free], logits["eager", free], atol=1e-4)


def test_protecting_what_stays_anyway_changes_nothing(fast):
    fast.set_policy("streaming_llm", BUDGET, window=WINDOW, sinks=4)
    ids, new = random_ids(1, N), random_ids(1, 40, seed=2)
    logits = [
        fast(new, past_key_values=fast(ids, protect=protect).past_key_values).logits for protect in (None, [(0, 4)])
    ]
    assert torch.equal(*logits)


@pytest.mark.parametrize("policy", ["lava", "ada_snapkv"])
def test_released_rules_that_round_keep_them_where_nothing_else_has_room(fast, policy):
    fast.set_policy(policy, WINDOW + 14, window=WINDOW, parity="code")
    heads = kept_by_head(fast.compress(random_ids(1, N), protect=[(0, 14)]))
    assert all(head >= set(range(14)) for head in heads)


@pytest.mark.parametrize("saved", [False, True])
def test_they_stay_when_a_conversation_is_compressed_again(saved, tmp_path):
    fast = compiled("snapkv", window=WINDOW, kernel_size=1, recompress="every_turn")
    ids = random_ids(2, N)
    cache = fast(ids, protect=SPANS).past_key_values
    for turn in range(3):
        if saved:
            cache.save(tmp_path / "cache.kv")
            cache = kvpass.load_cache(tmp_path / "cache.kv", fast)
        fast(random_ids(2, 20, seed=turn), past_key_values=cache)
        for row in range(2):
            heads = kept_by_head(cache, row)
            assert all(head >= TOKENS for head in heads)
            assert {len(head) for head in heads} == {BUDGET - WINDOW}
    assert any(max(head) >= N for head in kept_by_head(cache)), "newer tokens take the other places"


@pytest.mark.parametrize("policy", ["snapkv", "lava", "ada_snapkv"])
def test_what_was_protected_in_the_window_stays_when_the_window_moves_on(policy):
    fast = compiled(policy, window=WINDOW, recompress="every_turn")
    cache = fast(random_ids(1, N), protect=[(N - BUDGET, N)]).past_key_values
    fast(random_ids(1, 20), past_key_values=cache)
    assert kept_by_head(cache) == [set(range(N - BUDGET, N))] * LAYERS * HEADS


def test_generate_keeps_them_and_the_report_says_so(fast):
    fast.set_policy("snapkv", BUDGET, window=WINDOW)
    ids = random_ids(1, N)
    out = fast.generate(ids, protect=SPANS, max_new_tokens=3, do_sample=False, return_dict_in_generate=True)
    assert all(head >= TOKENS for head in kept_by_head(out.past_key_values, window=WINDOW + 2))
    assert f"protected: {len(TOKENS)} of {N} tokens" in str(fast.report())
    fast.generate(ids, max_new_tokens=1, do_sample=False)
    assert "protected" not in str(fast.report())
    wide = [(0, N - WINDOW)]
    fast.set_policy("full")
    assert torch.equal(fast(ids, protect=wide).logits, fast(ids).logits)


@pytest.mark.parametrize(
    ("protect", "said"),
    [
        ([(5, 5)], r"the span \(5, 5\) has no token"),
        ([(-2, 3)], r"the span \(-2, 3\) has no token, or begins before the text"),
        ([(0, 121)], r"the span \(0, 121\) ends behind the text, whose shortest row has 120"),
        ([(0, 9), (4, 12)], r"the spans \(0, 9\) and \(4, 12\) overlap"),
        ([3, 9], "must be pairs"),
        ("system", "must be pairs"),
        (torch.ones(1, 9, dtype=torch.bool), r"protect=bool \[1, 9\]: a mask must be bool \[1, 120\]"),
        (torch.ones(1, N), r"protect=float32 \[1, 120\]"),
        ([(0, 60)], r"60 tokens of row 0 .* the last 8, the window, and the budget is 40 .* 68 are needed"),
    ],
)
def test_what_cannot_be_protected_is_refused(fast, protect, said):
    fast.set_policy("snapkv", BUDGET, window=WINDOW)
    with pytest.raises(ValueError, match=said):
        fast.compress(random_ids(1, N), protect=protect)


def test_protected_tokens_in_the_window_cost_nothing(fast):
    fast.set_policy("snapkv", BUDGET, window=WINDOW)
    cache = fast.compress(random_ids(1, N), protect=[(N - WINDOW - 32, N)])
    assert kept_by_head(cache) == [set(range(N - WINDOW - 32, N - WINDOW))] * LAYERS * HEADS


def test_what_leaves_the_window_while_decoding_needs_room_and_filled_caches_refuse(fast):
    fast.set_policy("h2o", BUDGET, window=WINDOW)
    with pytest.raises(ValueError, match=r"40 tokens of row 0 .* the budget is 40 .* 48 are needed"):
        fast.compress(random_ids(1, N), protect=[(N - WINDOW - 32, N)])
    fast.set_policy("snapkv", BUDGET, window=WINDOW)
    cache, ids = fast.compress(random_ids(1, N)), random_ids(1, 3)
    for call in (fast, fast.generate):
        with pytest.raises(ValueError, match="spans are of the prompt that fills a cache"):
            call(ids, past_key_values=cache, protect=SPANS)
    with pytest.raises(ValueError, match="spans are of the prompt that fills a cache"):
        fast.generate(ids, use_cache=False, protect=SPANS)
