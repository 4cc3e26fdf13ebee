"""Caches that live on: several turns on one cache, and compressing it again after a turn."""

import pytest
import torch

from compiled_models import UNLIMITED, greedy, padded, prompts_of, reloaded, two_layers
from kvpass.cache.layers import FullAttentionLayers
from masked_oracle import MaskedOracle, Transcript, kept_columns
from numeric_checks import assert_close
from pairwise import quick
from tiny_models import random_ids

WINDOW, BUDGET = 8, 20  # of two_layers
DIVIDE_OTHERS = {"lava_nohead", "lava_pyramid", "lava_uniform", "ada_pyramidkv"}
"""Policies that divide a budget by the layers as one of the others does, and by the heads as another."""
LIKE_A_PROMPT = {
    **{name: {} for name in ("lava", "snapkv", "keydiff", "knorm", *sorted(DIVIDE_OTHERS))},
    "ada_snapkv": {"normalize": True},
    "pyramidkv": {"shape": "entropy"},
    "cake": {"tau1": 1.3, "tau2": 0.7, "evict_during_decode": False},
    "vatp": {"sinks": 2},
    "streaming_llm": {"evict_during_decode": False},
    "dropkv": {"alpha": 0.2},
}
"""Policies that can compress again, with options."""


def transcript_of(model, ids, mask):
    return Transcript(MaskedOracle(model), ids, mask, 2, model.config.num_key_value_heads)


# -- appending --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("whole", [False, True], ids=["new ids only", "whole sequence"])
def test_turns_of_generate_are_answered_as_the_whole_text_is(whole):
    """Of compressed caches, test_cache_fuzz.py compares the tokens of every call with the masked model."""
    model, fast = two_layers("gemma3", budget=UNLIMITED)
    text, mask = padded(50, 33)
    cache, fed = fast(text, attention_mask=mask, logits_to_keep=1).past_key_values, 50
    for turn in range(3):
        question = random_ids(2, 5 + turn, seed=7 + turn)
        text, mask = torch.cat([text, question], 1), torch.cat([mask, torch.ones_like(question)], 1)
        given = {"attention_mask": mask} if whole else {}
        answer = greedy(fast, text if whole else text[:, fed:], 4, past_key_values=cache, **given)[:, -4:]
        text = greedy(model, text, 4, attention_mask=mask)
        assert torch.equal(answer, text[:, -4:]), f"turn {turn}"
        mask, fed = torch.cat([mask, torch.ones_like(answer)], 1), text.shape[1] - 1
        assert cache.columns == fed, "the last token is not fed back yet"


# -- compressing again ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", quick([*LIKE_A_PROMPT], LIKE_A_PROMPT.keys() - DIVIDE_OTHERS))
def test_a_turn_is_judged_like_a_prompt_when_nothing_was_lost_before(policy):
    """A first prompt below the budget is kept whole, so that turn and prompt together are just one prompt."""
    options = LIKE_A_PROMPT[policy]
    _, again = two_layers(policy=policy, recompress="every_turn", budget=30, **options)
    _, once = two_layers(policy=policy, budget=30, **options)
    ids, mask = padded(50, 47)
    cache = again(ids[:, :28], attention_mask=mask[:, :28]).past_key_values
    again(ids[:, 28:], past_key_values=cache)
    expected = once(ids, attention_mask=mask).past_key_values
    assert torch.equal(cache.lengths, expected.lengths)
    assert torch.equal(cache.positions, expected.positions)
    report, prompt_report = again.report(), once.report()
    assert_close("mass", report.attention_mass, prompt_report.attention_mass, atol=1e-5)
    assert torch.equal(report.lengths, prompt_report.lengths)
    token = random_ids(2, 1, seed=3)
    logits = [fast(token, past_key_values=held).logits for fast, held in ((again, cache), (once, expected))]
    assert_close("logits", *logits, atol=1e-5)


GPT_OSS = pytest.param("gpt_oss", "pyramidkv", marks=pytest.mark.exhaustive)


@pytest.mark.parametrize(
    ("family", "policy"), [("llama", "lava"), ("llama", "ada_snapkv"), ("llama", "cake"), ("gemma3", "lava"), GPT_OSS]
)
def test_over_many_turns_the_budget_is_exact_and_the_logits_are_those_of_the_masked_model(family, policy):
    model, fast = two_layers(family, policy=policy, recompress="every_turn", **LIKE_A_PROMPT[policy])
    ids, mask = padded(50, 33)
    cache = fast(ids, attention_mask=mask).past_key_values
    pools = sum(store.geometry.layers * store.geometry.kv_heads for store in cache.state.full_layers)
    transcript = transcript_of(model, ids, mask)
    sizes, logits = [], []
    for turn, tokens in enumerate((12, 3, 2, 30, 9)):
        for piece in (random_ids(2, tokens, seed=turn), *random_ids(2, 5, seed=50 + turn).split(1, 1)):
            before = kept_columns(cache, cache.columns)
            transcript.append(piece, before)
            logits.append(fast(piece.contiguous(), past_key_values=cache).logits)
            if piece.shape[1] > 1:
                after = kept_columns(cache, cache.columns)
                assert int(cache.lengths.sum()) == 2 * pools * BUDGET, f"after turn {turn}"
                assert bool(after[..., -WINDOW:].all()), "the newest tokens were not kept"
                held = torch.cat([before, torch.ones(*before.shape[:3], tokens, dtype=torch.bool)], 3)
                assert not bool((after & ~held).any()), "an entry that was gone came back"
                sizes.append(cache.nbytes - cache.ids.nbytes)
    expected = transcript.logits()[:, ids.shape[1] :]
    assert_close("logits", torch.cat(logits, 1), expected, atol=2e-4)
    assert max(sizes) == min(sizes), "the size is bounded, but for the ids"


def test_rows_are_compressed_as_they_would_be_alone_each_when_it_is_full():
    _, fast = two_layers(recompress="when_full")
    ids, mask = padded(60, 9, 33)
    batch = fast(ids, attention_mask=mask).past_key_values
    alone = [fast(prompt[None]).past_key_values for prompt in prompts_of(60, 9, 33)]
    lengths = []
    for turn in range(8):
        piece = random_ids(3, 6, seed=turn)
        logits = fast(piece, past_key_values=batch).logits
        for row, cache in enumerate(alone):
            expected = fast(piece[row : row + 1], past_key_values=cache).logits
            assert_close(f"turn {turn}, row {row}", logits[row : row + 1], expected, atol=1e-4)
            columns = batch.columns - int(batch.state.start[row])
            kept = kept_columns(batch, batch.columns)[row, :, :, -columns:]
            assert torch.equal(kept, kept_columns(cache, columns)[0]), f"turn {turn}, row {row}"
        lengths.append(batch.lengths.sum((1, 2)) // 4)
    lengths = torch.stack(lengths, 1)
    assert int(lengths.max()) <= 2 * BUDGET and int(lengths.max()) > BUDGET
    falls = (lengths.diff(dim=1) < 0).nonzero().tolist()
    assert {row for row, _ in falls} == {0, 1, 2}, "every row was compressed again"
    assert len({turn for _, turn in falls}) > 1, "and not all at the same turn"
    assert bool((lengths[:, 1:][lengths.diff(dim=1) < 0] == BUDGET).all())


def test_a_question_longer_than_the_window_is_not_needed_and_a_reusable_cache_stays_and_warns_of_none(recwarn):
    _, fast = two_layers(recompress="every_turn")
    text = random_ids(1, 60)
    cache = fast.compress(text)
    before = cache.positions
    questions = [random_ids(1, n, seed=n) for n in (2, 5, 40)]
    answers, again = ([greedy(fast, q, 4, past_key_values=cache) for q in questions] for _ in range(2))
    assert all(torch.equal(*pair) for pair in zip(answers, again, strict=True))
    for question in questions[:2]:  # the whole sequence each time
        text = greedy(fast, torch.cat([text, question], 1), 4, past_key_values=cache)
    assert not [warning for warning in recwarn if "last token of the answer" in str(warning.message)]
    assert torch.equal(cache.positions, before) and cache.columns == 60
    follow = fast(questions[2], past_key_values=cache).past_key_values
    assert int(follow.lengths.sum()) == 4 * BUDGET


@pytest.mark.parametrize("reusable", [True, False])
def test_turns_continue_the_cache_of_compress_only_where_it_is_not_reusable(reusable, recwarn):
    _, fast = two_layers()
    cache = fast.compress(*padded(50, 33), reusable=reusable)
    assert f"reusable={reusable})" in repr(cache)
    turn, columns = random_ids(2, 5), []
    for _ in range(3):
        answer = greedy(fast, turn, 4, past_key_values=cache)
        columns.append(cache.columns)
        turn = torch.cat([answer[:, -1:], random_ids(2, 3, seed=9)], 1)
    assert columns == ([50, 50, 50] if reusable else [58, 65, 72])
    told = [str(warning.message) for warning in recwarn if "last token of the answer before" in str(warning.message)]
    assert bool(told) == reusable and all("compress(ids, reusable=False)" in message for message in told)


def test_a_prompt_below_its_budget_grows_to_it_and_a_tiny_fraction_budget_is_held():
    _, fast = two_layers(recompress="every_turn")
    cache = fast(random_ids(1, 3)).past_key_values
    for tokens, expected in ((5, 8), (12, 20), (2, 20), (50, 20)):
        fast(random_ids(1, tokens, seed=tokens), past_key_values=cache)
        assert int(cache.lengths.sum()) == 4 * expected
    fast.set_budget(1.0)
    cache = fast(random_ids(1, 5)).past_key_values
    fast(random_ids(1, 20), past_key_values=cache)
    assert int(cache.lengths.sum()) == 4 * 5, "the whole of 5 tokens is a budget below the window"
    fast.set_budget(0.5)
    cache = fast(*padded(60, 40, 50)).past_key_values
    cache.batch_select_indices(torch.tensor([2, 0, 0, 1]))
    fast(random_ids(4, 12), past_key_values=cache)
    assert cache.lengths.sum((1, 2)).tolist() == [4 * 25, 4 * 30, 4 * 30, 4 * 20], "rows take their budget along"


def test_inductor_compresses_again_like_the_eager_graph():
    caches, logits = [], []
    for backend in ("eager", "inductor"):
        _, fast = two_layers(layers=1, backend=backend, recompress="every_turn")
        cache = fast(random_ids(2, 50)).past_key_values
        outs = [fast(random_ids(2, n, seed=n), past_key_values=cache).logits for n in (12, 30)]
        caches.append(cache)
        logits.append(torch.cat(outs, 1))
    assert torch.equal(caches[0].positions, caches[1].positions)
    assert_close("logits", logits[1], logits[0], atol=1e-4)


def test_a_policy_that_evicts_while_decoding_needs_nothing():
    results = []
    for recompress in ("never", "every_turn"):
        _, fast = two_layers(policy="h2o", recompress=recompress)
        cache = fast(random_ids(1, 50)).past_key_values
        results += [fast(random_ids(1, 30, seed=1), past_key_values=cache).logits, cache.positions]
        assert int(cache.lengths.sum()) <= 4 * BUDGET
    assert torch.equal(results[0], results[2]) and torch.equal(results[1], results[3])


def test_the_report_is_of_the_last_prompt_until_all_rows_are_compressed_again(tmp_path):
    _, fast = two_layers(recompress="every_turn", policy="snapkv")
    older = fast(*padded(60, 6)).past_key_values
    loaded = reloaded(older, fast, tmp_path)
    fast(random_ids(1, 45, seed=2))
    for cache in (older, loaded):
        fast(random_ids(2, 5, seed=3), past_key_values=cache)
        assert cache.lengths.sum((1, 2)).tolist() == [4 * BUDGET, 4 * 11], "only one row was above its budget"
        assert fast.report().prompt_lengths.tolist() == [45]
    fast(random_ids(2, 40, seed=3), past_key_values=loaded)
    assert fast.report().prompt_lengths.tolist() == [105, 51]


def test_a_turn_that_is_never_compressed_does_not_look_at_lengths(monkeypatch):
    """They live on the device, and it would have to be waited for."""
    _, fast = two_layers()
    cache = fast(random_ids(1, 50)).past_key_values
    monkeypatch.delattr(FullAttentionLayers, "lengths")
    assert fast(random_ids(1, 12), past_key_values=cache).past_key_values.columns == 62
