"""Attention that is written out becomes a site with its scale, soft-capping and window, or is refused with the reason.

All forms of a table are captured as one graph of as many attention calls, since a capture is what takes time; the
capture fixture compares the outputs of the rewritten graph with those of the code as it stands.
"""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kvpass.errors import UnsupportedAttentionError
from kvpass.graphs.canonical import find_sites
from kvpass.graphs.find.eager import find_eager_attention_pass
from kvpass.graphs.find.repeat_kv import strip_repeat_kv_pass
from kvpass.graphs.verify.no_raw_attention import check_no_raw_attention_pass
from pairwise import quick, quick_rows

PASSES = [find_eager_attention_pass, strip_repeat_kv_pass, check_no_raw_attention_pass]
H, D, T = 4, 8, 11
SCALE = D**-0.5

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def hidden(t: int) -> Tensor:
    return torch.ones(t, t, dtype=torch.bool).triu(1)


def additive(t: int) -> Tensor:
    return torch.full((t, t), -torch.inf).triu(1)


def weights(logits: Tensor) -> Tensor:
    return logits.masked_fill(hidden(logits.shape[-1]), -torch.inf).softmax(-1)


def product_written_into(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    logits = torch.matmul(q * SCALE, k.transpose(2, 3))
    logits.add_(additive(q.shape[2]))
    return torch.softmax(logits, dim=3).matmul(v)


def added_in_the_product(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    b, h, t, d = q.shape
    flat = k.permute(0, 1, 3, 2).reshape(b * h, d, t)
    mask = additive(t).expand(b * h, t, t)
    logits = mask.baddbmm(q.reshape(b * h, t, d), flat, beta=1.0, alpha=SCALE)
    return torch.bmm(F.softmax(logits, -1), v.reshape(b * h, t, d)).view(b, h, t, d)


def grouped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Query heads in groups of two beside their own KV head, broadcast."""
    b, h, t, d = q.shape
    q, k, v = q.view(b, 2, h // 2, t, d), k[:, ::2, None], v[:, ::2, None]
    return (weights((q @ k.transpose(-1, -2)) * SCALE) @ v).reshape(b, h, t, d)


def grouped_einsum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    b, h, t, d = q.shape
    q = q.view(b, 2, h // 2, t, d)
    logits = torch.einsum("bkgtd,bksd->bkgts", q, k[:, ::2]) * SCALE
    return torch.einsum("bkgts,bksd->bkgtd", weights(logits), v[:, ::2]).reshape(b, h, t, d)


def tokens_first(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    logits = torch.einsum("bqhd, bkhd -> bhqk", [q, k]) / math.sqrt(D)
    return torch.einsum("bhqk,bkhd->bqhd", weights(logits), v).transpose(1, 2)


def one_key_head(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.einsum("bhts,bsd->bhtd", weights(torch.einsum("bhtd,bsd->bhts", q, k[:, 0]) * SCALE), v[:, 0])


def capped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    logits = 3.0 * torch.tanh(q @ k.mT * SCALE / 3.0) + additive(q.shape[2])
    return F.softmax(logits, dim=-1, dtype=torch.float32).to(q.dtype) @ v


def windowed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    order = torch.arange(q.shape[2])
    seen = (order[None] <= order[:, None]) & (order[:, None] - order[None] < 5)
    return torch.where(seen, q @ k.mT * SCALE, torch.finfo(q.dtype).min).softmax(-1) @ v


FOUND: dict[str, tuple[Attend, float, int]] = {
    "divided": (lambda q, k, v: torch.matmul(weights(torch.matmul(q, k.mT) / math.sqrt(D)), v), SCALE, H),
    "divided by a tensor": (lambda q, k, v: weights(q @ k.mT / torch.sqrt(torch.tensor(8.0))) @ v, SCALE, H),
    "scaled before": (lambda q, k, v: weights((q * SCALE) @ k.mT) @ v, 1.0, H),
    "scaled twice": (lambda q, k, v: weights((q * 0.5) @ k.mT * 0.25) @ v, 0.25, H),
    "mask before the scale": (lambda q, k, v: ((q @ k.mT + additive(q.shape[2])) * 0.3).softmax(-1) @ v, 0.3, H),
    "multiplied mask": (
        lambda q, k, v: (q @ k.mT * SCALE * ~hidden(q.shape[2]) - 1e10 * hidden(q.shape[2]).float()).softmax(-1) @ v,
        SCALE,
        H,
    ),
    "dropout in eval": (lambda q, k, v: F.dropout(weights(q @ k.mT * SCALE), 0.1, training=False) @ v, SCALE, H),
    "product written into": (product_written_into, 1.0, H),
    "baddbmm": (added_in_the_product, SCALE, H),
    "groups": (grouped, SCALE, 2),
    "groups, einsum": (grouped_einsum, SCALE, 2),
    "tokens first": (tokens_first, SCALE, H),
    "ellipsis": (
        lambda q, k, v: torch.einsum("...ij,...jd->...id", weights(torch.einsum("...id,...jd->...ij", q, k)), v),
        1.0,
        H,
    ),
    "one key head": (one_key_head, SCALE, 1),
    "repeated": (
        lambda q, k, v: weights(q @ k[:, ::2].repeat_interleave(2, 1).mT * SCALE) @ v[:, ::2].repeat_interleave(2, 1),
        SCALE,
        2,
    ),
}


def qkv(batch: int = 2, tokens: int = T) -> Tensor:
    return torch.randn(batch, tokens, 3 * H, D, generator=torch.Generator().manual_seed(0))


def of_heads(form: Attend) -> Callable[[Tensor], Tensor]:
    return lambda x: form(*x.transpose(1, 2).split([H, H, H], dim=1))


def run(forms, capture, *, batch: int = 2, tokens: int = T, **options):
    def attend(x: Tensor) -> list[Tensor]:
        q, k, v = x.transpose(1, 2).split([H, H, H], dim=1)
        return [form(q, k, v) for form in forms]

    return capture(attend, [qkv(batch, tokens)], PASSES, **options)


@pytest.mark.parametrize(
    ("dynamic", "batch", "tokens"),
    quick_rows([(True, 2, T), (True, 1, T), (False, 2, T), (False, 2, 1)], [(True, 2, T), (False, 2, 1)]),
)
def test_every_spelling_becomes_a_site_with_the_same_output(dynamic, batch, tokens, capture):
    gm, (found, *_) = run([form for form, *_ in FOUND.values()], capture, batch=batch, tokens=tokens, dynamic=dynamic)
    assert found == len(FOUND)
    sites = dict(zip(FOUND, find_sites(gm), strict=True))
    for name, (_, scale, kv_heads) in FOUND.items():
        exactly = name.startswith("divided")  # by the root of the head dim
        assert sites[name].scale == (scale if exactly else pytest.approx(scale, rel=1e-6)), name
        assert sites[name].k.meta["example_value"].shape[1] == kv_heads, name
    assert not any("softmax" in str(node.target) or "hidden" in str(node.target) for node in gm.graph.nodes)


def test_soft_capping_and_window_are_measured(capture):
    gm, _ = run([capped], capture)
    (site,) = find_sites(gm)
    assert (site.scale, site.softcap) == (pytest.approx(SCALE, rel=1e-6), pytest.approx(3.0, rel=1e-6))
    gm, _ = run([windowed], capture, execute=False)
    assert [site.sliding_window for site in find_sites(gm)] == [5]


@pytest.mark.parametrize("dtype", quick([torch.bfloat16, torch.float16], [torch.bfloat16]))
def test_half_precision_is_proved_and_keeps_entries_in_half(dtype, capture):
    def attend(x: Tensor) -> list[Tensor]:
        q, k, v = x.transpose(1, 2).split([H, H, H], dim=1)
        mask = torch.full((q.shape[2], q.shape[2]), torch.finfo(dtype).min, dtype=dtype).triu(1)
        plain = F.softmax(q @ k.mT * SCALE + mask, dim=-1, dtype=torch.float32).to(dtype) @ v
        return [plain.float(), (weights(q.float() @ k.to(torch.float32).mT / math.sqrt(D)).to(dtype) @ v).float()]

    gm, (found, *_) = capture(attend, [qkv().to(dtype)], PASSES, tolerance=0.03)
    assert found == 2
    assert {site.k.meta["example_value"].dtype for site in find_sites(gm)} == {dtype}
    assert [site.scale for site in find_sites(gm)] == [D**-0.5] * 2


def test_keys_of_more_precision_than_values_are_refused(capture):
    def attend(x: Tensor) -> Tensor:
        q, k, v = x.transpose(1, 2).split([H, H, H], dim=1)
        return weights((q.float() * 0.1) @ k.float().mT).bfloat16() @ v

    with pytest.raises(UnsupportedAttentionError, match=r"float32 beside values of torch\.bfloat16"):
        capture(attend, [qkv().bfloat16()], PASSES)


def logits_of(q: Tensor, k: Tensor) -> Tensor:
    return (q @ k.mT * SCALE).masked_fill(hidden(q.shape[2]), -torch.inf)


def normalised(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    products = q @ k.mT
    return weights(products - products.mean(-1, True)) @ v


REFUSED: dict[str, tuple[str, Attend]] = {
    "no mask": ("not causal", lambda q, k, v: (q @ k.mT * SCALE).softmax(-1) @ v),
    "weak mask": ("adds a bias", lambda q, k, v: (q @ k.mT - 1e4 * hidden(q.shape[2])).softmax(-1) @ v),
    "distance": ("adds a bias", lambda q, k, v: (logits_of(q, k) - (torch.arange(q.shape[2]) % 3)).softmax(-1) @ v),
    "clamped": ("not a multiple", lambda q, k, v: weights((q @ k.mT).clamp(-50, 50)) @ v),
    "negative scale": ("products of 1", lambda q, k, v: weights(q @ k.mT * -0.5) @ v),
    "normalised logits": ("products of 1", normalised),
    "capped after the mask": ("adds a bias", lambda q, k, v: (5 * (logits_of(q, k) / 5).tanh()).softmax(-1) @ v),
    "sharpened weights": ("not the softmax", lambda q, k, v: (logits_of(q, k).softmax(-1) * 2) @ v),
    "dropout": ("not the softmax", lambda q, k, v: F.dropout(logits_of(q, k).softmax(-1), 0.5, training=True) @ v),
    "heads of values": ("4 key heads and 1 value heads", lambda q, k, v: logits_of(q, k).softmax(-1) @ v[:, :1]),
    "other order of groups": (
        "not batch and heads",
        lambda q, k, v: (weights(q.view(q.shape[0], 2, 2, -1, D) @ k[:, None, :2].mT) @ v[:, None, :2]).flatten(1, 2),
    ),
}


LEFT = {
    "used twice": lambda q, k, v: (lambda w: w @ v + (w @ v).cos())(logits_of(q, k).softmax(-1)),
    "sink": lambda q, k, v: torch.cat([logits_of(q, k), torch.zeros_like(q[..., :1])], -1).softmax(-1)[..., :-1] @ v,
    "over queries": lambda q, k, v: logits_of(q, k).softmax(-2) @ v,
    "two products": lambda q, k, v: weights(q @ k.mT + k @ q.mT) @ v,
}
"""What has another structure is left to the check that refuses it."""


def test_anything_else_is_refused_by_name(capture_each):
    forms = {name: form for name, (_, form) in REFUSED.items()} | LEFT
    reasons = {name: reason for name, (reason, _) in REFUSED.items()} | dict.fromkeys(LEFT, "relates tokens to tokens")
    found = capture_each([of_heads(form) for form in forms.values()], [qkv()], PASSES)
    for (name, reason), refusal in zip(reasons.items(), found, strict=True):
        assert reason in str(refusal) and (name in LEFT or "softmax" in refusal.node), f"{name}: {refusal}"


def test_softmax_over_heads_and_experts_is_let_alone(capture):
    def mixed(x: Tensor) -> Tensor:
        q, k, v = x.transpose(1, 2).split([H, H, H], dim=1)
        rows = q.transpose(1, 2)
        across = (rows @ rows.mT).softmax(-1) @ rows
        experts = (rows @ torch.ones(D, H)).softmax(-1) @ torch.ones(H, D)
        return FOUND["divided"][0](q, k, v) + (across + experts).transpose(1, 2)

    _, counts = capture(mixed, [qkv()], PASSES)
    assert counts == [1, 0, 0]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bias", torch.ones(1, 1, 64, 64).tril())
        self.dropout = nn.Dropout(0.2)
        self.scale = 0.4

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        t = q.shape[2]
        logits = (q @ k.transpose(-2, -1) * self.scale).masked_fill(self.bias[:, :, :t, :t] == 0, float("-inf"))
        return self.dropout(logits.softmax(-1)) @ v


@pytest.mark.parametrize(("dynamic", "tokens"), [(True, T), (False, 1)])
def test_a_mask_stored_by_the_module_is_proved_at_any_length(dynamic, tokens, capture):
    layers = nn.ModuleList([Layer(), Layer()]).eval()

    def attend(x: Tensor) -> Tensor:
        q, k, v = x.transpose(1, 2).split([H, H, H], dim=1)
        return layers[1](layers[0](q, k, v), k, v)

    gm, (found, *_) = capture(attend, [qkv(tokens=tokens)], PASSES, dynamic=dynamic)
    assert (found, [site.scale for site in find_sites(gm)]) == (2, [pytest.approx(0.4, rel=1e-6)] * 2)
    layers.train()
    with pytest.raises(UnsupportedAttentionError, match="dropout"):
        capture(attend, [qkv(tokens=tokens)], PASSES, dynamic=dynamic)
