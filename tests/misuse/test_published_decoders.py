"""Decoders in the forms that published code has them in, under the raw backend: exact, or refused by the line.

Each module is a few lines of our own in the shape of what litgpt, gpt-fast, torchtune, lit-llama, x-transformers and
PaLM-rlhf do. ``forward`` knows nothing of kvpass; what is not in the shape of a causal decoder must not run at all.
"""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import kvpass
from numeric_checks import assert_close
from pairwise import quick
from tiny_models import random_ids

VOCABULARY, WIDTH, HEADS, LONGEST = 128, 32, 4, 64
PROMPT, PIECES = 29, (1, 1, 5, 1)


class Decoder(nn.Module):
    """Two layers of causal attention on learned positions; what a test changes is a method."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LONGEST, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.eval()

    def positions(self, ids: Tensor) -> Tensor:
        return self.places(torch.arange(ids.shape[1]))

    def begin(self, x: Tensor) -> Tensor:
        return x

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def forward(self, ids: Tensor) -> Tensor:
        b, t = ids.shape
        x = self.begin(self.embed(ids) + self.positions(ids))
        for i, layer in enumerate(self.layers):
            q, k, v = (part.view(b, t, HEADS, -1).transpose(1, 2) for part in layer(x).chunk(3, -1))
            x = x + self.attend(q, k, v, i).transpose(1, 2).reshape(b, t, WIDTH)
        return self.head(x)


class ScaledByAttributes(Decoder):
    """litgpt: a scale made of a float attribute, which Dynamo makes a symbol of."""

    def __init__(self) -> None:
        super().__init__()
        self.config, self.mscale = SimpleNamespace(head_size=WIDTH // HEADS), 1.5

    def attend(self, q, k, v, layer):
        scale = 1.0 / math.sqrt(self.config.head_size)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale * self.mscale * self.mscale)


class PlainTables(Decoder):
    """gpt-fast: a mask and a table of positions that are attributes, no buffers: Dynamo makes their sizes symbols."""

    def __init__(self) -> None:
        super().__init__()
        self.causal_mask = torch.ones(LONGEST, LONGEST, dtype=torch.bool).tril()
        self.table = torch.randn(LONGEST, WIDTH)

    def positions(self, ids):
        return self.table[: ids.shape[1]]

    def attend(self, q, k, v, layer):
        mask = self.causal_mask[None, None, : q.shape[2], : q.shape[2]]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


class TablesOnFirstCall(PlainTables):
    """lit-llama: the same tables, made by a first call, which was before the module is compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.built = self.table
        self.table = None
        self(random_ids(1, 3))

    def positions(self, ids):
        if self.table is None:
            self.table = self.built + 0
        return super().positions(ids)


class BiasOfLongestCall(Decoder):
    """x-transformers: an ALiBi table that is kept for shorter texts; the longest text was before the compilation."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bias", None, persistent=False)
        self(random_ids(1, LONGEST))

    def attend(self, q, k, v, layer):
        t = q.shape[2]
        if self.bias is None or self.bias.shape[-1] < t:
            order, slopes = torch.arange(t), 0.5 ** torch.arange(1, HEADS + 1)
            bias = -slopes[:, None, None] * (order[None] - order[:, None]).abs()
            self.register_buffer("bias", bias, persistent=False)
        bias = self.bias[..., -t:, -t:].masked_fill(torch.ones(t, t, dtype=torch.bool).triu(1), -torch.inf)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)


WORKS = [ScaledByAttributes, PlainTables, TablesOnFirstCall, BiasOfLongestCall]


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()


def compiled(module: nn.Module, **options):
    given = {"policy": "full", "compiler": "eager", **options}
    return torch.compile(module, backend="kvpass", fullgraph=True, dynamic=True, options=given)


@torch.no_grad()
def in_pieces(fast, text: Tensor) -> Tensor:
    """Logits of a prompt and of pieces after it."""
    with kvpass.session() as session:
        pieces = [fast(piece.contiguous()) for piece in text.split([PROMPT, *PIECES], 1)]
        assert session.cache.columns == text.shape[1]
    return torch.cat(pieces, 1)


def text(rows: int = 2, seed: int = 0) -> Tensor:
    return random_ids(rows, PROMPT + sum(PIECES), seed=seed)


@pytest.mark.parametrize("make", quick(WORKS, [ScaledByAttributes, TablesOnFirstCall]))
@torch.no_grad()
def test_contract_1_the_forms_of_published_decoders_give_what_the_whole_text_gives(make):
    module = make()
    fast = compiled(module)
    for rows in (2, HEADS):
        ids = text(rows)
        assert_close("logits", in_pieces(fast, ids), module(ids), atol=1e-4)


@torch.no_grad()
def test_a_float_attribute_of_another_value_is_another_capture():
    module, ids = ScaledByAttributes(), text()
    fast, before = compiled(module), module(ids)
    assert_close("before", in_pieces(fast, ids), before, atol=1e-4)
    module.mscale = 3.0
    assert (module(ids) - before).abs().max() > 1e-2
    assert_close("after", in_pieces(fast, ids), module(ids), atol=1e-4)


@torch.no_grad()
def test_a_tensor_attribute_of_another_size_is_another_capture_with_an_end_of_its_own():
    module, ids = PlainTables(), text()
    fast = compiled(module)
    in_pieces(fast, ids)
    module.table = torch.randn(ids.shape[1], WIDTH)
    assert_close("after", in_pieces(fast, ids), module(ids), atol=1e-4)
    with kvpass.session():
        fast(ids)
        with pytest.raises(ValueError, match=f"1 tokens after {ids.shape[1]}: the decoder does not take more"):
            fast(ids[:, :1].clone())


class WritesCache(Decoder):
    """gpt-fast, litgpt, torchtune after setup_caches: rows are written into buffers that all calls share."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("k_cache", torch.zeros(2, 2, HEADS, LONGEST, WIDTH // HEADS))
        self.seen = torch.zeros((), dtype=torch.long)

    def attend(self, q, k, v, layer):
        at = torch.arange(q.shape[2])
        self.k_cache[layer][:, :, at] = k
        mask = torch.arange(LONGEST) <= at[:, None]
        return F.scaled_dot_product_attention(q, self.k_cache[layer], self.k_cache[layer], attn_mask=mask)


class CopiesIntoCache(WritesCache):
    def attend(self, q, k, v, layer):
        t = q.shape[2]
        keys = self.k_cache[layer].index_copy_(2, torch.arange(t), k)
        return F.scaled_dot_product_attention(q, keys[:, :, :t], v, is_causal=True)


class CountsInBuffer(WritesCache):
    def positions(self, ids):
        found = self.places(self.seen + torch.arange(ids.shape[1]))
        self.seen.add_(ids.shape[1])
        return found

    attend = Decoder.attend


class CountsInAttribute(Decoder):
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


class ScaledByLength(Decoder):
    def attend(self, q, k, v, layer):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=1 / q.shape[2])


class LoopsOverTokens(Decoder):
    """litgpt with a sliding window: a Python loop makes a constant of the length."""

    def attend(self, q, k, v, layer):
        mask = torch.zeros(q.shape[2], q.shape[2], dtype=torch.bool)
        for i in range(q.shape[2]):
            mask[i, max(0, i - 7) : i + 1] = True
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


class BranchesOnLength(Decoder):
    def begin(self, x):
        return 2 * x if x.shape[1] > 8 else x


OWN_CACHE = r"cache or counter of the decoder's own.*kvpass keeps the cache"
REFUSED = {
    WritesCache: (rf"setitem.*changes k_cache, a {OWN_CACHE}", "self.k_cache[layer][:, :, at] = k"),
    CopiesIntoCache: (rf"changes k_cache, a {OWN_CACHE}", "keys = self.k_cache[layer].index_copy_"),
    CountsInBuffer: (rf"changes seen, a {OWN_CACHE}", "self.seen.add_(ids.shape[1])"),
    CountsInAttribute: (rf"changes current, a {OWN_CACHE}", "self.current += ids.shape[1]"),
    TableOfThisLength: (
        "a table for the length of this call.*once on the longest text",
        "bias = -slopes[:, None, None] *",
    ),
    ScaledByLength: (
        r"its scale \(node truediv\) depends on a size.*make it of numbers that the module holds",
        "scale=1 / q.shape[2])",
    ),
    LoopsOverTokens: (rf"captured for {PROMPT} tokens and no other length: `for i in range\(q.shape\[2\]\):", None),
    BranchesOnLength: ("branches on the length of its input, in `return 2 \\* x if x.shape\\[1\\] > 8 else x", None),
}


def line_that_reads(code: str) -> int:
    with open(__file__, encoding="utf-8") as lines:
        return next(number for number, line in enumerate(lines, 1) if code in line)


@pytest.mark.parametrize(
    "make", quick([*REFUSED], [WritesCache, CountsInAttribute, TableOfThisLength, BranchesOnLength])
)
def test_contract_7_what_goes_on_by_itself_is_refused_by_the_line_that_does_it(make):
    reason, code = REFUSED[make]
    with pytest.raises(Exception, match=f"(?s){reason}") as refusal:
        in_pieces(compiled(make()), text())
    assert code is None or f"{__file__}:{line_that_reads(code)})" in str(refusal.value)


class KeepsLast(Decoder):
    """A token shift that is carried in an attribute: without it, the graph of one token looks like any other."""

    def __init__(self, states: bool) -> None:
        super().__init__()
        self.last = None
        self.states = [None] if states else None

    def begin(self, x):
        held = self.last if self.states is None else self.states[0]
        if self.states is None:
            self.last = x[:, -1:]
        else:
            self.states[0] = x[:, -1:]
        return x if held is None else x + held


@pytest.mark.parametrize("states", [False, True], ids=["attribute", "list"])
@torch.no_grad()
def test_contract_7_state_in_an_attribute_is_refused_before_it_is_read(states):
    fast, ids = compiled(KeepsLast(states)), text()
    with kvpass.session() as session:
        fast(ids)
        cache = session.cache.clone()
        name = r"states\.0|states" if states else "last"
        with pytest.raises(Exception, match=rf"changes ({name}), a {OWN_CACHE}"):
            fast(ids[:, :1].clone())
        assert session.cache.columns == cache.columns


class WithMask(Decoder):
    """torchtune, x-transformers: a mask that the caller may give; gpt-fast: one of blocks."""

    def forward(self, ids, mask=None):
        b, t = ids.shape
        x = self.embed(ids) + self.positions(ids)
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
    module, ids = WithMask(), text()
    with pytest.raises(Exception, match=r"its mask is the input l_mask_.*Leave that argument out"), kvpass.session():
        compiled(module)(ids, torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril())
    blocks = create_block_mask(lambda b, h, q, k: q >= k, None, None, ids.shape[1], ids.shape[1], device="cpu")
    with pytest.raises(Exception, match=r"block mask is an input.*make it in forward"), kvpass.session():
        compiled(module)(ids, blocks)
    assert_close("logits", in_pieces(compiled(module), ids), module(ids), atol=1e-4)
