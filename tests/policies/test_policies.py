"""Policies: scores against their formulas written out, layer and head splits against brute force.

What the authors' code computes too is compared with that, in test_golden.py.
"""

import dataclasses
import itertools
import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from kvpass.cache.plan import plan
from kvpass.operands import PolicyInputs
from kvpass.policies import POLICIES, Policy, resolve
from kvpass.policies.head_splits import UniformHeads
from kvpass.policies.observation import Observation
from kvpass.policies.released import cake_budgets, rank_safeguarded
from kvpass.policies.replay import Replayed
from policy_variants import BUILT_IN, VARIANTS

TAUS = {"tau1": 1.0, "tau2": 1.0}
L, K, G, N, D, W = 3, 2, 2, 17, 4, 4
M = N - W


@pytest.fixture
def obs() -> Observation:
    g = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(1, heads, N, D, generator=g) for heads in (K * G, K, K))
    return Observation(q * 2, k, v, scale=0.5, window=W, layer=1, num_layers=L)


def attention(obs: Observation) -> Tensor:
    """Causal softmax of the whole prompt, fp64 ``[K, G, N, N]``, the plain way."""
    q = obs.queries[0].double().unflatten(0, (K, G))
    logits = q @ obs.keys[0].double()[:, None].transpose(2, 3) * obs.scale
    return logits.masked_fill(torch.ones(N, N).triu(1).bool(), -math.inf).softmax(-1)


def pooled(row: list[float], kind: str, size: int) -> list[float]:
    reach = range(-(size // 2), size // 2 + 1)
    near = [[row[i + j] for j in reach if 0 <= i + j < len(row)] for i in range(len(row))]
    return [max(x) if kind == "max" else sum(x) / size for x in near]


def assert_score(policy: Policy, obs: Observation, want: list[list[float]]) -> None:
    found = policy.score(obs)
    assert found.shape == (1, K, M) and found.dtype == torch.float32
    torch.testing.assert_close(found[0].double(), torch.tensor(want, dtype=torch.float64), rtol=1e-5, atol=1e-9)


OF_A_PROMPT = {"projection", "rotation", "replays", "queries", "column_sum"}


@pytest.mark.parametrize(
    ("name", "options"), [(name, given) for name, given in VARIANTS if not resolve(name, **given).inputs & OF_A_PROMPT]
)
def test_only_policies_that_say_so_score_a_head_by_other_heads_or_by_earlier_queries(obs, name, options):
    """Recompression scores the entries of each head alone, and knows the queries of the window."""
    policy = resolve(name, window=W, **options)
    one = dataclasses.replace(obs, queries=obs.queries[:, :, -W:], asked=PolicyInputs(entries=torch.tensor([5])))
    together, alone = policy.score(one), []
    for head in range(K):
        q, k, v = one.queries[:, G * head : G * (head + 1)], one.keys[:, head, None], one.values[:, head, None]
        alone.append(policy.score(dataclasses.replace(one, queries=q, keys=k, values=v)))
    same = torch.allclose(torch.cat(alone, 1), together, rtol=1e-4, atol=1e-6)
    assert same != ("heads" in policy.inputs) or name == "chunkkv", "whose form with each_head has no other heads"


READ_NOTHING_ELSE = sorted(
    name for name in BUILT_IN if POLICIES[name].needs_budget and "rotation" not in POLICIES[name].inputs
)


@pytest.mark.parametrize("name", READ_NOTHING_ELSE)
def test_only_policies_that_say_so_read_keys_for_more_than_attention(obs, name):
    """Columns of keys beside zeros in queries change no attention."""
    options = {"cake": TAUS, "lagkv": {"lag": 3}}.get(name, {})
    policy = resolve(name, window=W, **options)
    weight, replayed = torch.randn(9, K * G * D), torch.rand(1, K, N)
    asked = PolicyInputs(projection=weight, replayed=replayed, entries=torch.tensor([5]))
    obs = dataclasses.replace(obs, asked=asked)
    columns = torch.arange(2.0 * N).view(N, 2).expand(1, K, -1, -1)
    queries, keys = torch.nn.functional.pad(obs.queries, (0, 2)), torch.cat([obs.keys, columns], -1)
    wider = policy.score(dataclasses.replace(obs, queries=queries, keys=keys))
    assert torch.allclose(wider, policy.score(obs)) != ("keys" in policy.inputs)


@pytest.mark.parametrize("pool", ["max", "avg"])
@pytest.mark.parametrize(("group", "reduce"), [("mean", lambda x: sum(x) / G), ("max", max), ("sum", sum)])
def test_snapkv_score(obs, pool, group, reduce):
    a = attention(obs)[:, :, -W:, :M].mean(2).tolist()
    want = [pooled([reduce(x) for x in zip(*heads, strict=True)], pool, 5) for heads in a]
    assert_score(resolve("snapkv", window=W, pool=pool, kernel_size=5, group=group), obs, want)


def test_snapkv_without_pooling_and_pyramidkv_which_sums_where_it_takes_the_mean(obs):
    assert_score(resolve("snapkv", window=W, pool=None), obs, attention(obs)[:, :, -W:, :M].mean((1, 2)).tolist())
    assert_score(resolve("pyramidkv", window=W), obs, (resolve("snapkv", window=W).score(obs)[0] * W).tolist())


@pytest.mark.parametrize("indicator", ["sum", "mean", "var", "product"])
def test_cake_indicator_and_its_ablations(obs, indicator):
    a = attention(obs)[:, :, -W:, :M]
    mean, var = a.mean(2), a.var(2, unbiased=True)
    value = {"sum": mean + 30 * var, "mean": mean, "var": var, "product": mean * var}[indicator].tolist()
    want = [[sum(x) / G for x in zip(*(pooled(head, "avg", 5) for head in heads), strict=True)] for heads in value]
    assert_score(resolve("cake", window=W, gamma=30, indicator=indicator, **TAUS), obs, want)


def test_cake_layer_preference_also_serves_other_scores(obs):
    a = attention(obs)[:, :, -W:, :M]
    h = -(a * (a + 1e-10).log()).sum().item()
    v = a.var(2, unbiased=True).sum().item()
    for name in ("cake", "snapkv", "h2o"):
        options = {} if name == "cake" else {"layer_split": "cake"}
        policy = resolve(name, window=W, tau1=1.6, tau2=0.4, **options)
        assert policy.layer_weight(obs, policy.score(obs)).item() == pytest.approx(h ** (1 / 1.6) * v**2.5, rel=1e-5)
    assert resolve("snapkv", window=W).layer_weight(obs, torch.zeros(1, K, M)) is None


@pytest.mark.parametrize(("chunk", "blend"), [(4, 0.5), (3, None), (100, 0.0)])
def test_compactor_adds_leverage_and_attention_within_chunks(obs, chunk, blend):
    """With a matrix of rotation for each position, the whole leverage matrix and one query after the other; float64."""
    turns, sinks = torch.tensor([1.0, 0.1]), 2
    obs = dataclasses.replace(obs, asked=PolicyInputs(frequencies=turns, entries=torch.tensor([3])))
    middle = range(sinks, M)

    def before_rope(key: Tensor, position: int) -> Tensor:
        real, imaginary = key.double().chunk(2)
        turned = torch.complex(real, imaginary) * torch.polar(torch.ones(2).double(), -position * turns.double())
        return torch.cat([turned.real, turned.imag])

    leverage, attended = [], []
    for keys, values, head in zip(obs.keys[0], obs.values[0].double(), range(K), strict=True):
        x = torch.stack([before_rope(keys[i], i) for i in middle])
        x = x - x.mean(0)
        leverage.append((x @ torch.linalg.inv(x.T @ x + 0.01 * torch.eye(D)) @ x.T).diagonal().tolist())
        paid = dict.fromkeys(middle, 0.0)
        for i, query in itertools.product(middle, obs.queries[0, head * G : (head + 1) * G].double().unbind(0)):
            near = [j for j in middle if (j - sinks) // chunk == (i - sinks) // chunk]
            for j, p in zip(near, (keys[near].double() @ query[i]).softmax(0).tolist(), strict=True):
                paid[j] += p * float(values[j].norm()) / G
        attended.append(pooled([*paid.values()], "avg", 3))

    def standard(rows: list[list[float]]) -> Tensor:
        flat = [x for row in rows for x in row]
        return (torch.tensor(rows).double() - statistics.mean(flat)) / statistics.stdev(flat)

    weight = 1 - (3 + W) / N if blend is None else blend
    want = weight * standard(leverage) + standard(attended)
    score = resolve("compactor", window=W, sinks=sinks, chunk=chunk, blend=blend).score(obs)
    assert score.shape == (1, K, M) and score.dtype == torch.float32
    torch.testing.assert_close(score[0, :, sinks:].double(), want, rtol=1e-4, atol=1e-5)
    assert score[0, :, :sinks].amin() > 1e30


def test_leverage_of_compactor_is_exact_where_keys_nearly_depend_and_short_prompts_keep_their_ends(obs):
    """Of n independent keys in n + 1 dimensions each is needed (n - 1 of n once their mean is gone); of copies none."""
    turns = torch.ones(L, D // 2)
    q, k, v = (x[None, :, :, :12].expand(L, -1, -1, -1, -1) for x in (obs.queries, obs.keys, obs.values))
    for length, budget, want in ((12, 9, [0, 1, 2, 3, 4, 8, 9, 10, 11]), (3, 5, [0, 1, 2]), (10, 5, [0, 6, 7, 8, 9])):
        cut = (x[:, :, :, :length] for x in (q, k, v))
        keep = plan("compactor", *cut, budget=budget, rope_frequencies=turns).keep
        assert all(head.nonzero().flatten().tolist() == want for head in keep[:, 0].flatten(0, 1))
    keys = torch.cat([100 * torch.eye(8), 100 * torch.ones(24, 8) + 1e-3 * torch.randn(24, 8)])[None, None]
    asked = PolicyInputs(frequencies=torch.zeros(4), entries=torch.tensor([8]))
    obs = Observation(keys, keys, keys, 1.0, 0, 0, 1, asked=asked)
    leverage = resolve("compactor", window=0, sinks=0)._leverage(obs)[0, 0]
    assert leverage[:8].amin() > 0.85 and leverage[8:].amax() < 0.1 and 7.9 < leverage.sum() < 8.0


@pytest.mark.parametrize("sinks", [None, torch.tensor([2.0, -1.0, 0.5, 1.0])])
@pytest.mark.parametrize("form", ["dropkv", "caote"])
def test_dropkv_is_what_the_output_changes_by_if_one_entry_is_missing(obs, form, sinks):
    """By the softmax over the other entries, one row and one entry after the other; float64."""
    obs = dataclasses.replace(obs, sinks=sinks)
    rows = range(N - W, N) if form == "dropkv" else [N - 1]

    def output(head: int, row: int, without: int | None) -> Tensor:
        held = [i for i in range(row + 1) if i != without]
        logits = obs.keys[0, head // G, held].double() @ obs.queries[0, head, row].double() * 0.5
        if sinks is not None:
            logits = torch.cat([logits, sinks[head, None].double()])
        return logits.softmax(0)[: len(held)] @ obs.values[0, head // G, held].double()

    def change(head: int, entry: int) -> float:
        lengths = [float((output(head, i, entry) - output(head, i, None)).norm()) for i in rows]
        return sum(x**2 for x in lengths) if form == "dropkv" else sum(lengths)

    change_of = [[[change(k * G + g, i) for i in range(M)] for g in range(G)] for k in range(K)]
    want = [[sum(x) / G for x in zip(*heads, strict=True)] for heads in change_of]
    if form == "dropkv":
        want = [pooled(row, "avg", 3) for row in want]
    found = resolve("dropkv", window=W, form=form, kernel_size=3).score(obs)
    assert found.shape == (1, K, M) and found.dtype == torch.float32
    torch.testing.assert_close(found[0].double(), torch.tensor(want, dtype=torch.float64), rtol=1e-4, atol=1e-9)


def test_dropkv_knows_what_an_entry_with_nearly_all_attention_hides_and_heads_share_equally_unless_they_compete(obs):
    """Its value is nearly the output; without it the output is the mean of the others' values."""
    obs.queries[:], obs.keys[:] = 2.0, 0.0
    obs.keys[0, :, 3] = 2.5  # e^10 against 1
    score = resolve("dropkv", window=W, form="caote").score(obs)[0]
    others = obs.values[0, :, [i for i in range(N) if i != 3]].double().mean(1)
    share = 1 / (1 + (N - 1) / math.exp(10))
    want = (obs.values[0, :, 3].double() - others).norm(dim=-1) * share
    torch.testing.assert_close(score[:, 3].double(), want, rtol=5e-3, atol=0)
    q, k, v = torch.randn(3, 1, 1, K * G, 40, D, generator=torch.Generator().manual_seed(4))
    k, v = k[:, :, :K], v[:, :, :K] * torch.tensor([0.5, 2.0])[:, None, None]
    equal, compete = (plan("dropkv", q, k, v, budget=16, window=W, alpha=alpha).lengths[0, 0] for alpha in (1.0, 0.2))
    assert equal.tolist() == [16, 16] and compete[1] > compete[0] > W and compete.sum() == 32


def test_expected_attention_reads_mean_and_covariance_of_a_file_and_may_leave_the_covariance_out(obs, tmp_path):
    """Scores by the queries of the prompt: test_golden.py."""
    obs = dataclasses.replace(obs, asked=PolicyInputs(frequencies=torch.tensor([1.0, 0.1])))
    queries = torch.stack([obs.unrotated_queries(head, 3)[0] for head in range(K)])  # behind the sinks
    mean = queries.mean(2)
    covariance = torch.stack([x.T.cov(correction=0) for x in queries.flatten(0, 1)]).view(K, G, D, D)
    options = {"window": W, "sinks": 3, "n_future": 7, "epsilon": 0.02}
    for counts in (True, False):
        held = {"query_mean": torch.randn(L, K, G, D), "query_covariance": torch.randn(L, K, G, D, D)}
        held["query_mean"][obs.layer], held["query_covariance"][obs.layer] = mean, covariance * counts
        save_file(held, tmp_path / str(counts))
        fitted = resolve("expected_attention", statistics=str(tmp_path / str(counts)), **options)
        found = fitted.score(dataclasses.replace(obs, queries=obs.queries[:, :, N:]))
        wanted = resolve("expected_attention", covariance=counts, **options).score(obs)
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)


def chunks_kept(s: list[float], chunk: int, spikes: int, n: int) -> set[int]:
    """Which n positions stay: one chunk after the other is taken, then single positions, as kvpress does it."""
    parts = [[*range(first, min(first + chunk, len(s)))] for first in range(0, len(s), chunk)]
    worth = [sum(s[i] for i in part) / len(part) for part in parts]
    entropy = []
    for part in parts:
        shares = [s[i] / sum(s[j] for j in part) for i in part]
        entropy.append(-sum(p * math.log(p) for p in shares) / math.log(max(len(part), 2)))
    kept: list[int] = []
    for at in sorted(range(len(parts)), key=lambda at: -worth[at]):
        best = sorted(parts[at], key=lambda i: -s[i])
        if spikes and worth[at] >= statistics.median_low(worth) and entropy[at] < statistics.median_low(entropy):
            best = best[:spikes]
        kept += best[: n - len(kept)]
    rest = sorted({*range(len(s))} - {*kept}, key=lambda i: -s[i])
    return {*kept, *rest[: n - len(kept)]}


@pytest.mark.parametrize(("chunk", "spikes"), [(5, 0), (5, 2), (8, 2), (2, 1), (1, 3), (10, 4), (20, 0), (20, 4)])
def test_chunkkv_keeps_chunks_by_their_mean_and_cuts_the_last_one(chunk, spikes):
    q, k, v = torch.randn(3, 1, 1, K * G, 40, D, generator=torch.Generator().manual_seed(2))
    k, v = k[:, :, :K] * 2, v[:, :, :K]
    base = resolve("snapkv", window=W, pool="avg", kernel_size=3).score(Observation(q[0], k[0], v[0], D**-0.5, W, 0, 1))
    for n in range(1, 36):
        given = {"window": W, "kernel_size": 3, "chunk": chunk, "spikes": spikes}
        kept = plan("chunkkv", q, k, v, budget=W + n, **given).keep[0, 0, :, :36]
        assert {*kept[0].nonzero().flatten().tolist()} == chunks_kept(base[0].sum(0).tolist(), chunk, spikes, n)
        assert torch.equal(kept, kept[:1].expand(K, -1))
        kept = plan("chunkkv", q, k, v, budget=W + n, each_head=True, **given).keep[0, 0, :, :36]
        for head, own in enumerate(base[0].tolist()):
            assert {*kept[head].nonzero().flatten().tolist()} == chunks_kept(own, chunk, spikes, n)


def test_lagkv_scores_a_short_prompt_by_recency_and_expected_attention_keeps_one_from_the_front(obs):
    score = resolve("lagkv", window=W, sinks=2, lag=8).score(obs)[0]
    assert torch.equal(score, torch.tensor([1, 1, *(i / 15 for i in range(M - 2))]).expand(K, -1))
    short = Observation(obs.queries[:, :, :4], obs.keys[:, :, :4], obs.values[:, :, :4], 0.5, 0, 0, L)
    assert torch.equal(resolve("expected_attention", sinks=4).score(short), torch.ones(1, K, 4))


def test_random_depends_on_seed_layer_head_and_position_alone(obs):
    score = resolve("random", window=W).score(obs)[0]
    twice = dataclasses.replace(obs, keys=obs.keys.repeat(2, 1, 1, 1) * 3, values=obs.values.repeat(2, 1, 1, 1))
    assert torch.equal(resolve("random", window=W).score(twice), score.expand(2, -1, -1))
    longer = dataclasses.replace(obs, keys=torch.zeros(1, K, 5000, D), window=0)
    many = resolve("random", window=0).score(longer)[0]
    assert torch.equal(many[:, :M], score)
    assert many.unique().numel() > 9990 and many.min() >= 0 and many.max() < 1
    assert abs(many.mean().item() - 0.5) < 0.01 and abs(many.std().item() - 12**-0.5) < 0.01
    for seed, layer in ((1, obs.layer), (0, 2)):
        other = resolve("random", window=W, seed=seed).score(dataclasses.replace(obs, layer=layer))[0]
        assert (other != score).float().mean() > 0.9


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**30), st.lists(st.tuples(st.integers(0, 40), st.integers(0, 60)), min_size=1, max_size=3))
def test_random_layers_share_by_a_hash_and_total_what_uniform_ones_do(seed, rows):
    """The hash in Python's integers; rows of several lengths, as padding gives them; no cascade stage differs."""

    def mix(x: int) -> int:
        for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
            x = (x ^ (x >> shift)) * factor % 2**32
        return x ^ (x >> 16)

    layers = 5
    drawn = [(mix(seed ^ mix(layer + 1)) >> 8) / 2**24 for layer in range(layers)]
    split, none = resolve("snapkv", layer_split="random", seed=seed).layers(), torch.zeros(len(rows), layers).double()
    entries, available = torch.tensor(rows).T
    found = split.budgets(none, entries, available, K, layers)
    uniform = resolve("snapkv").layers().budgets(none, entries, available, K, layers)
    assert torch.equal(found.sum(1), uniform.sum(1))
    for own, n, m in zip(found.tolist(), *zip(*rows, strict=True), strict=True):
        assert max(own) <= m * K
        if max(own) < m * K:
            assert own == pytest.approx([n * layers * K * w / sum(drawn) for w in drawn], abs=1)
    for seen in range(1, layers):
        stage = split.budgets(none, entries, available, K, seen)
        assert torch.equal(stage[:, :seen], found[:, :seen]) and not stage[:, seen:].any()


def budgets(policy: Policy, entries: int, available: int, layers: int, kv_heads: int = 1, weights=None) -> list[int]:
    w = torch.zeros(1, layers).double() if weights is None else torch.tensor([weights]).double()
    return policy.layer_budgets(w, torch.tensor([entries]), torch.tensor([available]), kv_heads, layers)[0].tolist()


def test_layers_that_compete_go_with_heads_that_do_and_a_pyramid_is_an_exact_arithmetic_sequence():
    uniform = {"heads": lambda policy: UniformHeads()}
    kind = dataclasses.dataclass(frozen=True, kw_only=True)(type("Uniform", (POLICIES["layer_defensivekv"],), uniform))
    with pytest.raises(ValueError, match=r"needs heads\(\) to be AdaptiveHeads\(0.0\)"):
        kind()
    policy = resolve("pyramidkv", window=8)
    assert budgets(policy, 40, 500, 3) == [78, 40, 2]
    assert budgets(policy, 100, 1000, 5, 2) == [390, 295, 200, 105, 10]
    assert budgets(policy, 40, 70, 3) == [40, 40, 40]  # 78 tokens are fewer than 2 * 40
    assert budgets(policy, 40, 74, 3) == [74, 40, 6]  # the lowest layer has 74 entries, not 78
    assert budgets(resolve("pyramidkv"), 100, 180, 5, 2) == [360, 280, 200, 120, 40]
    assert budgets(resolve("pyramidkv"), 40, 48, 3) == [48, 40, 32]  # 80 tokens are not fewer than 2 * 40
    assert budgets(policy, 40, 20, 3) == [20, 20, 20]
    assert budgets(policy, 40, 500, 1) == [40]
    assert budgets(resolve("pyramidkv", parity="code"), 32, 1000, 1) == [32]


def test_other_pyramid_shapes_fall_and_keep_the_total_or_prefer_layers_that_look_everywhere(obs):
    for shape in ("geometric", "exponential"):
        found = budgets(resolve("pyramidkv", shape=shape), 100, 5000, 6)
        assert sum(found) == 600 and found == sorted(found, reverse=True) and found[0] > 2 * found[-1]
        assert found != budgets(resolve("pyramidkv"), 100, 5000, 6)
    sharp = dataclasses.replace(obs, queries=obs.queries * 20)
    flat = dataclasses.replace(obs, queries=obs.queries * 0)
    for shape in ("entropy", "gini"):
        policy = resolve("pyramidkv", window=W, shape=shape)
        weights = [policy.layer_weight(x, policy.score(x)).item() for x in (sharp, obs, flat)]
        assert 0 <= weights[0] < weights[1] < weights[2]
    assert weights[2] == pytest.approx(1.0)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 50), min_size=1, max_size=6), st.integers(0, 30), st.integers(0, 40), st.data())
def test_cake_budgets_as_released_equal_the_rule_in_plain_python(weights, entries, available, data):
    layers = len(weights)
    seen = data.draw(st.integers(1, layers))
    x32 = torch.tensor(weights[:seen], dtype=torch.float32)
    ratio = x32 / x32.sum() if sum(weights[:seen]) else torch.full((seen,), 1 / seen)
    x = [int(r * torch.tensor(float(entries * layers))) for r in ratio]
    cap, total = available, entries * layers

    def spread(amount, takers, sign):
        if takers:
            for n, i in enumerate(takers):
                x[i] += sign * (amount // len(takers) + (n < amount % len(takers)))

    excess = sum(max(y - cap, 0) for y in x)
    x = [min(y, cap) for y in x]
    spread(excess, [i for i in range(seen) if x[i] < cap], 1)
    rest = total - sum(x)
    if rest > 0:
        spread(rest, [i for i in range(seen) if x[i] < cap], 1)
    elif rest < 0:
        spread(-rest, [i for i in range(seen) if x[i] > 1], -1)
    want = [min(y, cap) * 3 for y in x] + [0] * (layers - seen)
    w = torch.tensor([weights], dtype=torch.float64)
    found = cake_budgets(w, torch.tensor([entries]), torch.tensor([available]), 3, seen)
    assert found[0].tolist() == want


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 3), st.integers(0, 9), st.sampled_from([0.0, 0.2, 0.3, 0.5, 1.0]), st.data())
def test_the_released_safeguard_equals_its_counts_for_every_budget(heads, m, alpha, data):
    rows = [[float(data.draw(st.integers(0, 4))) for _ in range(m)] for _ in range(heads)]
    frozen = data.draw(st.none() | st.integers(0, 4))
    n = torch.arange(m + 4)
    constant = (n * alpha).floor() if frozen is None else torch.full((m + 4,), float(frozen))
    padded = torch.tensor(rows).reshape(1, heads, m)
    padded = torch.nn.functional.pad(padded, (1, 1), value=-math.inf)
    rank = rank_safeguarded(padded, alpha, constant[None].float())[0, :, 1:-1]
    best = sorted(((h, i) for h in range(heads) for i in range(m)), key=lambda e: (-rows[e[0]][e[1]], e[1], e[0]))
    for budget in range(m + 3):
        for h in range(heads):
            own = [e for e in best if e[0] == h]
            count = sum(e[0] == h for e in best[: heads * budget])
            exact = torch.tensor(count).float() * (1 - alpha) + constant[budget]
            keep = own if budget > m else own[: int(exact.round())]
            found = (rank[h] < heads * budget).nonzero().flatten().tolist()
            assert found == sorted(i for _, i in keep), (budget, h)


def test_lava_has_a_safeguard_only_where_asked_and_normalize_raises_heads_whose_best_entries_hold_their_mass():
    even, peaked = [[9.0, 8.0, 7.0, 6.0], [1.0, 2.0, 3.0, 4.0]], [[5.0] * 6, [4.0, 4.0, 0.0, 0.0, 0.0, 0.0]]
    for policy, scores, lengths in (
        *((resolve("lava", alpha=a), even, n) for a, n in ((None, [4, 0]), (0.5, [3, 1]), (1.0, [2, 2]))),
        (resolve("ada_snapkv", alpha=0.0), peaked, [4, 0]),
        (resolve("ada_snapkv", alpha=0.0, normalize=True), peaked, [2, 2]),
    ):
        assert (policy.rank(torch.tensor([scores]), torch.tensor([2])) < 4).sum(2).tolist() == [lengths]


CRITICAL = {
    "snapkv": {},
    "ada_snapkv": {"alpha": 0.5},
    "expected_attention": {"value_norm": False, "head_split": "adaptive", "alpha": 0.0, "sinks": 2},
}


@pytest.mark.parametrize(("name", "options"), CRITICAL.items())
def test_critical_keeps_as_many_of_each_head_half_by_score_and_half_by_score_times_norm(name, options):
    generator = torch.Generator().manual_seed(3)
    layers, kv_heads, length, budget, window = 2, 3, 40, 17, 4
    q, k, v = (torch.randn(layers, 1, heads, length, 8, generator=generator) for heads in (6, kv_heads, kv_heads))
    weights = torch.randn(layers, 10, 48, generator=generator)
    given = {"budget": budget, "window": window, "output_weights": weights, **options}
    if name == "expected_attention":
        given["rope_frequencies"] = (0.3 ** torch.arange(4)).expand(layers, -1)
    plain, found = (plan(name, q, k, v, critical=critical, **given) for critical in (False, True))
    assert torch.equal(found.lengths, plain.lengths) and not torch.equal(found.keep, plain.keep)
    for layer, head in itertools.product(range(layers), range(kv_heads)):
        scores, held = plain.scores[layer, 0, head, : length - window], int(plain.lengths[layer, 0, head])
        columns = weights[layer].unflatten(1, (6, 8))[:, 2 * head : 2 * head + 2]
        norm = torch.einsum("ogd,nd->gno", columns, v[layer, 0, head, : length - window]).abs().sum(-1).mean(0)
        order = scores.argsort(descending=True, stable=True).tolist()
        first = order[: max(held // 2 - window, 0)]
        rest = sorted(order[len(first) :], key=lambda i: (-float((scores[i] + 1e-4) * norm[i]), i))
        wanted = {*first, *rest[: held - window - len(first)]}
        assert wanted == set(found.keep[layer, 0, head, : length - window].nonzero().flatten().tolist())


def test_plan_asks_for_the_norms_that_weigh_replays():
    q, k, v = torch.randn(3, 2, 1, 2, 9, 4)
    given = {"budget": 4, "output_weights": torch.randn(2, 6, 8)}
    for norms, found in ((None, "None"), (torch.ones(2, 1, 2), r"\(2, 1, 2\)")):
        replay = Replayed(4, 9, 4, q[..., :3, :], k[..., :3, :], norms)
        with pytest.raises(ValueError, match=rf"replays\[0\].norms.shape={found}: must be \[2, 1, 3\]"):
            plan("kvzip_plus", q, k, v, replays=[replay], **given)
