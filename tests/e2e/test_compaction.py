"""Compacted caches: nearer to the full cache for what repeats the prompt, and otherwise caches like any other."""

import pytest
import torch

from compiled_models import padded, prompts_of, reloaded, two_layers
from kvpass.policies import resolve
from pairwise import quick, quick_rows
from tiny_models import compiled_once, in_blocks, random_ids

KEPT = {"policy": "kvzip", "budget": 12, "chunk": 40, "window": None}
FAMILIES = ["llama", "gpt2", "gemma2", "gpt_oss", "bloom", "qwen2"]


def with_and_without(family: str, **options):
    """Caches of a prompt, evicted and compacted, and their mean errors for a repetition: to the full cache's logits."""
    (model, fast), prompt, caches, errors = two_layers(family, **options), random_ids(1, 80), [], []
    repeated = prompt[:, 4:]
    full = model(torch.cat([prompt, repeated], 1)).logits[:, prompt.shape[1] :]
    for compact in (False, True):
        fast.set_policy(**options, compact=compact)
        caches.append(fast.compress(prompt))
        errors.append((fast(repeated, past_key_values=caches[-1]).logits - full).abs().mean().item())
    return caches, errors


@pytest.mark.parametrize("family", quick(FAMILIES, ["gpt_oss"]))
def test_logits_of_a_repetition_are_nearer_to_those_of_the_full_cache(family):
    _, (evicted, compacted) = with_and_without(family, **KEPT)
    assert compacted < 0.8 * evicted


@pytest.mark.parametrize(
    ("policy", "window"), quick_rows([("snapkv", 8), ("keydiff", None), ("random", 0)], [("snapkv", 8)])
)
def test_other_policies_take_it_too_and_keep_the_same_positions(policy, window):
    caches, errors = with_and_without("llama", policy=policy, budget=12, window=window)
    assert torch.equal(caches[0].positions, caches[1].positions)
    assert caches[0].nbytes == caches[1].nbytes
    assert errors[1] < 0.9 * errors[0]


@pytest.mark.parametrize("family", quick(FAMILIES, ["llama"]))
def test_a_padded_row_is_compacted_as_it_is_alone_in_blocks_and_in_codes_too(family):
    """Rounding may turn the last bit of a code: with codes, rows differ by less than half of what the codes cost."""
    new, alone_in = random_ids(2, 3, seed=5), {}
    for entries, block in (("model", "auto"), ("int8", 16)):
        _, fast = two_layers(family, entries=entries, compact=True, **KEPT)
        with in_blocks(fast, block):
            together = fast(new, past_key_values=fast.compress(*padded(71, 44))).logits
            alone = [fast.compress(prompt[None]) for prompt in prompts_of(71, 44)]
        logits = [fast(ids[None], past_key_values=cache).logits for ids, cache in zip(new, alone, strict=True)]
        alone_in[entries] = torch.cat(logits)
        apart = (together - alone_in[entries]).abs().max()
        cost_of_codes = (alone_in[entries] - alone_in["model"]).abs().max()
        assert apart < (1e-4 if entries == "model" else cost_of_codes / 2)


def test_where_nothing_is_dropped_the_cache_is_that_of_the_full_policy():
    (model, fast), prompt = two_layers(policy="kvzip", budget=1.0, window=None, compact=True), random_ids(1, 30)
    expected = model(torch.cat([prompt, prompt], 1)).logits[:, 30:]
    found = fast(prompt, past_key_values=fast.compress(prompt)).logits
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert fast(random_ids(1, 1), past_key_values=fast.compress(random_ids(1, 1))).logits.isfinite().all()
    fast.set_policy("keydiff", 29, window=8, compact=True)  # of each head one entry
    fast.compress(prompt)
    assert bool((fast.report().output_errors[0] > 0).all())


def test_one_prompt_fills_compacted_and_other_caches_as_each_alone():
    _, fast = two_layers()
    conditions = [("kvzip", 12), (resolve("kvzip", compact=True), 12), (resolve("keydiff", compact=True), 20)]
    prompt, token = random_ids(1, 70), random_ids(1, 1)
    for (policy, budget), cache in zip(conditions, fast.compress_each(prompt, conditions=conditions), strict=True):
        fast.set_policy(policy, budget)
        alone = fast(token, past_key_values=fast.compress(prompt)).logits
        assert torch.equal(fast(token, past_key_values=cache).logits, alone)


def test_compiled_code_a_file_and_later_turns_continue_a_compacted_cache(tmp_path):
    found = []
    for backend in ("eager", "inductor"):
        _, fast = compiled_once("llama", layers=1, backend=backend, compact=True, **KEPT)
        cache = fast.compress(random_ids(1, 70))
        held = (cache, reloaded(cache, fast, tmp_path))
        tokens = [fast.generate(random_ids(1, 4), past_key_values=c, max_new_tokens=6) for c in held]
        assert torch.equal(*tokens)
        found.append(tokens[0])
    assert torch.equal(*found)


def test_the_report_says_how_much_is_lost_and_less_with_compaction_and_latents_and_embeddings_are_refused():
    _, fast = two_layers(compact=True, **KEPT)
    fast.compress(random_ids(1, 80))
    report = fast.report()
    before, after = report.output_errors
    assert before.shape == after.shape == report.lengths.shape
    assert bool((after <= before).all()) and bool((before > 0).all())
    assert report.to_dict()["output_errors"] == [before.tolist(), after.tolist()]
    assert "compact=True: error of attention outputs" in str(report)
    fast.set_policy("kvzip", 12)
    fast.compress(random_ids(1, 80))
    assert fast.report().output_errors is None
    fast.set_policy("keydiff", 12, window=8, compact=True)
    with pytest.raises(ValueError, match="it replays the ids of the prompt"):
        fast.compress(inputs_embeds=torch.randn(1, 20, fast.config.hidden_size))
    _, fast = two_layers("deepseek_v3", layers=1, compact=True, **KEPT)
    with pytest.raises(ValueError, match=r"cache holds latents, .* compile the model without compact$"):
        fast.compress(random_ids(1, 40))
