"""Prompts in blocks of tokens: the same logits and kept entries for any block, and no activations of a whole prompt."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.profiler import ProfilerActivity, profile
from transformers import GenerationConfig

import kvpass
from compiled_models import UNLIMITED as WHOLE
from compiled_models import padded, two_layers
from kvpass.compiler import backend
from kvpass.policies import POLICIES
from numeric_checks import assert_close
from pairwise import each_value, quick
from tiny_models import FAMILIES, HEAD_MAP, POLICY_OPTIONS, compiled_once, in_blocks, kvzap_file, random_ids, tiny_model

OPTIONS = POLICY_OPTIONS | {"full": {"budget": None}, "kvzap": {"weights": kvzap_file(2)}}
OPTIONS["duo_attention"] = {"head_map": HEAD_MAP[:2]}
UNUSUAL = ["gpt_oss", "bloom", "deepseek_v3"]
"""Sinks, experts and rings, ALiBi, latents; test_chunked_attention.py has chunks."""


def prefilled(fast, block, ids, mask=None, **options):
    """Logits and cache of a prompt in blocks, and logits of the next tokens."""
    with in_blocks(fast, block):
        out = fast(ids, mask, **options)
        more = fast(random_ids(len(ids), 3, seed=9), past_key_values=out.past_key_values)
    return out.logits, out.past_key_values, more.logits


def assert_same(fast, block, ids, mask=None, **options):
    logits, cache, more = prefilled(fast, block, ids, mask, **options)
    expected, whole, expected_more = prefilled(fast, WHOLE, ids, mask, **options)
    assert torch.equal(cache.positions, whole.positions)
    real = slice(None) if mask is None else mask[:, -logits.shape[1] :].bool()
    assert_close("logits", logits[real], expected[real], atol=2e-5)
    assert_close("next logits", more, expected_more, atol=2e-5)


@pytest.mark.parametrize("family", quick(FAMILIES, UNUSUAL))
def test_blocks_give_the_logits_of_the_uncompiled_model(family):
    model, fast = two_layers(family, layers=1 if family == "bloom" else 2, budget=WHOLE)
    ids = random_ids(2, 61)
    expected = model(torch.cat([ids, random_ids(2, 3, seed=9)], 1)).logits
    for block in (13, 60):
        logits, _, more = prefilled(fast, block, ids)
        assert_close("logits", torch.cat([logits, more], 1), expected, atol=1e-4)
    assert {record.not_in_blocks for record in fast.report().compiled} == {""}


@each_value(policy=sorted(POLICIES), block=(2, 13, 50))
def test_a_policy_keeps_the_same_entries_for_any_block(policy, block):
    _, fast = two_layers(policy=policy, **{"budget": 24, **OPTIONS.get(policy, {})})
    assert_same(fast, block, *padded(75, 41, 75))


@settings(max_examples=6, deadline=None)
@given(
    lengths=st.tuples(st.integers(2, 70), st.integers(2, 70)),
    block=st.integers(2, 80),
    logits_to_keep=st.sampled_from([0, 1]),
    policy=st.sampled_from(["lava", "h2o"]),
)
def test_lengths_paddings_and_blocks(lengths, block, logits_to_keep, policy):
    _, fast = two_layers("gemma3", policy=policy, budget=16, window=4)
    assert_same(fast, block, *padded(*lengths), logits_to_keep=logits_to_keep)


def test_compiled_blocks_of_a_long_prompt():
    model, fast = compiled_once("llama", layers=1, budget=WHOLE, window=8)
    ids, compiled = random_ids(2, 1300), set()
    expected = model(ids).logits
    for block in (512, 100, "auto"):
        assert_close("logits", prefilled(fast, block, ids)[0], expected, atol=1e-4)
        compiled.add(len(fast.report().compiled))
    assert len(compiled) == 1


def test_another_policy_compiles_no_part_of_the_prefill_again(monkeypatch):
    compiled = []
    monkeypatch.setattr(backend, "compile_fx", lambda gm, *_, **__: compiled.append(gm) or gm.forward)
    fast = kvpass.compile(tiny_model("llama", layers=2), policy="snapkv", budget=16, window=8)
    fast(random_ids(1, 40))
    for policy in ("h2o", "kvzip_plus"):
        fast.set_policy(policy, 16, window=8)
        fast(random_ids(1, 40))
    assert len(compiled) == 4
    (record,) = fast.report().compiled
    assert (record.phase, record.parts) == ("prefill", 4)


@pytest.mark.parametrize("family", quick(["llama", "gemma3", "gpt2", "mpt", "deepseek_v3", "lfm2"], ["llama"]))
def test_a_prompt_of_one_token_is_compiled_as_a_longer_one(monkeypatch, family):
    monkeypatch.setattr(backend, "compile_fx", lambda gm, *_, **__: gm.forward)
    model, ids = tiny_model(family, layers=2), random_ids(2, 20)
    fast = kvpass.compile(model, policy="snapkv", budget=1.0, window=8)
    out = fast(ids[:, :1])
    assert_close("one token", out.logits, model(ids[:, :1]).logits, atol=1e-4)
    after = fast(ids[:, 1:], past_key_values=out.past_key_values).logits
    assert_close("behind it", after, model(ids).logits[:, 1:], atol=1e-4)
    assert_close("a longer one", fast(ids).logits, model(ids).logits, atol=1e-4)
    assert [record.phase for record in fast.report().compiled] == ["prefill", "extend"]


def peak_bytes(run):
    """Most bytes of CPU tensors that a function holds at once, besides those that were there before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    return max(itertools.accumulate(event.nbytes() for event in events))


@pytest.mark.parametrize("backend", quick(["eager", "inductor"], ["eager"]))
def test_a_prompt_takes_the_memory_of_the_stream_of_a_layer_s_entries_and_of_a_block(backend):
    model = tiny_model("llama", layers=2, intermediate_size=2048)
    fast = kvpass.compile(model, budget=16, window=8, backend=backend, prefill_block=64)
    tokens, config = 600, model.config
    stream, entries = config.hidden_size, 2 * config.num_key_value_heads * config.head_dim
    tables = 2 * config.head_dim  # rotary, which are small beside the stream of a model of usual size

    def peak(tokens):
        ids = random_ids(1, tokens)
        return peak_bytes(lambda: fast(ids, logits_to_keep=1))

    fast(random_ids(1, 130))
    grown = (peak(tokens) - peak(64)) / (tokens - 64)
    assert grown < 1.15 * 4 * (stream + entries + tables)
    fast.prefill_block = WHOLE
    assert peak(tokens) / tokens > 2 * 4 * config.intermediate_size


def test_generate_takes_a_chunk_size_as_a_block(monkeypatch):
    _, fast = two_layers(budget=24)
    ids = random_ids(2, 80)
    expected = fast.generate(ids, max_new_tokens=6)
    seen, run = [], fast._kvpass.captures.run
    monkeypatch.setattr(fast._kvpass.captures, "run", lambda call, *a: seen.append(call.block) or run(call, *a))
    for options in ({"prefill_chunk_size": 11}, {"generation_config": GenerationConfig(prefill_chunk_size=11)}):
        seen.clear()
        config = options.get("generation_config")
        found = fast.generate(ids, **{"max_new_tokens": 6, "eos_token_id": None, "pad_token_id": 0, **options})
        assert torch.equal(found, expected) and seen[0] == 11
        assert config is None or config.prefill_chunk_size == 11
    assert fast.prefill_block == "auto"


def test_a_block_that_is_no_number_of_tokens_is_refused():
    message, (model, fast) = "must be 'auto' or a number of tokens, an int >= 2", two_layers(budget=24)
    for block in (0, 1, -4, 2.0, True, "all", None):
        with pytest.raises(ValueError, match=f"prefill_block={block!r}: {message}"):
            kvpass.compile(model, budget=40, prefill_block=block)
        if block is not None:
            with pytest.raises(ValueError, match=f"prefill_chunk_size={block!r}: {message}"):
                fast.generate(random_ids(1, 30), prefill_chunk_size=block)
