"""Decoders written as people write them, without cache or position inputs, unmodified under the raw backend.

Each computes its own positions from the length of its input and knows nothing of kvpass. ``keep`` of a test model,
which the oracle uses, hides prompt entries from later tokens; it is None while kvpass runs the model.

The forms of published code (litgpt, gpt-fast, torchtune, x-transformers, PaLM-rlhf) are a few lines of
our own each: exact, or refused by the line.
"""

import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import kvpass
from compiled_models import padded, prompts_of
from masked_oracle import kept_columns
from numeric_checks import assert_close
from pairwise import quick, quick_rows
from small_decoders import DIM, HEADS, WIDTH, SmallDecoder
from tiny_models import in_session, random_ids, raw

LONGEST = 96
PROMPT, NEW = 37, 11


class SlicedRotary(SmallDecoder):
    """Grouped KV repeated to the query heads, rotary tables cut to the input."""

    def __init__(self, wide: float = 2.0) -> None:
        super().__init__(wide=wide, layers=2, kv_heads=2)
        angles = torch.arange(LONGEST)[:, None] / 50.0 ** (torch.arange(0, DIM, 2) / DIM)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())
        self.keep: Tensor | None = None

    def embedded(self, ids, positions=None):
        return self.embed(ids)

    def turned(self, x, positions):
        cos, sin = self.cos[: x.shape[2]], self.sin[: x.shape[2]]
        even, odd = x[..., 0::2], x[..., 1::2]
        return torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2)

    def attend(self, q, k, v, layer):
        k, v = (part.repeat_interleave(HEADS // 2, dim=1) for part in (k, v))
        return self.attended(q, k, v, hidden_of(self.keep, layer, q.shape[2]))

    def attended(self, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None) -> Tensor:
        if hidden is None:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)
        causal = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).tril()
        return F.scaled_dot_product_attention(q, k, v, attn_mask=causal & ~hidden)


class WrittenOut(SlicedRotary):
    """The same with attention written out: scaled before, soft-capped, additive mask, softmax in fp32."""

    def attended(self, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None) -> Tensor:
        t = q.shape[2]
        logits = torch.einsum("bhqd,bhkd->bhqk", q / math.sqrt(q.shape[-1]), k)
        logits = 5.0 * torch.tanh(logits / 5.0)
        logits = logits + torch.full((t, t), torch.finfo(q.dtype).min, device=q.device).triu(1)
        if hidden is not None:
            logits = logits.masked_fill(hidden, torch.finfo(q.dtype).min)
        return torch.matmul(F.softmax(logits, dim=-1, dtype=torch.float32).to(q.dtype), v)


class Alibi(SlicedRotary):
    """No positions but a bias that grows with the distance, another slope per head."""

    def turned(self, x, positions):
        return x

    def attended(self, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None) -> Tensor:
        order = torch.arange(q.shape[2], device=q.device)
        slopes = 0.5 ** torch.arange(1, HEADS + 1, device=q.device)
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


def compiled(model, budget):
    return raw(model, {"policy": "snapkv", "budget": budget, "window": 8, "compiler": "eager"})


@pytest.mark.parametrize("make", quick([SlicedRotary, WrittenOut, Alibi], [WrittenOut, Alibi]))
@torch.no_grad()
def test_decoding_against_a_compressed_cache_equals_the_masked_oracle(make):
    decoder, ids, new = make(), random_ids(2, PROMPT, seed=1), random_ids(2, NEW, seed=2)
    fast = compiled(decoder, 14)
    with kvpass.session() as session:
        pieces = [fast(ids)]
        keep = kept_columns(session.cache, PROMPT)
        pieces += [fast(piece.contiguous()) for piece in new.split([1, 1, 5, 1, NEW - 8], dim=1)]
    assert int(keep.sum()) == 2 * 2 * 2 * 14, "of two KV heads, which are repeated"
    decoder.keep = keep.repeat_interleave(2, dim=2)
    expected = decoder(torch.cat([ids, new], 1))
    decoder.keep = None
    assert (expected - decoder(torch.cat([ids, new], 1))).abs().max() > 1e-2, "the budget hides nothing"
    assert_close("logits", torch.cat(pieces, 1), expected, atol=1e-4)


@torch.no_grad()
def test_contract_4_rows_of_a_padded_batch_are_as_alone_where_only_distances_count():
    fast = compiled(Alibi(wide=1.0), 14)
    (ids, mask), new = padded(PROMPT, 25), random_ids(2, 3, seed=5)
    together, _ = in_session(fast, [PROMPT, 1, 1, 1], torch.cat([ids, new], 1), attention_mask=mask)
    for row, prompt in enumerate(prompts_of(PROMPT, 25)):
        text = torch.cat([prompt, new[row]]).repeat(2, 1)
        alone, _ = in_session(fast, [len(prompt), 1, 1, 1], text)
        assert_close(f"row {row}", together[row, -4:], alone[0, -4:], atol=1e-5)


# -- forms of published code ------------------------------------------------------------------------------------------


TABLE = 64
BEGIN, PIECES = 29, (1, 1, 5, 1)


class ScaledByAttributes(SmallDecoder):
    """litgpt: a scale made of a float attribute, which Dynamo makes a symbol of."""

    def __init__(self) -> None:
        super().__init__()
        self.config, self.mscale = SimpleNamespace(head_size=WIDTH // HEADS), 1.5

    def attend(self, q, k, v, layer):
        scale = 1.0 / math.sqrt(self.config.head_size)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale * self.mscale * self.mscale)


class PlainTables(SmallDecoder):
    """gpt-fast: a mask and a table of positions that are attributes, no buffers: Dynamo makes their sizes symbols."""

    def __init__(self) -> None:
        super().__init__()
        self.causal_mask = torch.ones(TABLE, TABLE, dtype=torch.bool).tril()
        self.table = torch.randn(TABLE, WIDTH)

    def positions(self, ids):
        return self.table[: ids.shape[1]]

    def attend(self, q, k, v, layer):
        mask = self.causal_mask[None, None, : q.shape[2], : q.shape[2]]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


class BiasOfLongestCall(SmallDecoder):
    """x-transformers: an ALiBi table that is kept for shorter texts; the longest text was before the compilation."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bias", None, persistent=False)
        self(random_ids(1, TABLE))

    def attend(self, q, k, v, layer):
        t = q.shape[2]
        if self.bias is None or self.bias.shape[-1] < t:
            order, slopes = torch.arange(t), 0.5 ** torch.arange(1, HEADS + 1)
            bias = -slopes[:, None, None] * (order[None] - order[:, None]).abs()
            self.register_buffer("bias", bias, persistent=False)
        bias = self.bias[..., -t:, -t:].masked_fill(torch.ones(t, t, dtype=torch.bool).triu(1), -torch.inf)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)


WORKS = [SlicedRotary, WrittenOut, Alibi, ScaledByAttributes, PlainTables, BiasOfLongestCall]
TEXT = random_ids(2, BEGIN + sum(PIECES))


def uncompressed(module: nn.Module, compiler: str = "eager"):
    return raw(module, {"policy": "full", "compiler": compiler})


def in_pieces(fast, text: Tensor = TEXT) -> Tensor:
    """Logits of a prompt and of pieces after it."""
    logits, cache = in_session(fast, [BEGIN, *PIECES], text)
    assert cache.columns == text.shape[1]
    return logits


@pytest.mark.parametrize(
    ("make", "compiler"),
    quick_rows(
        [*((make, "eager") for make in WORKS), *((make, "inductor") for make in WORKS[:3])],
        [(make, "eager") for make in (SlicedRotary, ScaledByAttributes, BiasOfLongestCall)],
    ),
)
@torch.no_grad()
def test_contract_1_plain_modules_give_what_the_whole_text_gives(make, compiler):
    module = make()
    fast = uncompressed(module, compiler)
    for ids in (TEXT, TEXT.repeat(2, 1)):
        assert_close("logits", in_pieces(fast, ids), module(ids), atol=1e-4)


@torch.no_grad()
def test_a_tensor_attribute_of_another_size_is_another_capture_with_an_end_of_its_own():
    module = PlainTables()
    fast = uncompressed(module)
    in_pieces(fast)
    module.table = torch.randn(TEXT.shape[1], WIDTH)
    assert_close("after", in_pieces(fast), module(TEXT), atol=1e-4)
    with kvpass.session():
        fast(TEXT)
        with pytest.raises(ValueError, match=f"1 tokens after {TEXT.shape[1]}: the decoder does not take more"):
            fast(TEXT[:, :1].clone())


class WritesCache(SmallDecoder):
    """gpt-fast, litgpt, torchtune after setup_caches: rows are written into buffers that all calls share."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("k_cache", torch.zeros(1, 2, HEADS, TABLE, WIDTH // HEADS))

    def attend(self, q, k, v, layer):
        at = torch.arange(q.shape[2])
        self.k_cache[layer][:, :, at] = k
        mask = torch.arange(TABLE) <= at[:, None]
        return F.scaled_dot_product_attention(q, self.k_cache[layer], self.k_cache[layer], attn_mask=mask)


class CountsInAttribute(SmallDecoder):
    """LLMs-from-scratch with its cache: an int that counts tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.current = 0

    def positions(self, ids):
        found = self.places(torch.arange(self.current, self.current + ids.shape[1]))
        self.current += ids.shape[1]
        return found


class TableOfThisLength(BiasOfLongestCall):
    """x-transformers and PaLM-rlhf before their first call: the table kept is as long as the prompt."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = None


class PacksInFirstCall(SmallDecoder):
    """bitsandbytes on a CPU: weights get the layout of its kernels in the first call."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.ones(WIDTH, dtype=torch.float64)

    def embedded(self, ids, positions=None):
        if self.scale.dtype != torch.float32:
            self.scale = self.scale.float()
        return super().embedded(ids, positions) * self.scale


OWN_CACHE = r"cache or counter of the decoder's own.*kvpass keeps the cache"
BY_THE_LINE = {
    WritesCache: (rf"setitem.*changes k_cache, a {OWN_CACHE}", "self.k_cache[layer][:, :, at] = k"),
    CountsInAttribute: (rf"changes current, a {OWN_CACHE}", "self.current += ids.shape[1]"),
    TableOfThisLength: (
        "a table for the length of this call.*once on the longest text",
        "bias = -slopes[:, None, None]",
    ),
    PacksInFirstCall: (
        "changes scale by what stands there.*Call the decoder once before it is compiled",
        "self.scale = self.scale.float()",
    ),
}


@pytest.mark.parametrize("make", BY_THE_LINE)
def test_contract_7_what_goes_on_by_itself_is_refused_by_the_line_that_does_it(make):
    reason, code = BY_THE_LINE[make]
    with pytest.raises(Exception, match=f"(?s){reason}") as refusal:
        in_pieces(uncompressed(make()))
    lines = Path(__file__).read_text().splitlines()
    places = [f"{__file__}:{number})" for number, line in enumerate(lines, 1) if code in line]
    assert places[0] in str(refusal.value)


class KeepsLast(SmallDecoder):
    """A token shift that is carried in an attribute: without it, the graph of one token looks like any other."""

    def __init__(self, states: bool) -> None:
        super().__init__()
        self.last = None
        self.states = [None] if states else None

    def embedded(self, ids, positions=None):
        x = super().embedded(ids, positions)
        held = self.last if self.states is None else self.states[0]
        if self.states is None:
            self.last = x[:, -1:]
        else:
            self.states[0] = x[:, -1:]
        return x if held is None else x + held


@pytest.mark.parametrize("states", [False, True], ids=["attribute", "list"])
@torch.no_grad()
def test_contract_7_state_in_an_attribute_is_refused_before_it_is_read(states):
    fast = uncompressed(KeepsLast(states))
    if states:  # of a list, when it is written: what is read of it later, no graph of this call shows
        with pytest.raises(Exception, match="keeps results in a dict or list, outside of the call"), kvpass.session():
            fast(TEXT)
        return
    with kvpass.session() as session:
        fast(TEXT)
        with pytest.raises(Exception, match=rf"changes last, a {OWN_CACHE}"):
            fast(TEXT[:, :1].clone())
        assert session.cache.columns == TEXT.shape[1]


class WithMask(SmallDecoder):
    """torchtune, x-transformers: a mask that the caller may give; gpt-fast: one of blocks."""

    def forward(self, ids, mask=None):
        b, t = ids.shape
        x = self.embedded(ids)
        for layer in self.layers:
            q, k, v = (part.view(b, t, HEADS, -1).transpose(1, 2) for part in layer(x).chunk(3, -1))
            if mask is None or isinstance(mask, Tensor):
                y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
            else:
                y = flex_attention(q, k, v, block_mask=mask)
            x = x + y.transpose(1, 2).reshape(b, t, WIDTH)
        return self.head(x)


@torch.no_grad()
def test_a_mask_that_is_given_is_refused_and_the_module_works_without_it():
    module, t = WithMask(), TEXT.shape[1]
    with pytest.raises(Exception, match=r"its mask is the input l_mask_.*Leave that argument out"), kvpass.session():
        uncompressed(module)(TEXT, torch.ones(t, t, dtype=torch.bool).tril())
    blocks = create_block_mask(lambda b, h, q, k: q >= k, None, None, t, t, device="cpu")
    with pytest.raises(Exception, match="flex_attention is not a canonical attention site"), kvpass.session():
        uncompressed(module)(TEXT, blocks)
    assert_close("logits", in_pieces(uncompressed(module)), module(TEXT), atol=1e-4)
