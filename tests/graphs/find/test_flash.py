"""Calls of the flash-attn library become sites. The library needs a GPU, so a stand-in of the same names and signatures
computes the same attention on the CPU: its operator, and the autograd function around it that Dynamo traces through."""

import sys
from types import ModuleType

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.varlen import varlen_attn

from kvpass.errors import UnsupportedAttentionError
from kvpass.graphs.canonical import find_sites
from kvpass.graphs.find.flash import find_flash_attention_pass
from kvpass.graphs.verify.no_raw_attention import check_no_raw_attention_pass

PASSES = [find_flash_attention_pass, check_no_raw_attention_pass]
H, K, D, T = 4, 2, 8, 11


@torch.library.custom_op("flash_attn::_flash_attn_forward", mutates_args=())
def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    return_softmax: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    order = torch.arange(q.shape[1])
    seen = torch.ones(q.shape[1], q.shape[1], dtype=torch.bool)
    if window_size_left >= 0:
        seen &= order[:, None] - order[None] <= window_size_left
    if causal or window_size_right >= 0:
        seen &= order[None] - order[:, None] <= (0 if causal else window_size_right)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    logits = q @ k.mT * softmax_scale
    logits = softcap * torch.tanh(logits / softcap) if softcap else logits
    out = logits.masked_fill(~seen, -torch.inf).softmax(-1) @ v
    return out.transpose(1, 2).contiguous(), logits.logsumexp(-1), q.new_empty(0), q.new_empty(2)


@forward.register_fake
def _(q, k, v, *rest):
    return torch.empty_like(q), q.new_empty(q.shape[0], q.shape[2], q.shape[1]), q.new_empty(0), q.new_empty(2)


class Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, dropout_p, scale, causal, window, softcap, slopes, deterministic, with_lse):
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        size = q.size(3)
        if size % 8:
            q, k, v = (F.pad(x, [0, 8 - size % 8]) for x in (q, k, v))
        out, lse, _, _ = torch.ops.flash_attn._flash_attn_forward(
            q, k, v, dropout_p, scale, causal=causal, window_size_left=window[0], window_size_right=window[1],
            softcap=softcap, alibi_slopes=slopes, return_softmax=False,
        )  # fmt: skip
        return (out[..., :size], lse) if with_lse else out[..., :size]


def flash_attn_func(
    q,
    k,
    v,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
):
    return Function.apply(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    )


def opaque(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1)):
    return Function.apply(q, k, v, dropout_p, softmax_scale, causal, window_size, 0.0, None, False, False)


@pytest.fixture(autouse=True)
def library(monkeypatch):
    """A stand-in for the module; ``flash_attn_func`` as it is and, as users may, allowed in the graph as one call."""
    module = ModuleType("flash_attn")
    module.flash_attn_func = flash_attn_func
    opaque.__name__, opaque.__module__ = "flash_attn_func", "flash_attn.flash_attn_interface"
    module.whole = torch.compiler.allow_in_graph(opaque)
    monkeypatch.setitem(sys.modules, "flash_attn", module)


def run(forms, capture, *, dim: int = D, tokens: int = T, **options):
    import flash_attn

    def attend(x: Tensor) -> list[Tensor]:
        q, k, v = x.split([H, K, K], dim=2)
        return [form(flash_attn, q, k, v) for form in forms]

    return capture(attend, [torch.randn(2, tokens, H + 2 * K, dim)], PASSES, **options)


FOUND = {
    "plain": (lambda f, q, k, v: f.flash_attn_func(q, k, v, causal=True), D**-0.5, None),
    "scaled": (lambda f, q, k, v: f.flash_attn_func(q, k, v, softmax_scale=0.3, causal=True), 0.3, None),
    "capped": (lambda f, q, k, v: f.flash_attn_func(q, k, v, 0.0, 0.5, True, softcap=2.0), 0.5, 2.0),
    "right side": (lambda f, q, k, v: f.flash_attn_func(q, k, v, causal=True, window_size=(-1, 0)), D**-0.5, None),
    "deterministic": (lambda f, q, k, v: f.flash_attn_func(q, k, v, causal=True, deterministic=True), D**-0.5, None),
    "one call": (lambda f, q, k, v: f.whole(q, k, v, causal=True, softmax_scale=0.7), 0.7, None),
}


@pytest.mark.parametrize(("dynamic", "tokens"), [(True, T), (False, 1)])
def test_each_call_becomes_a_site_with_the_same_output(dynamic, tokens, capture):
    gm, (found, _) = run([form for form, *_ in FOUND.values()], capture, tokens=tokens, dynamic=dynamic)
    assert found == len(FOUND)
    got = [(site.scale, site.softcap, site.k.meta["example_value"].shape[1]) for site in find_sites(gm)]
    assert got == [(scale, softcap, K) for _, scale, softcap in FOUND.values()]


def test_a_window_to_the_left_counts_the_query_itself(capture):
    windowed = lambda f, q, k, v: f.flash_attn_func(q, k, v, causal=True, window_size=(4, 0))  # noqa: E731
    gm, _ = run([windowed], capture, execute=False)
    assert [site.sliding_window for site in find_sites(gm)] == [5]


def test_padded_head_dims_keep_the_scale_of_the_real_ones(capture):
    gm, _ = run([FOUND["plain"][0]], capture, dim=12)
    (site,) = find_sites(gm)
    assert (site.scale, site.k.meta["example_value"].shape[3]) == (pytest.approx(12**-0.5), 16)


REFUSED = {
    "not causal": lambda f, q, k, v: f.flash_attn_func(q, k, v),
    "dropout_p=0.1": lambda f, q, k, v: f.flash_attn_func(q, k, v, 0.1, causal=True),
    "alibi_slopes=": lambda f, q, k, v: f.flash_attn_func(q, k, v, causal=True, alibi_slopes=torch.ones(H)),
    "reads more of its result": lambda f, q, k, v: sum(
        part.sum() for part in f.flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    ),
    "computed in the graph": lambda f, q, k, v: f.flash_attn_func(
        q, k, v, causal=True, softmax_scale=q.shape[1] ** 0.5
    ),
    "cross-attention": lambda f, q, k, v: f.flash_attn_func(q, k[:, 1:], v[:, 1:], causal=True),
}


def test_anything_but_causal_self_attention_is_refused(capture_each):
    import flash_attn

    forms = [lambda x, form=form: form(flash_attn, *x.split([H, K, K], dim=2)) for form in REFUSED.values()]
    for reason, refusal in zip(REFUSED, capture_each(forms, [torch.randn(2, T, H + 2 * K, D)], PASSES), strict=True):
        assert reason in str(refusal) and refusal.node


def test_packed_sequences_are_refused_with_the_reason(capture):
    def packed(x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        bounds = torch.arange(0, (x.shape[0] + 1) * x.shape[1], x.shape[1], dtype=torch.int32)
        return varlen_attn(rows, rows, rows, bounds, bounds, x.shape[1], x.shape[1], window_size=(-1, 0))

    with pytest.raises(UnsupportedAttentionError, match="packed sequences"):
        capture(packed, [torch.randn(2, T, H, D)], PASSES, execute=False)
