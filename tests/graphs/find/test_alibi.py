"""A bias that grows with the position of the key becomes columns of queries and keys; any other bias is refused."""

import functools
import itertools

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from kvpass.errors import UnsupportedAttentionError
from kvpass.graphs.canonical import find_sites
from kvpass.graphs.find.alibi import fold_alibi_pass
from kvpass.graphs.find.eager import find_eager_attention_pass
from kvpass.graphs.find.repeat_kv import strip_repeat_kv_pass
from kvpass.graphs.find.sdpa import find_attention_pass
from kvpass.graphs.verify.no_raw_attention import check_no_raw_attention_pass
from kvpass.graphs.verify.offset_positions import counts_positions
from kvpass.graphs.verify.self_check import self_check_pass
from pairwise import each_value, quick
from tiny_models import ALIBI, compiled_once, random_ids

PASSES = [
    find_attention_pass, find_eager_attention_pass, strip_repeat_kv_pass, check_no_raw_attention_pass,
    self_check_pass, fold_alibi_pass,
]  # fmt: skip
H, D, T = 4, 8, 11


def slopes() -> Tensor:
    return (0.5 ** torch.arange(1.0, H + 1))[:, None, None]


def positions(t: int) -> Tensor:
    return torch.arange(t)


def hidden(t: int) -> Tensor:
    return torch.full((t, t), -torch.inf).triu(1)


def of_keys(t: int) -> Tensor:
    return slopes() * positions(t)


def of_distance(t: int) -> Tensor:
    return slopes() * (positions(t)[None, :] - positions(t)[:, None])


def counted(t: int) -> Tensor:
    return slopes() * (torch.ones(2, t).cumsum(-1) - 1)[:1, None].squeeze(0)


FORMS = {
    "SDPA, by key": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, hidden(q.shape[2]) + of_keys(q.shape[2])),
    "SDPA, by distance": lambda q, k, v: F.scaled_dot_product_attention(
        q, k[:, ::2].repeat_interleave(2, 1), v[:, ::2].repeat_interleave(2, 1),
        (hidden(q.shape[2]) + of_distance(q.shape[2]))[None], scale=0.3,
    ),
    "written out": lambda q, k, v: (q @ k.mT * 0.3 + of_distance(q.shape[2]) + hidden(q.shape[2])).softmax(-1) @ v,
    "written out, in float32": lambda q, k, v: (
        ((q @ k.mT * 0.3).float() + of_keys(q.shape[2]) + hidden(q.shape[2])).softmax(-1) @ v
    ),
    "counted, one bias for all heads": lambda q, k, v: (
        (q @ k.mT + hidden(q.shape[2]) + 0.1 * positions(q.shape[2])).softmax(-1) @ v
    ),
    "in the product": lambda q, k, v: (
        torch.baddbmm(
            counted(q.shape[2]).repeat(q.shape[0], 1, 1), q.flatten(0, 1), k.flatten(0, 1).mT, beta=0.5, alpha=0.25
        ).view(q.shape[0], H, q.shape[2], -1) + hidden(q.shape[2])
    ).softmax(-1) @ v,
}  # fmt: skip


def run(forms, capture, *, batch: int = 2, tokens: int = T, **options):
    def attend(x: Tensor) -> list[Tensor]:
        q, k, v = x.transpose(1, 2).split([H, H, H], dim=1)
        return [form(q, k, v) for form in forms]

    return capture(attend, [torch.randn(batch, tokens, 3 * H, D)], PASSES, **options)


@each_value(door=["SDPA", "eager"], batch=[1, 2])
def test_slopes_become_columns_with_the_same_output(door, batch, capture):
    forms = {name: form for name, form in FORMS.items() if name.startswith("SDPA") == (door == "SDPA")}
    gm, counts = run(list(forms.values()), capture, batch=batch)
    assert counts[-1] == len(forms)
    assert {site.k.meta["example_value"].shape[3] for site in find_sites(gm)} == {D + 2}
    heads = [site.k.meta["example_value"].shape[1] for site in find_sites(gm)]
    assert heads == [2 if "by distance" in name else H for name in forms]
    assert counts[-2] == 0 and not counts_positions(gm), "differences of positions do no harm to padded rows"


def test_a_bias_beside_soft_capping_is_refused(capture):
    def form(q, k, v):
        return (5 * torch.tanh(q @ k.mT / 5) + of_keys(q.shape[2]) + hidden(q.shape[2])).softmax(-1) @ v

    with pytest.raises(UnsupportedAttentionError, match="beside soft-capping"):
        run([form], capture)


REFUSED = {
    "bent": lambda t: positions(t).square() * 0.01,
    "steps": lambda t: positions(t) // 4 * 1.0,
    "other at other lengths": lambda t: positions(t) / t,
    "of one row of the batch": lambda t: positions(t) * torch.tensor([0.1, 0.3])[:, None, None, None],
}


def test_any_other_bias_is_refused(capture_each):
    def written_out(q, k, v, bias):
        return (q @ k.mT + bias + hidden(q.shape[2])).softmax(-1) @ v

    def sdpa(q, k, v, bias):
        return F.scaled_dot_product_attention(q, k, v, (bias + hidden(q.shape[2])).expand(2, H, -1, -1))

    def form(x, attend, bias):
        return attend(*x.transpose(1, 2).split([H, H, H], dim=1), bias(x.shape[1]))

    tried = [*itertools.product((written_out, sdpa), REFUSED)]
    forms = [functools.partial(form, attend=attend, bias=REFUSED[name]) for attend, name in tried]
    for case, refusal in zip(tried, capture_each(forms, [torch.randn(2, T, 3 * H, D)], PASSES), strict=True):
        assert "adds a bias" in str(refusal), f"{case}: {refusal}"


@pytest.mark.parametrize("family", quick(ALIBI, ["bloom"]))
def test_policies_that_score_keys_are_refused(family):
    _, fast = compiled_once(family, layers=1, policy="lava", budget=16, window=8, backend="eager")
    for options in ({"policy": "knorm"}, {"policy": "snapkv", "window": 8, "decode_policy": "r_kv"}):
        fast.set_policy(**options, budget=16)
        with pytest.raises(UnsupportedAttentionError, match="needs the keys of the model alone, and with ALiBi"):
            fast(random_ids(1, 30))
