"""``kvpass.generate`` on modules without a ``generate``: against recomputing the whole sequence for every token."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

import kvpass
from kvpass.frontends import generation
from tiny_models import left_pad, random_ids, raw, tiny_model

NEW, LONGEST = 7, 96


class Decoder(nn.Module):
    """One attention layer on token and position embeddings; positions are given or counted."""

    def __init__(self, width=32):
        super().__init__()
        self.tokens, self.places = nn.Embedding(128, width), nn.Embedding(LONGEST, width)
        self.qkv, self.head = nn.Linear(width, 3 * width), nn.Linear(width, 128)

    def forward(self, ids, positions=None):
        places = torch.arange(ids.shape[1], device=ids.device) if positions is None else positions
        x = self.tokens(ids) + self.places(places)
        q, k, v = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        return self.head(x + scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


@pytest.fixture
def decoder():
    module = Decoder().eval()
    for parameter in module.parameters():
        parameter.data.mul_(2)
    return module


def compiled(decoder, budget=1000):
    options = {"policy": "lava", "budget": budget, "window": 8, "compiler": "eager"}
    return raw(decoder, options)


@torch.no_grad()
def recomputed(decoder, ids):
    for _ in range(NEW):
        ids = torch.cat([ids, decoder(ids)[:, -1:].argmax(-1)], 1)
    return ids


@pytest.mark.parametrize("positions", [False, True])
def test_the_tokens_are_those_of_recomputing_everything(decoder, positions):
    ids = random_ids(2, 37)
    out = kvpass.generate(compiled(decoder), ids, max_new_tokens=NEW, positions=positions)
    assert torch.equal(out, recomputed(decoder, ids))


def test_contract_4_padded_rows_say_what_they_say_alone(decoder):
    prompts = [random_ids(1, n, seed=n)[0] for n in (40, 23)]
    ids, mask = left_pad(prompts)
    out = kvpass.generate(compiled(decoder, 12), ids, max_new_tokens=NEW, positions=True, attention_mask=mask)
    for row, prompt in enumerate(prompts):
        alone = kvpass.generate(compiled(decoder, 12), prompt[None], max_new_tokens=NEW, positions=True)
        assert torch.equal(out[row, ids.shape[1] :], alone[0, prompt.numel() :]), f"row {row}"


def test_a_row_that_has_ended_says_nothing_else(decoder):
    ids = random_ids(2, 37)
    free = recomputed(decoder, ids)[:, 37:]
    end = int(free[0, 2])
    out = kvpass.generate(compiled(decoder), ids, max_new_tokens=NEW, eos_token_id=end)[:, 37:]
    for row in range(2):
        said = free[row].tolist()
        stop = said.index(end) if end in said else NEW
        assert out[row].tolist() == (said[: stop + 1] + [end] * NEW)[: out.shape[1]]


@pytest.mark.parametrize("every", [2, 16])
def test_a_device_that_is_looked_at_now_and_then_gives_the_same(decoder, every, monkeypatch):
    ids = random_ids(1, 37)
    end = int(recomputed(decoder, ids)[0, 37 + 2])
    options = {"max_new_tokens": NEW, "eos_token_id": end}
    expected = kvpass.generate(compiled(decoder), ids, **options)
    monkeypatch.setattr(generation, "LOOK_EVERY", {"cpu": every})
    assert torch.equal(kvpass.generate(compiled(decoder), ids, **options), expected)
    assert expected[0, -1] == end and expected.shape[1] <= 37 + 3 < 37 + NEW


def test_logits_may_be_the_first_item_of_a_tuple(decoder):
    class WithLoss(nn.Module):
        """As nanoGPT: forward(idx, targets=None) returns logits of the last token and a loss."""

        def __init__(self):
            super().__init__()
            self.decoder = decoder

        def forward(self, ids, targets=None):
            logits, loss = self.decoder(ids)[:, [-1], :], None
            if targets is not None:
                loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
            return logits, loss

    ids = random_ids(2, 37)
    assert torch.equal(kvpass.generate(compiled(WithLoss()), ids, max_new_tokens=NEW), recomputed(decoder, ids))


def test_bad_arguments_are_refused(decoder):
    with pytest.raises(ValueError, match="max_new_tokens=0"):
        kvpass.generate(compiled(decoder), random_ids(1, 20), max_new_tokens=0)
    with pytest.raises(ValueError, match="must be a tensor of token ids, such as tokenizer"):
        kvpass.generate(compiled(decoder), "how are you?", max_new_tokens=2)
    with pytest.raises(ValueError, match=r"ids of shape \[20\]"):
        kvpass.generate(compiled(decoder), random_ids(1, 20)[0], max_new_tokens=2)
    model = kvpass.compile(tiny_model("llama", num_hidden_layers=1), budget=100)
    with pytest.raises(ValueError, match="use its own generate method"):
        kvpass.generate(model, random_ids(1, 20), max_new_tokens=2)
    answers = compiled(lambda ids, positions: {"logits": decoder(ids, positions)})
    with pytest.raises(ValueError, match="module returned a dict"):
        kvpass.generate(answers, random_ids(1, 20), max_new_tokens=2, positions=True)
    with pytest.raises(RuntimeError, match="nothing was compressed"):
        kvpass.generate(decoder, random_ids(1, 20), max_new_tokens=2)
