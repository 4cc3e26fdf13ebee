"""Attention that is written out, or hidden in a call, does not slip through; routers and vocabularies are let alone."""

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


def linear_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ repeat(k).transpose(-1, -2)).tril() @ repeat(v)


def checkpointed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    def body(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    return checkpoint(body, q, k, v, use_reentrant=False)


WRITTEN_OUT = {
    "function": lambda q, k, v: torch.matmul(torch.softmax(weights(q, k), -1), repeat(v)),
    "method": lambda q, k, v: weights(q, k).softmax(dim=-1) @ repeat(v),
    "einsum": einsum,
    "with a sink": with_sink,
    "decomposed": decomposed,
    "linear": linear_attention,
}
CALLS = {
    "flex_attention": lambda q, k, v: flex_attention(q, k, v, enable_gqa=True),
    "flash_attn_func": lambda q, k, v: flash_attn_func(q, k, v),
    "sub-graph": checkpointed,
}


def decoder_of(attend):
    """Attention of four query heads and two KV heads on a table of numbers."""

    def decode(ids: Tensor, positions: Tensor) -> Tensor:
        x = F.embedding(ids, torch.linspace(-1, 1, 50 * 64).view(50, 64)) + positions[..., None] / 100
        return attend(*x.unflatten(-1, (8, 8)).transpose(1, 2).split([4, 2, 2], dim=1))

    return decode


@pytest.mark.parametrize("length", ["any length", "11 tokens", "one token"])
def test_written_out_attention_is_refused(length, capture_each, inputs):
    dynamic = length == "any length"
    reason = "relates tokens to tokens" if dynamic else "no attention that kvpass understands"
    given, passes = inputs(tokens=1 if length == "one token" else 11), PASSES if dynamic else EVERY_CHECK
    found = capture_each([decoder_of(attend) for attend in WRITTEN_OUT.values()], given, passes, dynamic=dynamic)
    for name, refusal in zip(WRITTEN_OUT, found, strict=True):
        assert reason in str(refusal) and refusal.node, f"{name}: {refusal}"


def test_attention_inside_a_call_is_refused(capture_each, inputs):
    found = capture_each([decoder_of(attend) for attend in CALLS.values()], inputs(), PASSES)
    for name, refusal in zip(CALLS, found, strict=True):
        assert name in str(refusal)


@pytest.mark.parametrize(
    ("dynamic", "reason"),
    [(True, r"layers\.1.*relates tokens to tokens"), (False, "captured for exactly 11 tokens")],
)
def test_written_out_attention_beside_a_site_is_refused(dynamic, reason, decoder, capture, inputs):
    model = decoder()
    model.layers[1].attend = lambda m, q, k, v, p: WRITTEN_OUT["method"](q, k, v)
    with pytest.raises(UnsupportedAttentionError, match=reason):
        capture(model, inputs(), PASSES if dynamic else EVERY_CHECK, dynamic=dynamic)


def test_modules_that_carry_something_between_tokens_are_refused(capture_each, inputs):
    conv, gru = torch.nn.Conv1d(8, 8, 3, padding=2).eval(), torch.nn.GRU(8, 8, batch_first=True).eval()
    attention = torch.nn.MultiheadAttention(8, 2, batch_first=True).eval()

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).triu(1)
        return attention(q[:, 0], q[:, 0], q[:, 0], attn_mask=mask, need_weights=False)[0]

    def mixed(mix):
        grouped = decoder_of(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True))
        return lambda *given: mix(grouped(*given)[:, 0])

    def convolve(x: Tensor) -> Tensor:
        return conv(x.transpose(1, 2))[..., : x.shape[1]]

    assert all("attention" in str(found) for found in capture_each([decoder_of(attend)], inputs(), PASSES))
    (found,) = capture_each([mixed(convolve)], inputs(), PASSES)
    assert "conv1d with a kernel of 3" in str(found)
    with torch._dynamo.config.patch(allow_rnn=True):
        (found,) = capture_each([mixed(lambda x: gru(x)[0])], inputs(), PASSES, dynamic=False)  # its length is fixed
    assert "gru carries a state" in str(found)


def test_softmax_over_experts_and_vocabulary_and_a_convolution_of_one_token_are_let_alone(decoder, capture, inputs):
    model, pointwise = decoder(), torch.nn.Conv1d(50, 50, 1).eval()

    def routed(ids: Tensor, positions: Tensor) -> Tensor:
        logits = pointwise(model(ids, positions).transpose(1, 2)).mT
        experts = logits[..., :4].softmax(-1) @ torch.ones(4, 50)
        return torch.einsum("btv,vd->btd", logits.softmax(-1), torch.ones(50, 3)).sum() + experts

    _, counts = capture(routed, inputs(), PASSES)
    assert counts == [2, 0]
