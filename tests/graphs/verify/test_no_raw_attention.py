"""Attention that is written out, or hidden in a call, does not slip through; routers and vocabularies are let alone."""

import itertools
import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.checkpoint import checkpoint

from kvpass.errors import UnsupportedAttentionError
from kvpass.graphs.canonical import check_sites_pass
from kvpass.graphs.find.sdpa import find_attention_pass
from kvpass.graphs.verify.no_raw_attention import check_no_raw_attention_pass
from kvpass.graphs.verify.self_check import self_check_pass
from pairwise import quick_rows

PASSES = [find_attention_pass, check_no_raw_attention_pass]
EVERY_CHECK = [*PASSES, self_check_pass, check_sites_pass]


@torch.library.custom_op("kvpass_test::flash_attn_func", mutates_args=())
def flash_attn_func(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return q.clone()


@flash_attn_func.register_fake
def _(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.empty_like(q)


def repeat(x: Tensor) -> Tensor:
    return x.repeat_interleave(2, dim=1)


def weights(q: Tensor, k: Tensor) -> Tensor:
    t = q.shape[2]
    scores = q @ repeat(k).transpose(-1, -2) / math.sqrt(q.shape[3])
    return scores.masked_fill(torch.ones(t, t, dtype=torch.bool).triu(1), -torch.inf)


def decomposed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    exponent = weights(q, k).exp()
    return (exponent / exponent.sum(-1, keepdim=True)) @ repeat(v)


def with_sink(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = weights(q, k)
    both = torch.cat([scores, torch.zeros_like(scores[..., :1])], dim=-1)
    return both.softmax(-1)[..., :-1] @ repeat(v)


def einsum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.einsum("bhqk,bhkd->bhqd", F.softmax(weights(q, k), dim=-1), repeat(v))


def batched(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    b, h, t, d = q.shape
    return torch.bmm(weights(q, k).reshape(b * h, t, t).softmax(-1), repeat(v).reshape(b * h, t, d)).view(b, h, t, d)


def linear_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ repeat(k).transpose(-1, -2)).tril() @ repeat(v)


def checkpointed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    def body(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    return checkpoint(body, q, k, v, use_reentrant=False)


def cast_and_dropped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    attention = F.softmax(weights(q, k), dim=-1, dtype=torch.float64).to(q.dtype)
    return torch.matmul(F.dropout(attention, 0.1, training=False), repeat(v))


WRITTEN_OUT = {
    "function": lambda q, k, v: torch.matmul(torch.softmax(weights(q, k), -1), repeat(v)),
    "method": lambda q, k, v: weights(q, k).softmax(dim=-1) @ repeat(v),
    "cast and dropped": cast_and_dropped,
    "einsum": einsum,
    "bmm": batched,
    "with a sink": with_sink,
    "decomposed": decomposed,
    "linear": linear_attention,
}
CALLS = {
    "flex_attention": lambda q, k, v: flex_attention(q, k, v, enable_gqa=True),
    "flash_attn_func": lambda q, k, v: flash_attn_func(q, k, v),
    "sub-graph": checkpointed,
}


def plain(attend):
    return lambda m, q, k, v, p: attend(q, k, v)


FIXED = ["one token", "11 tokens", "11 tokens beside a site"]
EVERY_RUN = [*((name, "any length") for name in WRITTEN_OUT), *zip(WRITTEN_OUT, FIXED, strict=False)]


@pytest.mark.parametrize(
    ("name", "length"), quick_rows([*itertools.product(WRITTEN_OUT, ["any length", *FIXED])], EVERY_RUN)
)
def test_written_out_attention_is_refused(name, length, decoder, capture, inputs):
    beside, dynamic = length == FIXED[2], length == "any length"
    reason = "relates tokens to tokens" if dynamic else "no attention that kvpass understands"
    model = decoder(layers=2 if beside else 1)
    if beside:
        reason = "captured for exactly 11 tokens"
    model.layers[-1].attend = plain(WRITTEN_OUT[name])
    given = inputs(tokens=1 if length == "one token" else 11)
    with pytest.raises(UnsupportedAttentionError, match=reason) as refusal:
        capture(model, given, PASSES if dynamic else EVERY_CHECK, dynamic=dynamic)
    assert refusal.value.node
    assert not dynamic or refusal.value.module_path.endswith("layers.0")


def test_written_out_attention_beside_a_site_is_refused(decoder, capture, inputs):
    model = decoder()
    model.layers[1].attend = plain(WRITTEN_OUT["method"])
    with pytest.raises(UnsupportedAttentionError, match=r"layers\.1.*relates tokens to tokens"):
        capture(model, inputs(), PASSES)


@pytest.mark.parametrize("name", CALLS)
def test_attention_inside_a_call_is_refused(name, decoder, capture, inputs):
    with pytest.raises(UnsupportedAttentionError, match=name):
        capture(decoder(plain(CALLS[name]), layers=1), inputs(), PASSES)


def test_multi_head_attention_modules_are_refused(capture, inputs):
    attention = torch.nn.MultiheadAttention(8, 2, batch_first=True).eval()

    def attend(ids: Tensor, positions: Tensor) -> Tensor:
        x = F.one_hot(ids, 50).float()[..., :8]
        mask = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).triu(1)
        return attention(x, x, x, attn_mask=mask, need_weights=False)[0]

    with pytest.raises(UnsupportedAttentionError, match="attention"):
        capture(attend, inputs(), PASSES)


@pytest.mark.parametrize(("dynamic", "tokens"), quick_rows([(True, 11), (False, 11), (False, 1)], [(True, 11)]))
def test_softmax_over_experts_and_vocabulary_is_let_alone(dynamic, tokens, decoder, capture, inputs):
    model = decoder()

    def routed(ids: Tensor, positions: Tensor) -> Tensor:
        logits = model(ids, positions)
        experts = logits[..., :4].softmax(-1) @ torch.ones(4, 50)
        return torch.einsum("btv,vd->btd", logits.softmax(-1), torch.ones(50, 3)).sum() + experts

    _, counts = capture(routed, inputs(tokens=tokens), PASSES, dynamic=dynamic)
    assert counts == [2, 0]


@pytest.mark.parametrize(("layer", "reason"), [("conv", "conv1d with a kernel of 3"), ("gru", "gru carries a state")])
def test_other_state_between_tokens_is_refused(layer, reason, decoder, capture, inputs):
    conv, gru = torch.nn.Conv1d(50, 50, 3, padding=2).eval(), torch.nn.GRU(50, 50, batch_first=True).eval()
    model = decoder(layers=1)

    def hybrid(ids: Tensor, positions: Tensor) -> Tensor:
        logits = model(ids, positions)
        if layer == "gru":
            return gru(logits)[0]
        return conv(logits.transpose(1, 2))[..., : ids.shape[1]]

    with torch._dynamo.config.patch(allow_rnn=True), pytest.raises(UnsupportedAttentionError, match=reason):
        capture(hybrid, inputs(), PASSES, dynamic=layer != "gru")  # Dynamo fixes the length of a GRU


def test_a_convolution_of_one_token_is_let_alone(decoder, capture, inputs):
    model, pointwise = decoder(layers=1), torch.nn.Conv1d(50, 50, 1).eval()
    capture(lambda ids, positions: pointwise(model(ids, positions).transpose(1, 2)), inputs(), PASSES)
