"""Layers that attend to the keys and values of an earlier one: entries are kept once, by the scores of all readers."""

import functools

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

import kvpass
from compiled_models import greedy
from masked_oracle import MaskedOracle, kept_columns
from numeric_checks import assert_close
from pairwise import quick
from small_decoders import DIM, SmallDecoder
from tiny_models import LLAMA_LIKE, in_session, left_pad, random_ids, raw, sharing_captures, step_logits
from versions import needs_transformers

pytestmark = needs_transformers("5.23", "gemma4 has other names")
LAYERS, SHARED = 3, 1
RANDOM = {"sliding_window": 24, "initializer_range": 0.1}
IDS, MASK = left_pad([random_ids(1, n, seed=n)[0] for n in (61, 40)])
NEW = random_ids(2, 6, seed=5)


@functools.cache
def model(*types):
    """The last layers attend to the keys and values of the last one of their type before: one, or half of ``types``."""
    shared = len(types) // 2 or SHARED
    types = list(types) or ["full_attention"] * LAYERS
    sizes = {"head_dim": 16, "global_head_dim": 16, "vocab_size_per_layer_input": 128, "hidden_size_per_layer_input": 8}
    layers = {"num_hidden_layers": len(types), "layer_types": types, "num_kv_shared_layers": shared}
    torch.manual_seed(0)
    config = AutoConfig.for_model("gemma4_text", **{**LLAMA_LIKE, **sizes, **layers, **RANDOM})
    made = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    made.generation_config.eos_token_id = None
    return made


@functools.cache
def compiled(recompress="never"):
    fast = kvpass.compile(model(), policy="full", backend="eager", prefill_block=16)
    if recompress != "never":
        fast = kvpass.compile(model(), policy="snapkv", budget=24, window=8, recompress=recompress, backend="eager")
    return sharing_captures(fast, "gemma4")


def compressed(policy, budget, **options):
    fast = compiled()
    fast.set_policy(policy, budget, **options)
    return fast


def test_contract_1_logits_and_bytes_of_a_full_cache_are_those_of_transformers():
    fast, cache = compressed("full", None), DynamicCache(config=model().config)
    with torch.no_grad():
        expected = step_logits(model(), IDS, NEW)
        model()(IDS, past_key_values=cache)
    assert_close("logits", step_logits(fast, IDS, NEW), expected, atol=1e-4)
    held = sum(x.nbytes for layer in cache.layers for x in (layer.keys, layer.values) if x is not None)
    layout = fast(IDS).past_key_values.state.layout
    assert layout.token_bytes("model") * IDS.numel() == held
    assert [group.layers for group in layout.pools] == [(0, 1)]


@pytest.mark.parametrize("policy", quick(["snapkv", "lava", "keydiff", "h2o"], ["lava", "h2o"]))
def test_later_tokens_see_in_each_layer_what_is_kept_once(policy):
    fast = compressed(policy, 24, window=8, **({"evict_during_decode": False} if policy == "h2o" else {}))
    cache = fast(IDS, attention_mask=MASK).past_key_values
    columns = kept_columns(cache, 61)
    assert columns.shape[1] == LAYERS - SHARED and int(columns.sum()) == 24 * 2 * 2 * 2
    keep, logits = columns[:, [0, 1, 1]], []
    for piece in NEW.split([1, 3, 2], 1):
        out = fast(piece.contiguous(), past_key_values=cache)
        cache = out.past_key_values
        logits.append(out.logits)
    text, mask = torch.cat([IDS, NEW], 1), torch.cat([MASK, torch.ones_like(NEW)], 1)
    expected = MaskedOracle(model()).logits(text, mask, keep)[:, 61:]
    assert_close("logits", torch.cat(logits, 1), expected, atol=1e-4)


def test_scores_are_those_of_all_readers():
    window, kept = 8, 16
    fast = compressed("snapkv", kept + window, window=window, kernel_size=1)
    found = kept_columns(fast(IDS).past_key_values, 61)[0]
    with torch.no_grad():
        weights = model()(IDS[:1], output_attentions=True).attentions  # [1, H, N, N] of each layer
    for layer, readers in enumerate([[0], [1, 2]]):
        heads = torch.stack([weights[reader][0, :, -window:, :-window] for reader in readers])
        scores = heads.unflatten(1, (2, -1)).mean((0, 2, 3))
        expected = scores.topk(kept, -1).indices.sort(-1).values
        assert torch.equal(found[layer, :, :-window].nonzero()[:, 1].view(2, kept), expected)


@pytest.mark.parametrize("backend", quick(["eager", "inductor"], ["eager"]))
def test_layers_with_a_sliding_window_that_share_keys_have_rings_of_their_own(backend):
    mixed = model(*["sliding_attention", "full_attention"] * 2)
    fast = kvpass.compile(mixed, policy="full", backend=backend, prefill_block=16)
    told = {"attention_mask": MASK, "return_dict_in_generate": True, "output_logits": True}
    found, expected = (greedy(subject, IDS, 30, **told) for subject in (fast, mixed))
    assert torch.equal(found.sequences, expected.sequences)
    assert_close("logits", torch.stack(found.logits), torch.stack(expected.logits), atol=1e-4)
    layout = found.past_key_values.state.layout
    assert [group.layers for group in layout.rings] == [(0, 2)] and [group.layers for group in layout.pools] == [(1,)]


class Sharing(SmallDecoder):
    """The third and fourth layer attend to the keys and values of the second."""

    def forward(self, ids):
        x, held = self.embedded(ids), []
        for i, layer in enumerate(self.layers):
            q, *own = (part.unflatten(-1, (-1, DIM)).transpose(1, 2) for part in layer(x).split(self.sizes, -1))
            held = own if i < 2 else held
            x = x + scaled_dot_product_attention(q, *held, is_causal=True).transpose(1, 2).flatten(2)
        return self.head(x)


@pytest.mark.parametrize("policy", quick(["h2o", "lava", "full"], ["h2o", "full"]))
def test_a_prompt_in_blocks_keeps_what_a_whole_one_keeps(policy):
    module = Sharing(layers=4)
    budget = {} if policy == "full" else {"budget": 24, "window": 8}
    budget |= {"evict_during_decode": False} if policy == "h2o" else {}
    found = []
    for block in (16, 64):
        fast = raw(module, {"policy": policy, "compiler": "eager", "prefill_block": block, **budget})
        logits, cache = in_session(fast, [61, 3], torch.cat([IDS, NEW[:, :3]], 1))
        assert [group.layers for group in cache.state.layout.pools] == [(0, 1)]
        found.append((cache.positions, logits))
    (positions, logits), (whole, expected) = found
    assert torch.equal(positions, whole)
    assert_close("logits", logits, expected, atol=1e-4)
    if policy == "full":
        with torch.no_grad():
            assert_close("logits", logits, module(torch.cat([IDS, NEW[:, :3]], 1)), atol=1e-4)


def test_what_is_of_one_layer_alone_is_refused():
    for policy in ("h2o", "criticalkv", "kvzip"):
        with pytest.raises(ValueError, match=r"several layers.* attend to the"):
            compressed(policy, 24, window=8)(IDS)
    fast = compiled("every_turn")
    cache = fast(IDS).past_key_values
    with pytest.raises(ValueError, match="recompression of keys and values that several layers attend to"):
        fast(NEW, past_key_values=cache)
    assert cache.get_seq_length() == 61
