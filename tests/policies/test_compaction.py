"""The fit of kept entries to what all entries give, on inputs whose solution is known and on bad ones."""

import math
from itertools import product

import pytest
import torch

from kvpass.operands import Attention
from kvpass.policies.compaction import MOST_QUERIES, Reference, fit_entries, references
from pairwise import pairwise


def made(queries: int, entries: int, dim: int = 8, dtype: torch.dtype = torch.float32):
    generator = torch.Generator().manual_seed(entries)
    q, k, v = (torch.randn(n, dim, generator=generator) for n in (queries, entries, entries))
    q[:, 0] = 1.0  # queries of a head have a direction in common
    nothing = torch.full((queries,), -math.inf), torch.zeros(queries, dim)
    return k.to(dtype), v.to(dtype), Reference(q, *nothing)


@pytest.mark.parametrize("beside", [False, True])
def test_entries_that_stand_for_their_copies_give_what_all_give(beside):
    k, v, reference = made(200, 10)
    if beside:
        reference = reference._replace(lse=torch.linspace(1, 5, 200), rest=torch.randn(200, 8) * 3)
    copies = torch.arange(1, 11)
    keys, values = k.repeat_interleave(copies, 0), v.repeat_interleave(copies, 0)
    kept = copies.cumsum(0) - 1
    fitted = fit_entries(keys, values, kept, reference, 0.5)
    size, before, after = fitted.errors
    assert after < 0.1 * before < 0.1 * size


@pytest.mark.parametrize("softcap", [None, 5.0])
def test_the_errors_are_those_of_queries_that_were_not_fitted_to(softcap):
    k, v, reference = made(80, 60)
    rest = torch.randn(80, 8)
    reference = reference._replace(lse=torch.linspace(-2, 4, 80), rest=rest)
    kept = torch.arange(0, 60, 5)
    fitted = fit_entries(k, v, kept, reference, 0.35, softcap)

    def out(keys, values):
        logits = reference.queries.double() @ keys.double().T * 0.35
        logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
        weights = torch.cat([logits, reference.lse[:, None].double()], 1).softmax(1)
        return weights[:, :-1] @ values.double() + weights[:, -1:] * rest.double()

    judges, wanted = slice(0, None, 4), out(k, v)
    errors = [(out(*pair) - wanted)[judges].square().sum() for pair in ((k[kept], v[kept]), (fitted[0], fitted[1]))]
    expected = torch.stack([wanted[judges].square().sum(), *errors]).float()
    torch.testing.assert_close(fitted.errors, expected, rtol=1e-3, atol=0)
    assert errors[1] < 0.9 * errors[0]


@pairwise(
    sizes=[(6, 90, 2), (1, 40, 4), (300, 3, 3), (50, 50, 1)],
    dtype=[torch.float32, torch.float16, torch.bfloat16],
    how=["any", "equal keys", "zeros", "large"],
)
def test_bad_inputs_give_numbers_that_are_no_worse_than_the_entries_as_they_were(sizes, dtype, how):
    queries, entries, every = sizes
    k, v, reference = made(queries, entries, dtype=dtype)
    if how == "equal keys":
        k[:] = k[0]
    elif how == "zeros":
        k, v, reference = torch.zeros_like(k), torch.zeros_like(v), reference._replace(queries=reference.queries * 0)
    elif how == "large":
        k, v = k * 2000, v * 5000
    kept = torch.arange(0, entries, every)
    fitted = fit_entries(k, v, kept, reference, 0.35)
    assert fitted.keys.isfinite().all() and fitted.values.isfinite().all()
    assert fitted.keys.dtype == fitted.values.dtype == dtype
    assert fitted.errors[2] <= fitted.errors[1]
    if every == 1:
        assert torch.equal(fitted.keys, k) and torch.equal(fitted.values, v)


def test_entries_stay_where_queries_that_were_not_fitted_to_lose_and_of_a_head_without_any_the_rest_is_the_error():
    k, v, reference = made(40, 60)
    reference.queries[::4] = 40 * k[0]  # these judge the fit to the others, and read one kept entry alone
    kept = torch.arange(0, 60, 5)
    fitted = fit_entries(k, v, kept, reference, 0.35)
    assert torch.equal(fitted.keys, k[kept]) and torch.equal(fitted.values, v[kept])
    assert fitted.errors[1] == fitted.errors[2]
    k, v, reference = made(40, 20)
    reference = reference._replace(lse=torch.zeros(40))
    fitted = fit_entries(k, v, torch.arange(0), reference, 0.35)
    assert fitted.keys.shape == fitted.values.shape == (0, 8)
    size, before, after = fitted.errors
    assert size == before == after > 0


def test_references_are_queries_of_all_replays_that_see_what_is_before_them():
    generator = torch.Generator().manual_seed(0)
    n, first, real = 20, 16, (7, 5)
    replayed, sinks = [], torch.tensor([0.3, -0.2, 1.0, 0.0])
    for tokens in (7, 9):  # of the second, four are padding
        q = torch.randn(1, 4, tokens, 8, generator=generator)
        k, v = (torch.randn(1, 2, n + tokens, 8, generator=generator) for _ in range(2))
        replayed.append(Attention(q, k, v, 0.35, None, sinks))
    found = list(references(list(zip(replayed, real, strict=True)), first))
    assert len(found) == 2
    for kv_head, reference in enumerate(found):
        heads = range(2 * kv_head, 2 * kv_head + 2)
        rows = [
            (call, *at) for call, tokens in zip(replayed, real, strict=True) for at in product(heads, range(tokens))
        ]
        for (call, head, token), *seen in zip(rows, *reference, strict=True):
            query = call.q[0, head, token]
            keys, values = (x[0, kv_head, first : n + token + 1] for x in (call.k, call.v))
            logits = torch.cat([keys @ query * 0.35, sinks[head : head + 1]])
            expected = [logits.logsumexp(0), logits.softmax(0)[:-1] @ values]
            assert torch.equal(seen[0], query)
            torch.testing.assert_close(seen[1:], expected, rtol=1e-5, atol=1e-6)


def test_of_many_queries_evenly_spaced_ones_are_taken():
    q = torch.arange(3.0 * 7000).view(1, 3, 7000, 1)
    call = Attention(q, torch.zeros(1, 1, 7010, 1), torch.zeros(1, 1, 7010, 1), 1.0)
    (reference,) = references([(call, 7000)], 10)
    assert len(reference.lse) == 3 * len(range(0, 7000, 6)) <= MOST_QUERIES
    assert torch.equal(reference.queries[:3, 0], torch.tensor([0.0, 6.0, 12.0]))
