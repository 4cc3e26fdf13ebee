"""A guide: a question of the kind to come, by which a context is compressed, and which is not kept."""

import pytest
import torch

from compiled_models import GIVEN, greedy, padded, reloaded, two_layers
from masked_oracle import MaskedOracle, kept_columns
from numeric_checks import assert_close
from pairwise import quick
from tiny_models import random_ids

GUIDED = ["lava", "snapkv", "ada_snapkv", "pyramidkv", "cake", "vatp", "chunkkv"]
OPTIONS = {"cake": {"tau1": 1.6, "tau2": 0.4, "evict_during_decode": False}}
G = 5


@pytest.mark.parametrize("policy", quick(GUIDED, ["lava", "snapkv", "pyramidkv"]))
@pytest.mark.parametrize("budget", [14, 0.3])
def test_entries_are_those_that_the_questions_queries_want(policy, budget):
    """As of a prompt that ends with the guide, the guide being its window, without the guide."""
    _, fast = two_layers(policy=policy, **OPTIONS.get(policy, {}))
    ids, mask = padded(50, 33)
    guide = random_ids(1, G, seed=9)
    cache = fast.compress(ids, mask, budget=budget, guide=guide)
    assert cache.columns == 50 and torch.equal(cache.ids, ids.int())
    together = torch.cat([ids, guide.expand(2, -1)], 1), torch.cat([mask, torch.ones(2, G, dtype=torch.int64)], 1)
    fast.set_policy(policy, 20, window=G, **OPTIONS.get(policy, {}))
    for row, length in enumerate((50, 33)):
        entries = budget if budget == 14 else int(budget * length)
        seen = fast.compress(*(x[row : row + 1, -length - G :] for x in together), budget=entries + G)
        for ours, theirs in zip(cache.positions[row].flatten(0, 1), seen.positions[0].flatten(0, 1), strict=True):
            assert [p for p in ours.tolist() if p >= 0] == [p for p in theirs.tolist() if 0 <= p < length]


def test_what_comes_later_stands_behind_the_text(tmp_path):
    model, fast = two_layers()
    ids, mask = padded(50, 33)
    cache = fast.compress(ids, mask, guide=random_ids(2, G, seed=9), reusable=False)
    report, new = fast.report(cache), random_ids(2, 7, seed=3)
    assert report.prompt_lengths.tolist() == [50, 33] and report.prompt.entries.tolist() == [GIVEN["budget"]] * 2
    assert torch.equal(report.lengths, cache.lengths)
    assert {store.policy for store in cache.state.full_layers} == {fast.policy}, "its window is not the guide"
    assert cache.lengths.double().mean((1, 2)).tolist() == [GIVEN["budget"]] * 2
    keep = kept_columns(cache, 50)
    logits = [fast(new[:, :4], past_key_values=cache).logits]
    loaded = reloaded(cache, fast, tmp_path)
    logits += [fast(new[:, at : at + 1], past_key_values=loaded).logits for at in (4, 5, 6)]
    whole = torch.cat([ids, new], 1), torch.cat([mask, torch.ones_like(new)], 1)
    assert_close("logits", torch.cat(logits, 1), MaskedOracle(model).logits(*whole, keep)[:, 50:], atol=1e-4)


@pytest.mark.parametrize("policy", ["lava", "ada_pyramidkv"])
def test_guided_caches_are_compressed_again_and_asked_whole_texts(policy, tmp_path):
    _, fast = two_layers(policy=policy, recompress="every_turn")
    ids, question = random_ids(1, 60), random_ids(1, 4, seed=2)
    cache = fast.compress(ids, guide=question, protect=[(3, 9)])
    held = [set(head.tolist()) for head in cache.positions.flatten(0, 2)]
    assert all({*range(3, 9)} <= head for head in held)
    answer = greedy(fast, question, past_key_values=cache)[:, 4:]
    whole = greedy(fast, torch.cat([ids, question], 1), past_key_values=cache)
    assert torch.equal(whole[:, 64:], answer)
    turns = cache.clone(), reloaded(cache, fast, tmp_path).clone()  # a file knows nothing of the guide
    for going_on in turns:
        fast(question, past_key_values=going_on)
        assert going_on.lengths.double().mean() == GIVEN["budget"]
    assert torch.equal(*(going_on.positions for going_on in turns))


def test_conditions_of_one_reading_are_guided_alike():
    _, fast = two_layers()
    ids, guide = random_ids(1, 90), random_ids(1, G, seed=9)
    conditions = [("snapkv", 40), ("lava", 50)]
    for cache, (policy, budget) in zip(
        fast.compress_each(ids, conditions=conditions, guide=guide, protect=[(0, 4)]), conditions, strict=True
    ):
        fast.set_policy(policy, budget)
        alone = fast.compress(ids, guide=guide, protect=[(0, 4)])
        assert torch.equal(cache.positions, alone.positions) and (cache.positions[..., :4] == torch.arange(4)).all()


@pytest.mark.parametrize(
    ("family", "policy", "guide", "message"),
    [
        ("llama", "keydiff", random_ids(1, 3), "guide with policy 'keydiff': it reads none"),
        ("llama", "tova", random_ids(1, 3), "evicts while decoding"),
        ("llama", "snapkv", random_ids(3, 3), "must have one row, or 2"),
        ("llama", "snapkv", random_ids(1, 3)[0], r"must be \[B, T\]"),
        ("gemma3", "snapkv", random_ids(1, 3), "sliding window"),
    ],
)
def test_guides_that_cannot_be_followed_are_refused(family, policy, guide, message):
    _, fast = two_layers(family, policy=policy)
    with pytest.raises(ValueError, match=message):
        fast.compress(*padded(50, 33), guide=guide)
