"""Decoders written as people write them, without cache or position inputs, unmodified under the raw backend.

Each computes its own positions from the length of its input and knows nothing of kvpass. ``keep`` of a test model,
which the oracle uses, hides prompt entries from later tokens; it is None while kvpass runs the model.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import kvpass
from masked_oracle import kept_columns
from numeric_checks import assert_close
from pairwise import quick
from tiny_models import left_pad, random_ids, raw

VOCABULARY, LONGEST = 128, 96
PROMPT, NEW = 37, 11


class FusedAttention(nn.Module):
    """Query, key and value in one linear; fused or written out."""

    def __init__(self, width: int, heads: int, written_out: bool) -> None:
        super().__init__()
        self.c_attn = nn.Linear(width, 3 * width)
        self.c_proj = nn.Linear(width, width)
        self.heads, self.written_out = heads, written_out
        self.dropout = nn.Dropout(0.1)
        self.register_buffer("allowed", torch.ones(LONGEST, LONGEST).tril()[None, None])

    def forward(self, x: Tensor, hidden: Tensor | None) -> Tensor:
        b, t, c = x.size()
        q, k, v = self.c_attn(x).split(c, dim=2)
        q, k, v = (y.view(b, t, self.heads, c // self.heads).transpose(1, 2) for y in (q, k, v))
        if self.written_out or hidden is not None:
            logits = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
            logits = logits.masked_fill(self.allowed[:, :, :t, :t] == 0, float("-inf"))
            if hidden is not None:
                logits = logits.masked_fill(hidden, float("-inf"))
            y = self.dropout(F.softmax(logits, dim=-1)) @ v
        else:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.1 if self.training else 0.0)
        return self.c_proj(y.transpose(1, 2).contiguous().view(b, t, c))


class LearnedPositions(nn.Module):
    """The minimal GPT: token and position embeddings, pre-norm blocks, GELU."""

    def __init__(self, written_out: bool, width: int = 32, heads: int = 4, layers: int = 2) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCABULARY, width), nn.Embedding(LONGEST, width)
        self.drop = nn.Dropout(0.1)
        self.attentions = nn.ModuleList(FusedAttention(width, heads, written_out) for _ in range(layers))
        self.mlps = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(layers)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2 * layers + 1))
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.keep: Tensor | None = None

    def forward(self, ids: Tensor) -> Tensor:
        _, t = ids.size()
        assert t <= LONGEST
        x = self.drop(self.wte(ids) + self.wpe(torch.arange(0, t, dtype=torch.long, device=ids.device)))
        for i, (attention, mlp) in enumerate(zip(self.attentions, self.mlps, strict=True)):
            x = x + attention(self.norms[2 * i](x), hidden_of(self.keep, i, t))
            x = x + mlp(self.norms[2 * i + 1](x))
        return self.head(self.norms[-1](x))


class SlicedRotary(nn.Module):
    """Grouped KV repeated to the query heads, rotary tables cut to the input, RMS norms."""

    def __init__(self, width: int = 48, heads: int = 4, kv_heads: int = 2, layers: int = 2) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.dim = heads, kv_heads, width // heads
        angles = torch.arange(LONGEST)[:, None] / 50.0 ** (torch.arange(0, self.dim, 2) / self.dim)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())
        self.embed = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(
            nn.ModuleDict(
                {
                    "q": nn.Linear(width, width, bias=False),
                    "kv": nn.Linear(width, 2 * kv_heads * self.dim, bias=False),
                    "o": nn.Linear(width, width, bias=False),
                    "norm": nn.RMSNorm(width),
                }
            )
            for _ in range(layers)
        )
        self.keep: Tensor | None = None

    def rotated(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        even, odd = x[..., 0::2], x[..., 1::2]
        return torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None) -> Tensor:
        if hidden is None:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)
        causal = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).tril()
        return F.scaled_dot_product_attention(q, k, v, attn_mask=causal & ~hidden)

    def forward(self, ids: Tensor) -> Tensor:
        b, t = ids.shape
        cos, sin = self.cos[:t][:, None], self.sin[:t][:, None]
        x = self.embed(ids)
        for i, layer in enumerate(self.layers):
            y = layer["norm"](x)
            q = self.rotated(layer["q"](y).view(b, t, self.heads, self.dim), cos, sin).transpose(1, 2)
            k, v = layer["kv"](y).view(b, t, 2, self.kv_heads, self.dim).unbind(2)
            k = self.rotated(k, cos, sin).transpose(1, 2).repeat_interleave(self.heads // self.kv_heads, dim=1)
            v = v.transpose(1, 2).repeat_interleave(self.heads // self.kv_heads, dim=1)
            x = x + layer["o"](self.attend(q, k, v, hidden_of(self.keep, i, t)).transpose(1, 2).reshape(b, t, -1))
        return x @ self.embed.weight.T


class WrittenOut(SlicedRotary):
    """The same with attention written out: scaled before, soft-capped, additive mask, softmax in fp32."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None) -> Tensor:
        t = q.shape[2]
        logits = torch.einsum("bhqd,bhkd->bhqk", q / math.sqrt(q.shape[-1]), k)
        logits = 5.0 * torch.tanh(logits / 5.0)
        logits = logits + torch.full((t, t), torch.finfo(q.dtype).min, device=q.device).triu(1)
        if hidden is not None:
            logits = logits.masked_fill(hidden, torch.finfo(q.dtype).min)
        return torch.matmul(F.softmax(logits, dim=-1, dtype=torch.float32).to(q.dtype), v)


class Alibi(SlicedRotary):
    """No positions but a bias that grows with the distance, another slope per head."""

    def rotated(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return x

    def attend(self, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None) -> Tensor:
        order = torch.arange(q.shape[2], device=q.device)
        slopes = 0.5 ** torch.arange(1, self.heads + 1, device=q.device)
        bias = slopes[:, None, None] * (order[None, :] - order[:, None])
        bias = bias.masked_fill(order[None, :] > order[:, None], float("-inf"))
        if hidden is not None:
            bias = bias.masked_fill(hidden, float("-inf"))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)


def hidden_of(keep: Tensor | None, layer: int, tokens: int) -> Tensor | None:
    """What tokens after the prompt do not see of it, bool ``[B, heads or 1, T, T]``."""
    if keep is None:
        return None
    n = keep.shape[3]
    hidden = torch.zeros(keep.shape[0], keep.shape[2], tokens, tokens, dtype=torch.bool)
    hidden[:, :, n:, :n] = ~keep[:, layer, :, None, :]
    return hidden


MODELS = {
    "minimal GPT, fused": (lambda: LearnedPositions(False), 4),
    "minimal GPT, written out": (lambda: LearnedPositions(True), 4),
    "sliced rotary": (SlicedRotary, 2),
    "written out in fp32": (WrittenOut, 2),
    "ALiBi": (Alibi, 2),
}


@pytest.fixture(params=MODELS)
def decoder(request):
    """A model with weights wide enough that attention is far from uniform, and its KV heads."""
    torch.manual_seed(0)
    make, kv_heads = MODELS[request.param]
    model = make().eval()
    for name, parameter in model.named_parameters():
        parameter.data.mul_(20 if "wpe" in name else 2 if parameter.ndim > 1 else 1)
    return model, kv_heads


def compiled(model, budget, compiler="eager"):
    return raw(model, {"policy": "snapkv", "budget": budget, "window": 8, "compiler": compiler})


def greedy_without_cache(model, ids, steps):
    for _ in range(steps):
        ids = torch.cat([ids, model(ids)[:, -1:].argmax(-1)], 1)
    return ids


@pytest.mark.parametrize("compiler", quick(["eager", "inductor"], ["eager"]))  # test_raw has Inductor in every run
@torch.no_grad()
def test_contract_1_greedy_tokens_are_those_of_recomputing_the_whole_sequence(decoder, compiler):
    model, kv_heads = decoder
    fast = compiled(model, 10**6, compiler)
    for rows, prompt in ((2, PROMPT), (2, PROMPT + 5)):
        ids = random_ids(rows, prompt, seed=prompt)
        expected = greedy_without_cache(model, ids, NEW)
        with kvpass.session() as session:
            tokens = [fast(ids)[:, -1:].argmax(-1)]
            while len(tokens) < NEW:
                tokens.append(fast(tokens[-1])[:, -1:].argmax(-1))
            assert torch.equal(torch.cat([ids, *tokens], 1), expected)
            more = random_ids(rows, 6, seed=3)
            logits = fast(torch.cat([tokens[-1], more], 1))
        assert_close("extend", logits, model(torch.cat([expected, more], 1))[:, -7:], atol=1e-4)
        assert session.cache.get_seq_length() == prompt + NEW + 6
        assert {group.geometry.kv_heads for group in session.cache.layout.pools} == {kv_heads}


@pytest.mark.parametrize(
    "decoder", quick([*MODELS], ["minimal GPT, written out", "written out in fp32", "ALiBi"]), indirect=True
)
@torch.no_grad()
def test_decoding_against_a_compressed_cache_equals_the_masked_oracle(decoder):
    model, kv_heads = decoder
    ids, new = random_ids(2, PROMPT, seed=1), random_ids(2, NEW, seed=2)
    fast = compiled(model, 14)
    with kvpass.session() as session:
        pieces = [fast(ids)]
        keep = kept_columns(session.cache, PROMPT)
        pieces += [fast(piece.contiguous()) for piece in new.split([1, 1, 5, 1, NEW - 8], dim=1)]
    assert int(keep.sum()) == 2 * 2 * kv_heads * 14
    model.keep = keep.repeat_interleave(4 // kv_heads, dim=2)
    expected = model(torch.cat([ids, new], 1))
    model.keep = None
    assert (expected - model(torch.cat([ids, new], 1))).abs().max() > 1e-2, "the budget hides nothing"
    assert_close("logits", torch.cat(pieces, 1), expected, atol=1e-4)


COUNTED = {
    "arange": lambda ids: torch.arange(ids.shape[1]),
    "arange by row": lambda ids: torch.arange(ids.shape[1]).expand_as(ids),
    "cumsum": lambda ids: torch.ones_like(ids).cumsum(1) - 1,
}


class Unasserted(LearnedPositions):
    """Nothing but the table of positions ends."""

    def __init__(self, counted) -> None:
        super().__init__(written_out=False)
        self.counted = counted

    def forward(self, ids: Tensor) -> Tensor:
        x = self.wte(ids) + self.wpe(self.counted(ids))
        for i, attention in enumerate(self.attentions):
            x = x + attention(self.norms[i](x), None)
        return self.head(x)


@torch.no_grad()
@pytest.mark.parametrize("name", quick([*COUNTED], ["arange by row", "cumsum"]))
def test_a_session_ends_where_the_table_of_positions_does(name):
    """Compiled code ends the process when it looks up a row beyond a table."""
    model = Unasserted(COUNTED[name]).eval()
    fast = compiled(model, 10**6)
    ids = random_ids(2, LONGEST + 1)
    with kvpass.session() as session:
        pieces = [fast(ids[:, : LONGEST - 3]), fast(ids[:, LONGEST - 3 : LONGEST - 1].clone())]
        pieces.append(fast(ids[:, LONGEST - 1 : LONGEST].clone()))
        assert_close("logits", torch.cat(pieces, 1), model(ids[:, :LONGEST]), atol=1e-4)
        with pytest.raises(ValueError, match=f"1 tokens after {LONGEST}: the decoder does not take more"):
            fast(ids[:, LONGEST:].clone())
        assert session.cache.columns == LONGEST
    with kvpass.session():
        with pytest.raises(ValueError, match=f"{LONGEST + 1} tokens after 0"):
            fast(ids)
        fast(ids[:, :20])


@torch.no_grad()
def test_contract_4_rows_of_a_padded_batch_are_as_alone_where_only_distances_count():
    torch.manual_seed(0)
    model = Alibi().eval()
    fast = compiled(model, 14)
    prompts, new = [random_ids(1, n, seed=n)[0] for n in (PROMPT, 25)], random_ids(2, 3, seed=5)
    ids, mask = left_pad(prompts)
    with kvpass.session(attention_mask=mask):
        together = torch.cat([fast(ids)[:, -1:], *(fast(piece.contiguous()) for piece in new.split(1, 1))], 1)
    for row, prompt in enumerate(prompts):
        with kvpass.session():
            pieces = [fast(prompt[None])[:, -1:], *(fast(new[row : row + 1, i : i + 1].clone()) for i in range(3))]
        assert_close(f"row {row}", together[row], torch.cat(pieces, 1)[0], atol=1e-5)
