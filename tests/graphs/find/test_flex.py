"""FlexAttention becomes a site where mask, blocks and scores together are proved causal."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from kvpass.errors import UnsupportedAttentionError
from kvpass.graphs.canonical import find_sites
from kvpass.graphs.find.alibi import fold_alibi_pass
from kvpass.graphs.find.flex import find_flex_attention_pass
from kvpass.graphs.verify.no_raw_attention import check_no_raw_attention_pass

PASSES = [find_flex_attention_pass, fold_alibi_pass, check_no_raw_attention_pass]
H, K, D, T = 4, 2, 8, 11
DOCUMENT = torch.tensor([0] * 40 + [1] * 60)


def causal(b, h, i, j):
    return i >= j


def near(b, h, i, j):
    return (i >= j) & (i - j < 150)


def prefix(b, h, i, j):
    return (i >= j) | (j < 3)


def documents(b, h, i, j):
    return (i >= j) & (DOCUMENT[i] == DOCUMENT[j])


def capped(score, b, h, i, j):
    return 20 * torch.tanh(score / 20)


def hidden_by_score(score, b, h, i, j):
    return torch.where(i >= j, score, -float("inf"))


def alibi(score, b, h, i, j):
    return score + (j - i) * 2.0 ** -(h + 1)


def bent(score, b, h, i, j):
    return score + (j - i) * (j - i) * 0.1


def near_as_float(score, b, h, i, j):
    return torch.where((i >= j) & ((i - j).float() < 512.0), score, -float("inf"))


def near_in_all_heads_but_one(score, b, h, i, j):
    return torch.where((i >= j) & ((h < 1) | (i - j < 640)), score, -float("inf"))


def near_by_far_in_all_heads_but_one(score, b, h, i, j):
    return torch.where((i >= j) & ((h < 1) | (i - j < 2000)), score, -float("inf"))


def scaled_far_away(score, b, h, i, j):
    far = (torch.log(i + 1.0) / math.log(200)).clamp(min=1.0)
    return torch.where(i >= j, score * far, -float("inf"))


def blocks(q: Tensor, mask) -> BlockMask:
    return create_block_mask(mask, None, None, q.shape[2], q.shape[2], device="cpu")


def lying(q: Tensor) -> BlockMask:
    """Blocks of a causal mask with a function that allows more."""
    mask = blocks(q, causal)
    mask.mask_mod = prefix
    return mask


def run(forms, capture, *, tokens: int = T, **options):
    def attend(x: Tensor) -> list[Tensor]:
        q, k, v = x.transpose(1, 2).split([H, K, K], dim=1)
        return [form(q, k, v) for form in forms]

    return capture(attend, [torch.randn(2, tokens, H + 2 * K, D)], PASSES, **options)


def attend(q, k, v, **options):
    return flex_attention(q, k, v, enable_gqa=True, **options)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")  # to compare with
def test_masks_scores_and_scales_become_sites_with_the_same_output(capture) -> None:
    forms = [
        lambda q, k, v: attend(q, k, v, block_mask=blocks(q, causal)),
        lambda q, k, v: attend(q, k, v, score_mod=capped, block_mask=blocks(q, causal), scale=0.5),
        lambda q, k, v: attend(q, k, v, score_mod=hidden_by_score),
        lambda q, k, v: attend(q, k, v, score_mod=alibi, block_mask=blocks(q, causal)),
    ]
    gm, (found, *_) = run(forms, capture)
    assert found == len(forms)
    sites = find_sites(gm)
    assert [site.scale for site in sites] == [D**-0.5, pytest.approx(0.5), D**-0.5, D**-0.5]
    assert [site.softcap for site in sites] == [None, pytest.approx(20.0), None, None]
    assert {site.k.meta["example_value"].shape[1] for site in sites} == {K}
    assert [site.k.meta["example_value"].shape[3] for site in sites] == [D, D, D, D + 2]
    assert not any("vmap" in str(node.target) for node in gm.graph.nodes), "the block mask is gone"


def test_a_window_of_more_than_a_block_is_measured(capture) -> None:
    gm, _ = run([lambda q, k, v: attend(q, k, v, block_mask=blocks(q, near))], capture, execute=False)
    assert [site.sliding_window for site in find_sites(gm)] == [150]


def test_a_window_compared_with_a_float_is_measured(capture) -> None:
    gm, _ = run([lambda q, k, v: attend(q, k, v, score_mod=near_as_float)], capture, execute=False)
    assert [site.sliding_window for site in find_sites(gm)] == [512]


@pytest.mark.parametrize(
    ("score_mod", "heads"),
    [
        pytest.param(near_in_all_heads_but_one, 40, marks=pytest.mark.exhaustive),
        (near_by_far_in_all_heads_but_one, 40),
        (scaled_far_away, 2),
    ],
)
def test_what_differs_at_the_length_that_decides_is_refused(score_mod, heads, capture) -> None:
    def many(x: Tensor) -> Tensor:
        q = x.transpose(1, 2)
        return flex_attention(q, q, q, score_mod=score_mod)

    with pytest.raises(UnsupportedAttentionError, match=r"not causal|made by head or row|not a multiple"):
        capture(many, [torch.randn(2, T, heads, D)], PASSES)


def test_a_fixed_length_is_enough_for_a_causal_mask(capture) -> None:
    run([lambda q, k, v: attend(q, k, v, block_mask=blocks(q, causal))], capture, dynamic=False)


REFUSED = {
    "no mask": ("not causal", lambda q, k, v: attend(q, k, v)),
    "prefix": ("not causal", lambda q, k, v: attend(q, k, v, block_mask=blocks(q, prefix))),
    "blocks of another mask": ("not causal", lambda q, k, v: attend(q, k, v, block_mask=lying(q))),
    "documents": ("depends on the input", lambda q, k, v: attend(q, k, v, block_mask=blocks(q, documents))),
    "bent bias": ("adds a bias", lambda q, k, v: attend(q, k, v, score_mod=bent, block_mask=blocks(q, causal))),
    "log-sum-exp": (
        "reads more of its result",
        lambda q, k, v: sum(part.sum() for part in attend(q, k, v, score_mod=hidden_by_score, return_lse=True)),
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_anything_else_is_refused(name, capture) -> None:
    reason, form = REFUSED[name]
    with pytest.raises(UnsupportedAttentionError, match=reason) as refusal:
        run([form], capture)
    assert "flex" in refusal.value.node


def test_a_block_mask_that_comes_in_as_an_input_is_refused(capture) -> None:
    def with_mask(x: Tensor, counts: Tensor, indices: Tensor) -> Tensor:
        q, k, v = x.transpose(1, 2).split([H, K, K], dim=1)
        mask = BlockMask.from_kv_blocks(counts, indices, BLOCK_SIZE=128, mask_mod=causal, seq_lengths=(T, T))
        return attend(q, k, v, block_mask=mask)

    tables = torch.ones(1, 1, 1, dtype=torch.int32), torch.zeros(1, 1, 1, 1, dtype=torch.int32)
    with pytest.raises(UnsupportedAttentionError, match="its block mask is an input"):
        capture(with_mask, [torch.randn(2, T, H + 2 * K, D), *tables], PASSES, dynamic=False)
