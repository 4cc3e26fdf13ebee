"""Latent attention: the cache holds one latent row of each kept token, and attention of all heads reads it."""

import pytest
import torch
from torch import nn
from transformers import DynamicCache

import kvpass
from compiled_models import compiled_anew, padded, prompts_of, reloaded, two_layers
from kvpass.ops import latents, reference
from masked_oracle import assert_decodes_like_the_masked_model, kept_columns
from numeric_checks import assert_close
from pairwise import quick
from tiny_models import in_blocks, random_ids, tiny_model
from versions import needs_transformers

pytestmark = needs_transformers("5.16", "transformers before 5.16 caches expanded heads")
FAMILY, PROMPT, WINDOW, BUDGET = "deepseek_v3", 61, 8, 20
ROW = 16 + 8
"""kv_lora_rank and qk_rope_head_dim of the tiny models."""


@pytest.mark.parametrize("dtype", quick([torch.float32, torch.bfloat16], [torch.float32]), ids=str)
def test_a_kept_entry_is_one_row_for_all_heads(dtype):
    model, fast = two_layers(FAMILY, policy="snapkv", changes={} if dtype == torch.float32 else {"dtype": dtype})
    ids, row_bytes = random_ids(2, PROMPT), ROW * dtype.itemsize
    cache = fast(ids).past_key_values
    (store,) = cache.state.full_layers
    g = store.geometry
    assert (g.kv_heads, g.key_dim, g.value_dim, g.entry_bytes()) == (1, ROW, 16, row_bytes)
    rows = 2 * 2 * (BUDGET - WINDOW) + 2 * 2 * store.buffers.tail_k.shape[3]  # of pool and tails: batch, layers, slots
    held = (store.buffers.pool_k, store.buffers.pool_v, store.buffers.tail_k, store.buffers.tail_v)
    assert sum(x.untyped_storage().nbytes() for x in held) == rows * row_bytes
    report = fast.report()
    assert int(report.bytes_kept.sum()) == 2 * 2 * BUDGET * row_bytes and "expanded" not in str(report)
    theirs = DynamicCache(config=model.config)
    model(ids, past_key_values=theirs)
    assert report.bytes_full == sum(x.nbytes for layer in theirs.layers for x in (layer.keys, layer.values))


@pytest.mark.parametrize("group", ["mean", "max"])
def test_kept_entries_have_the_most_attention_of_the_window_over_all_heads(group):
    _, fast = two_layers(FAMILY, policy="snapkv", kernel_size=1, group=group)
    ids = random_ids(1, PROMPT, seed=3)
    kept = kept_columns(fast(ids).past_key_values, PROMPT)[0, :, 0]
    eager = tiny_model(FAMILY, layers=2)
    eager.set_attn_implementation("eager")
    for layer, attention in enumerate(eager(ids, output_attentions=True).attentions):
        by_head = attention[0, :, -WINDOW:, :-WINDOW].mean(1)
        scores = by_head.mean(0) if group == "mean" else by_head.amax(0)
        best = set(scores.topk(BUDGET - WINDOW).indices.tolist()) | set(range(PROMPT - WINDOW, PROMPT))
        assert set(kept[layer].nonzero().flatten().tolist()) == best


@pytest.mark.parametrize("policy", ["lava", pytest.param("tova", marks=pytest.mark.exhaustive)])
def test_several_turns_padding_and_files_equal_the_masked_model(policy, tmp_path):
    model, fast = two_layers(FAMILY, policy=policy, **({"evict_during_decode": False} if policy == "tova" else {}))
    pieces = [1, 1, 9, 59, 1, 19]
    assert_decodes_like_the_masked_model(model, fast, [PROMPT, 37], pieces, lambda held: reloaded(held, fast, tmp_path))


def test_blocks_of_a_prompt_attend_expanded_heads_that_fit_in_memory(monkeypatch):
    """Of latents of 64 columns heads are made of 28: that pays in blocks of 24 tokens, not in the last one of 13."""
    calls, attend = [], reference.attend_prompt
    monkeypatch.setattr(reference, "attend_prompt", lambda call, *rest: calls.append(call) or attend(call, *rest))
    monkeypatch.setattr(latents, "EXPANDED_BYTES", 3 * 2 * 48 * (28 + 24) * 4)  # of 3 heads: 2 rows of 48 tokens, fp32
    model = tiny_model(FAMILY, layers=1, kv_lora_rank=64)
    fast = compiled_anew(model, policy="h2o")
    ids, mask = padded(PROMPT, 37)
    with in_blocks(fast, 24):
        out = fast(ids, attention_mask=mask)
    assert [tuple(call.k.shape[1:]) for call in calls] == [(4, 24, 24), (3, 48, 24), (1, 48, 24), (1, PROMPT, 72)]
    for row, prompt in enumerate(prompts_of(PROMPT, 37)):
        assert_close("logits", out.logits[row, -len(prompt) :], model(prompt[None]).logits[0], atol=1e-4)
    whole = fast(ids, attention_mask=mask)
    assert torch.equal(out.past_key_values.positions, whole.past_key_values.positions)


def test_recompression_keeps_the_budget():
    _, fast = two_layers(FAMILY, recompress="every_turn", policy="snapkv")
    cache = fast(random_ids(1, PROMPT)).past_key_values
    fast(random_ids(1, 30, seed=1), past_key_values=cache)
    assert cache.lengths.tolist() == [[[BUDGET], [BUDGET]]]


class _Wrapped(nn.Linear):
    """A projection of which the weight does not say all, as one with an adapter."""

    def forward(self, x):
        return super().forward(x) * 1.5


def of_another_class(attention, monkeypatch):
    wrapped = _Wrapped(attention.kv_b_proj.in_features, attention.kv_b_proj.out_features, bias=False)
    wrapped.weight = attention.kv_b_proj.weight
    attention.kv_b_proj = wrapped
    return "model.layers.0.self_attn: kv_b_proj is a _Wrapped"


def of_an_older_transformers(attention, monkeypatch):
    attention.expand_kv = attention.expand_kv  # what its forward calls, where the class has no such method
    monkeypatch.delattr(type(attention), "expand_kv")
    return "its layers have no expand_kv, as those of transformers before 5.16"


@pytest.mark.parametrize("change", quick([of_another_class, of_an_older_transformers], [of_another_class]))
def test_expanded_heads_are_cached_where_latents_cannot_be_and_the_report_says_why(change, monkeypatch):
    model = tiny_model(FAMILY, layers=1)
    why = change(model.model.layers[0].self_attn, monkeypatch)
    fast = kvpass.compile(model, policy="full", backend="eager")
    ids = random_ids(1, PROMPT)
    assert_close("logits", fast(ids).logits, model(ids).logits, atol=1e-4)
    assert f"latents are cached as expanded heads: {why}" in " ".join(str(fast.report()).split())


def test_a_projection_replaced_after_compilation_raises():
    fast = kvpass.compile(tiny_model(FAMILY, layers=1), policy="full", backend="eager")
    attention = fast.model.layers[0].self_attn
    attention.kv_b_proj.register_forward_hook(lambda module, args, output: output * 1.5)
    with pytest.raises(kvpass.UnsupportedAttentionError, match="kv_b_proj has forward hooks"):
        fast(random_ids(1, PROMPT))
