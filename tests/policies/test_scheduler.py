"""Contract 3 at scheduler level: cascading equals deciding once, and both equal a brute force in exact arithmetic."""

import math
from fractions import Fraction

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvpass.policies.scheduler import adaptive_budgets, fixed_budgets, rank_entries

NONE = -math.inf
ALPHAS = (0.0, 0.2, 0.37, 0.5, 1.0)


def share_by_hand(weights: list[Fraction], total: int, cap: int) -> list[Fraction]:
    """Give in proportion to the weights, fill whoever is over the cap, start again with the others."""
    share = [Fraction(0)] * len(weights)
    open_layers, left = list(range(len(weights))), Fraction(total)
    while open_layers:
        takers = [i for i in open_layers if weights[i] > 0] or open_layers
        mass = sum(weights[i] for i in takers)
        wanted = {i: left * weights[i] / mass if mass else left / len(takers) for i in takers}
        over = [i for i in takers if wanted[i] >= cap]
        if not over:
            for i in takers:
                share[i] = wanted[i]
            break
        for i in over:
            share[i], left = Fraction(cap), left - cap
            open_layers.remove(i)
    return share


def whole_by_hand(share: list[Fraction], total: int, cap: int) -> list[int]:
    """Largest remainder; remainders that agree to 2**-20 are a tie and go to the lower layer."""
    whole = [math.floor(x) for x in share]
    missing = min(total, len(share) * cap) - sum(whole)
    by_remainder = sorted(range(len(share)), key=lambda i: (-round((share[i] - whole[i]) * 2**20), i))
    for i in [i for i in by_remainder if whole[i] < cap][:missing]:
        whole[i] += 1
    return whole


def order_by_hand(scores: list[list[float]], alpha: float) -> list[tuple[int, int]]:
    """Entries of one layer as (head, position), in the order in which a growing budget admits them."""
    part, heads = Fraction(alpha).limit_denominator(10**6), len(scores)
    entries = [(h, i) for h, row in enumerate(scores) for i, s in enumerate(row) if s != NONE]
    best = sorted(entries, key=lambda e: (-scores[e[0]][e[1]], e[1], e[0]))
    waiting = [[e for e in best if e[0] == h] for h in range(heads)]
    met, enters = [0] * heads, {}
    for n in range(len(best) + 1):
        if n:
            met[best[n - 1][0]] += 1
        for h in range(heads):
            quota = (1 - part) * met[h] + part * n / heads
            admitted = sum(e[0] == h for e in enters)
            while admitted < len(waiting[h]) and quota >= admitted + 1:
                enters[waiting[h][admitted]] = n
                admitted += 1
    return sorted(best, key=lambda e: (enters[e], best.index(e)))


@st.composite
def models(draw):
    """Scores of a whole model: rows of different real length (left padding), window columns, many exact ties."""
    layers, heads, batch = draw(st.integers(1, 4)), draw(st.integers(1, 3)), draw(st.integers(1, 2))
    window, longest = draw(st.integers(0, 2)), draw(st.integers(0, 7))
    length = longest + window
    values = st.integers(0, draw(st.sampled_from([1, 3, 50])))
    weight = st.builds(Fraction, st.sampled_from([0, 1, 1, 2, 3, 7, 1000]), st.sampled_from([1, 3]))
    rows = []
    for _ in range(batch):
        available = draw(st.integers(0, longest))
        first = length - window - available
        scores = [
            [
                [float(draw(values)) if first <= i < length - window else NONE for i in range(length)]
                for _ in range(heads)
            ]
            for _ in range(layers)
        ]
        entries, weights = draw(st.integers(0, 8)), [draw(weight) for _ in range(layers)]
        rows.append({"available": available, "entries": entries, "weights": weights, "scores": scores})
    return rows, draw(st.floats(0, 1) | st.sampled_from(ALPHAS))


def tensors(rows: list[dict]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    scores = torch.tensor([row["scores"] for row in rows], dtype=torch.float32)
    weights = torch.tensor([[float(w) for w in row["weights"]] for row in rows], dtype=torch.float64)
    return (
        scores.reshape(len(rows), len(rows[0]["weights"]), len(rows[0]["scores"][0]), -1),
        weights,
        torch.tensor([row["entries"] for row in rows]),
        torch.tensor([row["available"] for row in rows]),
    )


def kept_by_hand(row: dict, alpha: float) -> list[set[tuple[int, int]]]:
    layers, heads = len(row["weights"]), len(row["scores"][0])
    total, cap = row["entries"] * layers * heads, row["available"] * heads
    budgets = whole_by_hand(share_by_hand(row["weights"], total, cap), total, cap)
    return [set(order_by_hand(s, alpha)[:n]) for s, n in zip(row["scores"], budgets, strict=True)]


@settings(max_examples=200, deadline=None)
@given(models(), st.booleans())
def test_contract_3_cascade_equals_one_shot_equals_brute_force(model, adaptive):
    rows, alpha = model
    scores, weights, entries, available = tensors(rows)
    layers, heads = scores.shape[1], scores.shape[2]
    split = adaptive_budgets if adaptive else fixed_budgets
    ranks = torch.stack([rank_entries(scores[:, layer], alpha) for layer in range(layers)], 1)
    eligible = scores > NONE

    capacity = entries * layers * heads + layers
    kept = torch.zeros_like(eligible)
    for seen in range(1, layers + 1):
        known = weights.clone()
        if adaptive:
            known[:, seen:] = 0
        budgets = split(known, entries, available, heads, seen)
        assert (budgets[:, seen:] == 0).all()
        assert (budgets.sum(1) <= capacity).all()
        kept[:, seen - 1] = eligible[:, seen - 1]
        kept &= ranks < budgets[:, :, None, None]
        assert (kept.flatten(1).sum(1) <= capacity).all()

    assert torch.equal(budgets.sum(1), torch.minimum(entries, available) * layers * heads)
    once = (ranks < split(weights, entries, available, heads, layers)[:, :, None, None]) & eligible
    assert torch.equal(kept, once)
    assert torch.equal(kept.flatten(1).sum(1), torch.minimum(entries, available) * layers * heads)
    for row, found in zip(rows, kept, strict=True):
        by_hand = kept_by_hand(row, alpha)
        for layer in range(layers):
            assert set(map(tuple, found[layer].nonzero().tolist())) == by_hand[layer]


def test_negative_scores_and_signed_zeros_rank_by_value_and_entries_that_cannot_be_kept_last():
    scores = torch.tensor([[[-0.0, -3.0, 1e-40, 0.0, 2.0, -1e-40, NONE, -2.0]]])
    assert rank_entries(scores)[0, 0].tolist() == [2, 6, 1, 3, 0, 4, 7, 5]
    scores = torch.tensor([[[NONE, 1.0, NONE, NONE], [4.0, 3.0, 2.0, 5.0]]])
    for alpha in ALPHAS:
        assert rank_entries(scores, alpha)[scores > NONE].sort().values.tolist() == [0, 1, 2, 3, 4]


def test_only_the_proportions_of_weights_matter():
    for scale in (1e-30, 1.0, 1e30):
        weights = torch.tensor([[3 * scale, 2 * scale, scale]], dtype=torch.float64)
        assert adaptive_budgets(weights, *torch.tensor([[100], [1000]]), 4, 3).tolist() == [[600, 400, 200]]


def test_a_large_model_stays_exact():
    generator = torch.Generator().manual_seed(0)
    weights = torch.rand(2, 80, dtype=torch.float64, generator=generator)
    entries, available = torch.tensor([131_072, 1021]), torch.tensor([200_000, 1_000_003])
    previous = None
    for seen in range(1, 81):
        budgets = adaptive_budgets(weights, entries, available, 64, seen)
        assert (budgets.sum(1) <= entries * 80 * 64 + 80).all()
        if previous is not None:
            assert (budgets[:, : seen - 1] <= previous[:, : seen - 1]).all()
        previous = budgets
    assert torch.equal(budgets.sum(1), entries * 80 * 64)
