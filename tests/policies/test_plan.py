"""plan(): exact totals, independence of rows and dtypes, decoding at constant size, errors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import kvpass
from kvpass import Plan
from kvpass.operands import PolicyInputs
from kvpass.policies import POLICIES, Policy, resolve
from kvpass.policies.head_splits import AdaptiveHeads
from kvpass.policies.layer_splits import GlobalLayers
from kvpass.policies.observation import Observation
from kvpass.policies.replay import Replayed, most_attended
from kvpass.policies.scheduler import best_over_layers
from numeric_checks import Largest
from pairwise import each_value, pairwise
from policy_variants import TAUS, VARIANTS

EVICTING = [
    *(("cake", TAUS), ("h2o", {}), ("tova", {}), ("streaming_llm", {}), ("vatp", {"indicator": "h2o", "sinks": 2})),
    ("h2o", TAUS | {"layer_split": "cake"}),
    ("r_kv", {"buffer": 1}),
    ("triattention", {"buffer": 1}),
]


def name_of(variant):
    return "-".join([variant[0], *(str(v) for v in variant[1].values())])


def each(variants):
    """Parametrize a test by name and options of the policies."""
    return pytest.mark.parametrize(("name", "options"), variants, ids=map(name_of, variants))


def tensors(seed, layers=3, batch=1, kv_heads=2, group=2, length=24, dim=4):
    g = torch.Generator().manual_seed(seed)
    q = torch.randn(layers, batch, kv_heads * group, length, dim, generator=g) * 2
    k, v = (torch.randn(layers, batch, kv_heads, length, dim, generator=g) for _ in "kv")
    return q, k, v


def output_weights(q: Tensor, v: Tensor) -> Tensor:
    """Of each layer, the same for tensors of the same shapes."""
    generator = torch.Generator().manual_seed(7)
    return torch.randn(q.shape[0], 6, q.shape[2] * v.shape[4], generator=generator)


def rope_frequencies(q: Tensor) -> Tensor:
    """Of each layer, others in each; the last ones turn the slowest."""
    half = q.shape[4] // 2
    return 0.3 ** torch.arange(half) * torch.linspace(1.0, 0.5, q.shape[0])[:, None]


def replays(q: Tensor, k: Tensor) -> list[Replayed]:
    """Two replays of a prompt behind two first entries, of five tokens each, made of its own queries and keys."""
    n, sinks = k.shape[3], min(2, k.shape[3] - 1)
    rows = torch.arange(5) % q.shape[3], torch.arange(5) % n
    middle = (sinks + n + 1) // 2
    spans = [(sinks, middle), *([(middle, n)] if middle < n else [])]
    return [Replayed(*span, sinks, q[..., rows[0], :], k[..., rows[1], :].neg()) for span in spans]


def inputs_of(layer: int, q: Tensor, k: Tensor, v: Tensor, entries: int) -> PolicyInputs:
    """What a policy may ask for of a layer."""
    parts = [part._replace(queries=part.queries[layer], keys=part.keys[layer]) for part in replays(q, k)]
    most, share = most_attended(k[layer], parts, 0.5), torch.full((q.shape[1],), entries)
    return PolicyInputs(output_weights(q, v)[layer], rope_frequencies(q)[layer], share, replayed=most)


def plan(policy, queries, keys, values, **given) -> Plan:
    """``kvpass.plan`` with what policies may read besides."""
    given |= {"output_weights": output_weights(queries, values), "rope_frequencies": rope_frequencies(queries)}
    return kvpass.plan(policy, queries, keys, values, replays=replays(queries, keys), **given)


def new_tokens(seed: int, steps: int, like: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(steps, *x.shape[:3], x.shape[4], generator=g) for x in like)


@each(VARIANTS)
@settings(max_examples=8, deadline=None)
@given(st.integers(0, 2**31), *(st.integers(1, most) for most in (4, 3, 3, 30)), st.integers(0, 6))
def test_contract_2_the_total_is_exactly_the_budget(name, options, seed, layers, kv_heads, group, length, window):
    q, k, v = tensors(seed, layers, 1, kv_heads, group, length)
    budget = 10**6 if seed % 7 == 0 else window + 1 + seed % 13
    found = plan(name, q, k, v, budget=budget, window=window, **options)
    assert found.lengths.sum().item() == min(budget, length) * layers * kv_heads
    assert torch.equal(found.lengths, found.keep.sum(-1))
    assert found.keep[..., length - min(window, length) :].all()
    entries = max(min(budget, length) - min(window, length), 0)
    assert found.layer_budgets.sum().item() == pytest.approx(entries * layers)


@each([v for v in VARIANTS if v[0] not in ("tova", "streaming_llm")])
def test_contract_2_released_rules_stay_within_the_stated_capacity(name, options):
    window = 4
    for seed, layers, kv_heads, length in ((0, 1, 1, 12), (1, 2, 2, 17), (2, 3, 3, 22), (3, 4, 1, 27), (6, 1, 3, 20)):
        q, k, v = tensors(seed, layers, 1, kv_heads, 2, length)
        for budget in (5, 9, 16, 30):  # the pool has as many slots as the policy states, and raises when it is full
            plan(name, q, k, v, budget=budget, window=window, parity="code", **options)


@each(VARIANTS)
def test_contract_4_rows_do_not_influence_each_other(name, options):
    parts = [tensors(seed) for seed in range(3)]
    q, k, v = (torch.cat(x, 1) for x in zip(*parts, strict=True))
    decode = new_tokens(9, 3, (q, k, v))
    together = plan(name, q, k, v, budget=11, decode=decode, window=3, **options)
    for row, part in enumerate(parts):
        alone = plan(name, *part, budget=11, decode=tuple(x[:, :, row : row + 1] for x in decode), window=3, **options)
        assert torch.equal(together.keep[:, row], alone.keep[:, 0])
        assert torch.equal(together.scores[:, row].nan_to_num(), alone.scores[:, 0].nan_to_num())
        assert torch.equal(together.decode_keep[:, :, row], alone.decode_keep[:, :, 0])


@each_value(variant=VARIANTS, dtype=[torch.float16, torch.bfloat16])
def test_half_precision_inputs_give_the_fp32_decision(variant, dtype):
    name, options = variant
    q, k, v = (x.to(dtype) for x in tensors(5, length=40))
    half = plan(name, q, k, v, budget=12, window=4, **options)
    full = plan(name, q.float(), k.float(), v.float(), budget=12, window=4, **options)
    assert torch.equal(half.keep, full.keep)
    assert half.scores.dtype == torch.float32 and not half.scores[..., :36].isnan().any()


def plain_inputs(length: int) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
    """Queries, keys and values on which a division, a logarithm or a norm may fail."""
    q, k, v = tensors(3, layers=2, length=length)
    head, outlier, ahead = v.clone(), [x.clone() for x in (q, k, v)], k.clone()
    head[:, :, 0] = 0
    for x in outlier:
        x[..., length // 2, :] = 1e4
    ahead[..., -1, :] = 1e4 * q[:, :, ::2, -1]
    return {
        "zeros": (q * 0, k * 0, v * 0),
        "values are zero": (q, k, v * 0),
        "values of one head are zero": (q, k, head),
        "constants": tuple(torch.ones_like(x) for x in (q, k, v)),
        "equal rows": tuple(x[..., :1, :].expand_as(x) for x in (q, k, v)),
        "subnormal": (q * 1e-40, k * 1e-40, v * 1e-40),
        "outlier": tuple(outlier),
        "all attend to the last": (q, ahead, v),
    }


@each(VARIANTS)
@pytest.mark.parametrize("parity", ["paper", "code"])
def test_plain_inputs_give_finite_scores_and_the_exact_budget(name, options, parity, monkeypatch):
    checked: dict[str, list[Tensor]] = {"score": [], "layer_weight": []}
    for function, seen in checked.items():  # plan() replaces NaN
        original = getattr(POLICIES[name], function)

        def record(policy, *given, made=original, seen=seen):
            seen.append(made(policy, *given))
            return seen[-1]

        monkeypatch.setattr(POLICIES[name], function, record)
    for length, window in ((1, 0), (2, 1), (3, 5), (20, 3)):
        for dtype in (torch.float32, torch.float16) if length == 20 else (torch.float32,):
            prompts = {label: [x.to(dtype) for x in given] for label, given in plain_inputs(length).items()}
            finite = [label for label, given in prompts.items() if all(x.isfinite().all() for x in given)]
            rows = [torch.cat(x, 1) for x in zip(*(prompts[label] for label in finite), strict=True)]
            found = plan(name, *rows, budget=window + 3, window=window, parity=parity, **options)
            for x in filter(torch.is_tensor, [*checked["score"], *checked["layer_weight"], found.layer_budgets.T]):
                bad = (~x.isfinite()).reshape(len(x), -1).any(1).nonzero().flatten().tolist()
                assert not bad, [finite[row] for row in bad]
            if parity == "paper":
                assert found.lengths.sum((0, 2)).tolist() == len(finite) * [min(window + 3, length) * 4]
            for seen in checked.values():
                seen.clear()


def test_the_three_ways_to_say_a_budget_agree_and_the_window_queries_in_one_tensor_per_layer_are_enough():
    q, k, v = tensors(1)
    assert all(plan("full", q, k, v, budget=budget).keep.all() for budget in (None, 1.0))
    size = 12 * 3 * 2 * (4 + 4) * 4
    kept = [plan("lava", q, k, v, budget=b, window=4).keep for b in (12, 0.5, f"{size}B")]
    kept.append(kvpass.plan("lava", list(q[:, :, :, -4:]), list(k), list(v), budget=12, window=4).keep)
    assert all(torch.equal(kept[0], other) for other in kept[1:])


@each(EVICTING)
@pytest.mark.parametrize("parity", ["paper", "code"])
def test_decoding_keeps_the_cache_at_its_size(name, options, parity):
    q, k, v = tensors(4)
    steps, decode = 7, new_tokens(4, 7, (q, k, v))
    window = 0 if name in ("tova", "streaming_llm", "triattention") else 4
    found = plan(name, q, k, v, budget=9, decode=decode, window=window, parity=parity, **options)
    for step in range(steps):
        mask = found.decode_keep[step]
        assert torch.equal(mask.sum(-1), found.lengths)
        newest = 24 + step + 1
        assert mask[..., newest - window : newest].all() and not mask[..., newest:].any()
        before = found.keep if step == 0 else found.decode_keep[step - 1]
        assert not (mask[..., : newest - 1] & ~torch.nn.functional.pad(before, (0, steps))[..., : newest - 1]).any()

    q, k, v = tensors(4, length=6)  # a short prompt grows to the budget and stays there
    window = min(window, 3)
    found = plan(name, q, k, v, budget=9, decode=new_tokens(4, 6, (q, k, v)), window=window, parity=parity, **options)
    assert found.decode_keep.sum(-1).flatten(1).unique(dim=1).flatten().tolist() == [7, 8, 9, 9, 9, 9]


@each([("lava", {}), ("cake", TAUS | {"evict_during_decode": False})])
def test_without_a_decode_rule_tokens_are_only_appended(name, options):
    q, k, v = tensors(4)
    found = plan(name, q, k, v, budget=9, decode=new_tokens(4, 2, (q, k, v)), window=4, **options)
    assert torch.equal(found.decode_keep[1][..., :24], found.keep)
    assert found.decode_keep[0][..., 24:].sum(-1).unique().tolist() == [1]
    assert found.decode_keep[1][..., 24:].all()


def decode_by_hand(name: str, found, q, k, v, decode, window: int) -> list:
    """TOVA, H2O and CAKE (position order) with Python lists, one layer and head after another; G query heads a head."""
    layers, _, kv_heads, length, dim = k.shape
    group = q.shape[2] // kv_heads
    result = []
    for layer in range(layers):
        scores_of_all = torch.einsum("hrd,hnd->hrn", q[layer, 0], k[layer, 0].repeat_interleave(group, 0)) * dim**-0.5
        future = torch.ones(length, length).triu(1).bool()
        prompt = scores_of_all.masked_fill(future, -math.inf).softmax(-1).sum(1)
        live = [found.keep[layer, 0, h].nonzero().flatten().tolist() for h in range(kv_heads)]
        quota = [len(x) - window for x in live]
        heavy = [[prompt[h * group : (h + 1) * group, i].mean().item() for i in range(length)] for h in range(kv_heads)]
        keys = [[k[layer, 0, h, i] for i in range(length)] for h in range(kv_heads)]
        for s in range(decode[0].shape[0]):
            a = {}
            for h in range(kv_heads):
                keys[h].append(decode[1][s, layer, 0, h])
                heavy[h].append(0.0)
                live[h].append(length + s)
                queries = decode[0][s, layer, 0, h * group : (h + 1) * group]
                logits = torch.stack([keys[h][i] for i in live[h]]) @ queries.T
                a[h] = (logits * dim**-0.5).softmax(0)
            for h in range(kv_heads):
                old = [j for j, i in enumerate(live[h]) if i <= length + s - window]
                if name == "tova":
                    worth = {j: sum(a[x][j].mean().item() for x in range(kv_heads)) for j in old}
                elif name == "h2o":
                    for j, i in enumerate(live[h]):
                        heavy[h][i] += a[h][j].mean().item()
                    worth = {j: heavy[h][live[h][j]] for j in old}
                else:
                    mean = a[h].mean(1)
                    worth = {j: sum(mean[x].item() for x in range(j - 2, j + 3) if x in old) / 5 for j in old}
                best = sorted(old, key=lambda j: (-worth[j], live[h][j]))[: quota[h]]
                live[h] = [i for j, i in enumerate(live[h]) if j in best or j not in old]
            result.append((s, layer, [list(x) for x in live]))
    return result


def r_kv_by_hand(keys: Tensor, queries: Tensor, held: list[int], window: int, most: int, options: dict) -> list[int]:
    """Positions that R-KV keeps of those held, of one KV head: entry by entry, neighbours by position."""
    old, size = held[: len(held) - window], options["kernel_size"]
    shares = [0.0] * len(old)
    for query in queries:  # [G, D] each
        logits = [max(float(one @ keys[i]) for one in query) * keys.shape[1] ** -0.5 for i in old]
        total = sum(math.exp(x) for x in logits)
        shares = [share + math.exp(x) / total / len(queries) for share, x in zip(shares, logits, strict=True)]
    attended = [max(shares[max(at - size // 2, 0) : at + size // 2 + 1]) for at in range(len(old))]
    cosine = [[float(torch.cosine_similarity(keys[i], keys[j], dim=0)) for j in held] for i in held]
    for at, row in enumerate(cosine):
        row[at] = 0.0
        row[max((j for j, x in enumerate(row) if x > options["threshold"]), default=0)] = 0.0
    mean = [sum(row[at] for row in cosine) / len(held) for at in range(len(held))]
    redundant = [math.exp(x) / sum(map(math.exp, mean)) for x in mean]
    part = options["importance"]
    worth = [part * x - (1 - part) * redundant[at] for at, x in enumerate(attended)]
    best = sorted(range(len(old)), key=lambda at: -worth[at])[: most - window]
    return sorted(old[at] for at in best) + held[len(old) :]


@pytest.mark.parametrize(
    ("length", "block", "policy"), [(20, 1 << 20, "r_kv"), (20, 50, "r_kv"), (9, 50, "r_kv"), (20, 50, "lava")]
)
def test_r_kv_equals_a_brute_force(length, block, policy, monkeypatch):
    """A buffer of three tokens; also a prompt that fits the budget, which then grows beyond it; cosines in blocks.

    After another policy each head gathers a buffer beside what the prompt left it, and its window takes the other's.
    """
    monkeypatch.setattr("kvpass.policies.r_kv._CPU_BLOCK_ELEMENTS", block)
    q, k, v = (x.double() for x in tensors(8, layers=2, length=length))
    decode = tuple(x.double() for x in new_tokens(8, 9 if policy == "r_kv" else 30, (q, k, v)))
    options = {"kernel_size": 3, "importance": 0.4, "threshold": 0.6}
    window, budget, buffer = 2, 10, 3
    own = {"window": window, "buffer": buffer, **options}
    if policy != "r_kv":
        own = {"window": 4, "decode_policy": "r_kv", **{f"decode_{name}": value for name, value in own.items()}}
    found = plan(policy, q, k, v, budget=budget, decode=decode, **own)
    for layer, head in np.ndindex(2, 2):
        keys = torch.cat([k[layer, 0, head], decode[1][:, layer, 0, head]])
        queries = torch.cat([q[layer, 0], decode[0][:, layer, 0].transpose(0, 1)], 1)[2 * head : 2 * head + 2]
        first = found.keep[layer, 0, head].nonzero().flatten().tolist()
        held, most = list(range(length)), budget if policy == "r_kv" else len(first)
        for step in range(-1, len(decode[0])):
            now = length + step
            if step >= 0:
                held.append(now)
            if step < 0 and policy != "r_kv":
                held = first
            elif len(held) > most if step < 0 else len(held) == most + buffer:
                newest = queries[:, now - window + 1 : now + 1].transpose(0, 1)
                held = r_kv_by_hand(keys, newest, held, window, most, options)
            kept = found.keep if step < 0 else found.decode_keep[step]
            assert kept[layer, 0, head].nonzero().flatten().tolist() == held, (layer, head, step)
    assert (found.lengths.unique().numel() > 1) == (policy == "lava")


@pytest.mark.parametrize("how", [("mean", "max"), ("max", "mean")], ids="-".join)
def test_triattention_equals_a_brute_force(how):
    """The paper's form: keys turned back by their positions, and cosines of distances and phases."""
    q, k, v = tensors(8, layers=2, length=20)
    decode = new_tokens(8, 9, (q, k, v))
    budget, buffer, length, frequencies = 10, 3, 20, rope_frequencies(q).double()
    options = dict(zip(("aggregate", "group"), how, strict=True))
    found = plan("triattention", q, k, v, budget=budget, decode=decode, buffer=buffer, longest=40, **options)

    def before_rope(x: Tensor, layer: int) -> Tensor:
        """Complex numbers ``[.., N, D / 2]``."""
        angles = torch.arange(x.shape[-2])[:, None] * frequencies[layer]
        return torch.complex(*x.double().chunk(2, -1)) * torch.polar(torch.ones_like(angles), -angles)

    reduced = {"mean": lambda x: sum(x) / len(x), "max": max}
    for layer, head in np.ndindex(2, 2):
        asked = before_rope(q[layer, 0, 2 * head : 2 * head + 2], layer)
        keys = before_rope(torch.cat([k[layer, 0, head], decode[1][:, layer, 0, head]]), layer)
        mean, modulus = asked.mean(1), asked.abs().mean(1)

        def worth(at: int, tokens: int, head_in_group: int, keys=keys, mean=mean, modulus=modulus, layer=layer):
            m, size, x = mean[head_in_group], modulus[head_in_group], keys[at]
            phase = (m * x.conj()).angle()
            turns = [
                float((m.abs() * x.abs() * ((tokens - at + d) * frequencies[layer] + phase).cos()).sum())
                for d in (1, 2, 4, 8, 16, 32)
            ]
            return reduced[how[0]](turns) + float(((size - m.abs()) * x.abs()).sum())

        held = list(range(length))
        for step in range(-1, 9):
            if step >= 0:
                held.append(length + step)
            if step < 0 or len(held) == budget + buffer:
                scores = {at: reduced[how[1]]([worth(at, length + step + 1, one) for one in (0, 1)]) for at in held}
                held = sorted(sorted(held, key=lambda at, scores=scores: -scores[at])[:budget])
            kept = found.keep if step < 0 else found.decode_keep[step]
            assert kept[layer, 0, head].nonzero().flatten().tolist() == held, (layer, head, step)


@pytest.mark.parametrize(
    ("name", "prompt"),
    [("tova", None), ("h2o", None), ("cake", None), ("h2o", "lava"), ("cake", "lava"), ("cake", "layer_defensivekv")],
)
def test_decode_rules_equal_a_brute_force(name, prompt):
    """Alone, and after a prompt of which another policy keeps some, unequal numbers in heads and layers."""
    q, k, v = tensors(8, layers=2, length=20)
    decode = new_tokens(8, 5 if prompt is None else 60, (q, k, v))
    window = 0 if name == "tova" else 3
    options = {"window": window, **(TAUS if name == "cake" else {})}
    if prompt is not None:
        own = {f"decode_{option}": value for option, value in options.items()}
        options = {"window": 4, "decode_policy": name, **own}
    asked = {"output_weights": output_weights(q, v)} if prompt == "layer_defensivekv" else {}
    found = plan(prompt or name, q, k, v, budget=8, decode=decode, **options, **asked)
    if prompt is not None:
        assert torch.equal(found.keep, plan(prompt, q, k, v, budget=8, window=4, **asked).keep)
        assert found.lengths.unique().numel() > 1
    for step, layer, live in decode_by_hand(name, found, q, k, v, decode, window):
        for head, positions in enumerate(live):
            kept = found.decode_keep[step, layer, 0, head].nonzero().flatten().tolist()
            assert kept == positions, (step, layer, head)


def with_nan(x: Tensor) -> Tensor:
    x = x.clone()
    x[0, 0, 1, 2, 3] = math.nan
    return x


Q, K, V = tensors(0)
BAD_INPUT = [
    ({"policy": 3}, "policy=3"),
    ({"alpha": 0.2, "policy": "snapkv"}, "alpha=0.2.*snapkv"),
    ({"budget": 4}, "budget 4.*window \\+ 1 = 5"),
    ({"budget": 0}, "budget=0"),
    ({"budget": 1.5}, r"budget=1.5.*\(0, 1\]"),
    ({"policy": "full", "window": 32, "budget": 8}, "budget=8: policy 'full'.*takes no budget"),
    ({"scale": 0.0}, r"scale=0.0.*\(0.0, inf\)"),
    ({"scale": math.nan}, "scale=nan"),
    ({"keys": with_nan(K)}, r"keys\[0, 0, 1, 2, 3\]=nan"),
    ({"values": with_nan(V)}, r"values\[0, 0, 1, 2, 3\]=nan"),
    ({"queries": with_nan(Q)}, r"queries\[0, 0, 1, 2, 3\]=nan"),
    ({"queries": Q[:, :, :, -3:]}, r"R=3 must be in \[4, 24\]"),
    ({"queries": Q.repeat(1, 1, 1, 2, 1)}, r"R=48 must be in \[4, 24\]"),
    ({"queries": Q[:, :, :3]}, "H=3.*K=2"),
    ({"queries": Q[:2]}, r"queries.shape=\(2, "),
    ({"queries": Q[..., :3]}, r"queries.shape=.*must be"),
    ({"keys": K[:, :, :, :0], "values": V[:, :, :, :0]}, r"keys.shape=\(3, 1, 2, 0, 4\)"),
    ({"values": V[:, :, :, :5]}, r"values.shape=\(3, 1, 2, 5, 4\)"),
    ({"keys": K[0]}, r"keys.shape=\(1, 2, 24, 4\)"),
    ({"keys": K.long()}, "keys.dtype=torch.int64"),
    ({"keys": []}, "keys"),
    ({"queries": Q[:, :, :, -4:], "policy": "h2o"}, "row 0 is needed"),
    ({"decode": (Q[None, :, :, :, 0], K[None, :, :, :, 0])}, "decode has 2"),
    ({"decode": (Q[None, :, :, :, 0], K[None, :, :, :, 0], V[None, :, :1, :1, 0])}, r"decode values.shape"),
]


@pytest.mark.parametrize(("change", "message"), BAD_INPUT, ids=lambda x: x if isinstance(x, str) else None)
def test_contract_10_bad_input_names_what_is_wrong(change, message):
    call = {"policy": "lava", "queries": Q, "keys": K, "values": V, "budget": 8, "window": 4} | change
    with pytest.raises(ValueError, match=message):
        kvpass.plan(**call)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    sizes=st.tuples(st.integers(1, 5), st.integers(1, 3), st.integers(1, 30)),
    window=st.integers(0, 6),
    budget=st.integers(1, 34),
    values=st.integers(1, 6),
)
def test_contract_3_layers_that_compete_keep_the_best_of_all_entries(seed, sizes, window, budget, values):
    """Layer by layer, with equal scores aplenty, as sorting all entries once."""
    layers, kv_heads, length = sizes
    window = min(window, length)
    budget += window
    evictable = length - window
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randint(values, (layers, kv_heads, evictable), generator=generator).float()
    total = min(budget - window, evictable) * layers * kv_heads
    order = sorted(np.ndindex(*scores.shape), key=lambda at: (-float(scores[at]), at[0], at[2], at[1]))
    wanted = torch.zeros_like(scores, dtype=torch.bool)
    for at in order[:total]:
        wanted[at] = True

    keys = torch.zeros(layers, 1, kv_heads, length, 4)
    GIVEN[:] = [layer[None] for layer in scores]
    found = kvpass.plan(GivenScores(window=window), keys, keys, keys, budget=budget)
    assert torch.equal(found.keep[:, 0, :, :evictable], wanted)


GIVEN: list[Tensor] = []


@dataclass(frozen=True, kw_only=True)
class GivenScores(Policy):
    """Scores that a test has chosen; layers compete."""

    name: ClassVar[str] = "given_scores"

    def score(self, obs: Observation) -> Tensor:
        return GIVEN[obs.layer]

    def heads(self) -> AdaptiveHeads:
        return AdaptiveHeads(0.0)

    def layers(self) -> GlobalLayers:
        return GlobalLayers()


def prompt_keep(policy: Policy, sites: Sequence[Observation], entries: int, *, cascaded: bool = True) -> Tensor:
    """Entries kept of a prompt, bool ``[L, B, K, N]``: those that every stage of the cascade has room for.

    Args:
        sites: of the layers. entries: evictable ones per KV head and layer. cascaded: else only the last stage counts.
    """
    batch, kv_heads, length, _ = sites[0].keys.shape
    layers, share = len(sites), torch.full((batch,), entries)
    available = torch.full((batch,), sites[0].evictable)
    scores = torch.full((layers, batch, kv_heads, length), float("-inf"))
    weights = torch.zeros(batch, layers, dtype=torch.float64)
    limits = torch.full((batch, layers), torch.iinfo(torch.int64).max)
    for i, obs in enumerate(sites):
        scores[i, :, :, : obs.evictable] = policy.checked_score(obs)
        weight = policy.layer_weight(obs, scores[i, :, :, : obs.evictable])
        if weight is not None:
            weights[:, i] = weight
        if policy.compares_layers:
            known = scores[: i + 1].transpose(0, 1).flatten(1)
            of_layer = torch.arange(i + 1).repeat_interleave(kv_heads * length).expand(known.shape)
            weights = best_over_layers(known, of_layer, share * (layers * kv_heads), layers, policy.least_score)
        stage = policy.layer_budgets(weights, share, available, kv_heads, i + 1)
        if cascaded or i == layers - 1:
            limits[:, : i + 1] = torch.minimum(limits, stage)[:, : i + 1]
    ranks = torch.stack([policy.rank(layer, share) for layer in scores])
    return (scores == float("-inf")) | (ranks < limits.T[:, :, None, None])


@pairwise(variant=[*VARIANTS, ("full", {})], parity=["paper", "code"], budget=[8, 15, 29])
def test_contract_3_a_cascade_keeps_what_is_kept_when_all_scores_are_known(variant, parity, budget):
    """By rules of papers also what one decision at the end keeps. The pool has as many slots as a policy states."""
    name, options = variant
    layers, length, window = 4, 30, 4
    q, k, v = tensors(budget, layers, 2, 2, 2, length)
    policy = resolve(name, window=window, parity=parity, **options)
    found = plan(policy, q, k, v, budget=budget if policy.needs_budget else None)
    entries = (budget if policy.needs_budget else length) - window
    sites = [
        Observation(q[i], k[i], v[i], 0.5, window, i, layers, asked=inputs_of(i, q, k, v, entries))
        for i in range(layers)
    ]
    for cascaded in (True, False) if parity == "paper" else (True,):
        assert torch.equal(found.keep, prompt_keep(policy, sites, entries, cascaded=cascaded))


@pytest.mark.parametrize(
    "name", ["h2o", "compactor", "criticalkv", "expected_attention", "kvzip", "kvzip_plus", "r_kv"]
)
def test_no_statistic_holds_every_pair_of_tokens(name):
    q, k, v = tensors(0, 1, kv_heads=2, group=1, length=2048)
    given = {"output_weights": output_weights(q, v), "rope_frequencies": rope_frequencies(q)}
    if "replays" in POLICIES[name].inputs:
        given["replays"] = [Replayed(0, 2048, 0, q, k, torch.ones(1, 1, 2048))]
    with Largest() as largest:
        found = kvpass.plan(name, q, k, v, budget=512, **given)
    assert int(found.lengths.sum()) == 2 * 512
    assert q.nbytes <= largest.nbytes < 4 * 2048**2
