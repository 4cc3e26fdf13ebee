"""Layers that attend to the keys and values of an earlier one: entries are kept once, by the scores of all readers."""

import functools

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

import kvpass
from compiled_models import in_pieces, padded
from masked_oracle import MaskedOracle, kept_columns
from numeric_checks import assert_close
from pairwise import quick
from small_decoders import DIM, SmallDecoder
from tiny_models import LLAMA_LIKE, in_blocks, in_session, random_ids, raw, sharing_captures
from versions import needs_transformers

pytestmark = needs_transformers("5.23", "gemma4 has other names")
TYPES = ["sliding_attention", "full_attention"] * 2
READ = [0, 1, 2, 1]
"""The layer whose entries each layer attends to; the third has a ring of its own for keys and values of the first."""
SIZES = {"head_dim": 16, "global_head_dim": 16, "vocab_size_per_layer_input": 128, "hidden_size_per_layer_input": 8}
SIZES |= {"num_hidden_layers": 4, "num_kv_shared_layers": 2, "sliding_window": 24, "initializer_range": 0.1}
IDS, MASK = padded(61, 40)
NEW = random_ids(2, 6, seed=5)


@functools.cache
def model():
    torch.manual_seed(0)
    config = AutoConfig.for_model("gemma4_text", **{**LLAMA_LIKE, **SIZES, "layer_types": TYPES})
    made = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    made.generation_config.eos_token_id = None
    return made


@functools.cache
def compiled(backend="eager", **options):
    fast = kvpass.compile(model(), **{"policy": "full", **options}, backend=backend)
    return sharing_captures(fast, "gemma4", backend)


def compressed(policy, budget, **options):
    fast = compiled()
    fast.set_policy(policy, budget, **options)
    return fast


@pytest.mark.parametrize("backend", quick(["eager", "inductor"], ["eager"]))
def test_contract_1_logits_and_bytes_of_a_full_cache_are_those_of_transformers(backend):
    fast, theirs = compiled(backend), DynamicCache(config=model().config)
    fast.set_policy("full")
    with torch.no_grad(), in_blocks(fast, 16):
        text = torch.cat([IDS, NEW], 1)
        (logits, _), (expected, _) = (in_pieces(each, text, [61, 1, 1, 4]) for each in (fast, model()))
        assert_close("logits", logits, expected, atol=1e-4)
    with torch.no_grad():
        model()(IDS, past_key_values=theirs)
    layout = fast(IDS).past_key_values.state.layout
    assert [group.layers for group in layout.rings] == [(0, 2)]
    assert [group.layers for group in layout.pools] == [(1,)]
    held = theirs.layers[1].keys.nbytes + theirs.layers[1].values.nbytes
    assert layout.token_bytes("model") * IDS.numel() == held


@pytest.mark.parametrize("policy", quick(["snapkv", "lava", "keydiff", "h2o"], ["lava", "h2o"]))
def test_later_tokens_see_in_each_layer_what_is_kept_once_of_a_prompt_in_blocks_too(policy):
    fast = compressed(policy, 24, window=8, **({"evict_during_decode": False} if policy == "h2o" else {}))
    whole = fast(IDS, attention_mask=MASK).past_key_values
    with in_blocks(fast, 16):
        cache = fast(IDS, attention_mask=MASK).past_key_values
    assert torch.equal(cache.positions, whole.positions)
    columns = kept_columns(cache, 61)
    assert int(columns[:, 1].sum()) == 24 * 2 * 2
    logits = [fast(piece.contiguous(), past_key_values=cache).logits for piece in NEW.split([1, 3, 2], 1)]
    text, mask = torch.cat([IDS, NEW], 1), torch.cat([MASK, torch.ones_like(NEW)], 1)
    expected = MaskedOracle(model()).logits(text, mask, columns[:, READ])[:, 61:]
    assert_close("logits", torch.cat(logits, 1), expected, atol=1e-4)


def test_scores_are_those_of_all_readers():
    window, kept = 8, 16
    fast = compressed("snapkv", kept + window, window=window, kernel_size=1)
    found = kept_columns(fast(IDS).past_key_values, 61)[0]
    with torch.no_grad():
        weights = model()(IDS[:1], output_attentions=True).attentions  # [1, H, N, N] of each layer
    heads = torch.stack([weights[reader][0, :, -window:, :-window] for reader in (1, 3)])
    scores = heads.unflatten(1, (2, -1)).mean((0, 2, 3))
    expected = scores.topk(kept, -1).indices.sort(-1).values
    assert torch.equal(found[1, :, :-window].nonzero()[:, 1].view(2, kept), expected)


def test_what_is_of_one_layer_alone_is_refused():
    for policy in ("h2o", "criticalkv", "kvzip"):
        with pytest.raises(ValueError, match=r"several layers.* attend to the"):
            compressed(policy, 24, window=8)(IDS)
    fast = compiled(policy="snapkv", budget=24, window=8, recompress="every_turn")
    cache = fast(IDS).past_key_values
    with pytest.raises(ValueError, match="recompression of keys and values that several layers attend to"):
        fast(NEW, past_key_values=cache)
    assert cache.get_seq_length() == 61


class Sharing(SmallDecoder):
    """The third and fourth layer attend to the keys and values of the second."""

    def forward(self, ids):
        x, held = self.embedded(ids), []
        for i, layer in enumerate(self.layers):
            q, *own = (part.unflatten(-1, (-1, DIM)).transpose(1, 2) for part in layer(x).split(self.sizes, -1))
            held = own if i < 2 else held
            x = x + scaled_dot_product_attention(q, *held, is_causal=True).transpose(1, 2).flatten(2)
        return self.head(x)


@torch.no_grad()
def test_a_plain_module_in_blocks_attends_to_what_is_held_once():
    module, text = Sharing(layers=4), torch.cat([IDS, NEW[:, :3]], 1)
    fast = raw(module, {"policy": "full", "compiler": "eager", "prefill_block": 16})
    logits, cache = in_session(fast, [61, 3], text)
    assert [group.layers for group in cache.state.layout.pools] == [(0, 1)]
    assert_close("logits", logits, module(text), atol=1e-4)
