"""Perplexity against a compressed cache, by a loop over single tokens and by the uncompiled model."""

import pytest
import torch

from compiled_models import two_layers
from kvpass.eval.perplexity import perplexity
from tiny_models import random_ids

IDS = random_ids(2, 60)


@pytest.mark.parametrize("budget", [12, 10**6])
def test_every_token_behind_the_compressed_part_is_scored_against_what_is_left_of_it(budget):
    model, fast = two_layers(layers=1, budget=budget)
    cache = fast.compress(IDS[:, :40], reusable=False)
    logits = torch.cat([fast(IDS[:, n : n + 1], past_key_values=cache).logits for n in range(40, 59)], 1)
    with torch.no_grad():
        full = model(IDS).logits[:, 40:-1]
    small, whole = (torch.distributions.Categorical(logits=x).log_prob(IDS[:, 41:]) for x in (logits, full))
    found = perplexity(fast, IDS, 40)
    torch.testing.assert_close(found, (-small.mean(1)).exp(), rtol=1e-4, atol=1e-4)
    assert torch.allclose(found, (-whole.mean(1)).exp(), rtol=1e-4) == (budget > 12)


@pytest.mark.parametrize("compressed", [0, 59])
def test_a_text_of_which_nothing_is_compressed_or_scored_is_refused(compressed):
    with pytest.raises(ValueError, match=f"compressed={compressed}: must be 1 to 58 of 60 tokens"):
        perplexity(two_layers(layers=1, budget=12)[1], IDS, compressed)
