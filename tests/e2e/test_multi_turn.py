"""Caches that live on: several turns on one cache, and compressing it again after a turn."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import kvpass
from kvpass.observation import Observation
from kvpass.policies import resolve
from kvpass.recompress import NOT_DUE, fill_shares, observe_held, select_held
from kvpass.store import Store
from kvpass.testing import (
    MaskedOracle,
    Transcript,
    assert_close,
    compiled_once,
    kept_columns,
    left_pad,
    random_ids,
    tiny_model,
)

WINDOW, BUDGET = 8, 20
LIKE_A_PROMPT = {
    "lava": {},
    "lava_nohead": {},
    "lava_pyramid": {},
    "lava_uniform": {},
    "snapkv": {},
    "ada_snapkv": {"normalize": True},
    "pyramidkv": {"shape": "entropy"},
    "ada_pyramidkv": {},
    "cake": {"tau1": 1.3, "tau2": 0.7, "evict_during_decode": False},
    "vatp": {"sinks": 2},
    "streaming_llm": {"evict_during_decode": False},
}
"""Policies that can compress again, with options."""


def compiled(family="llama", policy="lava", **options):
    """A model and its compiled copy, both shared with other tests."""
    return compiled_once(family, policy=policy, **{"budget": BUDGET, "window": WINDOW, "backend": "eager", **options})


def shapes(model):
    return model.config.num_hidden_layers, model.config.num_key_value_heads


# -- appending --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("whole", [False, True], ids=["new ids only", "whole sequence"])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_generate_twice_appends_and_equals_the_masked_model(family, whole):
    model, fast = compiled(family)
    ids, mask = left_pad([random_ids(1, n, seed=n)[0] for n in (50, 33)])
    transcript = Transcript(MaskedOracle(model), ids, mask, *shapes(model))
    cache = fast(ids, attention_mask=mask, logits_to_keep=1).past_key_values
    sequence, seen_mask = ids, mask
    for turn in range(2):
        question = random_ids(2, 5 + turn, seed=7 + turn)
        sequence = torch.cat([sequence, question], 1)
        seen_mask = torch.cat([seen_mask, torch.ones_like(question)], 1)
        transcript.append(question, kept_columns(cache, cache.columns))
        options = {"past_key_values": cache, "max_new_tokens": 4, "do_sample": False, "return_dict_in_generate": True}
        if whole:
            out = fast.generate(sequence, attention_mask=seen_mask, **options)
        else:
            out = fast.generate(question, **options)
        assert out.past_key_values is cache
        answer = out.sequences[:, -4:]
        for step in range(4):
            expected = transcript.logits()[:, -1].argmax(-1)
            assert torch.equal(answer[:, step], expected), f"turn {turn}, token {step}"
            kept = kept_columns(cache, transcript.ids.shape[1])
            transcript.append(answer[:, step : step + 1], kept)
        # the last token was not fed back yet: the next turn begins with it
        last = answer[:, -1:]
        transcript.ids, transcript.mask = transcript.ids[:, :-1], transcript.mask[:, :-1]
        transcript.seen = transcript.seen[..., :-1, :-1]
        fast(last, past_key_values=cache)
        transcript.append(last, kept_columns(cache, cache.columns)[..., :-1])
        sequence = torch.cat([sequence, answer], 1)
        seen_mask = torch.cat([seen_mask, torch.ones_like(answer)], 1)
    assert cache.columns == sequence.shape[1] and torch.equal(transcript.ids, sequence)


# -- compressing again ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", LIKE_A_PROMPT)
def test_a_turn_is_judged_like_a_prompt_when_nothing_was_lost_before(policy):
    """A first prompt below the budget is kept whole, so that turn and prompt together are just one prompt."""
    options = LIKE_A_PROMPT[policy]
    _, fast = compiled(policy=policy, recompress="every_turn", budget=30, **options)
    ids, mask = left_pad([random_ids(1, n, seed=n)[0] for n in (50, 47)])
    cache = fast(ids[:, :28], attention_mask=mask[:, :28]).past_key_values
    fast(ids[:, 28:], past_key_values=cache)
    report = fast.report()
    expected = fast(ids, attention_mask=mask).past_key_values
    prompt_report = fast.report()
    assert torch.equal(cache.lengths, expected.lengths)
    assert torch.equal(cache.positions, expected.positions)
    assert_close("mass", report.attention_mass, prompt_report.attention_mass, atol=1e-5)
    assert torch.equal(report.lengths, prompt_report.lengths)
    token = random_ids(2, 1, seed=3)
    logits = [fast(token, past_key_values=held).logits for held in (cache, expected)]
    assert_close("logits", *logits, atol=1e-5)


@pytest.mark.parametrize(
    ("family", "policy"),
    [("llama", "lava"), ("llama", "ada_snapkv"), ("llama", "cake"), ("gemma3", "lava"), ("gpt_oss", "pyramidkv")],
)
def test_over_many_turns_the_budget_is_exact_and_the_logits_are_those_of_the_masked_model(family, policy):
    model, fast = compiled(family, policy, recompress="every_turn", **LIKE_A_PROMPT[policy])
    layers, kv_heads = shapes(model)
    ids, mask = left_pad([random_ids(1, n, seed=n)[0] for n in (50, 33)])
    cache = fast(ids, attention_mask=mask).past_key_values
    pools = sum(store.geometry.layers * store.geometry.kv_heads for store in cache.stores)
    transcript = Transcript(MaskedOracle(model), ids, mask, layers, kv_heads)
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
                sizes.append(cache.nbytes)
    expected = transcript.logits()[:, ids.shape[1] :]
    assert_close("logits", torch.cat(logits, 1), expected, atol=2e-4)
    assert max(sizes) == min(sizes), "the size is bounded"


def test_rows_are_compressed_as_they_would_be_alone_each_when_it_is_full():
    _, fast = compiled(recompress="when_full")
    prompts = [random_ids(1, n, seed=n)[0] for n in (60, 9, 33)]
    ids, mask = left_pad(prompts)
    batch = fast(ids, attention_mask=mask).past_key_values
    alone = [fast(prompt[None]).past_key_values for prompt in prompts]
    lengths = []
    for turn in range(8):
        piece = random_ids(3, 6, seed=turn)
        logits = fast(piece, past_key_values=batch).logits
        for row, cache in enumerate(alone):
            expected = fast(piece[row : row + 1], past_key_values=cache).logits
            assert_close(f"turn {turn}, row {row}", logits[row : row + 1], expected, atol=1e-4)
            columns = batch.columns - int(batch.start[row])
            kept = kept_columns(batch, batch.columns)[row, :, :, -columns:]
            assert torch.equal(kept, kept_columns(cache, columns)[0]), f"turn {turn}, row {row}"
        lengths.append(batch.lengths.sum((1, 2)) // 6)
    lengths = torch.stack(lengths, 1)
    assert int(lengths.max()) <= 2 * BUDGET and int(lengths.max()) > BUDGET
    falls = (lengths.diff(dim=1) < 0).nonzero().tolist()
    assert {row for row, _ in falls} == {0, 1, 2}, "every row was compressed again"
    assert len({turn for _, turn in falls}) > 1, "and not all at the same turn"
    assert bool((lengths[:, 1:][lengths.diff(dim=1) < 0] == BUDGET).all())


def test_a_question_longer_than_the_window_is_not_needed_and_a_reusable_cache_stays():
    _, fast = compiled(recompress="every_turn")
    cache = fast.compress(random_ids(1, 60))
    before = cache.positions
    questions = [random_ids(1, n, seed=n) for n in (2, 5, 40)]
    answers = [fast.generate(q, past_key_values=cache, max_new_tokens=4, do_sample=False) for q in questions]
    again = [fast.generate(q, past_key_values=cache, max_new_tokens=4, do_sample=False) for q in questions]
    assert all(torch.equal(*pair) for pair in zip(answers, again, strict=True))
    assert torch.equal(cache.positions, before) and cache.columns == 60
    follow = fast(questions[2], past_key_values=cache).past_key_values
    assert int(follow.lengths.sum()) == 6 * BUDGET


def test_a_prompt_below_its_budget_grows_to_it_and_a_tiny_fraction_budget_is_held():
    _, fast = compiled(recompress="every_turn")
    cache = fast(random_ids(1, 3)).past_key_values
    for tokens, expected in ((5, 8), (12, 20), (2, 20), (50, 20)):
        fast(random_ids(1, tokens, seed=tokens), past_key_values=cache)
        assert cache.lengths.unique().tolist() == [expected] or int(cache.lengths.sum()) == 6 * expected
    fast.set_budget(1.0)
    cache = fast(random_ids(1, 5)).past_key_values
    fast(random_ids(1, 20), past_key_values=cache)
    assert int(cache.lengths.sum()) == 6 * 5, "the whole of 5 tokens is a budget below the window"


def test_rows_take_their_own_budget_along():
    _, fast = compiled(recompress="every_turn", budget=0.5)
    ids, mask = left_pad([random_ids(1, n, seed=n)[0] for n in (60, 40, 50)])
    cache = fast(ids, attention_mask=mask).past_key_values
    cache.batch_select_indices(torch.tensor([2, 0, 0, 1]))
    fast(random_ids(4, 12), past_key_values=cache)
    assert cache.lengths.sum((1, 2)).tolist() == [6 * 25, 6 * 30, 6 * 30, 6 * 20]


def test_inductor_compresses_again_like_the_eager_graph():
    model = tiny_model("llama", num_hidden_layers=2)
    caches, logits = [], []
    for backend in ("eager", "inductor"):
        fast = kvpass.compile(model, budget=BUDGET, window=WINDOW, backend=backend, recompress="every_turn")
        cache = fast(random_ids(2, 50)).past_key_values
        outs = [fast(random_ids(2, n, seed=n), past_key_values=cache).logits for n in (12, 1, 30, 1)]
        caches.append(cache)
        logits.append(torch.cat(outs, 1))
        assert len(fast.report().compiled) == 3
    assert torch.equal(caches[0].positions, caches[1].positions)
    assert_close("logits", logits[1], logits[0], atol=1e-4)


def test_a_policy_that_evicts_while_decoding_needs_nothing():
    results = []
    for recompress in ("never", "every_turn"):
        _, fast = compiled(policy="h2o", recompress=recompress)
        cache = fast(random_ids(1, 50)).past_key_values
        results += [fast(random_ids(1, 30, seed=1), past_key_values=cache).logits, cache.positions]
        assert int(cache.lengths.sum()) <= 6 * BUDGET
    assert torch.equal(results[0], results[2]) and torch.equal(results[1], results[3])


def test_a_saved_cache_is_compressed_again_like_the_live_one(tmp_path):
    _, fast = compiled(recompress="every_turn")
    live = fast(random_ids(2, 50)).past_key_values
    fast(random_ids(2, 12, seed=1), past_key_values=live)
    live.save(tmp_path / "cache.kv")
    loaded = kvpass.load_cache(tmp_path / "cache.kv", fast)
    turn = random_ids(2, 12, seed=2)
    logits = [fast(turn, past_key_values=cache).logits for cache in (live, loaded)]
    assert torch.equal(*logits) and torch.equal(live.positions, loaded.positions)


def test_the_report_is_of_the_last_prompt_until_all_rows_are_compressed_again(tmp_path):
    _, fast = compiled(recompress="every_turn", policy="snapkv")
    ids, mask = left_pad([random_ids(1, n, seed=n)[0] for n in (60, 6)])
    older = fast(ids, attention_mask=mask).past_key_values
    older.save(tmp_path / "cache.kv")
    loaded = kvpass.load_cache(tmp_path / "cache.kv", fast)
    fast(random_ids(1, 45, seed=2))
    for cache in (older, loaded):
        fast(random_ids(2, 5, seed=3), past_key_values=cache)
        assert cache.lengths.sum((1, 2)).tolist() == [6 * BUDGET, 6 * 11], "only one row was above its budget"
        assert fast.report().prompt_lengths.tolist() == [45]
    fast(random_ids(2, 40, seed=3), past_key_values=loaded)
    assert fast.report().prompt_lengths.tolist() == [105, 51]


def test_a_turn_that_is_never_compressed_does_not_look_at_lengths(monkeypatch):
    """They live on the device, and it would have to be waited for."""
    _, fast = compiled()
    cache = fast(random_ids(1, 50)).past_key_values
    monkeypatch.delattr(Store, "lengths")
    fast(random_ids(1, 12), past_key_values=cache)
    assert cache.columns == 62


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"recompress": "sometimes"}, "recompress='sometimes': must be one of never, when_full, every_turn"),
        ({"policy": "full", "budget": None}, "keeps everything"),
        ({"parity": "code"}, "know only a prompt"),
        ({"policy": "h2o", "evict_during_decode": False}, "more than the window's queries"),
        ({"policy": "vatp", "indicator": "h2o", "evict_during_decode": False}, "more than the window's queries"),
        ({"policy": "tova", "evict_during_decode": False}, "each KV head by itself"),
    ],
    ids=str,
)
def test_what_cannot_be_compressed_again_is_refused_when_compiling(options, message):
    with pytest.raises(ValueError, match=message):
        kvpass.compile(
            tiny_model("llama"), **{"budget": BUDGET, "window": WINDOW, "recompress": "every_turn", **options}
        )


# -- the parts --------------------------------------------------------------------------------------------------------


def ragged(seed=0, t=5, window=4, heads=4, kv_heads=2, dim=6):
    """Arguments of ``observe_held`` for one layer of two, one row, with the entries of each head beside."""
    torch.manual_seed(seed)
    lengths, used, start = torch.tensor([7, 3, 5, 11]), 6, 2
    offsets = torch.cat([torch.zeros(1), lengths.cumsum(0)]).int()[None]
    pool_k, pool_v = torch.randn(1, 26, dim), torch.randn(1, 26, dim)
    tail_k, tail_v = torch.randn(2, 1, kv_heads, 16, dim), torch.randn(2, 1, kv_heads, 16, dim)
    q = torch.randn(1, heads, t, dim)
    keys, values = [], []
    for head in range(kv_heads):
        kept = slice(*offsets[0, 2 + head : 4 + head].tolist())
        keys.append(torch.cat([pool_k[0, kept], tail_k[1, 0, head, start : used + t]]))
        values.append(torch.cat([pool_v[0, kept], tail_v[1, 0, head, start : used + t]]))
    held = (pool_k, pool_v, offsets, tail_k, tail_v, torch.tensor([start]), torch.tensor(used))
    found = (
        torch.full((1, 2, kv_heads, 30), float("-inf")),
        torch.zeros(1, 2, kv_heads, 30),
        torch.zeros(1, 2).double(),
    )
    return q, held, found, keys, values


def attention_of(q, keys, rows):
    """Causal softmax of the last ``rows`` queries over the entries of one KV head, ``[G, rows, n]``."""
    n = keys.shape[0]
    logits = q[:, -rows:] @ keys.T * 0.3
    future = torch.arange(n) > torch.arange(n - rows, n)[:, None]
    return logits.masked_fill(future, float("-inf")).softmax(-1)


@pytest.mark.parametrize(("t", "window"), [(5, 4), (4, 4), (2, 4), (5, 0)])
def test_every_head_is_scored_over_its_own_entries(t, window):
    q, held, (scores, masses, ledger), keys, values = ragged(t=t)
    policy = resolve("lava", window=window, pool=None)
    observe_held(q, *held, scores, masses, ledger, torch.tensor([window]), 0.3, 1, 2, policy)
    assert bool((scores[:, 0] == float("-inf")).all()) and not bool(masses[:, 0].any()), "another layer was written"
    every = []
    for head in range(2):
        a = attention_of(q[0, 2 * head : 2 * head + 2], keys[head], max(min(window, t), 1)).mean(1)
        n = keys[head].shape[0]
        norm = values[head].abs().sum(-1)[: n - min(window, t)].max()
        worth = (a.amax(0) * norm)[: n - window]
        assert_close(f"scores of head {head}", scores[0, 1, head, : n - window], worth, atol=1e-5)
        assert bool((scores[0, 1, head, n - window :] == float("-inf")).all())
        assert_close(f"mass of head {head}", masses[0, 1, head, :n], a.mean(0), atol=1e-5)
        every.append(worth)
    p = torch.cat(every).double()
    p = p / p.sum()
    entropy = -(p * p.log()).sum() / torch.tensor(float(p.numel())).double().log()
    assert_close("weight", ledger[0, 1], entropy, atol=1e-5)


def test_the_weight_of_a_layer_takes_all_its_heads():
    q, held, (scores, masses, ledger), keys, _ = ragged(t=5)
    policy = resolve("cake", window=4, tau1=1.5, tau2=0.5, evict_during_decode=False)
    observe_held(q, *held, scores, masses, ledger, torch.tensor([4]), 0.3, 1, 2, policy)
    h = v = 0.0
    for head in range(2):
        a = attention_of(q[0, 2 * head : 2 * head + 2], keys[head], 4)[..., :-4].double()
        h, v = h - (a * (a + 1e-10).log()).sum(), v + a.var(1).sum()
    assert_close("weight", ledger[0, 1], h ** (1 / 1.5) * v ** (1 / 0.5), atol=1e-5)


def test_sinks_and_softcap_take_part():
    q, held, (scores, masses, ledger), keys, _ = ragged(t=5)
    policy = resolve("snapkv", window=4, pool=None)
    sinks = torch.randn(4)
    observe_held(q, *held, scores, masses, ledger, torch.tensor([4]), 0.3, 1, 2, policy, 2.0, sinks)
    for head in range(2):
        heads = slice(2 * head, 2 * head + 2)
        logits = 2.0 * torch.tanh(q[0, heads, -4:] @ keys[head].T * 0.3 / 2.0)
        n = keys[head].shape[0]
        logits = logits.masked_fill(torch.arange(n) > torch.arange(n - 4, n)[:, None], float("-inf")).exp()
        a = logits / (logits.sum(-1, keepdim=True) + sinks[heads].exp()[:, None, None])
        assert_close(f"scores of head {head}", scores[0, 1, head, : n - 4], a.mean((0, 1))[:-4], atol=1e-5)


def test_a_row_that_is_not_due_is_not_looked_at():
    q, held, found, _, _ = ragged()
    observe_held(q, *held, *found, torch.tensor([NOT_DUE]), 0.3, 1, 2, resolve("lava", window=4))
    assert bool((found[0] == float("-inf")).all()) and not bool(found[1].any()) and not bool(found[2].any())


def shares(layers):
    return st.lists(st.integers(0, 40), min_size=layers, max_size=layers)


@given(st.integers(1, 6).flatmap(lambda layers: st.tuples(shares(layers), shares(layers))))
def test_no_layer_gets_more_than_it_holds_and_the_total_is_exact(pair):
    budgets, held = (torch.tensor(values)[None] for values in pair)
    filled = fill_shares(budgets, held)
    assert int(filled.sum()) == min(int(budgets.sum()), int(held.sum()))
    assert bool((filled <= held).all()) and bool((filled >= torch.minimum(budgets, held)).all())


@pytest.mark.parametrize("policy", ["snapkv", "lava", "ada_snapkv", "pyramidkv"])
def test_the_selection_is_exact_and_keeps_the_best_of_every_head(policy):
    torch.manual_seed(0)
    chosen = resolve(policy, window=WINDOW)
    scores = torch.rand(2, 3, 2, 40)
    for row in range(2):
        for layer in range(3):
            for head in range(2):
                scores[row, layer, head, int(torch.randint(2, 40, ())) :] = float("-inf")
    held = (scores > float("-inf")).sum((2, 3))
    for entries in (0, 3, 9, 100):
        stay = select_held(
            scores, torch.rand(2, 3).double(), torch.tensor([entries] * 2), torch.tensor([60] * 2), chosen
        )
        total = torch.minimum(held.sum(1), torch.tensor(6 * entries))
        assert torch.equal(stay.sum((1, 2, 3)), total)
        worst = torch.where(stay, scores, float("inf")).amin(-1)
        best_lost = torch.where(stay, float("-inf"), scores).amax(-1)
        assert bool((best_lost <= worst).all()), "a head lost an entry better than one it kept"
    uniform = select_held(
        scores, torch.zeros(2, 3).double(), torch.tensor([2] * 2), torch.tensor([60] * 2), resolve("snapkv")
    )
    assert bool((uniform.sum(-1) == 2).all())


def test_an_observation_hides_the_future_only():
    q, k = torch.randn(1, 2, 3, 4), torch.randn(1, 1, 6, 4)
    hidden = Observation(q, k, k, 1.0, 3, 0, 1).hidden(0, 4, 6)
    assert hidden.tolist() == [[False] * 5 + [True], [False] * 6]
