"""A compiled model as the assistant of an uncompiled one: it drafts, and every token is the other model's."""

import functools
from typing import Any

import pytest
import torch

import compiled_models
from kvpass.cache.cache import CompressedCache
from tiny_models import compiled_once, random_ids, tiny_model

NEW, DRAFTS = 24, 5
PROMPT = random_ids(1, 65, seed=5)
SNAPKV = {"policy": "snapkv", "budget": 12, "window": 8}


def drafting(family: str = "llama", **settings: Any) -> tuple[Any, Any]:
    """A model and its compiled copy, which always drafts as many tokens as are asked for."""
    model, fast = compiled_once(family, layers=2, backend="eager", **{**SNAPKV, **settings})
    fast.generation_config.update(num_assistant_tokens=DRAFTS, assistant_confidence_threshold=0.0)
    return model, fast


greedy = functools.partial(compiled_models.greedy, new=NEW)


@pytest.fixture
def calls(calls: list[int], monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens of each call of a kvpass model, and negative: what was taken back from its cache."""
    crop = CompressedCache.crop

    def cropping(self: CompressedCache, tokens: int) -> None:
        before, held = self.columns, self.lengths
        crop(self, tokens)
        taken = before - self.columns
        if taken:
            calls.append(-taken)
        assert bool((held - self.lengths == taken).all()), "an entry of a rejected draft is left"

    monkeypatch.setattr(CompressedCache, "crop", cropping)
    return calls


@pytest.mark.parametrize(
    "settings",
    [
        {"budget": 9},
        {"policy": "lava", "budget": 24},
        {"policy": "streaming_llm", "budget": 12, "window": 0, "evict_during_decode": False},
        pytest.param({"policy": "h2o", "evict_during_decode": False}, marks=pytest.mark.exhaustive),
        pytest.param({"family": "gpt2", "policy": "keydiff"}, marks=pytest.mark.exhaustive),
    ],
    ids=lambda settings: settings.get("policy", "snapkv"),
)
def test_greedy_tokens_are_those_of_the_model_alone(settings, calls):
    model, fast = drafting(**settings)
    for ids in (PROMPT, random_ids(1, 90, seed=7), PROMPT[:, :1]):
        expected = greedy(model, ids)
        calls.clear()
        assert torch.equal(greedy(model, ids, assistant_model=fast), expected)
        assert calls[0] == ids.shape[1] and max(calls[1:]) <= 2, "the prompt is read once, then a token or two"
        assert min(calls) < 0 or ids.shape[1] == 1, "no draft was rejected"


def test_with_everything_kept_every_draft_is_accepted(calls):
    model, fast = drafting(budget=1.0)
    greedy(model, PROMPT, assistant_model=fast)
    assert calls == [65, *[1] * (DRAFTS - 1), *[2, *[1] * (DRAFTS - 1)] * 3]


def test_a_model_with_other_weights_drafts_for_a_compiled_one_too(calls):
    """Its drafts are rejected from the first on; transformers then takes back a prompt token too, which stays."""
    _, fast = drafting()
    other = tiny_model("llama", layers=1, seed=7)
    expected = greedy(other, PROMPT)
    calls.clear()
    assert torch.equal(greedy(other, PROMPT, assistant_model=fast), expected)
    assert calls[: DRAFTS + 2] == [65, *[1] * (DRAFTS - 1), 1 - DRAFTS, 1]
    expected = greedy(fast, PROMPT)
    assert torch.equal(greedy(fast, PROMPT, assistant_model=fast), expected)


def test_padding_of_the_prompt_counts_and_its_pad_tokens_need_not_be_padding():
    model, fast = drafting()
    padded, mask = torch.nn.functional.pad(PROMPT, (7, 0)), torch.ones(1, 72, dtype=torch.int64)
    for ids, seen, options in (
        (padded, mask.index_fill(1, torch.arange(7), 0), {}),
        (PROMPT, mask[:, :65], {"pad_token_id": int(PROMPT[0, 30])}),
    ):
        options |= {"attention_mask": seen}
        assert torch.equal(greedy(model, ids, assistant_model=fast, **options), greedy(model, ids, **options))


def test_nothing_of_a_call_is_left_in_the_next():
    """Prompts, budgets, policies, plain answers of the assistant and an interrupted call between them."""
    model, fast = drafting()

    def interrupting(ids, scores):
        if ids.shape[1] > 75:
            raise KeyboardInterrupt
        return scores

    plain, configured = greedy(fast, PROMPT), fast.generation_config.to_dict()
    for prompt, change in (
        (PROMPT, lambda: None),
        (random_ids(1, 40, seed=8), lambda: fast.set_budget(20)),
        (PROMPT, lambda: fast.set_policy("lava", 30, window=8)),
        (PROMPT, lambda: fast.set_policy(**SNAPKV)),
    ):
        change()
        assert torch.equal(greedy(model, prompt, assistant_model=fast), greedy(model, prompt))
        assert fast.report().prompt.columns == prompt.shape[1] and fast.report().budget == fast.budget
    with pytest.raises(KeyboardInterrupt):
        greedy(model, PROMPT, assistant_model=fast, logits_processor=[interrupting])
    assert torch.equal(greedy(fast, PROMPT), plain)
    assert fast.generation_config.to_dict() == configured
    assert not model.generation_config.is_assistant and not fast.compress(PROMPT).assists


def test_sampled_tokens_repeat_with_the_seed():
    (model, fast), found = drafting(), []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        found.append(greedy(model, PROMPT, assistant_model=fast, do_sample=True, temperature=1.5))
    assert torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2])
