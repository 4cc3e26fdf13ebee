"""``kvpass.generate`` on modules without a ``generate``: against recomputing the whole sequence for every token."""

import pytest
import torch
from torch import nn

import kvpass
from compiled_models import padded, prompts_of, two_layers
from kvpass.frontends import sampling
from small_decoders import SmallDecoder, recomputed
from tiny_models import random_ids, raw

NEW = 7


GIVEN = {"policy": "lava", "budget": 1000, "window": 8, "compiler": "eager"}


@pytest.fixture(scope="module")
def decoder():
    return SmallDecoder(wide=2)


@pytest.fixture(scope="module")
def fast(decoder):
    return raw(decoder, GIVEN)


@pytest.mark.parametrize("positions", [False, True])
def test_the_tokens_are_those_of_recomputing_everything(decoder, fast, positions):
    ids = random_ids(2, 37)
    out = kvpass.generate(fast, ids, max_new_tokens=NEW, positions=positions)
    assert torch.equal(out, recomputed(decoder, ids, NEW))


def test_a_row_that_has_ended_says_nothing_else_also_where_the_next_step_is_queued_before(decoder, fast, monkeypatch):
    ids = random_ids(2, 37)
    free = recomputed(decoder, ids, NEW)[:, 37:]
    end = int(free[0, 2])
    out = kvpass.generate(fast, ids, max_new_tokens=NEW, eos_token_id=end)
    for row in range(2):
        said = free[row].tolist()
        stop = said.index(end) if end in said else NEW
        assert out[row, 37:].tolist() == (said[: stop + 1] + [end] * NEW)[: out.shape[1] - 37]
    both = ids[:1].repeat(2, 1)
    expected = kvpass.generate(fast, both, max_new_tokens=NEW, eos_token_id=end)
    assert expected[0, -1] == end and expected.shape[1] <= 37 + 3 < 37 + NEW
    monkeypatch.setattr(sampling, "QUEUING", {"cpu"})
    for text, answer in ((ids, out), (both, expected)):
        assert torch.equal(kvpass.generate(fast, text, max_new_tokens=NEW, eos_token_id=end), answer)


def test_bad_arguments_are_refused(decoder, fast):
    ids = random_ids(1, 20)
    answers = raw(lambda ids: {"logits": decoder(ids)}, GIVEN)
    for module, text, new, error, message in (
        (fast, ids, 0, ValueError, "max_new_tokens=0"),
        (fast, "how are you?", 2, ValueError, "must be a tensor of token ids, such as tokenizer"),
        (fast, ids[0], 2, ValueError, r"ids of shape \[20\]"),
        (two_layers(budget=20)[1], ids, 2, ValueError, "use its own generate method"),
        (answers, ids, 2, ValueError, "module returned a dict"),
        (decoder, ids, 2, RuntimeError, "nothing was compressed"),
    ):
        with pytest.raises(error, match=message):
            kvpass.generate(module, text, max_new_tokens=new)


def test_contract_4_padded_rows_say_what_they_say_alone(decoder):
    (ids, mask), fast = padded(40, 23), raw(decoder, GIVEN | {"budget": 12})
    out = kvpass.generate(fast, ids, max_new_tokens=NEW, positions=True, attention_mask=mask)
    for row, prompt in enumerate(prompts_of(40, 23)):
        alone = kvpass.generate(fast, prompt[None], max_new_tokens=NEW, positions=True)
        assert torch.equal(out[row, ids.shape[1] :], alone[0, prompt.numel() :]), f"row {row}"


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
    assert torch.equal(kvpass.generate(raw(WithLoss(), GIVEN), ids, max_new_tokens=NEW), recomputed(decoder, ids, NEW))
